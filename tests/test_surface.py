"""What users see first: names, help, and what the package weighs."""

import ast
import inspect
import pydoc
from pathlib import Path

import millipode
import millipode as mp

SOURCE = Path(millipode.__file__).parent


def test_dir_shows_public_names_only():
    assert {name for name in dir(mp) if not name.startswith("__")} == set(mp.__all__)
    assert all(getattr(mp, name) is not None for name in mp.__all__)
    assert inspect.isfunction(millipode.solve)


def test_help_starts_with_a_readable_signature_and_three_examples():
    text = pydoc.plain(pydoc.render_doc(mp.solve))
    signature = text.splitlines()[2]
    assert signature.startswith(
        "solve(f, y0, t_span, *, solver=None, args=None, rtol=0.001, atol=1e-06, save='steps'"
    )
    assert text.index(">>> sol = mp.solve(") < text.index("Args:")
    assert text[: text.index("Args:")].count("mp.solve(") == 3
    assert {p.name for p in inspect.signature(mp.solve).parameters.values()} >= {"uncertainty", "progress"}


def test_every_public_name_is_documented():
    for name in mp.__all__:
        assert inspect.getdoc(getattr(mp, name)), name


def test_rooms_are_small():
    """Not an end in itself, but a room that outgrows this is two."""
    assert len(list(SOURCE.glob("*.py"))) <= 12
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        assert len(text.splitlines()) <= 350, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                words = (ast.get_docstring(node, clean=False) or "").splitlines()
                assert node.end_lineno - node.lineno + 1 - len(words) <= 60, (path, node.name)

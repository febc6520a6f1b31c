"""Collect the promises, with what was measured, from the results of the other benchmarks.

Run: ``python benchmarks/summary.py [--quick]``, after the other benchmarks.
"""

import json

from harness import RESULTS, quick

from millipode.paper.measuring import description, table


def main() -> None:
    """Print the summary, and write it to ``README.md`` beside the results."""
    folder = RESULTS / "quick" if quick() else RESULTS
    parts = [
        "# Promises, and what was measured",
        "Ratios within one run, medians of repeats; `make bench` writes this.",
    ]
    for path in sorted(folder.glob("*.json")):
        data = json.loads(path.read_text())
        if data["claims"]:
            question = f"## [{data['question']}]({path.stem}.md)"
            parts += [question, description(data["about"]), table(data["claims"])]
    text = "\n\n".join(parts) + "\n"
    (folder / "README.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()

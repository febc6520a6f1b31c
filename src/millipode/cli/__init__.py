"""The ``millipode`` command."""

from millipode.cli.app import app, main

__all__ = ["app", "main"]

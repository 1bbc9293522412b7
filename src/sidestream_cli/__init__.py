"""The command line, ``sidestream --help``. Needs the extra ``cli``.

A package beside ``sidestream`` in the same distribution, because ``import sidestream`` imports torch: ``--help``,
completion and usage errors import neither, and a command imports what it needs when it runs.
"""

from __future__ import annotations

import io
import sys
import warnings
from importlib.util import find_spec

__all__ = ["main"]


def main() -> None:
    """Run the command line. The entry point of the script ``sidestream``."""
    for package in ("rich", "typer"):
        if find_spec(package) is None:
            sys.stderr.write(f"the command line needs {package}: pip install 'sidestream[cli]'\n")
            sys.exit(2)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # an encoding such as ASCII lacks letters that occur in names
            stream.reconfigure(errors="backslashreplace")
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch can do without, and so do the commands
    from .app import app

    app()

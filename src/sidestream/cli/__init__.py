"""The command line: ``sidestream --help``. Needs the extra ``cli``."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """The entry point."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        sys.stderr.write(f"the command line needs {error.name}: pip install 'sidestream[cli]'\n")
        sys.exit(2)
    from .app import app

    app()

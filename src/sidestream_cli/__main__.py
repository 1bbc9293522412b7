"""``python -m sidestream_cli``: the command line where the script ``sidestream`` is not on the path."""

from __future__ import annotations

from . import main

main()

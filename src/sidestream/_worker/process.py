"""Starting the writer process with ``subprocess``, from an entry point of its own that does not run ``__main__``."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from ..errors import WriterProcessError

_PACKAGE = Path(__file__).parents[1]
# The package is imported from where the trainer has it, independent of the paths; further paths come last. Its
# ``__init__`` is not run, because it imports torch.
_BOOT = """\
import importlib.util, json, sys
descriptor, trainer, package, paths = json.loads(sys.argv[1])
sys.path += [path for path in paths if path not in sys.path]
home = [package]
spec = importlib.util.spec_from_file_location("sidestream", package + "/__init__.py", submodule_search_locations=home)
sys.modules["sidestream"] = importlib.util.module_from_spec(spec)
from sidestream._worker.main import main
main(descriptor, trainer)
"""


def available() -> bool:
    """Return whether this system can run a writer process."""
    return sys.platform == "linux" and hasattr(os, "memfd_create") and bool(sys.executable)


def spawn() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a process, and return it with this side of the socket. Raises ``WriterProcessError``.

    The calling thread has to live as long as the process: Linux sends the signal of a parent's death when the thread
    that made the child ends.
    """
    if not available():
        raise WriterProcessError(
            'this system cannot run a writer process, which needs Linux and sys.executable: pass writer="thread"'
        )
    try:
        paths = [os.path.abspath(path) for path in sys.path]
        ours, theirs = socket.socketpair()
    except OSError as error:  # raised by abspath if the working directory was deleted
        raise WriterProcessError(f"the writer process could not be started: {error}") from error
    arguments = json.dumps([theirs.fileno(), os.getpid(), str(_PACKAGE), paths])
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOT, arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            process_group=0,
        )
    except (OSError, subprocess.SubprocessError) as error:
        ours.close()
        raise WriterProcessError(f"the writer process could not be started: {error}") from error
    finally:
        theirs.close()
    return process, ours

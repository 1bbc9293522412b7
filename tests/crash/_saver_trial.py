"""Inside a writer process: something happens at the file operation that it is told, or all of them are recorded.
Imports no torch.

The other end: ``environment`` puts this into the processes that a trainer starts.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from _disk_model import Journal, Recorder
from _operations import Intercept, Operation

HERE = Path(__file__).parent
_kept: list[Any] = []


def environment(
    folder: Path, root: Path, what: str, at: int | str = 0, when: str = "before", journal: Path | None = None
) -> dict[str, str]:
    """At the ``at``-th operation below ``root`` (or the first of that name) of the first saver that gets there,
    ``what`` happens, once. ``folder`` gets the ids of all writer processes, and how many operations each has done.
    ``journal``: every change below ``root`` is added to it."""
    folder.mkdir(parents=True, exist_ok=True)
    trial = {"folder": str(folder), "root": str(root), "what": what, "at": at, "when": when}
    if journal is not None:
        trial["journal"] = str(journal)
    inherited = os.environ.get("PYTHONPATH", "")
    paths = os.pathsep.join(filter(None, (str(HERE / "_in_saver"), inherited)))
    return {"SIDESTREAM_SAVER_TRIAL": json.dumps(trial), "PYTHONPATH": paths}


@contextmanager
def processes_in(environment: dict[str, str]) -> Iterator[None]:
    """Processes that this one starts within this are in ``environment``, too."""
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def savers(folder: Path) -> dict[int, int]:
    """Operations by process, of those that were started in ``environment(folder)``."""
    return {int(path.name): path.stat().st_size for path in folder.iterdir() if path.name.isdigit()}


def happened(folder: Path) -> bool:
    return (folder / "happened").exists()


def alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def wait_until_gone(folder: Path, timeout_s: float = 60.0) -> list[int]:
    """Those savers that are still there after that time."""
    end = time.monotonic() + timeout_s
    while (left := [pid for pid in savers(folder) if alive(pid)]) and time.monotonic() < end:
        time.sleep(0.01)
    return left


# --- inside ---


def begin(trial: dict[str, Any]) -> None:
    folder = Path(trial["folder"])
    log = os.open(folder / str(os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
    call = Recorder(Journal(Path(trial["journal"]))) if "journal" in trial else Operation.call

    def hook(operation: Operation) -> Any:
        os.write(log, b".")
        if trial["at"] not in (operation.index, operation.name) or not _first(folder):
            return call(operation)
        done = call(operation) if trial["when"] == "after" else None
        _do(trial["what"])
        return done if trial["when"] == "after" else call(operation)

    installed = Intercept(Path(trial["root"]), hook).installed()
    installed.__enter__()
    _kept.append(installed)


def _first(folder: Path) -> bool:
    try:
        os.close(os.open(folder / "happened", os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _do(what: str) -> None:
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "kill the trainer":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(3600)
    elif what == "stop the trainer":
        trainer = os.getppid()
        os.kill(trainer, signal.SIGSTOP)
        time.sleep(0.2)
        os.kill(trainer, signal.SIGCONT)
    elif what == "hang":
        time.sleep(3600)
    elif what == "full":
        raise OSError(errno.ENOSPC, "No space left on device")

"""Opens hostile checkpoints in a process of its own and tells what came of it, and what else happened meanwhile.

An audit hook sees what Python code cannot hide: imports, code that is compiled or run, processes, sockets, and every
file that is opened.
"""

from __future__ import annotations

import asyncio
import encodings.cp437  # noqa: F401  # zipfile decodes some names with it
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np  # noqa: F401  # what a checkpoint may lawfully need is imported before one is looked at
import torch
import zstandard  # noqa: F401

import sidestream

FORBIDDEN = (
    "import", "exec", "compile", "code.__new__", "marshal", "pickle", "os.system", "os.exec", "os.fork", "os.forkpty",
    "os.posix_spawn", "os.spawn", "os.startfile", "os.kill", "os.remove", "os.rename", "os.rmdir", "os.mkdir",
    "os.chmod", "os.link", "os.symlink", "os.truncate", "os.putenv", "subprocess", "socket", "shutil", "tempfile",
    "urllib", "http", "ftplib", "webbrowser", "ctypes.dlopen", "ctypes.dlsym", "function.__new__", "mmap",
)  # fmt: skip

seen: list[str] = []
here: Path | None = None


def watch(event: str, args: tuple[Any, ...]) -> None:
    if here is None:
        return
    if event == "open":
        path, mode, flags = args
        # A number is a descriptor that is open: this event was emitted when it was opened.
        inside = isinstance(path, int) or (isinstance(path, str) and os.path.abspath(path).startswith(str(here)))
        writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if not inside or writes:
            seen.append(f"open {path!r} {mode!r}")
    elif event.startswith(FORBIDDEN):
        seen.append(f"{event} {str(args)[:200]}")


def peak_kib() -> int:
    """Of this program: ``ru_maxrss`` still has the peak of the process that started it."""
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


async def attempt(call: Any) -> str:
    """What the caller gets: the error's name, prefixed if it is not of our tree, or ``"returned"``."""
    try:
        result = await call
    except sidestream.errors.SidestreamError as error:
        return type(error).__name__
    except Exception as error:
        return f"FOREIGN {type(error).__name__}: {error}"
    return "damaged" if isinstance(result, sidestream.VerifyReport) and not result.ok else "returned"


async def everything(url: Path) -> dict[str, Any]:
    return await (await sidestream.open_checkpoint(url, timeout_s=120)).state_dict()


async def loaded(url: Path) -> sidestream.LoadReport:
    return await sidestream.load(
        {"w": torch.zeros(4), "v": None},
        url,
        allow_missing=True,
        allow_cast=True,
        options=sidestream.LoadOptions(timeout_s=120),
    )


async def look(case: Path) -> dict[str, Any]:
    global here
    seen.clear()
    os.chdir(case)  # names in an open directory are taken for names here: other directories are opened by their path
    here = case
    outcomes = {
        "state_dict": await attempt(everything(case)),
        "load": await attempt(loaded(case)),
        "verify": await attempt(sidestream.verify(case, timeout_s=120)),
    }
    here = None
    return {**outcomes, "seen": list(seen)}


async def main(root: Path) -> dict[str, Any]:
    for sound in sorted((root / "sound").iterdir()):
        outcomes = await look(sound)  # brings every lazy import
        assert {outcomes[call] for call in ("state_dict", "load", "verify")} == {"returned"}, (sound, outcomes)
    sys.addaudithook(watch)
    before = peak_kib()
    results = {case.name: await look(case) for case in sorted((root / "hostile").iterdir())}
    results["sound again"] = await look(root / "sound" / "own")
    return {"results": results, "grown_kib": peak_kib() - before}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(Path(sys.argv[1])))))

"""A program that lacks what it takes to share memory with its writer process: see ``test_row_shared_memory.py``."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import json
import os
import resource
import struct
import sys
from pathlib import Path
from typing import Any

from _look import attempts_in
from _seeded import blank_state, make_state, same

import sidestream
from sidestream._runtime.threads import Deadline, time_limit
from sidestream._worker.client import worker_for

LACKS = (
    "memfd_create: ENOSPC",
    "memfd_create: ENOMEM",
    "memfd_create: EMFILE",
    "ftruncate: ENOSPC",
    "descriptors of the writer process",
    "address space of the writer process",
)

_CALLS = {"x86_64": {"memfd_create": 319, "ftruncate": 77}, "aarch64": {"memfd_create": 279, "ftruncate": 46}}
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


def refuse(call: str, number: int) -> None:
    """From now on the kernel answers ``call`` with the error ``number``, in threads and processes yet to be started."""
    known = _CALLS.get(os.uname().machine)
    if known is None:
        raise OSError(errno.ENOSYS, "the number of the system call is not known")
    instructions = [
        (_LOAD, 0, 0, 0),
        (_JUMP_IF_EQUAL, 0, 1, known[call]),
        (_RETURN, 0, 0, _ERRNO | number),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in instructions))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(instructions), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program, 0, 0):
        raise OSError(ctypes.get_errno(), "this kernel or container takes no seccomp filter")


async def lack_in_saver(options: sidestream.WriterProcess, lack: str) -> int:
    """The process is up, and may have nothing more than it has. Returns its number."""
    process = worker_for(options)
    with time_limit(Deadline.after(60)):
        await process.up()
    assert process.pid is not None
    if lack.startswith("descriptors"):
        held = len(os.listdir(f"/proc/{process.pid}/fd"))
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (held, held))
    else:
        pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[0])
        limit = pages * resource.getpagesize()
        resource.prlimit(process.pid, resource.RLIMIT_AS, (limit, limit))
    return process.pid


async def work(run: Path, saver: Any, lack: str) -> dict[str, Any]:
    """Save, and load what was saved; a failure has to be one of ours."""
    told: dict[str, Any] = {"wrong": [], "acked": [], "refused": []}
    options = sidestream.WriterProcess(retries=0)
    used = options if saver == "process" else sidestream.WriterProcess()
    lacking = await lack_in_saver(used, lack) if "writer process" in lack else None
    if saver == "process":
        saver = options
    for step in (1, 2, 3):
        # The last one needs nothing that is lacking.
        async with sidestream.Checkpointer(
            run, save=sidestream.SaveOptions(writer="thread" if step == 3 else saver)
        ) as checkpoints:
            try:
                await checkpoints.save(make_state(step), step=step)
            except sidestream.errors.SidestreamError as error:
                told["refused"].append(f"{type(error).__name__}: {error}")
                continue
            except Exception as error:
                told["wrong"].append(f"untyped: {error!r}")
                continue
            told["acked"].append(step)
            state = blank_state()
            await checkpoints.restore(state, step)
            if not same(state, make_state(step)):
                told["wrong"].append(f"step {step} holds something else")
    # It may end for what it lacks before a save needs it, which starts another one.
    told["replaced"] = lacking is not None and worker_for(used).pid != lacking
    told["wrong"] += [f"left: {one}" for one in attempts_in(run)]
    return told


def main() -> None:
    run, saver, lack = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    call, _, number = lack.partition(": ")
    if number:
        try:
            refuse(call, getattr(errno, number))
        except OSError as error:
            print(json.dumps({"cannot": str(error)}), flush=True)
            return
    print(json.dumps(asyncio.run(work(run, saver, lack))), flush=True)


if __name__ == "__main__":
    main()

"""What the script checks: where the trainer was killed, where it resumed, and that all ends have the same bits."""

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from train_live_.records import Run, StockLoad, directory_size

POLL_S = 0.001
STEPS_BEFORE_THE_KILL = 2


class CheckFailed(Exception):
    """Something that this example promises turned out not to be so."""


@dataclass(frozen=True, slots=True)
class Kill:
    """What was on disk when the trainer was killed."""

    committed: list[int]
    interrupted_step: int
    interrupted_nbytes: int


def kill_during_save(trainer: subprocess.Popen[bytes], steps: Path) -> Kill:
    """Wait until a save is half done, and kill the trainer there.

    The process is frozen first: that leaves time to look whether the save is still unfinished.
    """
    while trainer.poll() is None:
        if half_done(steps):
            freeze(trainer)
            if half_done(steps):
                trainer.kill()
                trainer.wait()
                return look_at_wreck(steps)
            trainer.send_signal(signal.SIGCONT)
        time.sleep(POLL_S)
    raise CheckFailed(f"the trainer ended (exit status {trainer.returncode}) before a save of it could be interrupted")


def half_done(steps: Path) -> bool:
    """Return whether an uncommitted attempt has grown to half a checkpoint, with enough whole ones before it."""
    whole = committed(steps)
    return len(whole) >= STEPS_BEFORE_THE_KILL and any(
        size_on_disk(attempt) >= size_on_disk(whole[max(whole)]) / 2 for attempt in attempts(steps).values()
    )


def freeze(process: subprocess.Popen[bytes]) -> None:
    """Stop every thread of `process`, and return when they have stopped."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)


def look_at_wreck(steps: Path) -> Kill:
    """Describe what the killed trainer left: whole steps, and an attempt at another that nobody may see."""
    whole, unfinished = committed(steps), attempts(steps)
    step = max(unfinished)
    if step in whole:
        raise CheckFailed(f"step {step} is visible although its save was interrupted")
    return Kill(sorted(whole), step, size_on_disk(unfinished[step]))


def committed(steps: Path) -> dict[int, Path]:
    """Return the checkpoints that anybody who lists the directory can see."""
    return {int(path.name.removeprefix("step-")): path for path in steps.glob("step-*")}


def attempts(steps: Path) -> dict[int, Path]:
    """Return the directories of saves that have begun and not been committed."""
    return {int(path.name.split(".")[1]): path for path in steps.glob(".*.partial")}


def size_on_disk(directory: Path) -> int:
    """Return the size of what `directory` holds, 0 when it is gone: committed, and so renamed, while we look."""
    try:
        return directory_size(directory)
    except FileNotFoundError:
        return 0


def check_resumed(resumed: Run, kill: Kill, reference: Run) -> None:
    """Check that the restarted run went on from the newest whole step and ended where it should."""
    if resumed.steps_seen != kill.committed:
        raise CheckFailed(f"after the kill steps {kill.committed} were whole, but sidestream sees {resumed.steps_seen}")
    if resumed.resumed_from != kill.committed[-1]:
        raise CheckFailed(f"resumed from step {resumed.resumed_from} instead of step {kill.committed[-1]}")
    check_same_digest("the run that was killed and resumed", resumed.digest, reference)


def check_same_digest(what: str, digest: str, reference: Run) -> None:
    if digest != reference.digest:
        raise CheckFailed(f"{what} ends with other bits ({digest}) than the first run of all ({reference.digest})")


def check_stock_load(loaded: StockLoad, steps: int, reference: Run) -> None:
    if loaded.sidestream_imported:
        raise CheckFailed("the process that was to load with stock DCP imported sidestream")
    if loaded.step != steps:
        raise CheckFailed(f"stock dcp.load returned step {loaded.step} instead of {steps}")
    check_same_digest("the checkpoint that stock dcp.load read", loaded.digest, reference)

"""What dead processes have left in a directory: attempts, and interrupted deletions."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ..names import LEASES, is_attempt_name, target_of_attempt
from ..replacing import refusal
from .attempt_lock import silence_s
from .directories import is_retired, remove_tree, storage_time, take_away
from .publishing import look_at


def collect_orphans(root: Path, after_s: float, take: Callable[[Path, str], Path | None] = take_away) -> list[str]:
    """Delete the attempts in ``root`` whose process has ended. Where that is not known, delete those that were last
    written to more than ``after_s`` ago. Delete the rest of deletions that were interrupted more than ``after_s`` ago.
    Return the names of what was deleted.

    In a run, leases show which processes are alive, so there the time alone does not decide about attempts at steps. If
    ``take`` renames an attempt, a process that still writes it cannot publish it any more. Directories that cannot be
    deleted are skipped."""
    collected: list[str] = []
    with suppress(OSError):
        hidden = (name for name in os.listdir(root) if name.startswith("."))  # a run may have thousands of steps
        found = [name for name in hidden if is_retired(name) or is_attempt_name(name)]
        if not found:
            return []
        in_run, now = (root / LEASES).exists(), storage_time(root)
        for name in found:
            with suppress(OSError):  # another process collects it, or it may not be deleted
                path: Path | None = root / name
                if refusal(look_at(root / name), "collect", name) is not None:
                    continue
                if is_retired(name):
                    if now - (root / name).stat().st_ctime <= after_s:
                        continue
                else:
                    # There are three cases. The lock proves that the writer has ended: the attempt goes at once. It
                    # proves that the writer lives: the silence is 0, and the attempt stays. Otherwise only the last
                    # write counts, and in a run not even that, because the leases of the run decide there.
                    silent_s = silence_s(root / name, now)
                    leased = in_run and target_of_attempt(name) is not None
                    if silent_s < math.inf and (leased or silent_s <= after_s):
                        continue
                    path = take(root, name)
                if path is not None:
                    remove_tree(path)
                    collected.append(name)
    return collected

"""Random pauses before system calls, in every process that has this directory on its path: ``nox -s perturbed``.

What is concurrent then ends in orders that a quiet machine never shows. A test that fails has found a race: in the
library, or in what the test takes for granted. ``SIDESTREAM_PAUSE_S`` is the longest pause; most are far shorter.
"""

from __future__ import annotations

import functools
import os
import random
import time
from collections.abc import Callable
from typing import Any

_LONGEST_S = float(os.environ.get("SIDESTREAM_PAUSE_S", "0"))
_SHARES = {
    0.5: ("fsync", "fdatasync", "rename", "open", "scandir", "unlink"),
    0.2: ("pwrite", "pwritev", "pread", "preadv"),  # there are many of them
}


def _paused(call: Callable[..., Any], share: float) -> Callable[..., Any]:
    draw = random.Random(os.urandom(8))

    @functools.wraps(call)
    def after_a_pause(*args: Any, **options: Any) -> Any:
        if draw.random() < share:
            time.sleep(draw.random() ** 3 * _LONGEST_S)
        return call(*args, **options)

    return after_a_pause


if _LONGEST_S:
    for _share, _names in _SHARES.items():
        for _name in _names:
            setattr(os, _name, _paused(getattr(os, _name), _share))

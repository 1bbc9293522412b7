"""Hostile input must not hang the reader: a budget of processor time, which a busy machine does not use up."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def processor_budget(seconds: float) -> Iterator[None]:
    """Within, the process may compute for ``seconds``; then whatever the main thread is doing is cut off."""

    def used_up(_: int, frame: FrameType | None) -> None:
        raise AssertionError(f"still computing after {seconds:g} s of processor time, in {frame}")

    before = signal.signal(signal.SIGVTALRM, used_up)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)

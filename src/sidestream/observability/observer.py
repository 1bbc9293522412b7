"""``EventObserver``: what all observers of this package have in common."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Self

from ..events import Event, observe

__all__ = ["EventObserver"]


class EventObserver:
    """The base of the observers. It observes from the end of its construction to ``close()``, or to the end of its
    ``with`` block. What it raises is logged, and changes no save or load."""

    def __init__(self) -> None:
        self._observing = ExitStack()
        self._observing.enter_context(observe(self._observe))

    def _observe(self, event: Event) -> None:
        """Take one event. Called in any thread, by several at a time."""
        raise NotImplementedError

    def close(self) -> None:
        """Observe no more. Calling it again has no effect."""
        self._observing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

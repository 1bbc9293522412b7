"""The iterator over the steps of a run as they are committed, by this process or any other."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import deque
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from .._engine.calls import in_operation
from .._load.open.steps import Step
from .._runtime.public import public
from .._runtime.threads import Deadline, Stop, Threads, time_limit
from .._storage import LocalStore, Store
from ..options import check_seconds, step_number
from .steps import list_generations

_JITTER = 0.25
_DEBOUNCE_MS = 50


def new_steps(seen: Iterable[str], steps: Iterable[Step]) -> list[Step]:
    """Return those of ``steps`` that are not damaged and were not ``seen``, each in its highest generation, in
    order."""
    highest = {step.step: step for step in sorted(steps, key=lambda each: each.order)}
    known = frozenset(seen)
    fresh = [step for step in highest.values() if step.damage is None and step.name not in known]
    return sorted(fresh, key=lambda each: each.order)


@public
class Watch:
    """An iterator over the numbers of committed steps, in order, for ``async for``. ``Checkpointer.watch`` returns it.

    A step that was saved again comes again. A step that is gone before its turn is left out, and so is, with
    ``newest=True``, each one that is not the newest when the next one is requested. It looks every ``poll_s``
    seconds, give or take a quarter, and at once when the file system reports a change (local files, with the extra
    ``watch``). Between two steps it holds nothing: no task, no thread, no file. An error of a look ends the iteration.
    A cancel loses no step.
    """

    def __init__(self, store: Store, *, after: int | None, newest: bool, poll_s: float, timeout_s: float) -> None:
        self._pauses = Pauses(store, poll_s)
        self._store = store
        self._newest = newest
        self._timeout_s = timeout_s
        self._after = -1 if after is None else step_number(after)
        self._begun = False
        self._known: dict[str, Step] = {}
        self._seen: set[str] = set()
        self._ready: deque[Step] = deque()

    def __aiter__(self) -> Watch:
        return self

    async def __anext__(self) -> int:
        await in_operation(self._look, "watch", ends=False)
        return self._ready.popleft().step  # here, so that a cancel of the look loses nothing

    async def _look(self) -> None:
        """Look until there is a step."""
        while True:
            await self._poll()
            if self._ready:
                return
            await self._pauses.wait()

    async def _poll(self) -> None:
        with time_limit(Deadline.after(self._timeout_s)):
            steps = await list_generations(self._store, self._known)
        self._known = {step.name: step for step in steps if step.damage is None}
        if not self._begun:
            self._begun = True
            self._seen = {step.name for step in steps if step.step <= self._after}
        fresh = new_steps(self._seen, steps)
        self._seen = (self._seen | {step.name for step in fresh}) & {step.name for step in steps}
        # What is left of earlier news is compared with this listing, so that a step that was deleted before its turn is
        # not reported.
        left = {step.name for step in (new_steps((), steps)[-1:] if self._newest else self._known.values())}
        self._ready = deque(step for step in (*self._ready, *fresh) if step.name in left)


class Pauses:
    """The pauses between two looks at a run: ``poll_s`` seconds, give or take a quarter, or until its directory has
    changed."""

    def __init__(self, store: Store, poll_s: float) -> None:
        check_seconds("poll_s", poll_s)
        self._poll_s = poll_s
        self._changes = _changes(store)

    async def wait(self) -> None:
        pause_s = self._poll_s * random.uniform(1 - _JITTER, 1 + _JITTER)
        if self._changes is None:
            await asyncio.sleep(pause_s)
        else:
            await self._changes.wait(pause_s)


def _changes(store: Store) -> _Changes | None:
    if not isinstance(store, LocalStore):
        return None
    return _Changes(store.root) if find_spec("watchfiles") is not None else None


class _Changes:
    """A thread that waits for a change in a directory. It exists only during a call of ``wait``."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._threads = Threads("sidestream-watch", 1)

    async def wait(self, timeout_s: float) -> None:
        """Return when something has changed in the directory, or after ``timeout_s``."""
        stop = Stop()
        await self._threads.run(self._wait, timeout_s, stop, stop=stop)

    def _wait(self, timeout_s: float, stop: Stop) -> None:
        ended = threading.Event()
        with stop.waking(ended.set):
            if not self._root.is_dir():
                ended.wait(timeout_s)
                return
            changes = import_module("watchfiles").watch(
                self._root,
                watch_filter=None,
                debounce=_DEBOUNCE_MS,
                step=_DEBOUNCE_MS // 5,
                stop_event=ended,
                rust_timeout=max(1, round(timeout_s * 1000)),
                yield_on_timeout=True,
                raise_interrupt=False,
                recursive=False,
            )
            try:
                next(changes, None)
            except (OSError, RuntimeError):  # inotify is not supported, or its limit is reached: wait for the next poll
                ended.wait(timeout_s)
            finally:
                changes.close()

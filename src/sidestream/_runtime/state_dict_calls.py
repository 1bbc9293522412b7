"""``state_dict()`` and ``load_state_dict()`` of the caller's objects: in one order on all ranks, and watched.

Both may be collectives (FSDP). Ranks that call them in the order of their own dicts are in different collectives at the
same time, and wait for each other for ever. So objects are called level by level (first the objects in the state, then
the objects in their state dicts) and within a level in the order of their paths, with keys compared as the strings that
make up names. A rank that lacks an object skips it; the order of the others is the same.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from .caller import call

__all__ = ["LEAVES", "Found", "Look", "ask", "asked_in_order", "find_objects", "in_order", "key_order", "watched"]

_log = logging.getLogger("sidestream")

LEAVES = frozenset({torch.Tensor, torch.nn.Parameter, bool, int, float, str, bytes, complex, type(None)})
_SLICE = 1024  # values examined between two yields: up to a few microseconds each
_PATIENCE_S = 5.0

Look: TypeAlias = Callable[[Any], Iterable[tuple[Any, Any]] | None]
"""Returns the contents of a container by key (of a list: by index), nothing for a leaf, and None for an object whose
``state_dict()`` is to be called. The result stays valid if the container is changed."""


class Found(NamedTuple):
    """An object and its place: its path as sort keys, and its name."""

    order: tuple[str, ...]
    name: str
    instance: Any


def key_order(key: object, *, index: bool = False) -> str:
    """The sort key of ``key``. ``index``: ``key`` is a position in a list."""
    return f"{key:020d}" if index else str(key)


def in_order(found: Iterable[Found]) -> list[Found]:
    return sorted(found, key=lambda one: one.order)


def find_objects(start: Found, look: Look) -> Iterator[Found | None]:
    """Yield every object in ``start.instance``, itself included, unordered; yield None whenever other tasks should run.

    Nothing but ``look`` is called. An object in several places is found in the first of them, and a container that
    contains itself is walked once.
    """
    stack = [start]
    seen: dict[int, Found] = {}
    count = 0
    while stack:
        here = stack.pop()
        order, name, value = here
        contents = look(value)
        if contents is None:
            yield here
        if not contents or (id(value) in seen and seen[id(value)].order <= order):
            continue
        seen[id(value)] = here  # kept, so that no other container gets its id
        index = isinstance(value, list | tuple)
        for key, item in contents:
            count += 1
            if count % _SLICE == 0:
                yield None
            if type(item) in LEAVES:
                continue
            stack.append(Found((*order, key_order(key, index=index)), f"{name}.{key}" if name else str(key), item))


def asked_in_order(state: Any, look: Look, known: dict[int, tuple[Any, Any]]) -> Iterator[bool]:
    """Call ``state_dict()`` of every object in ``state``, once: ``known`` has each by its id, with its answer.

    Yields True after each level, and False whenever other tasks should run.
    """
    level = [Found((), "", state)]
    while level:
        found: dict[int, Found] = {}
        for start in level:
            for one in find_objects(start, look):
                if one is None:
                    yield False
                elif id(one.instance) not in known:
                    other = found.setdefault(id(one.instance), one)
                    if one.order < other.order:
                        found[id(one.instance)] = one
        level = []
        for one in in_order(found.values()):
            answer = ask(one)
            known[id(one.instance)] = (one.instance, answer)  # kept, so that no other object gets its id
            level.append(one._replace(instance=answer))
            yield False
        yield True


def ask(one: Found) -> Any:
    """Call and return its ``state_dict()``."""
    with watched(one.name, one.instance, "state_dict"):
        return call(one.instance.state_dict)


# --- calls that do not return ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Call:
    since: float
    name: str
    instance: Any
    method: str
    told: bool = False


class _Watch:
    """The calls into objects that are in progress, and a thread that monitors them. The thread runs while there are
    such calls and for a few seconds more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[int, _Call] = {}
        self._watched = False

    def begin(self, name: str, instance: Any, method: str) -> _Call:
        one = _Call(time.monotonic(), name, instance, method)
        with self._lock:
            self._calls[id(one)] = one
            start, self._watched = not self._watched, True
        if start:
            try:
                threading.Thread(target=self._run, name="sidestream-watch", daemon=True).start()
            except RuntimeError:  # the system cannot start another thread, or the interpreter ends
                self._watched = False
        return one

    def end(self, one: _Call) -> None:
        with self._lock:
            del self._calls[id(one)]

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._calls:
                    self._watched = False
                    return
                now = time.monotonic()
                silent = [one for one in self._calls.values() if not one.told]
                late = [one for one in silent if one.since + _PATIENCE_S <= now]
                due = min((one.since for one in silent if one.since + _PATIENCE_S > now), default=now) + _PATIENCE_S
                for one in late:
                    one.told = True
            for one in late:
                _tell(one)
            del silent, late
            time.sleep(due - now)


def _tell(one: _Call) -> None:
    _log.warning(
        "%s%s: %s.%s() has not returned for %d s, and blocks the thread that called it. If it calls a collective, "
        "every rank has to make the same call; ranks that wait for this one raise at their timeout_s",
        _this_rank(),
        one.name,
        type(one.instance).__qualname__,
        one.method,
        time.monotonic() - one.since,
    )


def _this_rank() -> str:
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return ""
    return f"rank {dist.get_rank()} of {dist.get_world_size()}: "


_watch = _Watch()


def _after_fork() -> None:
    global _watch
    _watch = _Watch()


os.register_at_fork(after_in_child=_after_fork)


@contextmanager
def watched(name: str, instance: Any, method: str) -> Iterator[None]:
    """Monitor a call of ``method`` of the object at ``name``: a thread logs a call that has not returned after 5 s. A
    thread does it because such a call blocks the loop."""
    watch = _watch
    one = watch.begin(name, instance, method)
    try:
        yield
    finally:
        watch.end(one)

"""Tasks that outlive the call that started them, each owned by the event loop's supervisor."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any
from weakref import WeakKeyDictionary

from .errors import WrongLoop

__all__ = ["running_loop", "supervise"]

_owned: WeakKeyDictionary[asyncio.AbstractEventLoop, set[asyncio.Task[None]]] = WeakKeyDictionary()


def running_loop(what: str) -> asyncio.AbstractEventLoop:
    """The loop that runs this code. Raises ``WrongLoop`` where there is none."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise WrongLoop(f"{what} needs a running event loop; use sidestream.blocking where there is none") from None


def supervise(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Run ``work`` on the running loop; a strong reference is kept until it has ended.

    ``work`` must not raise: it delivers every failure to whoever awaits its result. When the loop is closed by
    ``asyncio.run`` it is cancelled and waited for.
    """
    loop = asyncio.get_running_loop()
    task = loop.create_task(work, name=name)
    tasks = _owned.setdefault(loop, set())
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task

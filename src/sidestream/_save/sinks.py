"""Sinks: what a save feeds besides the checkpoint, from the same snapshot, without delaying it."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from concurrent.futures import Future
from typing import Any, Protocol

from .._runtime.tasks import supervise
from .._runtime.threads import Deadline, Stop, Threads, time_limit
from .._staging import SnapshotReader, clean
from .._storage import Location
from ..errors import SnapshotLost
from .order import SaveOrder
from .pending import PendingSave

__all__ = ["PendingSink", "Sink"]


class Sink(Protocol):
    """An export, or weights that are served. It reads the snapshot of a save, or else the checkpoint that was
    committed."""

    def read(self, snapshot: SnapshotReader[Any], stop: Stop) -> Any:
        """Read the windows of a snapshot, one after the other, and return the result of the sink. Called in a thread.
        Where this raises ``SnapshotLost`` it undoes what it did, because ``read_checkpoint`` starts over. Memory of a
        window is kept for as long as any view or tensor over it exists."""

    async def read_checkpoint(self, checkpoint: Location) -> Any:
        """Read the committed checkpoint, and return the result of the sink."""


class PendingSink:
    """The outcome of one sink of a save. ``await`` it for the result of the sink, any number of times; a cancelled
    awaiter does not cancel the sink, ``cancel()`` does. The checkpoint does not depend on it.

    ``snapshot`` is read in a thread that begins at once; None: the sink reads the checkpoint of ``save``.
    """

    def __init__(self, sink: Sink, order: SaveOrder, snapshot: SnapshotReader[Any] | None, save: PendingSave) -> None:
        self._sink = sink
        self._order = order
        self._save = save
        self._snapshot = snapshot
        self._stop = Stop()
        self._threads = Threads("sidestream-sink", 1)
        self._read: Future[Any] | None = None
        if snapshot is not None:
            with time_limit(order.deadline):
                self._read = self._threads.submit(_read, sink, snapshot, self._stop)
        self._result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._task = supervise(self._run(), f"sidestream sink of {order.location.url}")
        self._task.add_done_callback(self._settle)

    def done(self) -> bool:
        return self._result.done()

    def cancel(self) -> bool:
        """Ask the sink to stop; awaiting it then raises ``CancelledError``. False if it has ended already."""
        return self._task.cancel()

    async def ended(self) -> None:
        """Wait until it has ended. Never raises what the sink raised."""
        await asyncio.wait([self._task])

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.shield(self._result).__await__()

    async def _run(self) -> None:
        """The edge of the background: everything ends in the future."""
        try:
            self._result.set_result(await self._outcome())
        except asyncio.CancelledError:
            self._result.cancel()
        except Exception as error:
            self._result.set_exception(error)
            self._result.exception()  # the caller may not want to know

    def _settle(self, _: object) -> None:
        """The task has ended, perhaps before its first step."""
        self._stop.set()
        self._threads.close()
        if self._snapshot is not None:
            self._snapshot.close()  # the thread may not have begun
        if not self._result.done():
            self._result.cancel()

    async def _outcome(self) -> Any:
        order = self._order
        if self._read is not None:
            try:
                with time_limit(order.deadline):
                    return await self._threads.wait(self._read, "a sink", stop=self._stop)
            except SnapshotLost:
                pass
        await self._save.ended()
        if self._save.outcome != "committed":
            raise SnapshotLost(
                f"the snapshot could not be read to its end, and {order.location.url} was not saved, which could have "
                "been read in its place"
            )
        with time_limit(Deadline.after(order.deadline.timeout_s)):
            return await self._sink.read_checkpoint(order.location)


def _read(sink: Sink, snapshot: SnapshotReader[Any], stop: Stop) -> Any:
    try:
        return sink.read(snapshot, stop)
    except Exception as error:
        raise clean(error, "the thread of a sink") from None  # its frames refer to staged memory
    except BaseException as error:  # SystemExit in this thread is not the end of the program
        ended = f"a sink was ended by {type(error).__name__}: {error}"
    finally:
        snapshot.close()
    raise RuntimeError(ended)  # here, because its context would keep the frames too

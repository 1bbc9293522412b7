"""Sinks, such as exports: readers of the snapshot of a save beside the checkpoint, which they do not delay."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

from .._engine.handle import Pending, Waitable
from .._group import Operation, prepare_together
from .._runtime.public import public
from .._runtime.tasks import run_shielded
from .._runtime.threads import Deadline, Stop, ThreadFuture, Threads, time_limit
from .._staging import SnapshotReader, clean
from ..errors import ClosedError, InvalidOptionError, SkippedError, SnapshotLostError, printable, printable_lines
from ..options import Durability, Outcome
from .running import Save

_log = logging.getLogger("sidestream")


class _Closed(Protocol):
    def close(self) -> None: ...


R = TypeVar("R", bound=_Closed)


class Sink(Protocol):
    """A reader of the snapshot of a save, such as an export or the publication of weights. If there is no snapshot, it
    reads the committed checkpoint."""

    together: bool
    """Whether the ranks that save together also read the checkpoint together, and each writes a part."""

    replaces: bool
    """Whether what it makes replaces that of an earlier generation of the step."""

    @property
    def url(self) -> str:
        """The URL to which it writes."""

    async def prepare(self, save: Save) -> None:
        """Read what the sink needs besides the state of ``save``. Called first, with the deadline of the save. Of ranks
        that save together only rank 0 calls it."""

    def read(self, snapshot: SnapshotReader[Any], save: Save, stop: Stop) -> Any:
        """Read the windows of the snapshot of ``save``, one after the other. Called in a thread. The memory of a window
        is kept as long as a view of it, or a tensor over it, exists."""

    async def finish(self, read: Any, save: Save) -> Any:
        """Return the result of the sink of ``save``. ``read`` is the result of the method ``read``. The snapshot has
        been released."""

    async def undo(self, error: BaseException) -> None:
        """Remove what ``read`` and ``finish`` have written, after the ``error`` that ended them. A thread may still
        hang in ``read``. After ``SnapshotLostError``, ``read_checkpoint`` is called next."""

    async def read_checkpoint(self, save: Save, ranks: Operation | None) -> Any:
        """Read the checkpoint that ``save`` has committed, and no other one, and return the result of the sink. If
        ``ranks`` is given, all ranks do so together."""


class Export(Protocol):
    """The type of the argument ``export=`` of a save: ``sidestream.HF``."""

    @property
    def counts_steps(self) -> bool:
        """Whether the names of the exports of a run differ in their last part, by the step."""

    def sink(self, *, step: int | None, durability: Durability) -> Sink:
        """Return the sink of one save. Raises ``InvalidOptionError``."""

    async def prune(self, keep: int, *, durability: Durability) -> None:
        """Delete the exports of a run except those of the ``keep`` highest steps. Raises what the storage raises."""


class PublishingSink(Sink, Protocol):
    """The sink that publishes a version of weights."""

    async def applied(self, count: int, timeout_s: float | None) -> Any:
        """Do ``PendingVersion.applied``."""

    def ended(self) -> None:
        """Note that the version is published, or never will be. Called in any thread."""


class Publishes(Protocol):
    """The type of the argument ``publish=``: a ``sidestream.Publisher``, or what its ``version()`` returns."""

    def sink(self, step: int | None, metadata: Mapping[str, Any] | None) -> PublishingSink:
        """Return the sink of one save, and take the number of its version. Raises what is wrong with the version."""


SinkContext: TypeAlias = Callable[[Save], AbstractAsyncContextManager[object]]
"""A function that returns the context in which a sink of a save works, from its beginning to its end."""


def _no_context(save: Save) -> AbstractAsyncContextManager[object]:
    return nullcontext()


class PendingOutcome(Pending[Any]):
    """What a save produces beside the checkpoint, in progress. The checkpoint does not depend on it. A failure is
    logged.

    If the save is cancelled before it is committed, this is cancelled too. If the save is skipped, it raises
    ``SkippedError``. If the save fails, so that nothing is left to read, it raises ``SnapshotLostError``.
    """

    _doing = "making"
    _done = "made"

    def __init__(self, sink: Sink, context: SinkContext = _no_context) -> None:
        super().__init__(f"sidestream: {self._doing} {sink.url}")
        self._sink = sink
        self._context = context
        # Two futures, because the outcomes are independent. The save sets this one when it ends; this may continue for
        # long after that.
        self._saved: ThreadFuture[Outcome] = ThreadFuture()
        self._begun = False
        self._ranks: Operation | None = None

    @property
    def url(self) -> str:
        """Where it is written to."""
        return self._sink.url

    def __repr__(self) -> str:
        how = "in progress"
        if self.done():
            how = "cancelled" if self.cancelled() else "failed" if self._future.exception() else "done"
        return printable(f"<{type(self).__name__} {self.url}: {how}>")

    def cancel(self) -> bool:
        """Ask it to stop. Awaiting it raises ``CancelledError`` when what it has written is removed.

        Returns:
            False if it had ended already.
        """
        return super().cancel()

    def report_or_error(self) -> Any:
        """Return what awaiting it returns, or the error that awaiting it raises, once it is ``done()``."""
        if self.cancelled():
            return asyncio.CancelledError()
        return self._future.exception() or self._future.result()

    def drop(self) -> None:
        """End it, because there is no save. Called in any thread."""
        self.cancel() if self._begun else self.fail(asyncio.CancelledError())

    # --- called by the save, on the operation loop ---

    def begin(self, save: Save, number: int, snapshot: SnapshotReader[Any] | None) -> None:
        """Start to read ``snapshot`` in a thread. None: read the checkpoint when it is committed. ``number`` counts the
        outcomes of the save, some of which several ranks make together."""
        if self.done():  # cancelled before the save began
            if snapshot is not None:
                snapshot.close()
            self._report(save, number, asyncio.CancelledError())
            return
        self._begun = True
        self._start(partial(self._make, save, number, snapshot))

    def saved(self, outcome: Outcome, error: BaseException | None) -> None:
        """Note that the save has ended with ``outcome``, and with ``error`` if it did not succeed."""
        if not self._saved.done():
            self._saved.set_result(outcome)
        if self.done() or outcome == "committed":
            return
        if isinstance(error, asyncio.CancelledError):
            self._cancelling = True
            self._cancel()
        elif not self._begun and isinstance(error, SkippedError):
            self.fail(SkippedError(f"nothing was {self._done} {self.url}: {error}"))
        elif not self._begun:
            self.fail(SnapshotLostError(f"nothing was {self._done} {self.url}, because the save did not begin"))

    # --- the task ---

    def _cancel(self) -> None:
        super()._cancel()
        if not self._begun:
            self.fail(asyncio.CancelledError())

    async def _make(self, save: Save, number: int, snapshot: SnapshotReader[Any] | None) -> Any:
        try:
            async with self._context(save):
                if save.operation is None or not self._sink.together:
                    return await self._made(save, snapshot)
                return await self._made_together(save, number)
        except (Exception, asyncio.CancelledError) as error:
            self._report(save, number, error)
            # Otherwise the save itself tells what has failed.
            if not isinstance(error, (SkippedError, SnapshotLostError, asyncio.CancelledError)):
                text = printable_lines(f"{type(error).__name__}: {error}")
                _log.error("%s %s from %s failed: %s", self._doing, self.url, save.location.url, text)
            raise
        finally:
            if snapshot is not None:  # or its windows would stay leased
                snapshot.close()

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        self.mark_retrieved()  # it was logged

    def _report(self, save: Save, number: int, error: BaseException) -> None:
        """Report to the other ranks that this one does not take part. Does nothing if it has begun to work with them,
        because that work reports its own errors."""
        if save.operation is not None and self._sink.together and self._ranks is None:
            self._ranks = _following(save, number)
            self._ranks.report(error)

    async def _made(self, save: Save, snapshot: SnapshotReader[Any] | None) -> Any:
        with time_limit(save.deadline):
            await self._sink.prepare(save)
        if snapshot is not None:
            try:
                with time_limit(save.deadline):
                    read = await read_in_thread(snapshot, lambda found, stop: self._sink.read(found, save, stop))
                    # What was made of the generation before stays, unless this one is committed.
                    if save.order.generation > 1 and self._sink.replaces:
                        await self._committed(save)
                    return await self._sink.finish(read, save)
            except (Exception, asyncio.CancelledError) as error:
                # What was written is removed before the cause is looked at. If the snapshot was taken back, for memory
                # that another stage needs, the sink begins anew from the checkpoint, below. Every other error ends it.
                await run_shielded(self._sink.undo, error)
                if not isinstance(error, SnapshotLostError):
                    raise
        await self._committed(save)
        # A time limit of its own. The first one began with the save, and the wait for the commit may have used it up.
        # That wait has none: the save ends by its own deadline.
        with time_limit(Deadline.after(save.deadline.timeout_s)):
            return await self._sink.read_checkpoint(save, None)

    async def _made_together(self, save: Save, number: int) -> Any:
        """Export a part of the checkpoint, as each rank of the group does, and return the result."""
        await self._committed(save)
        # The ranks begin this operation after the save, and other operations of the group may come in between, on each
        # rank in another order. So its number follows from that of the save, and not from a count of calls.
        ranks = self._ranks = _following(save, number)
        with time_limit(ranks.deadline):
            if ranks.rank == 0:
                await prepare_together(ranks, self._sink.prepare, save)
            return await self._sink.read_checkpoint(save, ranks)

    async def _committed(self, save: Save) -> None:
        """Wait until the save is committed. Raises ``SnapshotLostError`` if it is not."""
        if await asyncio.wrap_future(self._saved) != "committed":
            raise SnapshotLostError(f"nothing was {self._done} {self.url}, because {save.location.url} was not saved")


@public
class PendingExport(PendingOutcome):
    """An export of a save in progress. Awaiting it returns its ``ConvertReport``, or raises the error of the export.

    Any number of tasks may await it, any number of times, on any event loops, and ``result()`` waits for it in a
    thread. A cancel of an awaiting task does not cancel the export; ``cancel()`` does. The checkpoint does not depend
    on it. An export that fails is logged.

    If the save is cancelled before it is committed, the export is cancelled too. If the save is skipped, it raises
    ``SkippedError``. If the save fails, so that nothing is left to export, it raises ``SnapshotLostError``.
    """

    _doing = "exporting to"
    _done = "exported to"


@public
class PendingVersion(PendingOutcome):
    """A version that a ``Publisher`` is about to publish. Awaiting it returns its ``PublishedVersion``, or raises its
    error.

    Any number of tasks may await it, any number of times, on any event loops, and ``result()`` waits for it in a
    thread. A cancel of an awaiting task has no effect on it; ``cancel()`` withdraws what is not published yet. The
    checkpoint of the same save does not depend on it, nor it on the checkpoint. A version that fails is logged.
    """

    _doing = "publishing to"
    _done = "published to"
    _sink: PublishingSink

    def __init__(self, sink: PublishingSink, context: SinkContext = _no_context) -> None:
        super().__init__(sink, context)
        self._staged: Waitable[None] = Waitable(f"staging for {sink.url}")
        self.when_done(partial(self._staged.succeed, None))
        self.when_done(sink.ended)

    @property
    def staged(self) -> Waitable[None]:
        """Await it before the tensors change. For a version of a save this is later than ``staged`` of the save."""
        return self._staged

    def follow(self, free: Future[None]) -> None:
        """Resolve ``staged`` as soon as ``free`` is resolved."""
        free.add_done_callback(self._on_free)

    def _on_free(self, free: Future[None]) -> None:
        # What was given up reads no source any more: the version itself says so.
        error = Future.exception(free)
        if error is None or isinstance(error, (SkippedError, ClosedError)):
            self._staged.succeed(None)
        else:
            self._staged.fail(error)

    def begin_alone(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """Start ``work``, which publishes a state that is not saved."""
        self._begun = True

        async def logged() -> Any:
            try:
                return await work()
            except SkippedError:
                raise
            except Exception as error:
                text = printable_lines(f"{type(error).__name__}: {error}")
                _log.error("publishing to %s failed: %s", self.url, text)
                raise

        self._start(logged)

    @property
    def published(self) -> PendingVersion:
        """This object: ``await pending.published``."""
        return self

    async def applied(self, *, count: int, timeout_s: float | None = None) -> Any:
        """Wait until subscribers have answered: they serve the version, have refused it, or have passed to a later one.

        A cancel has no effect on the version.

        Args:
            count: How many answers to wait for.
            timeout_s: The limit, in seconds. None: none.

        Returns:
            An ``AppliedReport``: who serves it, and who does not.

        Raises:
            DeadlineExceededError: Fewer have answered in time. The message says which have.
            ClosedError: The publisher is closed.
            SidestreamError: What awaiting the version raises.
        """
        await self
        return await self._sink.applied(count, timeout_s)


def _following(save: Save, number: int) -> Operation:
    """Begin the operation in which the ranks export together after the save."""
    assert save.operation is not None
    return save.operation.follow(number, "export", Deadline.after(save.deadline.timeout_s))


async def read_in_thread(snapshot: R, read: Callable[[R, Stop], Any]) -> Any:
    """Read the snapshot with ``read``, in a thread that no other work uses, because a sink may hang for ever."""
    # Not one of the shared threads. A sink that hangs would keep one of those for ever, and enough of them would stop
    # all saves.
    threads, stop = Threads("sidestream-sink", 1), Stop()
    try:
        return await threads.run(_read, snapshot, read, stop, stop=stop)
    finally:
        threads.close()


def exports_in(export: Export | Sequence[Export] | None) -> tuple[Export, ...]:
    """Return the exports that ``export=`` names. Raises ``InvalidOptionError``."""
    found = () if export is None else tuple(export) if isinstance(export, Sequence) else (export,)
    for one in found:
        if not callable(getattr(one, "sink", None)):
            raise InvalidOptionError(f"export={one!r} has to be a sidestream.HF, or a list of them")
    return found


def publication(
    publish: Publishes | None,
    step: int | None,
    metadata: Mapping[str, Any] | None,
    context: SinkContext = _no_context,
) -> tuple[PendingVersion, ...]:
    """Return the version that ``publish=`` asks for, if any. Raises what is wrong with it."""
    if publish is None:
        return ()
    if not callable(getattr(publish, "sink", None)):
        raise InvalidOptionError(f"publish={publish!r} has to be a sidestream.Publisher, or its version()")
    return (PendingVersion(publish.sink(step, metadata), context),)


def sinks_of(exports: Sequence[Export], target: str, *, step: int | None, durability: Durability) -> list[Sink]:
    """Return the sinks of a save to the URL ``target``. Raises ``InvalidOptionError`` if one of them would write into
    the directory of the save or of another sink."""
    sinks = [one.sink(step=step, durability=durability) for one in exports]
    places = [target, *(sink.url for sink in sinks)]
    for one, other in itertools.permutations(places, 2):
        if f"{one}/".startswith(f"{other}/"):
            raise InvalidOptionError(
                f"{one} lies in {other}: a checkpoint and each of its exports need places of their own"
            )
    return sinks


async def all_ended(outcomes: Sequence[PendingOutcome]) -> None:
    """Wait until ``outcomes`` have ended. Never raises their errors."""
    for one in outcomes:
        await one.ended()


def _read(snapshot: R, read: Callable[[R, Stop], Any], stop: Stop) -> Any:
    try:
        return read(snapshot, stop)
    except Exception as error:
        raise clean(error, "the thread of a sink") from None  # its frames refer to staged memory
    except BaseException as error:  # SystemExit in this thread must not end the program
        ended = f"a sink was ended by {type(error).__name__}: {error}"
    finally:
        snapshot.close()
    raise RuntimeError(ended)  # outside of the except clause: the context of the error would keep the frames

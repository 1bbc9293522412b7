"""The coordinator of one save by all ranks of a group. Rank 0 commits when all ranks have written."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

from .._group import Operation, Stopped, has_ended
from .._runtime.threads import Deadline, Stop, ThreadFuture, io_threads, pause_point, report, time_limit
from .._runtime.waits import WaitReasons
from ..errors import NotDurableError, OutcomeUnknownError, RankFailuresError, SidestreamError
from ..events import SaveContext
from ..options import Outcome
from .lifecycle import Lifecycle
from .operation import (
    Committed,
    RankReceipt,
    SharedLayout,
    Writer,
    join_pieces,
    split_pieces,
)
from .pending import SaveInfo, SaveProgress
from .running import READ_BACK_S, Save

_POLL_S = 0.1


@dataclass(slots=True)
class FailedSave:
    """A save that this rank could not begin. ``run`` sends the error to the other ranks."""

    operation: Operation
    url: str
    error: BaseException
    outcome: Outcome = "absent"
    progress: SaveProgress = field(default_factory=SaveProgress)
    reasons: WaitReasons = field(default_factory=lambda: WaitReasons("ranks"))

    @property
    def context(self) -> SaveContext:
        return SaveContext("save", self.url, rank=self.operation.rank, world=self.operation.world)

    async def run(self, staged: Future[None]) -> SaveInfo:
        lifecycle = Lifecycle(SaveContext("save", self.url, rank=self.operation.rank, world=self.operation.world))
        await report(lifecycle.started)
        verdict = await self.operation.failed(self.error)
        await report(lifecycle.failed, verdict, "absent")
        raise self.operation.cancelled or verdict from self.error


class Group:
    """The coordinator of a save by several ranks, on one of them."""

    def __init__(self, save: Save, layout: SharedLayout) -> None:
        assert save.operation is not None
        self._save = save
        self._layout = layout
        self._operation = save.operation

    def attach(self, writer: Writer) -> None:
        self._operation.on_stop(writer.interrupt)

    def relay(self, staged: Future[None]) -> Future[None]:
        """Return a future that resolves ``staged`` if the copies succeed. If they fail, the verdict has the error."""
        # If the copies of this rank fail, ``staged`` must not get the error of this rank: all ranks raise the same
        # verdict, and it does not exist yet. ``PendingSave`` resolves ``staged`` with the verdict when the save ends.
        inner: ThreadFuture[None] = ThreadFuture()

        def pass_on(_: Future[None]) -> None:
            if inner.exception() is None:
                with suppress(InvalidStateError):  # the save has ended
                    staged.set_result(None)

        inner.add_done_callback(pass_on)
        return inner

    def close(self) -> None:
        self._operation.close()

    async def before_commit(self) -> None:
        """Do nothing. Called on rank 0 when all ranks have written; if a subclass raises here, nothing is committed."""

    # --- the commit ---

    def finish(self, plan: Any, written: Any, stop: Stop) -> bytes:
        """Return the receipt of this rank, and the times of its phases, as bytes."""
        lifecycle = self._save.lifecycle
        receipt = self._layout.receipt(plan, written, stop)
        lifecycle.written(receipt.nbytes)
        seconds = dict(lifecycle.seconds)  # a copy: another thread may add to it meanwhile
        head = json.dumps({"files": receipt.files, "crcs": receipt.crcs, "seconds": seconds}).encode()
        return join_pieces(head, self._layout.pack(receipt))

    async def commit(self, finished: bytes) -> Committed:
        save = self._save
        answer = await self._operation.aexchange("commit", finished, self._commit)
        sent = json.loads(answer)
        # The answer is a proof: rank 0 sends it after its commit. It is recorded first, because the checkpoint is
        # visible also if it may not be durable.
        save.transaction.outcome = "committed"
        if "not_durable" in sent:
            raise NotDurableError(sent["not_durable"])
        return Committed(sent["nbytes"], sent["seconds"])

    async def _commit(self, packed: Sequence[bytes]) -> bytes:
        """Commit, and return the answer to all ranks. Called on rank 0, when all ranks have written."""
        save, operation, layout = self._save, self._operation, self._layout
        threads, transaction = io_threads(), save.transaction
        # All that can fail without consequences comes first: other storage, a manifest that cannot be made, a caller
        # that forbids the commit. Until ``make_irrevocable`` returns, the failure of any rank stops the save, and the
        # attempt is deleted. After it the other ranks cannot change the outcome any more: their failures are dropped,
        # because the commit may take effect at any moment.
        received = await threads.run(_unpack, packed, layout)
        receipts = [receipt for receipt, _ in received]
        await save.check_shared({name: nbytes for receipt in receipts for name, nbytes in receipt.files.items()})
        files = await threads.run(layout.files, receipts)
        await self.before_commit()
        if not operation.make_irrevocable():
            raise Stopped
        times = [seconds for _, seconds in received]
        try:
            await save.commit(files)
        except NotDurableError as error:
            return json.dumps({"not_durable": str(error)}).encode()
        except asyncio.CancelledError:
            # There are two cases for a cancel. The commit did not take place: the cancel is a failure of this rank, and
            # ends the save on all of them. It did: the others succeed. They are sent the answer, and only this rank
            # raises its cancel.
            if transaction.outcome != "committed":
                raise
            operation.step_completed = True
            operation.answer("commit", self._answer(receipts, times))
            raise
        save.lifecycle.mark("committed")
        return self._answer(receipts, times)

    def _answer(self, receipts: Sequence[RankReceipt], times: Sequence[Mapping[str, float]]) -> bytes:
        """Return the answer to all ranks. A phase has the time of the rank on which it ended last."""
        seconds = dict(self._save.lifecycle.seconds)
        for one in times:
            for phase, value in one.items():
                seconds[phase] = max(seconds.get(phase, 0.0), value)
        return json.dumps({"nbytes": sum(receipt.nbytes for receipt in receipts), "seconds": seconds}).encode()

    # --- failures ---

    async def fail(self, error: BaseException) -> Committed:
        """End the save after ``error``. Raises the error that all ranks raise; returns only if the checkpoint has been
        committed."""
        operation, save = self._operation, self._save
        # Nothing is left to agree on. Either the answer has reached all ranks and a cancel came after it, or rank 0 has
        # sent all of them the same ``NotDurableError``. A verdict would turn a commit into a failure on the other
        # ranks.
        if operation.step_completed or (isinstance(error, NotDurableError) and save.outcome == "committed"):
            save.transaction.outcome = "committed"
            operation.close()
            raise error
        verdict = await operation.failed(self._reason(error))
        # Only rank 0 deletes, and only now: ``failed`` has waited until the other ranks have stopped. A rank that was
        # still writing would put files into a directory that is being removed.
        if operation.rank == 0:
            await save.clean_up(verdict)
        else:
            await self._read_back(verdict)
        # The caller's own cancel comes before the verdict, so that ``asyncio.timeout`` and task groups recognize it. It
        # may have come while ``failed`` waited: then it is in ``cancelled``.
        if isinstance(error, asyncio.CancelledError):
            raise error
        if operation.cancelled is not None:
            raise operation.cancelled from error
        if save.outcome == "committed":
            return await self._committed_read_back()
        raise verdict from error

    def _reason(self, error: BaseException) -> BaseException:
        """Return the error that is sent to the other ranks. They take a cancel for a save that was not committed. So if
        the outcome is unknown, another error is sent."""
        save = self._save
        if isinstance(error, asyncio.CancelledError) and save.outcome == "unknown":
            return OutcomeUnknownError(
                f"rank 0 was cancelled after the commit of {save.location.url} was sent, and whether it took place "
                "could not be read back. Nothing was deleted; look whether it is there"
            )
        return error

    async def _read_back(self, verdict: RankFailuresError) -> None:
        """Find out the outcome if rank 0 has died in its commit, or does not know the outcome."""
        save, first = self._save, verdict.failures[0]
        if first.rank == 0 and first.kind == "OutcomeUnknownError":
            save.transaction.outcome = "unknown"
        # Rank 0 has reported nothing: its connection has ended, or it was silent until the deadline. Any other failure
        # was judged by a rank 0 that knows its outcome, and the outcome is ``"absent"``. If this rank was not in the
        # commit yet, rank 0 had not committed either, because it commits when all ranks have sent their receipts.
        alone = first.rank == 0 and first.kind in ("RankDied", "DeadlineExceededError") and first.step != "commit"
        if self._operation.step != "commit" or not alone:
            return
        first_process = self._operation.first
        assert first_process is not None
        deadline = Deadline.after(READ_BACK_S)
        save.transaction.outcome = "unknown"
        while True:
            # Checked first: a process that has ended before the look cannot commit after it.
            ended = save.location.store.capabilities.rename and has_ended(first_process)
            with time_limit(deadline):
                save.transaction.outcome = await self._seen()
            if save.outcome == "absent" and not ended:
                save.transaction.outcome = "unknown"  # rank 0 may still commit
            if save.outcome != "unknown" or not deadline.remaining_s():
                return
            await asyncio.sleep(_POLL_S)

    async def _seen(self) -> Outcome:
        location = self._save.location
        try:
            async with aclosing(location.source()) as source:
                marker = await source.marker()
        except FileNotFoundError:
            return "absent"
        except (SidestreamError, OSError):
            return "unknown"
        return "committed" if marker is not None and marker.save_id == self._save.save_id else "absent"

    async def _committed_read_back(self) -> Committed:
        location = self._save.location
        with time_limit(Deadline.after(READ_BACK_S)):
            sizes = await location.store.sizes(location.name)
        nbytes = sum(size for name, size in sizes.items() if name.startswith("__"))
        return Committed(nbytes, self._save.lifecycle.seconds)


def _unpack(packed: Sequence[bytes], layout: SharedLayout) -> list[tuple[RankReceipt, Mapping[str, float]]]:
    """Return the receipts of all ranks, and the times of their phases. Called in a worker thread."""
    received = []
    for rank, raw in enumerate(packed):
        pause_point()
        head, content = split_pieces(raw, 2)
        facts = json.loads(head)
        receipt = RankReceipt(facts["files"], layout.unpack(rank, content), facts["crcs"])
        received.append((receipt, facts["seconds"]))
    return received

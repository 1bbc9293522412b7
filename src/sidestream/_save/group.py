"""One save by all ranks of a group: each stages and writes its part, rank 0 commits when all have, or for none."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

from .._format.checksum import crc32
from .._format.dcp.shared import places_of_chunks, places_of_values, shared_metadata
from .._format.manifest import metadata_line, write_root
from .._format.marker import METADATA_NAME, Marker, manifest_name
from .._format.records import Manifest
from .._format.shard import BlockSums
from .._format.shared import PartName, Root, part_name, write_part
from .._group import Operation, Stopped, has_ended
from .._layout.sharded.rank_layout import RankPlan
from .._load.open.steps import read_marker
from .._runtime.tasks import finish
from .._runtime.threads import Deadline, Stop, io_threads, politely
from .._runtime.torch_probes import TORCH_VERSION
from .._storage import Outcome, Transaction
from .._storage.bodies import BytesBody
from ..errors import NotDurable, NotShared, OutcomeUnknown, RankFailures, SidestreamError
from .group_planning import Planned, Planning, Terms
from .operation import Job, Writer
from .pending import SaveInfo, SaveProgress
from .writing import SaveOrder

__all__ = ["FailedSave", "JointSave", "maker_of_attempt", "planning_of", "terms_of"]

_READ_BACK_S = 10.0
_LOOK_S = 0.1


class Agreeing(Protocol):
    """What the ranks plan together; ``planned`` is there once they have."""

    @property
    def planned(self) -> Any: ...


def planning_of(order: SaveOrder, operation: Operation) -> Planning:
    """How the ranks plan ``order`` together."""
    return Planning(operation, terms_of(order), maker_of_attempt(order))


def terms_of(order: SaveOrder, *, planner: bool = False) -> Terms:
    return Terms(order.location.name, order.durability, order.digest, planner)


def maker_of_attempt(order: SaveOrder) -> Callable[[], None]:
    """Rank 0 makes the attempt. Its name is one that no other save has, so that whoever finds it sees this very
    directory, and whoever does not is told so."""

    return lambda: order.transaction.write_here(())


@dataclass(slots=True)
class FailedSave:
    """A save that this rank could not even begin; the others are told."""

    operation: Operation
    url: str
    error: BaseException
    outcome: Outcome = "absent"
    progress: SaveProgress = field(default_factory=SaveProgress)

    @property
    def expires_at(self) -> float:
        return self.operation.deadline.at

    async def run(self, staged: asyncio.Future[None]) -> SaveInfo:
        raise await self.operation.failed(self.error) from self.error

    def abandon(self) -> None:
        self.operation.report(self.error)

    def leave(self, *, stuck: bool) -> None:
        """Do nothing: nothing has been written."""


@dataclass(slots=True, kw_only=True)
class JointSave(Job):
    """One save, from launched copies to the commit, as one rank sees it."""

    operation: Operation
    planning: Agreeing
    _reply: bytes | None = None
    """On rank 0, once the commit has been sent: the reply to the other ranks for when it has taken place."""

    def abandon(self) -> None:
        if self.outcome == "absent":
            self.operation.report(asyncio.CancelledError())
        self.source.abandon()

    def leave(self, *, stuck: bool) -> None:
        self.source.leave()
        if self.operation.rank == 0:
            self._leave_first(stuck)
        else:
            self._leave_other()

    def _leave_first(self, stuck: bool) -> None:
        """On rank 0: send the outcome of a commit to the other ranks."""
        operation = self.operation
        try:
            self.order.transaction.settle(stuck=stuck)
        finally:
            if self.outcome == "committed" and self._reply is not None:
                operation.answer("commit", self._reply)
                operation.close()
            else:
                operation.report(self._reason(asyncio.CancelledError()))

    def _leave_other(self) -> None:
        """On any other rank: find out whether rank 0 has committed."""
        operation = self.operation
        if operation.step != "commit":
            return
        from .._storage.clients.io_loop import Call  # imports fsspec

        wait([operation.verdict], min(operation.deadline.remaining_s(), _READ_BACK_S))
        deadline = Deadline.after(_READ_BACK_S)
        self.order.transaction.outcome = "unknown"
        seen = Call(self._seen_by(deadline)).result("reading back", stop=Stop(), deadline=deadline)
        if seen == "committed" or operation.verdict.done():
            self.order.transaction.outcome = seen

    def _seen_by(self, deadline: Deadline) -> Callable[[], Coroutine[Any, Any, Outcome]]:
        return partial(self._seen, deadline)

    async def run(self, staged: asyncio.Future[None]) -> SaveInfo:
        staged.add_done_callback(lambda _: self._mark("staged"))
        writing: Writer | None = None
        try:
            writing = await self.source.launch()
            self.operation.on_stop(writing.interrupt)
            writing.pass_on(_unless_failed(staged))
            info = await self._write_and_commit(writing)
        except BaseException as error:
            info = await self._fail(error)
        finally:
            if writing is not None:
                await finish(writing.release)
        self.operation.close()
        return info

    async def _write_and_commit(self, writing: Writer) -> SaveInfo:
        _, written = await writing.ended()
        planned = self.planning.planned
        assert planned is not None
        receipt = await self._receipt(planned, written)
        self._mark("written")
        answer = await self.operation.aexchange("commit", receipt, self._commit)
        return self._info(json.loads(answer))

    def _info(self, told: Mapping[str, Any]) -> SaveInfo:
        self.order.transaction.outcome = "committed"
        if told.get("not_durable"):
            raise NotDurable(told["not_durable"])
        order = self.order
        return SaveInfo(
            self.url,
            order.save_id,
            order.step,
            order.generation,
            told["nbytes"],
            order.durability,
            MappingProxyType(told["seconds"]),
        )

    # --- how it fails ---

    async def _fail(self, error: BaseException) -> SaveInfo:
        """Raises what all ranks raise; returns only if the checkpoint turns out to be there."""
        operation = self.operation
        if operation.went_on or (isinstance(error, NotDurable) and self.outcome == "committed"):
            self.order.transaction.outcome = "committed"
            operation.close()
            raise error
        verdict = await operation.failed(self._reason(error))
        if operation.rank == 0:
            await self.order.transaction.clean_up(verdict)
        else:
            await self._look_back(verdict)
        if isinstance(error, asyncio.CancelledError):
            raise error
        if self.outcome == "committed":
            return await self._info_read_back()
        raise verdict from error

    def _reason(self, error: BaseException) -> BaseException:
        """What the others are told. Of a cancel only that nothing came of this save, so not where that is not known."""
        if isinstance(error, asyncio.CancelledError) and self.outcome == "unknown":
            return OutcomeUnknown(
                f"rank 0 was cancelled after the commit of {self.url} was sent, and whether it took place could not be "
                "read back. Nothing was deleted; look whether it is there"
            )
        return error

    async def _look_back(self, verdict: RankFailures) -> None:
        """Rank 0 has gone while it committed, or does not know what came of it."""
        first = verdict.failures[0]
        if first.rank == 0 and first.kind == "OutcomeUnknown":
            self.order.transaction.outcome = "unknown"
        alone = first.rank == 0 and first.kind in ("RankDied", "DeadlineExceeded") and first.step != "commit"
        if self.operation.step != "commit" or not alone:
            return
        planned = self.planning.planned
        assert planned is not None
        deadline = Deadline.after(_READ_BACK_S)
        self.order.transaction.outcome = "unknown"
        while True:
            # In this order: what a process has not done when it has ended, it will not do.
            ended = self.order.location.store.appears_whole and has_ended(planned.first)
            self.order.transaction.outcome = await self._seen(deadline)
            if self.outcome == "absent" and not ended:
                self.order.transaction.outcome = "unknown"  # it may be about to publish
            if self.outcome != "unknown" or not deadline.remaining_s():
                return
            await asyncio.sleep(_LOOK_S)

    async def _seen(self, deadline: Deadline) -> Outcome:
        location = self.order.location
        try:
            marker = await read_marker(location.store, location.name, deadline)
        except FileNotFoundError:
            return "absent"
        except (SidestreamError, OSError):
            return "unknown"
        return "committed" if marker is not None and marker.save_id == self.order.save_id else "absent"

    async def _info_read_back(self) -> SaveInfo:
        location = self.order.location
        sizes = await location.store.sizes(location.name, deadline=Deadline.after(_READ_BACK_S))
        nbytes = sum(size for name, size in sizes.items() if name.startswith("__"))
        return self._info({"nbytes": nbytes, "seconds": self.seconds})

    # --- receipts ---

    async def _receipt(self, planned: Any, written: Any) -> bytes:
        """This rank's part of the manifest is on storage when this returns, and rank 0 can do without it."""
        order = self.order
        transaction = order.transaction
        made = await io_threads().run(_make_part, planned, written, transaction, deadline=order.deadline)
        if made.part:
            name = part_name(manifest_name(order.save_id), self.operation.rank)
            await transaction.put(name, BytesBody(made.part))
        told = {
            "new": made.new,
            "stable": made.stable,
            "files": made.files,
            "part": [len(made.part), crc32(made.part)],
            "layout": planned.plan.layout.digest,
            "nbytes": planned.plan.nbytes,
            "seconds": self.seconds,
        }
        head = json.dumps(told).encode()
        return struct.pack("<3Q", len(head), len(made.chunks), len(made.values)) + head + made.chunks + made.values

    async def _commit(self, receipts: Sequence[bytes]) -> bytes:
        """On rank 0: everybody has written."""
        order = self.order
        planned = self.planning.planned
        assert planned is not None
        told = await io_threads().run(self._take, receipts, planned, deadline=order.deadline)
        await self._check_files(told)
        nbytes = sum(one["nbytes"] for one in told)
        files = await io_threads().run(self._files, told, planned, deadline=order.deadline)
        if not await self.operation.seal():
            raise Stopped
        self._reply = self._answer(told, nbytes)
        try:
            await order.transaction.commit(files)
        except NotDurable as error:
            return json.dumps({"not_durable": str(error)}).encode()
        except asyncio.CancelledError:
            if self.outcome != "committed":
                raise
            self.operation.went_on = True
            self.operation.answer("commit", self._answer(told, nbytes))
            raise
        self._mark("committed")
        return self._answer(told, nbytes)

    def _answer(self, told: Sequence[Mapping[str, Any]], nbytes: int) -> bytes:
        seconds = dict(self.seconds)
        for one in told:
            for phase, value in one["seconds"].items():
                seconds[phase] = max(seconds.get(phase, 0.0), value)
        return json.dumps({"nbytes": nbytes, "seconds": seconds}).encode()

    async def _check_files(self, told: Sequence[Mapping[str, Any]]) -> None:
        order = self.order
        expected = {name: nbytes for one in told for name, nbytes in one["files"].items()}
        try:
            found = await order.location.store.sizes(order.transaction.path_of(), deadline=order.deadline)
        except FileNotFoundError:
            found = {}
        lost = [name for name, nbytes in expected.items() if found.get(name) != nbytes]
        if lost:
            raise NotShared(
                2,
                f"ranks wrote {len(expected)} files, and rank 0 does not see {len(lost)} of them "
                f"({', '.join(lost[:4])}): save to storage that all ranks share",
                self.url,
            )

    def _take(self, receipts: Sequence[bytes], planned: Any) -> list[dict[str, Any]]:
        """In a worker thread: what all ranks have told, with ``files`` (sizes by name), ``nbytes`` and ``seconds``, and
        the places of this very save; new ones are kept for the next if they will hold for it."""
        told = []
        for rank, receipt in enumerate(politely(receipts, 8)):
            head, chunks, values = struct.unpack_from("<3Q", receipt)
            start = struct.calcsize("<3Q")
            one: dict[str, Any] = json.loads(receipt[start : start + head])
            one["values"] = receipt[start + head + chunks : start + head + chunks + values]
            if one["new"]:
                one["chunks"] = receipt[start + head : start + head + chunks]
                if one["stable"]:
                    planned.agreement.fragments[rank] = (one["layout"], one["chunks"])
            else:
                layout, one["chunks"] = planned.fragments.get(rank, ("", b""))
                if layout != one["layout"]:
                    raise SidestreamError(f"rank {rank} relies on places of its tensors that rank 0 does not have")
            told.append(one)
        return told

    def _files(self, told: Sequence[Mapping[str, Any]], planned: Any) -> dict[str, list[bytes]]:
        """In a worker thread: the root of the manifest, and ``.metadata``, which has 100 MB where 512 ranks save 2,000
        tensors: it is written from the pieces that the ranks have sent, and not put together first."""
        order, agreement = self.order, planned.agreement
        assert agreement.shared is not None
        files = {name: nbytes for one in told for name, nbytes in one["files"].items()}
        made = Manifest(order.save_id, {}, files, order.step, order.generation, order.digest, order.metadata)
        root = Root(made, agreement.shared, tuple(PartName(*one["part"]) for one in told))
        raw = b"".join(write_root(root, TORCH_VERSION, agreement.body))
        last = metadata_line(made)
        marker = Marker(
            order.save_id, len(raw), crc32(raw), order.step, order.generation, order.saved_at, len(last), crc32(last)
        )
        places = [one["chunks"] for one in told] + [one["values"] for one in told]
        return {
            manifest_name(order.save_id): [raw],
            METADATA_NAME: list(shared_metadata(agreement.head, places, marker)),
        }


def _unless_failed(staged: asyncio.Future[None]) -> asyncio.Future[None]:
    """Resolves ``staged`` where the copies have ended well; what went wrong is told by the verdict."""
    inner: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def pass_on(_: asyncio.Future[None]) -> None:
        if inner.exception() is None and not staged.done():
            staged.set_result(None)

    inner.add_done_callback(pass_on)
    return inner


@dataclass(frozen=True, slots=True)
class _Made:
    """A rank's part of the manifest, its files, and the places of its items as ``.metadata`` has them; those of its
    tensors only if they are ``new`` to rank 0. ``stable``: they hold for the next save as well."""

    part: bytes
    files: dict[str, int]
    chunks: bytes
    values: bytes
    new: bool
    stable: bool


def _make_part(planned: Planned, sums: Sequence[BlockSums], transaction: Transaction) -> _Made:
    plan: RankPlan = planned.plan
    names = {name: transaction.published_name(name) for name in plan.files}
    chunks = list(politely(plan.chunks(sums, names)))
    values = [
        (row, fqn, names[plan.values_file], offset, nbytes, node)
        for row, fqn, offset, nbytes, node in plan.value_places
    ]
    part = b"".join(
        write_part(
            [(row, chunk) for row, _, chunk in chunks],
            [(row, file, offset, nbytes, node) for row, _, file, offset, nbytes, node in values],
        )
    )
    # Names on object storage carry the save's id: there the places are new each time.
    stable = all(name == published for name, published in names.items())
    new = not stable or planned.known_layout != plan.layout.digest
    return _Made(
        part,
        {names[name]: nbytes for name, nbytes in plan.files.items()},
        places_of_chunks((fqn, chunk) for _, fqn, chunk in chunks) if new else b"",
        places_of_values((fqn, file, offset, nbytes) for _, fqn, file, offset, nbytes, _ in values),
        new,
        stable,
    )

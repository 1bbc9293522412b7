"""Exports by several ranks. Each rank writes some of the files into one attempt, which rank 0 commits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from .._group import Operation, stoppable
from .._runtime.threads import io_threads
from .._save.group import Group
from .._save.operation import RankReceipt, SaveOrder
from .._storage import Transaction
from ..errors import InvalidOptionError, RankFailuresError
from ..options import Outcome
from .source import Pipeline
from .targets import TargetFile

__all__ = ["Divided", "DividedFiles"]


@dataclass(slots=True)
class DividedFiles:
    """The files of an export. The ranks divide ``tensors`` among each other, and rank 0 writes those in ``beside``.
    ``others`` has the sizes of these; only rank 0 knows them before it sends them. The file ``final``, which readers
    look for, is written when the others are complete."""

    order: SaveOrder
    operation: Operation
    tensors: Sequence[TargetFile]
    beside: Sequence[TargetFile]
    final: str
    terms: object
    """The facts on which the files depend, apart from their names and sizes."""
    others: dict[str, int] = field(default_factory=dict)
    _written: dict[str, int] = field(default_factory=dict)

    async def write(self, pipeline: Pipeline, into: Transaction) -> None:
        """Write the files of this rank. Raises ``Stopped`` when another rank has failed."""
        operation = self.operation
        layout = [[one.name, one.nbytes] for one in self.tensors]
        digest = await io_threads().run(_digest, [layout, self.terms])
        answer = await operation.aexchange("plan", digest, self._begin)
        self.others = json.loads(answer)
        ranks = _divided(self.tensors, operation.world)
        mine = [one for one, rank in zip(self.tensors, ranks, strict=True) if rank == operation.rank]
        if operation.rank == 0:
            mine.extend(self.beside)
        await stoppable(operation, pipeline.write([one for one in mine if one.name != self.final], into))
        await operation.agree("write")
        await stoppable(operation, pipeline.write([one for one in mine if one.name == self.final], into))
        self._written.update((one.name, one.nbytes) for one in mine)

    # --- the layout: the files need no manifest ---

    async def receipt(self, plan: None, written: None) -> RankReceipt:
        return RankReceipt(self._written, None)

    def files(self, receipts: Sequence[RankReceipt]) -> dict[str, list[bytes]]:
        return {}

    def pack(self, receipt: RankReceipt) -> bytes:
        return b""

    def unpack(self, rank: int, content: bytes) -> None:
        return None

    async def _begin(self, digests: Sequence[bytes]) -> bytes:
        """Make the attempt, if all ranks have the same export. Called on rank 0."""
        differs = [rank for rank, one in enumerate(digests) if one != digests[0]]
        if differs:
            raise InvalidOptionError(
                f"ranks that export together have to say the same: select=, names=, dtype= and max_shard_bytes= make "
                f"other files on rank {differs[0]} than on rank 0"
            )
        await io_threads().run(self.order.make_attempt)
        return json.dumps({one.name: one.nbytes for one in self.beside}).encode()


def _digest(content: object) -> bytes:
    """Return a digest of ``content``. Called in a worker thread."""
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).digest()


def _divided(files: Sequence[TargetFile], world: int) -> list[int]:
    """Return the rank that writes each file. The largest files come first, and each gets the rank with the least
    bytes."""
    load = [0] * world
    ranks = [0] * len(files)
    for number in sorted(range(len(files)), key=lambda one: (-files[one].nbytes, one)):
        rank = min(range(world), key=lambda one: (load[one], one))
        ranks[number] = rank
        load[rank] += files[number].nbytes
    return ranks


class Divided(Group):
    """The coordinator of such an export. Rank 0 commits when all ranks have written their files. If one fails, all
    fail."""

    async def _look_back(self, verdict: RankFailuresError) -> None:
        """Delete the files that this rank has written, if they have their final names. The outcome is unknown if rank 0
        died during the commit, because an export has no marker."""
        first = verdict.failures[0]
        if first.rank == 0 and first.kind in ("RankDied", "DeadlineExceededError") and self._operation.step == "commit":
            self._order.transaction.outcome = "unknown"
        elif self._order.transaction.place is None:  # otherwise rank 0 deletes the hidden directory
            await self._order.transaction.clean_up(verdict)

    async def _seen(self) -> Outcome:
        return "unknown"

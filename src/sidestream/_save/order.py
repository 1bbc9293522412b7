"""``SaveOrder``: what a save was asked to do, its transaction, and the times of its phases."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field

from .._format.records import Node
from .._group import Operation
from .._runtime.threads import Deadline, Stop, Threads
from .._storage import Attempt, Body, Kind, Location, Outcome, Transaction
from .._worker.client import Saver
from ..options import Apart, Digest, Durability

__all__ = ["Phases", "SaveOrder"]


class Phases:
    """The times at which the phases of a save ended, in seconds from when it was asked for."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began = time.monotonic()

    def mark(self, phase: str) -> None:
        """Record that ``phase`` has ended, the first time that this is called for it."""
        self.seconds.setdefault(phase, time.monotonic() - self._began)


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """What a save was asked to do, and the transaction that it does it in."""

    location: Location
    durability: Durability
    deadline: Deadline
    step: int | None = None
    generation: int = 1
    budget_bytes: int | None = None
    """The bound of the memory that is mapped for this save alone."""
    digest: Digest | None = None
    metadata: Node = None
    operation: Operation | None = None
    """Set for a save of several ranks together."""
    saver: Saver | None = None
    """The process that writes; None: threads of this process."""
    fall_back: bool = False
    """Whether threads write where no process can be started."""
    apart: Apart | None = None
    """Set for a save of one rank's part, in the target itself."""
    kind: Kind = "directory"
    """What becomes visible, where that does not follow from ``operation`` and ``apart``."""
    own_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    saved_at: int = field(default_factory=lambda: int(time.time()))
    phases: Phases = field(default_factory=Phases, init=False, repr=False, compare=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)
    _begun: list[Transaction] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def transaction(self) -> Transaction:
        """The transaction, which the first call begins. Over ranks it must not be called before they have planned,
        because the id of the save is not known until then."""
        with self._lock:
            if not self._begun:
                kind = self.kind
                if self.apart is not None:
                    kind = "part"
                elif self.operation is not None and self.operation.rank:
                    kind = "joined"
                attempt = Attempt(self.location.name, kind, self.save_id, self.durability, self.deadline)
                self._begun.append(self.location.store.begin(attempt))
            return self._begun[0]

    @property
    def outcome(self) -> Outcome:
        return self._begun[0].outcome if self._begun else "absent"

    @property
    def save_id(self) -> str:
        """Several ranks have one id, which is known once they have planned."""
        return self.own_id if self.operation is None else self.operation.save_id

    @property
    def told_id(self) -> str:
        """The save id that is reported to the caller."""
        return self.save_id if self.apart is None else self.apart.save_id

    def write(self, files: Iterable[tuple[str, Body]], *, threads: Threads, stop: Stop) -> None:
        """Write ``files`` into the attempt, in ``threads`` or by the saver process. Blocks; raises what
        ``Transaction.write`` raises, and ``SaverLost``."""
        if self.saver is None:
            self.transaction.write(files, threads=threads, stop=stop)
        else:
            self.saver.write(
                self.transaction,
                files,
                threads=threads,
                stop=stop,
                fall_back=self.fall_back,
                url=self.location.url,
            )

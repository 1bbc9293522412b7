"""A transaction: the files of one attempt on a store, which become visible together or not at all.

The transaction knows the name of its attempt, the names of its files, which files were written, and whether it
committed. The ``begin`` of a store returns a transaction and changes nothing on the storage. The first ``write`` makes
the attempt.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

from .._format.marker import TAIL_BYTES, Marker, find_marker
from .._runtime.tasks import run_shielded
from .._runtime.threads import Deadline, Stop, time_limit
from ..errors import (
    CheckpointExistsError,
    ClosedError,
    CorruptCheckpointError,
    DeadlineExceededError,
    NotDurableError,
    OutcomeUnknownError,
    SidestreamError,
    is_stuck,
)
from ..options import Durability, Outcome, Storage
from .bodies import Body
from .names import attempt_name, name_with_id, sidecar_with_id

__all__ = [
    "Attempt",
    "CommitFiles",
    "Kind",
    "MakeFiles",
    "StoreAddress",
    "Transaction",
    "being_removed",
    "id_in",
    "marker_in",
]

T = TypeVar("T")

CommitFiles: TypeAlias = Mapping[str, Sequence[bytes]]
"""The files that a commit adds, each as a sequence of pieces. Readers look for the last one."""
MakeFiles: TypeAlias = Callable[[], CommitFiles]

Kind: TypeAlias = Literal["directory", "replacement", "joined", "files", "joined_files", "file"]
"""What a transaction makes visible.

- ``"directory"``: a checkpoint in a directory that does not exist or is empty.
- ``"replacement"``: the same, or a checkpoint that takes the place of an existing directory in one step.
- ``"joined"``: files in the attempt of another process, which commits it.
- ``"files"``: a directory of files that keep their given names on every store.
- ``"joined_files"``: files in the attempt of another process that has the kind ``"files"``.
- ``"file"``: one file, which is the target itself.
"""

_log = logging.getLogger("sidestream")

_READ_BACK_S = 10.0
_CLEAN_UP_S = 60.0


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """The address with which another process on this machine opens the same store. It contains secrets, so its parts
    are never shown."""

    url: str = field(repr=False)
    storage: Storage = field(default_factory=Storage)


@dataclass(frozen=True, slots=True)
class Attempt:
    """The description of an attempt, for ``begin``. ``target`` is a name below the root of the store. ``save_id``, 32
    hexadecimal digits, identifies the save to which the files of the attempt belong."""

    target: str
    kind: Kind
    save_id: str
    durability: Durability
    in_run: bool = False
    """Whether a ``Checkpointer`` deletes the attempts that killed saves left behind at its target."""
    replaces_export: bool = False
    """Whether an existing export, and nothing else, is replaced: by a ``"replacement"``, and by ``"files"`` in a store
    without directories, where it is deleted first."""

    @property
    def name(self) -> str:
        """The name of the attempt in messages and in listings of leftovers, and of its hidden directory."""
        return attempt_name(self.target, self.save_id)


class Transaction(ABC):
    """One attempt. Only one thread or task at a time may call its methods, except that ``discard`` may run at the same
    time as ``write``."""

    _adds_ids = False
    """Whether several attempts write the files of checkpoints into one target, under names that contain the id of the
    save."""

    def __init__(self, attempt: Attempt, address: StoreAddress | None) -> None:
        self.attempt = attempt
        self.address = address
        """The address with which another process opens the store to join this attempt. None if only this process has
        the store."""
        self._carries_id = self._adds_ids and attempt.kind in ("directory", "replacement", "joined")
        """Whether the names of the files contain the id of the save."""
        # The states of an attempt:
        #
        #   begun ── first write ──▶ made ── last data file ──▶ complete ── commit sent ──▶ sent ──▶ committed
        #     │                        │                          │                          ├────▶ absent ─▶ discarded
        #     └──────── discard ───────┴───────── discard ────────┘                          └────▶ unknown
        #
        # ``outcome`` is ``"absent"`` up to the moment at which the commit is sent, and ``"unknown"`` from then until it
        # is known. Only an attempt whose outcome is ``"absent"`` is ever deleted.
        self.outcome: Outcome = "absent"
        """The state of the commit: ``"absent"`` until it has been sent."""
        self._making = threading.Lock()
        self._discarded = False
        self._keeps_replaced = False
        """Whether what the transaction has replaced stays, because the commit may not be durable."""
        # A forked child has a copy of this object. Its finalizers and ``finally`` clauses must not delete what the
        # parent is about to commit.
        self._pid = os.getpid()

    # --- what each store does in its own way ---

    @abstractmethod
    async def read_tail(self, name: str, nbytes: int) -> bytes:
        """Return the last ``nbytes`` of the file with this name in the store, or all of it if it is smaller. Raises
        ``FileNotFoundError``."""

    @abstractmethod
    def path_of(self, name: str = "") -> str:
        """Return the path before the commit, relative to the root of the store, of the file with this committed name.
        Without a name, return the path of the directory of the files."""

    @abstractmethod
    def write(self, files: Iterable[tuple[str, Body]], *, stop: Stop | None = None) -> None:
        """Write ``files``, one after the other, in the calling thread and in others. Needs no event loop.

        The first call makes the attempt and, durably, every missing parent directory. The iterator ``files`` may block
        until the next file is known.

        Raises:
            CheckpointExistsError: the target exists and is not what the kind of the transaction allows. Nothing is left
                behind.
            StorageNotSharedError: the attempt of another process, or of an earlier call, does not exist.
            ClosedError: ``stop`` is set.
            StorageError, DeadlineExceededError: an attempt may be left behind, for ``discard``.
        """

    @abstractmethod
    async def put(self, name: str, content: bytes) -> None:
        """Write a small file. With ``durability="fsync"``, its content is durable when this returns, and its name after
        the commit. Raises ``CheckpointExistsError`` if it exists."""

    @abstractmethod
    async def put_all(self, files: CommitFiles | MakeFiles) -> CommitFiles:
        """Write the files of a commit, and return them. The last one, for which readers look, is kept for
        ``make_visible``. A store whose commit is one rename writes it now."""

    @abstractmethod
    async def make_visible(self) -> None:
        """Make all files visible in one atomic step, then durable.

        Raises ``CheckpointExistsError`` if the target exists; then nothing was changed. Raises ``NotDurableError`` if
        the files are visible but a sync failed. If the commit may still take place after this has raised, the error is
        marked with ``mark_stuck``. The checkpoint that a ``"replacement"`` replaced is in the attempt afterwards."""

    @abstractmethod
    def discard_here(self) -> None:
        """Delete the attempt, with the files that other processes have written into it, in the calling thread. Does
        nothing if the attempt does not exist, and nothing in a forked child. Afterwards the attempt cannot be made any
        more: the first ``write`` raises ``ClosedError``."""

    @abstractmethod
    async def discard(self) -> None:
        """Do ``discard_here`` without blocking the event loop."""

    @abstractmethod
    def wrote(self, sizes: Mapping[str, int]) -> None:
        """Record files that another process has written for this transaction, so that the commit checks them, and a
        failed attempt removes them. ``sizes`` has their committed names."""

    @abstractmethod
    def expect(self, sizes: Mapping[str, int]) -> None:
        """Record the files of all ranks, so that the commit checks them. Each rank removes its own. ``sizes`` has their
        committed names."""

    @abstractmethod
    def clear(self, names: Sequence[str]) -> None:
        """Remove these files of the attempt, which a dead process left behind, in the calling thread. Files that do not
        exist are skipped."""

    # --- what is the same for all ---

    @property
    def place(self) -> Path | None:
        """The directory in which the files are written; None if they are not on a file system of this machine."""
        return None

    @property
    def over(self) -> bool:
        """Whether nothing more is written: the commit has been sent, or the attempt was discarded."""
        return self._discarded or self.outcome != "absent"

    def committed_name(self, name: str) -> str:
        """Return the name that the file has once it is visible. ``write`` is given it as ``name``."""
        return name_with_id(name, self.attempt.save_id) if self._carries_id else name

    def sidecar_name(self, name: str) -> str:
        """Return the name of a sidecar file, which is the same before and after the commit."""
        return sidecar_with_id(name, self.attempt.save_id) if self._carries_id else name

    @contextmanager
    def _make_once(self) -> Iterator[None]:
        """Make the attempt in this context, which excludes ``discard``. Raises ``ClosedError`` if the attempt was
        discarded: another thread may have ended the save before this thread reaches its first write. If the file
        system hangs here, ``discard`` waits until its own deadline."""
        with self._making:
            if self._discarded:
                raise ClosedError(f"{self.attempt.name} was discarded")
            yield

    def _end_making(self) -> bool:
        """Prevent the attempt from being made from now on, and return True. In a forked child, do nothing and return
        False: the parent owns the attempt."""
        if os.getpid() != self._pid:
            return False
        with self._making:
            self._discarded = True
        return True

    async def commit(self, files: CommitFiles | MakeFiles) -> None:
        """Write ``files``, each given as a sequence of pieces, and make the attempt visible. A function that returns
        the files is called in a worker thread.

        Readers look for the last of the files. Its last bytes are different in every save, so reading them back shows
        whether this commit took place. Without ``files``, the commit cannot be read back. Such a commit is not
        interrupted by cancels, and ``outcome`` is ``"unknown"`` if the deadline passes meanwhile.

        When this returns, the files are visible and, with ``durability="fsync"``, durable. If an error or a cancel
        arrives after the commit has been sent, the commit is read back, shielded from cancels. So ``outcome`` is true
        whatever is raised.

        Raises:
            asyncio.CancelledError: the call was cancelled; ``outcome`` may have any value.
            CheckpointExistsError: the target exists; ``outcome`` is ``"absent"``.
            NotDurableError: ``outcome`` is ``"committed"``, but a sync failed or timed out.
            OutcomeUnknownError: the read-back failed too, so ``outcome`` is ``"unknown"``. Nothing was deleted.
        """
        made = await self.put_all(files) if files else {}
        if not made:
            # An export, or a single file, has no marker that names its save. A look at the target could not tell this
            # commit from that of another writer. So the commit is not interrupted instead, and is not read back.
            await run_shielded(self._send_without_id)
            return
        *_, (name, last) = made.items()
        await self._send(f"{self.attempt.target}/{name}", _tail_of(last))

    async def _send_without_id(self) -> None:
        self.outcome = "unknown"
        try:
            await self.make_visible()
        except DeadlineExceededError:
            raise
        except NotDurableError as error:
            self.outcome = "committed"
            self._keep_replaced(error)
            raise
        except Exception:
            self.outcome = "absent"
            raise
        self.outcome = "committed"

    async def _send(self, name: str, tail: bytes) -> None:
        """Send the commit. If that fails, find out whether it took place: then the file ``name`` ends with ``tail``."""
        target = self.attempt.target
        # Before the call: once the rename or the put is sent, it may take effect whatever is raised here. From
        # ``"unknown"`` on nothing is deleted that has not been looked at.
        self.outcome = "unknown"
        try:
            await self.make_visible()
            self.outcome = "committed"
        except CheckpointExistsError:
            # The one error that proves that nothing has happened: the storage refused, because the target is taken.
            self.outcome = "absent"
            raise
        except NotDurableError as error:
            self.outcome = "committed"
            self._keep_replaced(error)
            raise
        except (Exception, asyncio.CancelledError) as error:
            # Every other error may come after the commit took effect: a lost answer, a deadline, a cancel. The outcome
            # is a fact that has to be read back. The tail of the marker contains the id of the save, so the marker of
            # another save that was faster is not taken for this one.
            stuck = is_stuck(error)
            await run_shielded(self._read_back, name, tail, stuck)
            outcome: Outcome = self.outcome
            if isinstance(error, asyncio.CancelledError) or outcome == "absent":
                raise
            if outcome == "committed":
                # The checkpoint is complete, but how far the sync has come is unknown. So what was replaced stays until
                # another collection: after a power cut the old name may be the one that the file system has.
                committed = NotDurableError(
                    f"{target} is committed and complete, but publishing it did not end well: {error}"
                )
                self._keep_replaced(committed)
                raise committed from error
            raise OutcomeUnknownError(
                f"the commit of {target} was sent, and whether it took place could not be read back: {error}. Nothing "
                f"was deleted; look for {target}, and remove {self.attempt.name} if it is still there"
            ) from error

    async def _read_back(self, name: str, tail: bytes, stuck: bool) -> None:
        try:
            with time_limit(Deadline.after(_READ_BACK_S)):
                found = await self.read_tail(name, TAIL_BYTES) == tail
        except FileNotFoundError:
            found = False
        except (SidestreamError, OSError):
            return
        if found:
            self.outcome = "committed"
        elif not stuck:  # a thread that was left behind may still commit
            self.outcome = "absent"

    async def clean_up(self, error: BaseException) -> None:
        """Delete the files of an attempt that was not committed. A failure to do so is added to ``error`` as a note."""
        # Files of a committed checkpoint stay, and so do those of an unknown outcome: they may be the only checkpoint
        # there is.
        if self.outcome != "absent":
            return

        async def discard() -> None:
            try:
                with time_limit(Deadline.after(_CLEAN_UP_S)):
                    await self.discard()
            except (SidestreamError, OSError) as failure:
                error.add_note(f"what it had written could not be removed: {failure}")
                if isinstance(error, SidestreamError):
                    error.about(left_behind=self.attempt.name)

        await run_shielded(discard)
        if is_stuck(error):
            attempt = self.attempt.name
            if isinstance(error, SidestreamError):
                error.about(left_behind=attempt)
            error.add_note(f"a thread hangs in a system call and may still write {attempt}; remove it if it appears")

    async def check_not_overtaken(self) -> None:
        """Raise ``CheckpointExistsError`` if this is a ``"replacement"`` that cannot be committed any more, because
        another save has replaced its target meanwhile. On stores that commit by an exchange of directories this does
        nothing: there the last save replaces all earlier ones."""
        return

    async def _discard_replaced(self) -> None:
        """Delete the checkpoint that this transaction has replaced. After an exchange of two directories it has the
        name of the attempt, so ``discard`` deletes it."""
        await self.discard()

    def _keep_replaced(self, error: NotDurableError) -> None:
        """Keep what this transaction has replaced, because the commit may not be durable. ``error`` says where."""
        self._keeps_replaced = True
        self._note_replaced(error)

    def _note_replaced(self, error: NotDurableError) -> None:
        """Add to ``error`` the place of the replaced checkpoint."""
        return

    async def remove_replaced(self) -> None:
        """Remove what a ``"replacement"`` has replaced, if it was committed durably. Called at the end of every save
        and export, also of one that was cancelled after its commit, and not interrupted by a cancel. A failure is only
        logged, because the save itself has succeeded."""
        if self.attempt.kind != "replacement" or self.outcome != "committed" or self._keeps_replaced:
            return
        await run_shielded(self._remove_replaced)

    async def _remove_replaced(self) -> None:
        try:
            with time_limit(Deadline.after(_CLEAN_UP_S)):
                await self._discard_replaced()
        except (SidestreamError, OSError) as error:
            _log.warning("what %s replaced could not be removed: %s", self.attempt.target, error)


async def marker_in(name: str, read_tail: Callable[[str, int], Awaitable[bytes]]) -> Marker | None:
    """Return the marker in the file ``name``; None if another writer made it. Raises ``CorruptCheckpointError``, and
    ``FileNotFoundError`` if there is no such file."""
    return find_marker(await read_tail(name, TAIL_BYTES))


async def id_in(name: str, read_tail: Callable[[str, int], Awaitable[bytes]]) -> str:
    """Return the id of the save that wrote the marker ``name``; empty if the marker is damaged or of another writer.
    Raises ``FileNotFoundError`` if there is no marker."""
    try:
        marker = await marker_in(name, read_tail)
    except CorruptCheckpointError:
        return ""
    return "" if marker is None else marker.save_id


def being_removed(where: str | Path) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"{where} is being removed: save when remove() has ended, and call it again if it was interrupted"
    )


def _tail_of(pieces: Sequence[bytes]) -> bytes:
    tail = b""
    for piece in reversed(pieces):
        if len(tail) >= TAIL_BYTES:
            break
        tail = piece[-TAIL_BYTES:] + tail
    return tail[-TAIL_BYTES:]

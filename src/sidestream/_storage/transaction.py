"""A transaction: the files of one attempt on a store, which become visible together or not at all.

The transaction knows the name of its attempt, the names of its files, which files were written, and whether it
committed. The ``begin`` of a store returns a transaction and changes nothing on the storage. The first ``write`` makes
the attempt.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

from .._format.marker import TAIL_BYTES
from .._runtime.threads import Stop
from ..errors import (
    CheckpointExistsError,
    ClosedError,
    DeadlineExceededError,
    NotDurableError,
    is_stuck,
)
from ..options import Durability, Outcome, Storage
from .bodies import Body
from .names import attempt_name, name_with_id, sidecar_with_id

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
    """One attempt. Its methods block, and need no event loop. Only one thread at a time may call them, except that
    ``discard`` may run at the same time as ``write`` and ``commit``, and every method beside a thread that hangs in a
    system call."""

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
        self._mark: tuple[str, bytes] | None = None
        """The name of the file that readers look for, and its end, when the commit has written the others."""
        self.may_follow = False
        """Whether the commit may still take place although it has failed: a request or a thread was left behind."""
        self._ended = False
        self._deciding = threading.Lock()
        """Held for moments, by what sends the commit and by what prevents that."""
        self._making = threading.Lock()
        self._discarded = False
        self._keeps_replaced = False
        """Whether what the transaction has replaced stays, because the commit may not be durable."""
        # A forked child has a copy of this object. Its finalizers and ``finally`` clauses must not delete what the
        # parent is about to commit.
        self._pid = os.getpid()

    # --- what each store does in its own way ---

    @abstractmethod
    def _read_tail(self, name: str, nbytes: int) -> bytes:
        """Return the last ``nbytes`` of the file with this name in the store, or all of it if it is smaller. Raises
        ``FileNotFoundError``."""

    @abstractmethod
    def path_of(self, name: str = "") -> str:
        """Return the path before the commit, relative to the root of the store, of the file with this committed name.
        Without a name, return the path of the directory of the files."""

    @abstractmethod
    def write(self, files: Iterable[tuple[str, Body]], *, stop: Stop | None = None) -> None:
        """Write ``files``, one after the other, in the calling thread and in others.

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
    def put(self, name: str, content: bytes, stop: Stop | None = None) -> None:
        """Write a small file. With ``durability="fsync"``, its content is durable when this returns, and its name after
        the commit. Raises ``CheckpointExistsError`` if it exists."""

    @abstractmethod
    def _complete(self, files: CommitFiles, stop: Stop) -> None:
        """Write the files of a commit, and check that the others are there. The last one, for which readers look, is
        kept for ``_make_visible``. A store whose commit is one rename writes it now, and leaves the check to that."""

    @abstractmethod
    def _make_visible(self) -> None:
        """Make all files visible in one atomic step, then durable.

        Raises ``CheckpointExistsError`` if the target exists; then nothing was changed. Raises ``NotDurableError`` if
        the files are visible but a sync failed. If the commit may still take place after this has raised, the error is
        marked with ``mark_stuck``. The checkpoint that a ``"replacement"`` replaced is in the attempt afterwards."""

    @abstractmethod
    def discard(self) -> None:
        """Delete the attempt, with the files that other processes have written into it. Does nothing if the attempt
        does not exist, and nothing in a forked child. Afterwards the attempt cannot be made any more: the first
        ``write`` raises ``ClosedError``."""

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
        """Remove these files of the attempt, which a dead process left behind. Files that do not exist are skipped."""

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
    def _unless_discarded(self) -> Iterator[None]:
        """Exclude ``discard`` in this context, which makes the attempt. Raises ``ClosedError`` if the attempt was
        discarded: another thread may have ended the save before this one reaches its first write. If the file system
        hangs here, ``discard`` waits until its own deadline."""
        with self._making:
            if self._discarded:
                raise ClosedError(f"{self.attempt.name} was discarded")
            yield

    def _may_discard(self) -> bool:
        """Return whether the attempt may be deleted, and prevent it from being made or committed from now on. Not in a
        forked child, whose parent owns the attempt, and not once the commit was sent, unless it has not taken place."""
        if os.getpid() != self._pid:
            return False
        with self._making, self._deciding:
            self._discarded = self._discarded or self.outcome == "absent"
            return self._discarded

    def commit(self, files: CommitFiles | MakeFiles, stop: Stop | None = None) -> None:
        """Write ``files``, each given as a sequence of pieces, and make the attempt visible. When this returns, the
        files are visible and, with ``durability="fsync"``, durable.

        Readers look for the last of the files. Its last bytes are different in every save, so reading them back shows
        whether this commit took place. Without ``files`` the commit cannot be read back.

        ``stop`` ends it before the commit is sent. A commit that was sent is finished.

        Raises:
            ClosedError: ``stop`` is set; ``outcome`` is ``"absent"``.
            CheckpointExistsError: the target exists; ``outcome`` is ``"absent"``.
            NotDurableError: ``outcome`` is ``"committed"``, but a sync failed.
            StorageError, DeadlineExceededError: ``outcome`` is ``"absent"``, or ``"unknown"`` until ``read_back``.
        """
        stop = stop or Stop()
        files = files() if callable(files) else files
        self._complete(files, stop)
        if files:
            *_, (name, last) = files.items()
            self._mark = f"{self.attempt.target}/{name}", _tail_of(last)
        with self._deciding:
            if self._ended or self._discarded:
                raise ClosedError(f"{self.attempt.name} was discarded")
            stop.check()
            # Before the call: once the rename or the put is sent, it may take effect whatever is raised here. From
            # ``"unknown"`` on nothing is deleted that has not been looked at.
            self.outcome = "unknown"
        try:
            self._make_visible()
        except CheckpointExistsError:
            # The one error that proves that nothing has happened: the storage refused, because the target is taken.
            self._found("absent")
            raise
        except NotDurableError as error:
            self._found("committed")
            self.keep_replaced(error)
            raise
        except Exception as error:
            # Every other error may come after the commit took effect: a lost answer, a deadline. The outcome is a fact
            # that has to be read back. An export, or a single file, has no marker that names its save, and a look at
            # the target could not tell this commit from that of another writer. For these an error of the storage
            # counts as a refusal.
            with self._deciding:
                self.may_follow = self.may_follow or is_stuck(error)
            if self._mark is None and not isinstance(error, DeadlineExceededError):
                self._found("absent")
            raise
        self._found("committed")

    def _found(self, outcome: Outcome) -> None:
        """Record the outcome of the commit, unless ``end`` was called: a thread that hung in a system call until then
        does not change what was reported."""
        with self._deciding:
            if not self._ended:
                self.outcome = outcome

    @property
    def can_be_read_back(self) -> bool:
        """Whether the commit was sent, its outcome is unknown, and ``read_back`` may find it out."""
        return self.outcome == "unknown" and self._mark is not None

    def end(self, *, may_follow: bool) -> None:
        """Record that nothing waits for the commit any more. If it was not sent, it never is. What a thread still does
        has no effect on ``outcome``. ``may_follow``: a thread was left in a system call."""
        with self._deciding:
            self._ended = True
            self.may_follow = self.may_follow or may_follow

    def read_back(self) -> None:
        """Set ``outcome`` by what is on the storage, if that ``can_be_read_back``. It stays ``"unknown"`` if the
        storage cannot be read, or if the commit may still take place."""
        assert self._mark is not None
        name, tail = self._mark
        try:
            # The tail of the marker contains the id of the save, so the marker of another save that was faster is not
            # taken for this one.
            found = self._read_tail(name, TAIL_BYTES) == tail
        except FileNotFoundError:
            found = False
        if found:
            self.outcome = "committed"
        elif not self.may_follow:
            self.outcome = "absent"

    def check_not_overtaken(self) -> None:
        """Raise ``CheckpointExistsError`` if this is a ``"replacement"`` that cannot be committed any more, because
        another save has replaced its target meanwhile. On stores that commit by an exchange of directories this does
        nothing: there the last save replaces all earlier ones."""
        return

    @property
    def has_replaced(self) -> bool:
        """Whether this is a ``"replacement"`` that was committed durably."""
        return self.attempt.kind == "replacement" and self.outcome == "committed" and not self._keeps_replaced

    @abstractmethod
    def discard_replaced(self) -> None:
        """Delete the checkpoint that this transaction has replaced."""

    def keep_replaced(self, error: NotDurableError) -> None:
        """Keep what this transaction has replaced, because the commit may not be durable. ``error`` says where."""
        self._keeps_replaced = True


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

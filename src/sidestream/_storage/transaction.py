"""A transaction: the files of one attempt on a store, which become visible together or not at all.

The transaction knows its attempt: the name, how its files are called, which ones were written, whether it committed. A
store makes it with ``begin``, which changes nothing on the storage; the first ``write`` makes the attempt.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from .._format.marker import TAIL_BYTES, Marker, find_marker
from .._runtime.marks import is_stuck
from .._runtime.tasks import run_shielded
from .._runtime.threads import Deadline, Stop, Threads, time_limit
from ..errors import (
    CheckpointExistsError,
    ClosedError,
    DeadlineExceededError,
    NotDurableError,
    OutcomeUnknownError,
    SidestreamError,
)
from ..options import Durability, Storage
from .bodies import Body, BytesBody, PiecesBody
from .names import attempt_name

__all__ = ["WRITE_THREADS", "Attempt", "Kind", "Outcome", "StoreAddress", "Transaction", "marker_in"]

Outcome: TypeAlias = Literal["committed", "absent", "unknown"]

Kind: TypeAlias = Literal["directory", "replacement", "joined", "files", "joined_files", "file", "part"]
"""What a transaction makes visible.

``"directory"``: a checkpoint in a directory that does not exist or is empty. ``"replacement"``: the same, exchanged in
one step with the directory that is there. ``"joined"``: files of a directory that another process has begun and will
commit. ``"files"``: a directory of files that keep the names that they are given on every store. ``"joined_files"``:
some of these, as ``"joined"``. ``"file"``: one file, which is the target itself. ``"part"``: files in the target
itself, which other processes write to as well.
"""

WRITE_THREADS = 4
"""So many threads write one attempt: as many direct writes in flight keep a fast disk busy."""

_log = logging.getLogger("sidestream")

_READ_BACK_S = 10.0
_CLEAN_UP_S = 60.0


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """What another process on this machine opens the same store with: secrets included, which are never shown."""

    url: str = field(repr=False)
    storage: Storage = field(default_factory=Storage)


@dataclass(frozen=True, slots=True)
class Attempt:
    """What ``begin`` is given. ``target``: the name below the root of the store. The files of an attempt are private to
    ``save_id``, 32 hexadecimal digits."""

    target: str
    kind: Kind
    save_id: str
    durability: Durability
    in_run: bool = False
    """Whether a ``Checkpointer`` collects what killed saves have left of its target."""
    replaces_export: bool = False
    """For ``"files"`` in a store without directories: delete an export that is there first."""

    @property
    def name(self) -> str:
        """The name in messages, in listings of what saves have left behind, and of the hidden directory."""
        return attempt_name(self.target, self.save_id)


class Transaction(ABC):
    """One attempt. One thread or task at a time calls its methods; ``discard`` may be called beside ``write``."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.outcome: Outcome = "absent"
        """``"absent"`` until the commit has been sent."""
        self._look: Callable[[bool], Coroutine[Any, Any, None]] | None = None
        self._making = threading.Lock()
        self._discarded = False
        self._pid = os.getpid()

    # --- what each store does in its own way ---

    @property
    @abstractmethod
    def address(self) -> StoreAddress | None:
        """What another process opens the store with, to join this attempt; None where only this process has it."""

    @abstractmethod
    async def read_tail(self, name: str, nbytes: int) -> bytes:
        """As ``Store.read_tail``."""

    @abstractmethod
    def committed_name(self, name: str) -> str:
        """Return what the file ``name`` given to ``write`` is called once it is visible."""

    @abstractmethod
    def path_of(self, name: str = "") -> str:
        """Return where a file with this committed name lies before the commit, relative to the root of the store;
        without a name, the directory of the files."""

    @abstractmethod
    def write(self, files: Iterable[tuple[str, Body]], *, threads: Threads, stop: Stop) -> None:
        """Write ``files``, one after the other, in the calling thread and in ``threads``. Needs no event loop.

        The first call makes the attempt and, durably, every missing parent directory. ``files`` may block until it
        knows the next one.

        Raises:
            CheckpointExistsError: the target exists and is not what the kind of the transaction allows. Nothing is left
            behind. StorageNotSharedError: the attempt of another process, or of an earlier call, is not there.
            ClosedError: ``stop`` is set. StorageError, DeadlineExceededError: an attempt may be left behind, for
            ``discard``.
        """

    @abstractmethod
    async def put(self, name: str, body: Body) -> None:
        """Write a small file. Its content is durable when this returns, as far as ``durability`` says; its name is so
        after the commit. Raises ``CheckpointExistsError`` if it exists."""

    async def put_all(self, others: Sequence[tuple[str, Body]], last: tuple[str, Body]) -> None:
        """``put`` each of ``others`` in turn, then ``put_last``."""
        for name, body in others:
            await self.put(name, body)
        await self.put_last(*last)

    @abstractmethod
    async def put_last(self, name: str, body: Body) -> None:
        """Keep the file that readers look for until ``make_visible``. A store that commits by a rename writes it
        now."""

    @abstractmethod
    async def make_visible(self) -> None:
        """Make all files visible in one atomic step, then durable.

        Raises ``CheckpointExistsError``, having changed nothing, if the target is taken; ``NotDurableError`` if the
        files are visible and a sync failed. What a ``"replacement"`` replaced is in the attempt afterwards. A commit
        that may still be carried out after this has raised is marked on the error (``mark_stuck``)."""

    @abstractmethod
    def discard_here(self) -> None:
        """Delete the attempt, in the calling thread, with the files that other processes have written into it. Does
        nothing if nothing is there, and nothing in a forked child. From now on no attempt is made: the first ``write``
        raises ``ClosedError``."""

    @abstractmethod
    async def discard(self) -> None:
        """``discard_here``, from an event loop."""

    @abstractmethod
    def wrote(self, sizes: Mapping[str, int]) -> None:
        """Note the files that another process has written into this attempt, by the names given to it, so that the
        commit expects them."""

    @abstractmethod
    def clear(self, names: Sequence[str]) -> None:
        """Remove what a dead process has left of these files of the attempt, in the calling thread. What is not there
        is passed over."""

    # --- what is the same for all ---

    @property
    def place(self) -> Path | None:
        """The directory in which its files are written; None where that is no file system of this machine."""
        return None

    @property
    def over(self) -> bool:
        """Whether nothing more is written: the commit has been sent, or the attempt was discarded."""
        return self._discarded or self.outcome != "absent"

    def sidecar_name(self, name: str) -> str:
        """Return what a sidecar file is called, before and after the commit."""
        return name

    def write_here(self, files: Iterable[tuple[str, Body]], *, stop: Stop | None = None) -> None:
        """``write`` in the calling thread and in threads that end with it."""
        threads = Threads("sidestream-write", WRITE_THREADS)
        try:
            self.write(files, threads=threads, stop=Stop() if stop is None else stop)
        finally:
            threads.close()

    @contextmanager
    def _make_once(self) -> Iterator[None]:
        """Keep ``discard`` out while the attempt is made, and refuse to make one that was discarded before: a thread
        may come to its first write when another thread has already ended the save. A file system that hangs holds up
        the discard too, which ends at its own deadline."""
        with self._making:
            if self._discarded:
                raise ClosedError(f"{self.attempt.name} was discarded")
            yield

    def _end_making(self) -> bool:
        """Make no attempt from now on. Returns False, having done nothing, in a forked child: its parent owns the
        attempt."""
        if os.getpid() != self._pid:
            return False
        with self._making:
            self._discarded = True
        return True

    async def commit(self, files: Mapping[str, Sequence[bytes]]) -> None:
        """Write ``files``, given in pieces, and make the attempt visible. Readers look for the last of them, whose end
        no other save has. Without ``files`` there is nothing to read back: such a commit runs to its end through
        cancels, and ``outcome`` is ``"unknown"`` if the deadline passes meanwhile.

        When this returns the files are visible and, with ``durability="fsync"``, durable. Once the commit has been
        sent, an error or a cancel leads to a read-back, shielded, so that ``outcome`` is true whatever is raised.

        Raises:
            asyncio.CancelledError: see ``outcome``.
            CheckpointExistsError: the target is taken; ``"absent"``.
            NotDurableError: ``"committed"``, but a sync failed or timed out.
            OutcomeUnknownError: ``"unknown"``, because the read-back failed too. Nothing was deleted.
        """
        if not files:
            await run_shielded(self._send_without_id)
            return
        *others, (name, last) = files.items()
        await self.put_all([(other, _body(pieces)) for other, pieces in others], (name, _body(last)))
        await self._send(f"{self.attempt.target}/{name}", _tail_of(last))

    async def _send_without_id(self) -> None:
        self.outcome = "unknown"
        try:
            await self.make_visible()
        except DeadlineExceededError:
            raise
        except NotDurableError as error:
            self.outcome = "committed"
            self._note_replaced(error)
            raise
        except Exception:
            self.outcome = "absent"
            raise
        self.outcome = "committed"

    async def _send(self, name: str, tail: bytes) -> None:
        """Send the commit, and find out what happened: whether the file ``name`` is there and ends with ``tail``."""
        target = name if self.attempt.kind == "part" else self.attempt.target
        self._look = lambda stuck: self._read_back(name, tail, stuck)
        self.outcome = "unknown"
        try:
            await self.make_visible()
            self.outcome = "committed"
        except CheckpointExistsError:
            self.outcome = "absent"
            raise
        except NotDurableError as error:
            self.outcome = "committed"
            self._note_replaced(error)
            raise
        except (Exception, asyncio.CancelledError) as error:
            outcome = await self._after_failure(name, tail, error)
            if isinstance(error, asyncio.CancelledError) or outcome == "absent":
                raise
            if outcome == "committed":
                committed = NotDurableError(
                    f"{target} is committed and complete, but publishing it did not end well: {error}"
                )
                self._note_replaced(committed)
                raise committed from error
            raise OutcomeUnknownError(
                f"the commit of {target} was sent, and whether it took place could not be read back: {error}. Nothing "
                f"was deleted; look for {target}, and remove {self.attempt.name} if it is still there"
            ) from error
        finally:
            if asyncio._get_running_loop() is not None:  # else the loop has ended, and ``settle`` reads back
                self._look = None  # which refers to this object

    async def _after_failure(self, name: str, tail: bytes, error: BaseException) -> Outcome:
        await run_shielded(lambda: self._read_back(name, tail, is_stuck(error)))
        return self.outcome

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

    def settle(self, *, stuck: bool) -> None:
        """Find out the outcome, and delete what an absent attempt wrote. Called in a thread, when no other code uses
        the transaction. ``stuck``: a thread is left behind in a system call. Raises what the storage raises."""
        from .clients.io_loop import LoopCall  # imports fsspec

        look = self._look
        if self.outcome == "unknown" and look is not None:
            with time_limit(Deadline.after(_READ_BACK_S)):
                LoopCall(lambda: look(stuck)).result("reading back the outcome of the commit")
            self._look = None  # which refers to this object
        if self.outcome == "absent":
            self.discard_here()

    async def clean_up(self, error: BaseException) -> None:
        """Delete what an absent attempt wrote. Whatever prevents that is added to ``error`` as a note."""
        if self.outcome != "absent":
            return

        async def discard() -> None:
            try:
                with time_limit(Deadline.after(_CLEAN_UP_S)):
                    await self.discard()
            except SidestreamError as failure:
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
        another save has replaced its target meanwhile. Where an exchange commits, the last one stays, and there is no
        such case."""
        return

    async def _discard_replaced(self) -> None:
        """Delete what this transaction has replaced. Where two directories were exchanged, it has the name of the
        attempt."""
        await self.discard()

    def _note_replaced(self, error: NotDurableError) -> None:
        """Add to ``error`` where the checkpoint is that was replaced by a commit which may not be durable: it is not
        deleted."""
        return

    async def remove_replaced(self) -> None:
        """Remove what a committed ``"replacement"`` has replaced. A failure is logged, because the new one is there."""
        try:
            await self._discard_replaced()
        except (SidestreamError, OSError) as error:
            _log.warning("what %s replaced could not be removed: %s", self.attempt.target, error)


class _Ends(Protocol):
    async def tail(self, name: str, nbytes: int) -> bytes: ...


async def marker_in(files: _Ends, name: str) -> Marker | None:
    """Return the marker in the file ``name``; None if another writer made it. Raises ``CorruptCheckpointError``."""
    return find_marker(await files.tail(name, TAIL_BYTES))


def _body(pieces: Sequence[bytes]) -> Body:
    return BytesBody(pieces[0]) if len(pieces) == 1 else PiecesBody(pieces)


def _tail_of(pieces: Sequence[bytes]) -> bytes:
    tail = b""
    for piece in reversed(pieces):
        if len(tail) >= TAIL_BYTES:
            break
        tail = piece[-TAIL_BYTES:] + tail
    return tail[-TAIL_BYTES:]

"""An attempt in local directories. It is a hidden sibling of its target, published by one rename, exchange or link.

Several threads write the parts of a file, with direct I/O if the file system allows it.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from pathlib import Path

from ..._runtime.threads import Stop, Threads, write_threads
from ...errors import (
    CheckpointExistsError,
    NoSpaceError,
    NotDurableError,
    StorageError,
    StorageNotSharedError,
    from_os_error,
    os_errors_as,
    without_frames,
)
from ...options import Durability
from ..bodies import Body, BytesBody, FilePart, PiecesBody
from ..names import ABANDONED_AFTER_S
from ..replacing import Use
from ..transaction import Attempt, CommitFiles, StoreAddress, Transaction
from .attempt_lock import AttemptLock
from .directories import (
    RACES,
    exchanges,
    is_vacant,
    link_new,
    make_root,
    remove_tree,
    sync_directory,
    take_away,
    unlink,
)
from .orphans import collect_orphans
from .publishing import Step, check_use, move_there, publish, replace, sync_visible
from .read import read_tail

_THREADS = 4
"""The number of threads that write one file. This many direct writes in flight keep a fast disk busy."""

_MAX_TRANSFER_BYTES = 0x7FFFF000  # the most that one write on Linux transfers
_NO_DIRECT_IO = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP})


def write_file(
    path: Path,
    body: Body,
    durability: Durability,
    stop: Stop,
    threads: Threads | None = None,
    *,
    preallocate: bool,
    target: str = "",
) -> None:
    """Write a new file. Errors name ``target``, because ``path`` need not contain the name of what is saved.
    ``preallocate=False`` is for file systems that cannot reserve space: there libc would write into every block."""
    with os_errors_as(f"writing {target}".rstrip(), path):
        try:
            # O_EXCL: the name of an attempt contains the id of the save, so a file that exists was written by a second
            # save with the same id, and writing into it would mix the two.
            descriptor, direct = _open_new(path, direct=body.aligned)
        except FileExistsError as error:
            raise CheckpointExistsError(f"{path} exists already: two saves share one attempt's name") from error
        try:
            if body.nbytes and preallocate:
                _preallocate(descriptor, body.nbytes)
            _Parts(descriptor, direct, body).write(stop, threads)
            if durability == "fsync":
                os.fsync(descriptor)
        finally:
            os.close(descriptor)  # its errors count: NFS may report a failed write only here


def write_again(write: Callable[[], None], make: Callable[[], object], directory: Path) -> None:
    """Call ``write``, which writes a file in ``directory``. If the directory does not exist, call ``make`` and then
    ``write`` again: another process that removes the last file of a directory removes the directory too."""
    for _ in range(RACES):
        try:
            write()
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
            make()
        else:
            return
    raise CheckpointExistsError(f"{directory} is removed as often as it is made")


class _Parts:
    """The parts of one file, written at their offsets by several threads."""

    def __init__(self, descriptor: int, direct: bool, body: Body) -> None:
        self._descriptor = descriptor
        self._direct = direct
        self._parts = body.parts
        self._lock = threading.Lock()
        self._next = 0
        self._error: BaseException | None = None

    def write(self, stop: Stop, threads: Threads | None) -> None:
        """Write all parts. When this returns or raises, no thread writes any more. Of several errors the first is
        raised."""
        failed = Stop()
        others: list[Future[None]] = []
        with stop.waking(failed.set):
            stop.check()
            try:
                if threads is not None:
                    for _ in range(min(len(self._parts), _THREADS) - 1):
                        # The calling thread works too, below. So a file is written also if the pool gives it no further
                        # thread, and a small file costs no switch of threads.
                        others.append(threads.submit(self._work, failed))
                self._work(failed)
            except BaseException:
                failed.set()
                raise
            finally:  # also if ``submit`` fails: the caller closes the descriptor after this
                wait([other for other in others if not other.cancel()])
        if self._error is not None:
            raise self._error

    def _work(self, failed: Stop) -> None:
        while (part := self._take_one()) is not None:
            try:
                self._write_part(part, failed)
            except BaseException as error:
                with self._lock:  # without frames: an error that is kept for a retry must not keep the memory alive
                    self._error = self._error or without_frames(error)
                failed.set()
            finally:
                part.release()

    def _take_one(self) -> FilePart | None:
        # In the order of the file. A part may wait for the checksums of the parts before it. If threads took parts in
        # another order, all of them could wait for a part that no thread has taken.
        with self._lock:
            if self._error is not None or self._next == len(self._parts):
                return None
            self._next += 1
            return self._parts[self._next - 1]

    def _write_part(self, part: FilePart, failed: Stop) -> None:
        view = part.take(failed)
        failed.check()
        self._direct = write_buffer(self._descriptor, view, part.offset, self._direct)


def _open_new(path: Path, *, direct: bool) -> tuple[int, bool]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    if direct and hasattr(os, "O_DIRECT"):
        try:
            return os.open(path, flags | os.O_DIRECT, 0o666), True
        except OSError as error:
            if error.errno not in _NO_DIRECT_IO:
                raise
            with suppress(FileNotFoundError):  # some kernels create the file before they refuse the flag
                os.unlink(path)
    return os.open(path, flags, 0o666), False


def _preallocate(descriptor: int, nbytes: int) -> None:
    """Reserve the space of the file, so that a full disk raises before anything is written. File systems without
    preallocation raise later."""
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if error.errno not in _NO_DIRECT_IO:
            raise


def write_buffer(descriptor: int, buffer: memoryview, position: int, direct: bool = False) -> bool:
    """Write all of ``buffer``. Returns whether direct I/O still works on this file."""
    done = 0
    while done < len(buffer):
        # Direct I/O takes whole pages at page offsets. The last part of a file, and what remains after a short write,
        # pass through the page cache.
        if direct and (len(buffer) % 4096 or done % 4096):
            direct = _leave_direct_io(descriptor)
        try:
            done += os.pwrite(descriptor, buffer[done : done + _MAX_TRANSFER_BYTES], position + done)
        except OSError as error:
            if not direct or error.errno not in _NO_DIRECT_IO:
                del buffer  # the error refers to this frame, and must not keep the memory alive
                raise
            direct = _leave_direct_io(descriptor)
    return direct


def _leave_direct_io(descriptor: int) -> bool:
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return False


class LocalTransaction(Transaction):
    """A ``Transaction`` below the directory ``root``, which need not exist yet.

    Three operations on names differ between file systems. ``_appear`` gives a complete file the name that readers look
    for, and raises ``FileExistsError`` if another file has the name. ``_sync`` makes the names in a directory durable.
    ``_take`` puts an attempt of a dead process where its process cannot publish it, if that is possible, and returns
    its path."""

    _appear = staticmethod(link_new)
    _sync = staticmethod(sync_directory)
    _take: Callable[[Path, str], Path | None] = staticmethod(take_away)
    _preallocates = True
    _locks = True

    def __init__(self, root: Path, attempt: Attempt, address: StoreAddress) -> None:
        super().__init__(attempt, address)
        self._root = root
        self._target = root / attempt.target
        self._hidden = root / attempt.name
        self._directory = self._target if self._carries_id else self._hidden
        self._made: os.stat_result | None = None  # the directory that this transaction has made, as it was then
        self._lock: AttemptLock | None = None
        self._new: list[Path] = []  # directories that were made down to the target
        self._names: dict[str, None] = {}  # of the files written, in their order
        self._last: tuple[str, Sequence[bytes]] | None = None

    @property
    def place(self) -> Path:
        return self._directory

    def _read_tail(self, name: str, nbytes: int) -> bytes:
        return read_tail(self._root / name, None, nbytes)

    def path_of(self, name: str = "") -> str:
        directory = self.attempt.target if self._carries_id else self.attempt.name
        return f"{directory}/{name}" if name else directory

    def write(self, files: Iterable[tuple[str, Body]], *, stop: Stop | None = None) -> None:
        attempt, stop = self.attempt, stop or Stop()
        stop.check()
        # Rank 0 has made the attempt before the ranks were asked to write, under a name that no other save has. So a
        # rank that does not find it sees other storage. The directory is not made here in any case: if it is gone,
        # another process has taken the attempt away, with the files that were in it.
        if attempt.kind in ("joined", "joined_files") or self._made is not None:
            self._check_joined()
        else:
            self._make()
        for given, body in files:
            name = self.committed_name(given)
            self._names[name] = None
            self._write_file(name, body, stop, write_threads())
            del body  # frees its memory while the loop waits for the next file

    def _write_file(self, name: str, body: Body, stop: Stop, threads: Threads | None = None) -> None:
        attempt = self.attempt
        path, preallocate = self._directory / name, self._preallocates
        write_file(path, body, attempt.durability, stop, threads, preallocate=preallocate, target=attempt.target)

    def _make(self) -> None:
        # Three questions before anything is made, so that a save that is refused leaves nothing behind: may the target
        # be taken, what have killed processes left of it, and can this file system exchange two directories. The target
        # is looked at again at the commit, because another save may be faster.
        vacant = is_vacant(self._target)
        if not vacant or self.attempt.kind == "file":
            check_use(self._target, self._use)
        # A run has a rule of its own for attempts of which only the age is known.
        collect_orphans(self._root, math.inf if self.attempt.in_run else ABANDONED_AFTER_S, self._take)
        with self._unless_discarded():
            self._made = self._create()
            if self._locks:
                self._lock = AttemptLock(self._hidden)
        # Tried in the new directory, because there is no other way to find out, and now, because the commit would find
        # it out after everything was written.
        if not vacant and not exchanges(self._hidden):
            self.discard()
            raise CheckpointExistsError(
                f"{self._target} is not empty, and this file system cannot exchange two directories in one step: save "
                "to a new directory, or remove the old one first"
            )

    @property
    def _use(self) -> Use:
        """What this attempt does with its target."""
        if self.attempt.kind == "replacement":
            return "export" if self.attempt.replaces_export else "overwrite"
        return "create file" if self.attempt.kind == "file" else "create"

    def wrote(self, sizes: Mapping[str, int]) -> None:
        self._names.update(dict.fromkeys(sizes))

    def expect(self, sizes: Mapping[str, int]) -> None:
        own = self._names  # which stay behind the others: the last file is the one that readers look for
        self._names = {**{name: None for name in sizes if name not in own}, **own}

    def clear(self, names: Sequence[str]) -> None:
        for name in names:
            unlink(self._directory / self.committed_name(name))

    def put(self, name: str, content: bytes, stop: Stop | None = None) -> None:
        self._names[name] = None
        # The directory is not made again if it is gone: another process has removed the attempt.
        self._write_file(name, BytesBody(content), stop or Stop())

    def _complete(self, files: CommitFiles, stop: Stop) -> None:
        names = [*files]
        if names and self._carries_id:  # otherwise the last file of a commit is written like the others
            last = names.pop()
            self._last = last, files[last]
        for name in names:
            stop.check()
            self._names[name] = None
            self._write_file(name, PiecesBody(files[name]), stop)

    def _make_visible(self) -> None:
        attempt = self.attempt
        if attempt.kind == "file":
            self._publish_file()
            return
        self._publish(partial(replace, use=self._use) if attempt.kind == "replacement" else move_there)
        self._made = None  # from now on the name of the attempt is that of the replaced checkpoint, if any

    def keep_replaced(self, error: NotDurableError) -> None:
        super().keep_replaced(error)
        if self.attempt.kind == "replacement":
            error.add_note(f"what it has replaced may still be in {self._hidden}, until it is collected")

    def discard_replaced(self) -> None:
        if os.getpid() != self._pid:
            return
        path: Path | None = self._hidden
        with suppress(NoSpaceError):  # a quota may refuse the rename but allow the removal, which frees space
            # After the exchange the old checkpoint has the name of the attempt. It is renamed before it is deleted. If
            # this process is killed meanwhile, the rest has a name that only interrupted deletions have, and never
            # looks like an attempt that may still be committed.
            path = take_away(self._root, self.attempt.name)
        if path is not None:
            remove_tree(path)

    def discard(self) -> None:
        if not self._may_discard():
            return
        # Only this process can publish an attempt that it has made. Any other attempt is renamed first, so that its
        # writer cannot publish what is left of it.
        own, self._made = self._made is not None, None
        path = self._hidden if own else take_away(self._root, self.attempt.name)
        try:
            if path is not None:
                remove_tree(path)
        finally:
            self._close_lock()

    def _close_lock(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def _create(self) -> os.stat_result:
        """Make the directory of the attempt, and return its status with the mode that the umask gives. Until it is
        published, other users have no access to it."""
        made: list[Path] = []
        try:
            make_root(self._root, self.attempt.durability, made, self._sync)
            self._hidden.mkdir()
            made.append(self._hidden)
            found = self._hidden.stat()
            # ``publish`` gives it the mode that the umask asks for. Until then another user could otherwise open files
            # that are not complete, or put files into the directory.
            self._hidden.chmod(stat.S_IMODE(found.st_mode) & ~0o077)
        except OSError as error:
            with suppress(OSError):  # not empty: another save uses the new directory already
                for path in reversed(made):
                    path.rmdir()
            doing = f"creating a directory for {self.attempt.target}"
            raise from_os_error(error, doing, str(self._hidden)) from error
        return found

    def _make_target(self) -> None:
        """Make the target if it does not exist. Another process may make it at the same time."""
        with os_errors_as("creating a checkpoint directory", self._target):
            make_root(self._target, self.attempt.durability, self._new, self._sync)

    def _check_joined(self) -> None:
        there = False
        with os_errors_as("looking at this path", self._directory), suppress(FileNotFoundError):
            there = stat.S_ISDIR(self._directory.lstat().st_mode)
        if not there:
            raise StorageNotSharedError(
                errno.ENOENT,
                "rank 0 has made this directory, and it is not here: save to storage that all ranks share",
                str(self._directory),
            )

    def _publish(self, move: Step) -> None:
        # Before the rename: from then on the directory is the checkpoint, and the file of the lock must not be in it.
        if self._lock is not None:
            with os_errors_as("publishing", self._target):
                self._lock.release()
        names = frozenset(self._names)
        publish(self._hidden, self._target, names, self._made, self.attempt.durability, move)

    def _publish_file(self) -> None:
        target = self._target
        with os_errors_as("publishing", target):
            try:
                self._appear(self._hidden / target.name, target)
            except FileExistsError as error:
                exists = f"{target} already exists: choose another name, or delete it first"
                raise CheckpointExistsError(exists) from error
        try:
            if self.attempt.durability == "fsync":
                failed = "the file is complete, but the sync of its directory failed"
                sync_visible(target.parent, target, failed, self._sync)
        finally:
            shutil.rmtree(self._hidden, ignore_errors=True)
            self._close_lock()

"""One save in a writer process, as the trainer sees it: files and memory are sent, receipts come back.

Memory stays allocated until the receipt of its file, so that a new process can write the file again. It is released
earlier only if another stage waits for memory; if the process is lost after that, the save fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from .._runtime.error_data import error_from
from .._runtime.threads import Deadline, Stop
from .._staging import Allocation
from .._storage import Attempt, Body, BytesBody, ShardBody, StoreAddress, Transaction
from ..errors import ClosedError, InvalidOptionError, SidestreamError, WriterProcessError, without_frames
from ..events import WriterProcessLost, emit
from .link import WorkerLink, WorkerRequest
from .wire import READY, SUMS, UNUSED, WorkerMessage, WorkerMessageKind, pack, unpack, with_length

_HELD_BYTES = 1 << 20  # of messages: the process begins with them while more are made


@dataclass(frozen=True, slots=True)
class JobOrder:
    """The request to a writer process, and to every process that replaces it."""

    address: StoreAddress
    attempt: Attempt
    url: str
    deadline: Deadline

    def packed(self) -> bytes:
        """Return the order as bytes, with the current umask."""
        storage = self.address.storage
        policy = None if storage.policy is None else asdict(storage.policy)
        return pack({
            "url": self.address.url,
            "storage": {"options": storage.options, "policy": policy, "commit": storage.commit},
            "target": self.attempt.target,
            "save_id": self.attempt.save_id,
            "durability": self.attempt.durability,
            "at": self.deadline.at,
            "timeout_s": self.deadline.timeout_s,
            "umask": _umask(),
        })  # fmt: skip


@dataclass(slots=True)
class _File:
    """A file, until its receipt arrives."""

    name: str
    nbytes: int
    body: Body | None
    withdraw: list[Callable[[], None]] = field(default_factory=list)
    taken_back: bool = False
    """Some of its memory was taken back for other stages, so it cannot be written again."""
    sums: bytes | None = None
    done: bool = False

    def wrote(self, *windows: int) -> None:
        """Record that the process has written ``windows``."""
        if isinstance(self.body, ShardBody):
            self.body.written.update(windows)

    def begin_again(self) -> None:
        """Reset the progress for another process, unless the receipt has arrived."""
        if isinstance(self.body, ShardBody) and not self.done:
            self.body.written.clear()

    def take_back(self, image: Any) -> None:
        """Release the memory of one window, which the process has reported as written."""
        self.taken_back = True
        image.release()

    def finish(self, sums: bytes) -> None:
        """Accept the receipt."""
        self.sums, self.done = sums, True
        if isinstance(self.body, ShardBody):
            self.wrote(*range(len(self.body.images)))
        self.release()
        if isinstance(self.body, BytesBody):
            self.body = None

    def release(self) -> None:
        """Withdraw the offers of memory, and release it if the receipt has arrived."""
        for withdraw in self.withdraw:
            withdraw()
        self.withdraw.clear()
        # Without a receipt the memory stays leased: another process may have to read it.
        if isinstance(self.body, ShardBody) and self.done:
            for image in self.body.images:
                image.release()


class Job:
    """The work of writing ``files`` in a writer process. They are consumed one after the other, as a store would. If
    ``files`` is a list, its files share messages, because getting the next one does not block."""

    def __init__(self, order: JobOrder, files: Iterable[tuple[str, Body]], stop: Stop) -> None:
        self._order = order
        self._source = iter(files)
        self._at_once = isinstance(files, list)
        self._stop = stop
        self._files: list[_File] = []

    def run(self, transaction: Transaction, link: Callable[[], WorkerLink], retries: int) -> None:
        """Block until all files are written and synced and all receipts have arrived. Call it in a thread of the save.

        Raises the errors of writing in threads of this process, and ``WriterProcessError``. By then no process writes
        any more, or reads memory that has been released.
        """
        # One round for each process. The attempt is the same in all of them: its id is also that of other ranks. A new
        # process writes the files without a receipt again, from memory that is still leased. That ends when the retries
        # are used up, the deadline has passed, or another stage has taken back memory that was needed.
        for lives in range(retries, -1, -1):
            current: WorkerLink | None = None
            try:
                current = link()
                _Exchange(self._order, self._stop, current, at_once=self._at_once).run(self._to_write())
                break
            except WriterProcessError as lost:
                self._stop.check()
                again = lives > 0 and self._order.deadline.remaining_s() > 0 and not any(
                    file.taken_back and not file.done for file in self._files
                )  # fmt: skip
                emit(WriterProcessLost(self._order.url, None if current is None else current.pid, str(lost), again))
                if not again:
                    raise self._not_again(lost, lives) from lost
                for file in self._files:
                    file.begin_again()
                left = [file.name for file in self._files if not file.done]
                if left:
                    # Before the next process begins, because it creates its files exclusively. Files with a receipt are
                    # complete and synced, and stay.
                    transaction.clear(left)
        for file in self._files:
            _take_sums(file)
        # Only now, when all receipts are there: the commit compares these sizes with what it sees.
        transaction.wrote({transaction.committed_name(file.name): file.nbytes for file in self._files})

    def _to_write(self) -> Iterator[_File]:
        """Yield the files without a receipt, then new files."""
        yield from [file for file in self._files if not file.done]
        for name, body in self._source:
            self._files.append(_File(name, body.nbytes, body))
            del body
            yield self._files[-1]

    def _not_again(self, lost: WriterProcessError, lives: int) -> SidestreamError:
        if self._order.deadline.remaining_s() == 0:
            return self._order.deadline.exceeded(f"writing ({lost})")
        if lives == 0:
            return WriterProcessError(f"{self._order.url} was not saved: {lost}, and so did each process after it")
        return WriterProcessError(
            f"{self._order.url} was not saved: {lost}, and memory that a new process would need was in use again; a "
            "new process can write it again with a budget_bytes= that holds the whole state"
        )


def _take_sums(file: _File) -> None:
    """Store the checksums of a receipt in the body of the file, as a thread of this process would."""
    body, file.body = file.body, None
    if isinstance(body, ShardBody) and file.sums is not None:
        _, crc_bytes = SUMS.unpack_from(file.sums)
        crcs, digests = file.sums[SUMS.size : SUMS.size + crc_bytes], file.sums[SUMS.size + crc_bytes :]
        body.sums.unpack(body.layout, crcs, digests)
    file.sums = None


class _Exchange(WorkerRequest):
    """One request to one process."""

    def __init__(self, order: JobOrder, stop: Stop, link: WorkerLink, *, at_once: bool) -> None:
        super().__init__(link, lambda: stop.is_set() or order.deadline.remaining_s() == 0.0)
        self._order = order
        self._at_once = at_once
        self._stop = stop
        self._halt = Stop()  # set when sending has to end: stopped by the caller, a failure of the process, its loss
        self._sent: list[_File] = []
        self._in_use: dict[tuple[int, int], Any] = {}  # the windows that the process may still read
        self._failure: BaseException | None = None
        self._done = False
        self._released = False
        self._held: list[tuple[WorkerMessageKind, bytes]] = []  # sent with the next message
        self._ready: dict[tuple[int, int], Any] = {}  # the windows that the held messages name

    def run(self, files: Iterator[_File]) -> None:
        # Registered before anything is sent: from here on the thread of the link notices if this request does not end,
        # and kills the process. Every wait below relies on that.
        self.begin()
        try:
            with self._stop.waking(self._halt_now):
                self._stop.check()
                self._held.append((WorkerMessageKind.WRITE, self._order.packed()))
                for file in files:
                    self._send_file(file)
                    if not self._at_once or sum(len(body) for _, body in self._held) > _HELD_BYTES:
                        self._flush()
                self._flush((WorkerMessageKind.END, b""))
                self._wait()
                self._raise_end()
        except BaseException as error:
            self._fail(error)
            raise

    # --- sending ---

    def _send_file(self, file: _File) -> None:
        self._halt.check()
        body = file.body
        index = len(self._sent)
        self._sent.append(file)
        if isinstance(body, ShardBody):
            head = pack([file.name, body.digest])
            packed = body.layout.pack()
            self._held.append((WorkerMessageKind.SHARD_FILE, with_length(head) + packed))
            self._send_windows(file, index, body.images)
        else:
            assert isinstance(body, BytesBody)
            self._held.append((WorkerMessageKind.BYTES_FILE, with_length(file.name.encode()) + body.content))

    def _send_windows(self, file: _File, index: int, images: Sequence[Any]) -> None:
        """Send the windows of a file as they become complete. Those that are complete already share a message."""
        found: dict[int, tuple[Any, Allocation, Any]] = {}
        try:
            for window, image in enumerate(images):
                # The windows that are complete already travel in one message. Before a wait for the next one they are
                # sent, so that the process writes meanwhile.
                if not image.whole:
                    self._hold_ready(index, found)
                    found.clear()
                    self._flush()
                found[window] = self._window(file, image)
            self._hold_ready(index, found)
        finally:
            found.clear()  # so that an error that is kept, with this stack frame, does not keep the memory

    def _window(self, file: _File, image: Any) -> tuple[Any, Allocation, Any]:
        """Wait until a window is complete, and return its array, its allocation and its image."""
        try:
            image.wait(image.nbytes, stop=self._halt)
            lease: Allocation = image.lease()
            array = lease.array
        except ClosedError as error:
            if file.taken_back:
                raise WriterProcessError("memory of the save was taken back for other stages") from error
            raise
        if lease.shared is None:
            raise InvalidOptionError('this stager has private memory: make it with AsyncStager(backing="shared")')
        # Before the message that names the memory, and on the same socket, so that the process has mapped it when that
        # arrives.
        self.share(lease.shared)
        return array, lease, image

    def _hold_ready(self, index: int, found: dict[int, tuple[Any, Allocation, Any]]) -> None:
        self._ready.update(((index, window), used) for window, used in found.items())
        ready = [
            READY.pack(index, window, lease.shared.number, lease.start, image.nbytes)
            for window, (_, lease, image) in found.items()
            if lease.shared is not None
        ]
        if ready:
            self._held.append((WorkerMessageKind.READY, b"".join(ready)))

    def _flush(self, *last: tuple[WorkerMessageKind, bytes]) -> None:
        """Send what is held, and then ``last``, in one call: after each call the thread waits for the GIL."""
        held, self._held = [*self._held, *last], []
        with self._changed:
            self._halt.check()
            # Before the message is sent, and with the lock. The process may answer at once, in the thread of the link,
            # and a window that is not in the dict would be taken for one that is not in use. The arrays in it keep the
            # memory leased.
            self._in_use.update(self._ready)
            self._ready.clear()
        if held:
            self.send(*held)

    # --- receiving, in the thread of the link ---

    @property
    def finished(self) -> bool:
        return self._lost is not None or (self.ended and not self._in_use)

    @property
    def ended(self) -> bool:
        return self._done or self._failure is not None or self._lost is not None

    def on_message(self, message: WorkerMessage) -> None:
        with self._changed:
            if message.kind == WorkerMessageKind.UNUSED:
                index, window = UNUSED.unpack(message.body)
                self._unused(self._sent[index], window, self._in_use.pop((index, window), None))
            elif message.kind == WorkerMessageKind.FILE_DONE:
                self._sent[SUMS.unpack_from(message.body)[0]].finish(message.body)
            else:
                if message.kind == WorkerMessageKind.DONE:
                    self._done = True
                elif message.kind == WorkerMessageKind.FAILED:
                    self._failure = error_from(unpack(message.body))
                self._changed.notify_all()  # only here: the thread that waits for the end is not woken up in vain
        if message.kind == WorkerMessageKind.FAILED:
            self._halt.set()

    def _unused(self, file: _File, window: int, used: Any) -> None:
        # There are three cases in which the window is not offered: its file has its receipt, so the memory has been
        # released; the request has ended; or it has failed, and its files will be removed.
        if used is None or file.done or self._released or self._failure is not None:
            return  # it will not be written again
        file.wrote(window)
        _, lease, image = used
        file.withdraw.append(lease.offer(lambda: file.take_back(image)))

    def on_lost(self, reason: str) -> None:
        with self._changed:
            # The process has been killed and reaped, so nothing reads the memory any more, whatever it has reported.
            self._in_use.clear()
            super().on_lost(reason)
        self._halt.set()

    # --- the end ---

    def _halt_now(self) -> None:
        self._halt.set()
        with self._changed:
            self._changed.notify_all()

    def _wait(self) -> None:
        deadline = self._order.deadline
        with self._changed:
            self._changed.wait_for(lambda: self.ended or self._halt.is_set(), deadline.remaining_s())
            if not self.ended:
                self._halt.check()
                raise deadline.exceeded("writing")

    def _fail(self, error: BaseException) -> None:
        """End the request after ``error``. When this returns, the process writes nothing of it any more."""
        with self._changed:
            ended = self.ended
        self._held.clear()
        self._ready.clear()
        # When this returns, the process must not touch the memory or the files any more, because the caller releases
        # the one and deletes the other. So the process either acknowledges the cancel or is killed.
        if not ended:
            with suppress(WriterProcessError):
                self.cancel()
        with self._changed:
            self._released = True
            for file in self._sent:
                file.release()
        if isinstance(error, (ClosedError, WriterProcessError)):  # only a consequence: raise the cause, if it is known
            self._raise_end()

    def _raise_end(self) -> None:
        if self._done:
            return
        self._stop.check()
        if self._failure is not None:
            raise without_frames(self._failure)
        if self._lost is not None:
            raise WriterProcessError(self._lost)


def _umask() -> int:
    """Return the umask without changing it. The functions of ``os`` have to set it, for all threads, to read it."""
    with suppress(OSError), open("/proc/self/status", "rb") as file:
        for line in file:
            if line.startswith(b"Umask:"):
                return int(line.split()[1], 8)
    return 0o077

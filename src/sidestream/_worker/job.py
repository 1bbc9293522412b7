"""One save in a writer process, seen from the trainer: files and memory are handed over, receipts come back.

Memory stays leased until the receipt of its file, so that a new process can write it once more; it is let go of earlier
only when somebody waits for memory, and then a lost process is the end of the save.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from .._format.layout_bytes import pack_layout, unpack_sums
from .._runtime.threads import Deadline, Stop, run_sliced
from .._storage import Attempt, Body, BytesBody, ShardBody, StoreAddress, Transaction
from ..errors import ClosedError, InvalidOptionError, SidestreamError, WriterProcessError, without_frames
from ..events import WriterProcessLost, emit
from .faults import unpack_error
from .link import ACKNOWLEDGE_S, SharedSegment, WorkerLink
from .wire import WorkerMessage, WorkerMessageKind, pack
from .work import READY, SUMS, UNUSED

__all__ = ["Job", "JobOrder"]


class _Lease(Protocol):
    start: int

    @property
    def shared(self) -> SharedSegment | None: ...

    @property
    def array(self) -> Any: ...

    def offer(self, take_back: Callable[[], None]) -> Callable[[], None]: ...


@dataclass(frozen=True, slots=True)
class JobOrder:
    """What is asked of a process, and of every one that takes its place."""

    address: StoreAddress
    attempt: Attempt
    url: str
    deadline: Deadline

    def packed(self) -> bytes:
        """For one process; with the umask as it is now."""
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
    """A file until its receipt."""

    name: str
    nbytes: int
    body: Body | None
    windows: int
    withdraw: list[Callable[[], None]] = field(default_factory=list)
    given_up: bool = False
    """Some of its memory was wanted by others: it cannot be written again."""
    sums: bytes | None = None
    done: bool = False

    def wrote(self, *windows: int) -> None:
        if isinstance(self.body, ShardBody):
            self.body.written.update(windows)

    def begin_again(self) -> None:
        """Unless its receipt has come."""
        if isinstance(self.body, ShardBody) and not self.done:
            self.body.written.clear()

    def give_up(self, image: Any) -> None:
        """The memory of one window, which is on storage already, as far as the process has said."""
        self.given_up = True
        image.release()

    def finish(self, sums: bytes) -> None:
        """The receipt has come."""
        self.sums, self.done = sums, True
        self.wrote(*range(self.windows))
        self.release()
        if isinstance(self.body, BytesBody):
            self.body = None

    def release(self) -> None:
        for withdraw in self.withdraw:
            withdraw()
        self.withdraw.clear()
        if isinstance(self.body, ShardBody) and self.done:
            for image in self.body.images:
                image.release()


class Job:
    """``files`` are taken one after the other, as the store would take them."""

    def __init__(self, order: JobOrder, files: Iterable[tuple[str, Body]], stop: Stop) -> None:
        self._order = order
        self._source = iter(files)
        self._stop = stop
        self._files: list[_File] = []

    def run(self, transaction: Transaction, link: Callable[[], WorkerLink], retries: int) -> None:
        """Return when everything is written, synced and receipted. Blocks: for a thread of the save's own.

        Raises what writing raises in threads of this process, and ``WriterProcessError``. No process writes any more
        then, or reads memory whose lease has ended.
        """
        for lives in range(retries, -1, -1):
            current: WorkerLink | None = None
            try:
                current = link()
                _Exchange(self._order, self._stop, current).run(self._to_write())
                break
            except WriterProcessError as lost:
                self._stop.check()
                again = lives > 0 and self._order.deadline.remaining_s() > 0 and not any(
                    file.given_up and not file.done for file in self._files
                )  # fmt: skip
                emit(WriterProcessLost(self._order.url, None if current is None else current.pid, str(lost), again))
                if not again:
                    raise self._not_again(lost, lives) from lost
                for file in self._files:
                    file.begin_again()
                left = [file.name for file in self._files if not file.done]
                if left:
                    transaction.clear(left)
        for file in self._files:
            _settle(file)
        transaction.wrote({file.name: file.nbytes for file in self._files})

    def _to_write(self) -> Iterator[_File]:
        """Those without a receipt, then what is new."""
        yield from [file for file in self._files if not file.done]
        for name, body in self._source:
            windows = len(body.images) if isinstance(body, ShardBody) else 0
            self._files.append(_File(name, body.nbytes, body, windows))
            del body
            yield self._files[-1]

    def _not_again(self, lost: WriterProcessError, lives: int) -> SidestreamError:
        if self._order.deadline.remaining_s() == 0:
            return self._order.deadline.exceeded(f"writing ({lost})")
        if lives == 0:
            return WriterProcessError(f"{self._order.url} was not saved: {lost}, and so did those that took its place")
        return WriterProcessError(
            f"{self._order.url} was not saved: {lost}, and the memory of what it had written was in use again; with a "
            "budget_bytes= that holds the whole state it could have been written again"
        )


def _settle(file: _File) -> None:
    """Put the checksums of a receipt where those that are computed here would stand."""
    body, file.body = file.body, None
    if isinstance(body, ShardBody) and file.sums is not None:
        _, crc_bytes = SUMS.unpack_from(file.sums)
        crcs, digests = file.sums[SUMS.size : SUMS.size + crc_bytes], file.sums[SUMS.size + crc_bytes :]
        run_sliced(unpack_sums(body.layout, crcs, digests, body.sums))
    file.sums = None


class _Exchange:
    """One request to one process."""

    def __init__(self, order: JobOrder, stop: Stop, link: WorkerLink) -> None:
        self._order = order
        self._stop = stop
        self._link = link
        self._changed = threading.Condition()
        self._halt = Stop()  # whatever ends the handing over: the caller, a failure there, a loss
        self._sent: list[_File] = []
        self._in_use: dict[tuple[int, int], Any] = {}  # what the process may still read
        self._failure: BaseException | None = None
        self._lost: str | None = None
        self._done = False
        self._number = 0
        self._asked = False
        self._release = False
        self._sending = False
        self._halted_at: float | None = None

    def run(self, files: Iterator[_File]) -> None:
        self._number = self._link.request(self)
        try:
            with self._stop.waking(self._halt_now):
                self._stop.check()
                packed = self._order.packed()
                self._asked = True
                self._send(WorkerMessageKind.WRITE, packed)
                for file in files:
                    self._hand_over(file)
                self._send(WorkerMessageKind.END, b"")
                self._wait()
                self._raise_end()
        except BaseException as error:
            self._give_up(error)
            raise

    # --- handing over ---

    def _hand_over(self, file: _File) -> None:
        self._halt.check()
        body = file.body
        index = len(self._sent)
        self._sent.append(file)
        if isinstance(body, ShardBody):
            said = pack([file.name, body.digest])
            packed = run_sliced(pack_layout(body.layout))
            self._send(WorkerMessageKind.SHARD_FILE, _text(said) + packed)
            self._hand_windows(file, index, body.images)
        else:
            assert isinstance(body, BytesBody)
            self._send(WorkerMessageKind.BYTES_FILE, _text(file.name.encode()) + body.content)

    def _hand_windows(self, file: _File, index: int, images: Sequence[Any]) -> None:
        """As they become whole; of those that are there already the process is told at once."""
        found: dict[int, tuple[Any, _Lease, Any]] = {}
        try:
            for window, image in enumerate(images):
                if found and not image.whole:
                    self._tell(index, found)
                    found.clear()
                found[window] = self._window(file, image)
            self._tell(index, found)
        finally:
            found.clear()  # whoever keeps an error, and this frame with it, does not keep the memory

    def _window(self, file: _File, image: Any) -> tuple[Any, _Lease, Any]:
        """Its memory, when it is whole."""
        try:
            image.wait(image.nbytes, deadline=self._order.deadline, stop=self._halt)
            lease: _Lease = image.lease()
            array = lease.array
        except ClosedError as error:
            if file.given_up:
                raise WriterProcessError("the memory of what was written was wanted by others") from error
            raise
        if lease.shared is None:
            raise InvalidOptionError('this stager has private memory: make it with AsyncStager(backing="shared")')
        self._send(lease.shared)
        return array, lease, image

    def _tell(self, index: int, found: dict[int, tuple[Any, _Lease, Any]]) -> None:
        with self._changed:
            self._halt.check()
            self._in_use.update(((index, window), used) for window, used in found.items())
        ready = (
            READY.pack(index, window, lease.shared.number, lease.start, image.nbytes)
            for window, (_, lease, image) in found.items()
            if lease.shared is not None
        )
        self._send(WorkerMessageKind.READY, b"".join(ready))

    def _send(self, what: WorkerMessageKind | SharedSegment, body: bytes = b"") -> None:
        self._sending = True
        try:
            if isinstance(what, WorkerMessageKind):
                self._link.send(what, self._number, body)
            else:
                self._link.share(what)
        finally:
            self._sending = False

    # --- what comes back; in the thread of the link ---

    @property
    def stuck(self) -> bool:
        halted_at = self._halted_at
        ended_at = self._order.deadline.at if halted_at is None else min(halted_at, self._order.deadline.at)
        return self._sending and time.monotonic() - ended_at > ACKNOWLEDGE_S

    @property
    def finished(self) -> bool:
        return self._lost is not None or ((self._done or self._failure is not None) and not self._in_use)

    def on_message(self, frame: WorkerMessage) -> None:
        with self._changed:
            if frame.kind == WorkerMessageKind.UNUSED:
                index, window = UNUSED.unpack(frame.body)
                self._unused(self._sent[index], window, self._in_use.pop((index, window), None))
            elif frame.kind == WorkerMessageKind.FILE_DONE:
                self._sent[SUMS.unpack_from(frame.body)[0]].finish(frame.body)
            else:
                if frame.kind == WorkerMessageKind.DONE:
                    self._done = True
                elif frame.kind == WorkerMessageKind.FAILED:
                    self._failure = unpack_error(frame.body)
                self._changed.notify_all()  # not before: whoever waits for the end is not to be woken up in vain
        if frame.kind == WorkerMessageKind.FAILED:
            self._halt.set()

    def _unused(self, file: _File, window: int, used: Any) -> None:
        if used is None or file.done or self._release or self._failure is not None:
            return  # there will be no second time
        file.wrote(window)
        _, lease, image = used
        file.withdraw.append(lease.offer(lambda: file.give_up(image)))

    def on_lost(self, reason: str) -> None:
        with self._changed:
            self._lost = reason
            self._in_use.clear()
            self._changed.notify_all()
        self._halt.set()

    # --- the end ---

    def _halt_now(self) -> None:
        self._halted_at = self._halted_at or time.monotonic()
        self._halt.set()
        with self._changed:
            self._changed.notify_all()

    def _wait(self) -> None:
        deadline = self._order.deadline
        with self._changed:
            while not (self._done or self._failure or self._lost or self._halt.is_set()):
                if not self._changed.wait(deadline.remaining_s()):
                    raise deadline.exceeded("writing")
            if not (self._done or self._failure or self._lost):
                raise ClosedError("stopped before the work was done")

    def _give_up(self, error: BaseException) -> None:
        """Nothing is written any more when this returns."""
        with self._changed:
            ended = self._done or self._failure is not None or self._lost is not None
        if not self._asked:
            self._link.withdraw(self._number)  # the process knows nothing of it, and would not answer
        elif not ended:
            try:
                self._send(WorkerMessageKind.CANCEL, b"")
            except WriterProcessError:
                pass
            else:
                self._acknowledged()
        with self._changed:
            self._release = True
            for file in self._sent:
                file.release()
        if isinstance(
            error, (ClosedError, WriterProcessError)
        ):  # what follows from an end that is known, not the end itself
            self._raise_end()

    def _acknowledged(self) -> None:
        patience = Deadline.after(ACKNOWLEDGE_S)
        with self._changed:
            while not (self._done or self._failure or self._lost) and patience.remaining_s():
                self._changed.wait(patience.remaining_s())
            if self._done or self._failure or self._lost:
                return
        self._link.end("the writer process did not end a save that was cancelled, and was killed", ACKNOWLEDGE_S)

    def _raise_end(self) -> None:
        if self._done:
            return
        self._stop.check()
        if self._failure is not None:
            raise without_frames(self._failure)
        if self._lost is not None:
            raise WriterProcessError(self._lost)


def _umask() -> int:
    """Without setting it, which is the only way that ``os`` has, and for all threads."""
    with suppress(OSError), open("/proc/self/status", "rb") as file:
        for line in file:
            if line.startswith(b"Umask:"):
                return int(line.split()[1], 8)
    return 0o077


def _text(raw: bytes) -> bytes:
    return len(raw).to_bytes(4, "little") + raw

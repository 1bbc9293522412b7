"""The trainer's end of one writer process: a thread that starts the process, reads its messages, and reaps it."""

from __future__ import annotations

import os
import subprocess
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from .._staging import MappedMemory
from ..errors import WriterProcessError
from ..events import emit
from ..options import WriterProcess
from .process import spawn
from .wire import Channel, WorkerMessage, WorkerMessageKind, pack, unpack_event

ACKNOWLEDGE_S = 2.5
"""How long the process may take to stop using the memory of a cancelled request. Together with the time to kill and
reap it, this is less than the grace of a thread (5 s)."""

_TICK_S = 0.25
_START_S = 60.0
_REAP_S = 5.0
_ENDED = "the writer process has ended"


@dataclass(slots=True)
class _Call:
    """A call of ``send`` or ``share`` that has not returned, and the time at which it was first seen to be late."""

    late_since: float | None = None


class WorkerRequest(ABC):
    """One request to the writer process. ``late()`` says whether it should have ended, because it was stopped or its
    deadline has passed. The methods ``on_message`` and ``on_lost``, ``finished`` and ``stuck`` are for the thread of
    the link. They must be quick."""

    def __init__(self, link: WorkerLink, late: Callable[[], bool]) -> None:
        self._link = link
        self._late = late
        self._changed = threading.Condition()
        self._lost: str | None = None
        self._number = 0
        self._asked = False
        self._call: _Call | None = None

    def begin(self) -> None:
        """Register the request, before anything is sent or shared, because the thread of the link monitors registered
        requests. Raises ``WriterProcessError``."""
        self._number = self._link.request(self)

    def send(self, *messages: tuple[WorkerMessageKind, bytes]) -> None:
        """Send messages of the request in one call. Raises what ``WorkerLink.send`` raises."""
        self._asked = True
        with self._in_call():
            self._link.send([(kind, self._number, body) for kind, body in messages])

    def share(self, memory: MappedMemory) -> None:
        """Do ``WorkerLink.share``."""
        with self._in_call():
            self._link.share(memory)

    def cancel(self) -> None:
        """End a request that has not ended. When this returns, the process neither reads nor writes memory for it any
        more. Raises ``WriterProcessError``."""
        if not self._asked:
            self._link.discard(self._number)  # the process does not know the request, and would not answer
            return
        self.send((WorkerMessageKind.CANCEL, b""))
        with self._changed:
            ended = self._changed.wait_for(lambda: self.ended, ACKNOWLEDGE_S)
        if not ended:
            self._link.end("the writer process did not end a save that was cancelled, and was killed", ACKNOWLEDGE_S)

    @contextmanager
    def _in_call(self) -> Iterator[None]:
        self._call = _Call()
        try:
            yield
        finally:
            self._call = None

    # --- in the thread of the link ---

    @abstractmethod
    def on_message(self, message: WorkerMessage) -> None:
        """Handle a message about the request."""

    def on_lost(self, reason: str) -> None:
        """End the request, because the process has ended. Nothing of it will be written any more."""
        with self._changed:
            self._lost = reason
            self._changed.notify_all()

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether the request has ended, with success or not."""

    @property
    def finished(self) -> bool:
        """Whether no message about the request will follow."""
        return self.ended

    @property
    def stuck(self) -> bool:
        """Whether the request should have ended, but waits in a call of ``send`` or ``share`` that does not return."""
        call = self._call  # another thread may end it, and begin the next one
        if call is None or not self._late():
            return False
        call.late_since = call.late_since or time.monotonic()
        return time.monotonic() - call.late_since > ACKNOWLEDGE_S


class WorkerLink:
    """One writer process. Once ``lost`` is set, the link is not used again."""

    def __init__(self, options: WriterProcess) -> None:
        self.up: Future[None] = Future()
        """Done when the process is ready to write. Fails with ``WriterProcessError`` if it never is."""
        self.lost: str | None = None
        self.pid: int | None = None
        self._options = options
        self._lock = threading.Lock()
        self._requests: dict[int, WorkerRequest] = {}
        self._numbers = 0
        self._channel: Channel | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._shared: set[int] = set()
        self._sharing = threading.Lock()
        self._forgotten: deque[int] = deque()
        self._killed: str | None = None
        self._users = 0
        self._used_at = time.monotonic()
        # The thread that starts the process also reads from it and reaps it. Linux sends a process the signal of its
        # parent's death when the thread that made it ends, so this thread has to live as long as the process.
        self._thread = threading.Thread(target=self._run, name="sidestream-saver", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # the system cannot start another thread
            self.lost = f"the writer process could not be started: {error}"
            raise WriterProcessError(self.lost) from error

    # --- any thread ---

    def request(self, request: WorkerRequest) -> int:
        """Register ``request`` for its messages, and return its number. Raises ``WriterProcessError``."""
        with self._lock:
            if self.lost is not None:
                raise WriterProcessError(self.lost)
            self._numbers += 1
            self._requests[self._numbers] = request
            return self._numbers

    def discard(self, number: int) -> None:
        """Remove a request that was never sent."""
        with self._lock:
            self._requests.pop(number, None)
            self._used_at = time.monotonic()

    def send(self, messages: Sequence[tuple[WorkerMessageKind, int, bytes]]) -> None:
        """Send messages in one call. Blocks while the process does not read. Raises ``WriterProcessError`` if it has
        ended."""
        self._call(lambda channel: channel.send_all(messages))

    def share(self, memory: MappedMemory) -> None:
        """Have the process map ``memory``, unless it has already. The process unmaps it after it was freed here."""
        with self._sharing:
            # The number and not the address: memory that was freed here may be mapped again at the same address. The
            # process unmaps it when it is asked to, by FORGET, which a finalizer queues and the next message carries.
            if memory.number in self._shared:
                return
            kind, number, nbytes = WorkerMessageKind.SEGMENT, memory.number, len(memory).to_bytes(8, "little")
            self._call(lambda channel: channel.send(kind, number, nbytes, descriptor=memory.descriptor))
            self._shared.add(memory.number)
            weakref.finalize(memory, self._forgotten.append, memory.number).atexit = False

    def _call(self, send: Callable[[Channel], None]) -> None:
        channel = self._channel
        if channel is not None:
            try:
                self._forget(channel)
                send(channel)
                return
            except OSError:  # the thread may not have noticed the end yet, and no other request may use this link
                self.end(_ENDED, _REAP_S)
        raise WriterProcessError(self.lost or _ENDED)

    def add_users(self, users: int) -> None:
        """Add to the number of references that keep the process alive."""
        with self._lock:
            self._users += users
            self._used_at = time.monotonic()

    def kill(self, reason: str) -> None:
        """Kill the process for ``reason``, which all requests receive. Does not wait; may be called in any thread."""
        self._killed = self._killed or reason
        with self._lock:  # not after it was reaped, when another process may have its PID
            if self._process is not None and self._process.returncode is None:
                with suppress(OSError):
                    self._process.kill()

    def end(self, reason: str, timeout_s: float) -> None:
        """Kill the process and wait until it has ended and all requests know it, for at most ``timeout_s``."""
        self.kill(reason)
        self._thread.join(timeout_s)

    def close_after_fork(self) -> None:
        """Close the socket in a forked child, which would keep the writer process from noticing the trainer's end."""
        if self._channel is not None:
            with suppress(OSError):
                os.close(self._channel.socket.detach())

    # --- its thread ---

    def _run(self) -> None:
        reason = _ENDED
        try:
            process, ours = spawn()
            self.pid = process.pid
            with self._lock:
                self._process = process
            self._channel = Channel(ours)
            options = self._options
            self._channel.send(
                WorkerMessageKind.SETUP,
                0,
                pack({
                    "nice": options.nice,
                    "io_priority": options.io_priority,
                    "affinity": None if options.affinity is None else sorted(options.affinity),
                    "max_bytes_per_second": options.max_bytes_per_second,
                }),
            )  # fmt: skip
            reason = self._listen()
        except Exception as error:  # the edge of the thread
            reason = (
                str(error)
                if isinstance(error, WriterProcessError)
                else f"the writer process: {type(error).__name__}: {error}"
            )
        finally:
            self._end(reason)

    def _listen(self) -> str:
        """Read messages until the process has ended, is silent for too long, or is not needed any more. Return the
        reason."""
        assert self._channel is not None
        self._channel.set_timeout(_TICK_S)
        started = time.monotonic()
        # There are six ends. The socket is closed. The process has ended, and a child of the trainer keeps the socket
        # open. It is silent for too long. It does not take what it is sent. It does not come up. It has been idle for
        # long enough.
        silent, gone = 0, False
        while True:
            try:
                messages = self._channel.receive()
            except TimeoutError:
                if gone:  # and no message is left: forked workers of the trainer may keep the socket open
                    return self._killed or _ENDED
                gone = self._has_ended()
                silent += 1  # counted and not measured, because a machine that was suspended does not count
                if silent * _TICK_S >= self._options.silence_s and self.up.done():
                    return f"the writer process did not answer for {self._options.silence_s:g} s and was killed"
            else:
                if messages is None:
                    return self._killed or _ENDED
                silent = 0
                for message in messages:
                    self._on_message(message)
                del messages
            if self._is_stuck():
                return "the writer process did not take what it was sent, and was killed"
            if not self.up.done() and time.monotonic() - started > _START_S:
                return f"the writer process was not up within {_START_S:g} s and was killed"
            if not self._requests:  # else another thread may be stuck in sending, which this thread must notice
                self._forget(self._channel)
            if self._idle():
                return "the writer process was not needed any more"

    def _has_ended(self) -> bool:
        with self._lock:
            return self._process is not None and self._process.poll() is not None

    def _is_stuck(self) -> bool:
        """Return whether a thread of a request waits for room in the socket for too long. Neither a cancel nor a
        deadline reaches such a thread; the end of the process does."""
        with self._lock:
            return any(one.stuck for one in self._requests.values())

    def _on_message(self, message: WorkerMessage) -> None:
        if message.kind == WorkerMessageKind.UP:
            self.up.set_result(None)
        elif message.kind == WorkerMessageKind.EVENT:
            emit(unpack_event(message.body))
        elif message.number:
            with self._lock:
                request = self._requests.get(message.number)
            if request is not None:
                request.on_message(message)
                if request.finished:
                    with self._lock:
                        self._requests.pop(message.number, None)
                        self._used_at = time.monotonic()

    def _forget(self, channel: Channel) -> None:
        with suppress(IndexError):
            while True:
                channel.send(WorkerMessageKind.FORGET, self._forgotten.popleft())

    def _idle(self) -> bool:
        with self._lock:
            if self._requests or self._users or not self.up.done():
                return False
            if time.monotonic() - self._used_at < self._options.idle_s:
                return False
            self.lost = "the writer process was not needed any more"  # with the lock, so that no request follows
            return True

    def _end(self, reason: str) -> None:
        """Kill and reap the process, then notify all requests: by then it writes nothing any more."""
        # In this order, which is the promise to every request: killed, reaped, and only then notified. So the memory
        # that a request releases next is read by no process.
        self.kill(reason)
        process = self._process
        code = None
        if process is not None:
            with suppress(
                subprocess.TimeoutExpired
            ):  # it is in a system call that does not return: it writes nothing new
                code = process.wait(_REAP_S)
        if code is not None and reason == _ENDED:
            reason += f" (signal {-code})" if code < 0 else f" (exit status {code})"
        with self._lock:
            self.lost = reason
            requests, self._requests = list(self._requests.values()), {}
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        if not self.up.done():
            self.up.set_exception(WriterProcessError(reason))
        for request in requests:
            request.on_lost(reason)

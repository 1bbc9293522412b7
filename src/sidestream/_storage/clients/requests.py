"""Requests to storage, with time limits, retries after passing failures, and pauses when the storage throttles.

They run on the event loop that fsspec keeps in a thread of its own, as asynchronous fsspec file systems do. So threads
without a loop can make them, and they continue while the caller's loop is blocked.
"""

from __future__ import annotations

import asyncio
import errno
import random
import re
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Literal, TypeVar

from fsspec.asyn import get_loop, iothread

from ..._runtime.threads import Deadline, Stop, Threads, current_deadline
from ...errors import (
    AccessDeniedError,
    ClosedError,
    CorruptCheckpointError,
    SidestreamError,
    StorageError,
    mark_uncertain,
    redacted,
)
from ...events import Retried, Throttled, emit
from ...options import StorePolicy

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)

_GRACE_S = 5.0
_waiter = Threads("sidestream-storage", 1)  # only its ``wait`` is used, so it never starts a thread


class LoopCall(Generic[T]):
    """A coroutine that runs on the loop. ``future`` is done when the coroutine has ended, also if it was cancelled."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self.loop: asyncio.AbstractEventLoop = get_loop()
        self.future: Future[T] = Future()
        self.future.set_running_or_notify_cancel()
        self.stop = Stop()
        """What ``result`` waits with if it is given no other. It is there before the work begins, so the end of a
        program finds it."""
        self.cancelled = False
        """Whether ``cancel`` was called."""
        self._task: asyncio.Task[T] | None = None
        # On the loop of fsspec, which runs in a thread of its own. So a request continues while the caller's loop is
        # blocked at a fence, and a thread of the writer can wait for it although no loop runs there.
        self.loop.call_soon_threadsafe(self._start, work)

    def cancel(self) -> None:
        """Cancel the coroutine. ``future`` raises ``ClosedError`` when it has ended. From any thread."""
        self.cancelled = True
        self.loop.call_soon_threadsafe(self._cancel)

    def cancel_after(self, grace_s: float) -> None:
        """Cancel the coroutine if it has not ended in ``grace_s``. From any thread."""
        self.loop.call_soon_threadsafe(self.loop.call_later, grace_s, self.cancel)

    def result(self, name: str, stop: Stop | None = None, grace_s: float = 0.0) -> T:
        """Wait for the coroutine in a thread, and return its result. Raises what the coroutine raised, ``ClosedError``
        when ``stop`` is set, and ``DeadlineExceededError``. The coroutine has ``grace_s`` to end after ``stop`` was
        set."""
        stop, deadline = stop or self.stop, current_deadline()
        with stop.waking(partial(self.cancel_after, grace_s) if grace_s else self.cancel):
            if stop.is_set():
                self.cancel()
            try:
                return self.future.result(deadline.remaining_s())
            except FutureTimeout:
                if self.future.done():
                    raise
            self.cancel()
            try:
                return self.future.result(_GRACE_S)
            except ClosedError as error:
                raise deadline.exceeded(name) from error
            except FutureTimeout as error:
                raise deadline.exceeded(f"{name}, which does not end when it is cancelled") from error

    def _start(self, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        if self.cancelled:
            self.future.set_exception(_stopped())
            return
        self._task = self.loop.create_task(work())
        self._task.add_done_callback(self._ended)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _ended(self, task: asyncio.Task[T]) -> None:
        self._task = None
        if task.cancelled():
            self.future.set_exception(_stopped())
        elif (error := task.exception()) is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(task.result())


def in_io_thread() -> bool:
    """Return whether the calling thread runs the loop. Such a thread must not wait for a ``LoopCall``."""
    return threading.current_thread() is iothread[0]


def _stopped() -> ClosedError:
    return ClosedError("stopped before the work was done")


async def on_io_loop(work: Callable[[], Coroutine[Any, Any, T]], name: str) -> T:
    """Run ``work()`` on the loop and wait for it. When this returns or raises, the work has ended. A cancel of the
    caller cancels the work, and is raised when the work has ended."""
    call = LoopCall(work)
    with call.stop.waking(call.cancel):
        if call.stop.is_set():
            call.cancel()
        return await _waiter.wait(call.future, name, stop=call.stop)


FailureKind = Literal["absent", "taken", "denied", "throttled", "transient", "final"]

_BASE_S = 0.1
_THROTTLED_BASE_S = 0.5
_MOST_S = 20.0
_STATUS = re.compile(r"(?:status(?: code)?:?|HTTP(?: error)?|\()\s*(\d{3})\b", re.IGNORECASE)
# A URL, a path, or an element of an answer of S3 that names an object. A match begins where a word begins, so that each
# character is looked at a bounded number of times.
_NAME = re.compile(r"<(?:key|resource)>[^<]*|(?<![^\s<>\"'])[^\s<>\"'/]*/[^\s<>\"']*", re.IGNORECASE)
_THROTTLING = ("slowdown", "slow down", "reduce your request rate", "toomanyrequests", "throttl", "serverbusy")
_PASSING = (
    "timed out", "timeout", "connect", "reset", "broken pipe", "sending request", "incomplete", "eof", "body",
    "disconnected", "temporarily", "conditionalrequestconflict", "operationaborted",
)  # fmt: skip
_CUT_OFF = frozenset(
    {
        "ClientPayloadError",
        "ContentLengthError",
        "TransferEncodingError",
        "IncompleteReadError",
        "ResponseStreamingError",
    }
)
_ABSENT = frozenset({"NotFoundError", "NoSuchKey", "ResourceNotFoundError"})
_TAKEN = frozenset({"AlreadyExistsError", "PreconditionError", "ResourceExistsError", "FileExpired"})
_DENIED = frozenset(
    {"PermissionDeniedError", "UnauthenticatedError", "NoCredentialsError", "ClientAuthenticationError"}
)


@dataclass(slots=True)
class Requests:
    """The requests of one store, whose keys begin with ``root``. When the storage throttles one of them, all of them
    wait."""

    url: str
    root: str
    policy: StorePolicy
    _quiet_until: float = field(default=0.0)

    async def run(
        self,
        operation: str,
        name: str,
        call: Callable[[], Awaitable[T]],
        *,
        request_timeout_s: float | None = None,
    ) -> T:
        """Repeat ``call()`` until it succeeds, fails for good, or the deadline passes. Each call has the time limit
        ``request_timeout_s``, by default that of the policy.

        Raises ``FileNotFoundError``, ``AccessDeniedError``, ``StorageError``, ``DeadlineExceededError``, and any
        error of sidestream that ``call()`` raises. If it is unknown whether the request was carried out,
        ``is_uncertain`` is true of the error.
        """
        timeout_s = request_timeout_s or self.policy.request_timeout_s
        tries, throttled, uncertain, deadline = 0, 0, False, current_deadline()
        doing = f"{operation} {self._at(name)}"
        while True:
            tries += 1
            try:
                await self._wait_for_quiet(deadline, doing)
                async with asyncio.timeout(min(timeout_s, deadline.remaining_s())):
                    return await call()
            except (Exception, asyncio.CancelledError) as error:
                if isinstance(error, (asyncio.CancelledError, SidestreamError)):
                    _marked(error, uncertain)  # whatever ends this try, an earlier one may still be carried out
                    raise
                failure = failure_kind(error)
                if failure == "taken":
                    failure = "transient"  # 409 or 412 in answer to a request without a condition
                # Without a status it is unknown whether the storage has answered.
                uncertain = uncertain or failure == "transient" or (failure == "throttled" and _status(error) is None)
                throttled += failure == "throttled"
                wait_s = self._pause(failure, throttled if failure == "throttled" else tries - throttled)
                if wait_s is None:
                    raise _marked(translated(error, operation, self._at(name)), uncertain) from error
                if deadline.remaining_s() <= wait_s:
                    late = deadline.exceeded(f"{doing} ({_reason(error)})")
                    raise _marked(late, uncertain) from error
                event = Throttled if failure == "throttled" else Retried
                emit(event(operation, self._at(name), tries, wait_s, _reason(error)))
            if failure != "throttled":
                await asyncio.sleep(wait_s)

    def _pause(self, failure: FailureKind, tries: int) -> float | None:
        """Return how long to wait after so many tries that ended like this one; None if there is no next try. A
        throttled request is repeated until its deadline, whatever the policy says."""
        if failure == "throttled":
            wait_s = _jittered(_THROTTLED_BASE_S, tries)
            self._quiet_until = max(self._quiet_until, time.monotonic() + wait_s)
            return wait_s
        if failure != "transient" or tries > self.policy.retries:
            return None
        return _jittered(_BASE_S, tries)

    async def _wait_for_quiet(self, deadline: Deadline, doing: str) -> None:
        while (wait_s := self._quiet_until - time.monotonic()) > 0:
            deadline.check(doing)
            await asyncio.sleep(min(wait_s, deadline.remaining_s()))
        deadline.check(doing)

    def name_of(self, key: str) -> str:
        """Return the name of a key, relative to the root."""
        return key.removeprefix(f"{self.root}/")

    def _at(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url


def _jittered(base_s: float, tries: int) -> float:
    """Return a random time between half and all of a limit that doubles with each try. Writers that failed at the
    same time do not try again at the same time."""
    return min(_MOST_S, base_s * 2.0 ** min(tries, 10)) * random.uniform(0.5, 1.0)


def _marked(error: E, uncertain: bool) -> E:
    return mark_uncertain(error) if uncertain else error


def translated(error: BaseException, doing: str, url: str) -> Exception:
    """Return the typed error, without secrets, for what a client raised while ``doing`` something at ``url``. Do
    not pass errors of sidestream: callers raise them unchanged."""
    failure = failure_kind(error)
    if failure == "absent":
        return FileNotFoundError(errno.ENOENT, "no such object", url)
    if failure == "denied":
        return AccessDeniedError(
            errno.EACCES, f"{doing} was refused ({_reason(error)}); check credentials and policy", url
        )
    if _status(error) == 416:
        return CorruptCheckpointError(f"{url} ends before the bytes that were saved there", file=url.rpartition("/")[2])
    number = getattr(error, "errno", None)
    return StorageError(number if isinstance(number, int) else errno.EIO, f"{doing} failed: {_reason(error)}", url)


def failure_kind(error: BaseException) -> FailureKind:
    """Return what the exception of a client means for the request."""
    status, text = _status(error), _text(error)
    names = {type(one).__name__ for one in _chain(error)}
    # The classes of the client come first, then the status, then the words of the message. The words decide only where
    # there is neither a known class nor a status, as in obstore's ``GenericError``. The names of objects are taken out
    # before, because any word may be a part of them.
    if names & _CUT_OFF:
        return "transient"
    if isinstance(error, FileNotFoundError) or names & _ABSENT:
        return "absent"
    if isinstance(error, FileExistsError) or names & _TAKEN or "preconditionfailed" in text.replace("-", ""):
        return "taken"
    if isinstance(error, PermissionError) or names & _DENIED:
        return "denied"
    if (status is None or status == 400 or status >= 500) and any(word in text for word in _THROTTLING):
        return "throttled"
    if status == 400 and (isinstance(error, TimeoutError) or "requesttimeout" in text):
        return "transient"  # S3 has not received the whole request in time
    if status is not None:
        return _failure_of_status(status)
    if isinstance(error, (TimeoutError, ConnectionError, EOFError)) or any(word in text for word in _PASSING):
        return "transient"
    return "final"


def is_refused(error: BaseException) -> bool:
    """Return whether the storage does not support the request, or does not allow it to this client."""
    if (
        isinstance(error, NotImplementedError)
        or failure_kind(error) in ("denied", "absent")
        or _status(error) in (405, 501)
    ):
        return True
    text = _text(error).replace(" ", "")
    return "notimplemented" in text or "methodnotallowed" in text


def _failure_of_status(status: int) -> FailureKind:
    known: dict[int, FailureKind] = {
        401: "denied", 403: "denied", 404: "absent", 412: "taken", 429: "throttled", 503: "throttled",
        408: "transient", 409: "transient",
    }  # fmt: skip
    return known.get(status, "transient" if status >= 500 else "final")


def _status(error: BaseException) -> int | None:
    """Return the HTTP status of the failed request; None if it is unknown. botocore, aiohttp, gcsfs and azure keep it
    in an attribute, and obstore in the text of the message."""
    for one in _chain(error):
        response = getattr(one, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            if isinstance(status, int):
                return status
        for attribute in ("status", "status_code", "code"):
            status = getattr(one, attribute, None)
            if type(status) is int and 100 <= status < 600:
                return status
    match = _STATUS.search(_NAME.sub("", str(error)))
    return int(match[1]) if match is not None and 400 <= int(match[1]) < 600 else None


def _text(error: BaseException) -> str:
    """Return the message in small letters, without the names of objects, in which any word may stand, and without the
    dump that obstore appends."""
    return _NAME.sub("", str(error).partition("\n\nDebug source:")[0]).lower()


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or one.__context__


def _reason(error: BaseException) -> str:
    text = redacted(str(error)).strip()
    first = text.splitlines()[0] if text else ""
    return f"{type(error).__name__}: {first[:300]}" if first else type(error).__name__

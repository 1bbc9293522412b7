"""Requests to storage: each with a deadline, repeated where that may help, slower where the storage asks for it."""

from __future__ import annotations

import asyncio
import errno
import random
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from ..._runtime.marks import mark_uncertain
from ..._runtime.redact import redacted
from ..._runtime.threads import Deadline, current_deadline
from ...errors import AccessDeniedError, CorruptCheckpointError, SidestreamError, StorageError
from ...events import Retried, Throttled, emit
from ...options import StorePolicy

__all__ = ["Fate", "Requests", "Taken", "fate_of", "is_refused", "translated"]

T = TypeVar("T")

Fate = Literal["absent", "taken", "denied", "throttled", "transient", "final"]

_BASE_S = 0.1
_THROTTLED_BASE_S = 0.5
_MOST_S = 20.0
_STATUS = re.compile(r"(?:status(?: code)?:?|HTTP(?: error)?|\()\s*(\d{3})\b", re.IGNORECASE)
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
_TAKEN = frozenset({"Taken", "AlreadyExistsError", "PreconditionError", "ResourceExistsError", "FileExpired"})
_DENIED = frozenset(
    {"PermissionDeniedError", "UnauthenticatedError", "NoCredentialsError", "ClientAuthenticationError"}
)


class Taken(Exception):
    """A create-only put found the name taken."""


@dataclass(slots=True)
class Requests:
    """The requests of one store, which slow down together."""

    url: str
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
        """``call()`` until it succeeds, may not be repeated, or the deadline passes. Each has ``request_timeout_s``, or
        what the policy says.

        Raises ``FileNotFoundError``, ``Taken``, ``AccessDeniedError``, ``StorageError``, ``DeadlineExceededError``. An
        error after which nobody knows whether the request was carried out ``is_uncertain``.
        """
        timeout_s = request_timeout_s or self.policy.request_timeout_s
        attempt, uncertain, deadline = 0, False, current_deadline()
        while True:
            attempt += 1
            await self._wait_for_quiet(deadline, f"{operation} {self._at(name)}")
            try:
                async with asyncio.timeout(min(timeout_s, deadline.remaining_s())):
                    return await call()
            except (Exception, asyncio.CancelledError) as error:
                if isinstance(error, (asyncio.CancelledError, SidestreamError)):
                    raise
                fate = fate_of(error)
                if fate == "taken" and not isinstance(error, Taken):
                    fate = "transient"  # 409 or 412 where there was no condition
                uncertain = uncertain or fate == "transient"
                wait_s = self._pause(fate, attempt)
                if wait_s is None:
                    raise _marked(translated(error, operation, self._at(name)), uncertain) from error
                if deadline.remaining_s() <= wait_s:
                    late = deadline.exceeded(f"{operation} {self._at(name)} ({_reason(error)})")
                    raise _marked(late, uncertain) from error
                self._tell(fate, operation, name, attempt, wait_s, error)
            if fate != "throttled":
                await asyncio.sleep(wait_s)

    def _pause(self, fate: Fate, attempt: int) -> float | None:
        """How long to wait before the next attempt; None if there shall be none. Throttling costs time only."""
        if fate == "throttled":
            wait_s = _jittered(_THROTTLED_BASE_S, attempt)
            self._quiet_until = max(self._quiet_until, time.monotonic() + wait_s)
            return wait_s
        if fate != "transient" or attempt > self.policy.retries:
            return None
        return _jittered(_BASE_S, attempt)

    async def _wait_for_quiet(self, deadline: Deadline, doing: str) -> None:
        while (wait_s := self._quiet_until - time.monotonic()) > 0:
            deadline.check(doing)
            await asyncio.sleep(min(wait_s, deadline.remaining_s()))
        deadline.check(doing)

    def _tell(self, fate: Fate, operation: str, name: str, attempt: int, wait_s: float, error: Exception) -> None:
        kind = Throttled if fate == "throttled" else Retried
        emit(kind(operation, self._at(name), attempt, wait_s, _reason(error)))

    def _at(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url


def _jittered(base_s: float, attempt: int) -> float:
    """Between half and all of a time that doubles, so that writers that failed together do not return together."""
    return min(_MOST_S, base_s * 2.0 ** min(attempt, 10)) * random.uniform(0.5, 1.0)


def _marked(error: Exception, uncertain: bool) -> Exception:
    return mark_uncertain(error) if uncertain else error


def translated(error: BaseException, doing: str, url: str) -> Exception:
    """The typed error for what a client raised while ``doing`` something at ``url``; without secrets."""
    if isinstance(error, SidestreamError):
        return error
    fate = fate_of(error)
    if fate == "absent":
        return FileNotFoundError(errno.ENOENT, "no such object", url)
    if isinstance(error, Taken):
        return error
    if fate == "denied":
        return AccessDeniedError(
            errno.EACCES, f"{doing} was refused ({_reason(error)}); check credentials and policy", url
        )
    if _status(error) == 416:
        return CorruptCheckpointError(f"{url} ends before the bytes that were saved there", file=url.rpartition("/")[2])
    number = getattr(error, "errno", None)
    return StorageError(number if isinstance(number, int) else errno.EIO, f"{doing} failed: {_reason(error)}", url)


def fate_of(error: BaseException) -> Fate:
    """What a client's exception means for the request, whoever raised it."""
    by_status = _fate_of_status(_status(error))
    names = {type(one).__name__ for one in _chain(error)}
    text = (str(error).splitlines() or [""])[0].lower()  # obstore appends a dump of everything it knows
    if names & _CUT_OFF:
        return "transient"
    if isinstance(error, FileNotFoundError) or names & _ABSENT:
        return "absent"
    if isinstance(error, FileExistsError) or names & _TAKEN or "preconditionfailed" in text.replace("-", ""):
        return "taken"
    if isinstance(error, PermissionError) or names & _DENIED:
        return "denied"
    if any(word in text for word in _THROTTLING):
        return "throttled"
    if by_status is not None:
        return by_status
    if isinstance(error, (TimeoutError, ConnectionError, EOFError)) or any(word in text for word in _PASSING):
        return "transient"
    return "final"


def is_refused(error: BaseException) -> bool:
    """Whether the storage does not know the request, or does not let this client make it."""
    if isinstance(error, NotImplementedError) or fate_of(error) in ("denied", "absent") or _status(error) in (405, 501):
        return True
    text = str(error).lower().replace(" ", "")
    return "notimplemented" in text or "methodnotallowed" in text


def _fate_of_status(status: int | None) -> Fate | None:
    if status is None:
        return None
    known: dict[int, Fate] = {
        401: "denied", 403: "denied", 404: "absent", 412: "taken", 429: "throttled", 503: "throttled",
        408: "transient", 409: "transient",
    }  # fmt: skip
    return known.get(status, "transient" if status >= 500 else "final")


def _status(error: BaseException) -> int | None:
    """The HTTP status behind an exception: botocore, aiohttp, gcsfs and azure keep it, obstore writes it."""
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
    match = _STATUS.search(str(error))
    return int(match[1]) if match is not None and 400 <= int(match[1]) < 600 else None


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

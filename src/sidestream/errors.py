"""One tree of exceptions. Each is also the builtin that a caller would expect to catch.

Foreign exceptions (``OSError`` from the file system, a decoder's own complaints) are translated into this tree
where they enter the library, so nothing else leaves it.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

__all__ = [
    "AccessDeniedError",
    "ArenaExhaustedError",
    "AsyncOnlyError",
    "BadSignatureError",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "ClosedError",
    "CorruptCheckpointError",
    "DeadlineExceededError",
    "DeviceError",
    "DtypeMismatchError",
    "ForkedProcessError",
    "GraphCaptureError",
    "IncompleteCheckpointError",
    "IncompleteTensorError",
    "InvalidOptionError",
    "KeyCollisionError",
    "KindMismatchError",
    "LoadStateDictError",
    "MissingExtraError",
    "MissingKeysError",
    "NoSpaceError",
    "NotDurableError",
    "OutOfMemoryError",
    "OutcomeUnknownError",
    "RankFailure",
    "RankFailuresError",
    "RefusedVersionError",
    "SaveAbortedError",
    "ShapeMismatchError",
    "SidestreamError",
    "SkippedError",
    "SnapshotLostError",
    "StaleVersionError",
    "StateMismatchError",
    "StorageError",
    "StorageNotSharedError",
    "TooManySavesError",
    "UnexpectedKeysError",
    "UnsafeObjectError",
    "UnsupportedCheckpointError",
    "UnsupportedError",
    "UnsupportedModuleError",
    "UnsupportedTensorError",
    "WriterProcessError",
    "WrongLoopError",
]


class SidestreamError(Exception):
    """The base of all errors that sidestream raises.

    Attributes that do not apply are None, or empty.

    Attributes:
        phase: The phase of a save (``"plan"``, ``"write"``, ``"commit"``) or load (``"open"``, ``"plan"``, ``"read"``,
            ``"apply"``) that failed. Copying the sources is part of ``"plan"`` and ``"write"``.
        url: The checkpoint that was saved or loaded.
        step: The step of the run that was saved or loaded.
        fqn: The tensor or value that the error is about.
        file: The file of the checkpoint that the error is about.
        offset: The byte in ``file``.
        written: The FQNs of tensors in the target of a load that were overwritten, whole or in part, before the error.
            Everything else in the target is unchanged.
        left_behind: What a failed save could not remove: the path or name of its attempt.
    """

    phase: str | None = None
    url: str | None = None
    step: int | None = None
    fqn: str | None = None
    file: str | None = None
    offset: int | None = None
    written: tuple[str, ...] = ()
    left_behind: str | None = None
    _before: tuple[str, ...] = ()
    _after: str = ""

    def __str__(self) -> str:
        """Return the message. Control characters in it, such as those in the names of a hostile checkpoint, are
        escaped."""
        return printable_lines(f"{''.join(self._before)}{self._message()}{self._after}")

    def _message(self) -> str:
        return super().__str__()

    def within(self, place: str, after: str = "") -> Self:
        """Put ``place`` (a URL, an FQN) before the message and ``after`` behind it, and return this error."""
        self._before = (f"{place}: ", *self._before)
        self._after += after
        return self

    def about(self, **facts: Any) -> Self:
        """Set those attributes that are None or empty, and return this error."""
        for name, value in facts.items():
            if not getattr(self, name):
                setattr(self, name, value)
        return self

    def reworded(self, change: Callable[[str], str]) -> Self:
        """Return an error of this type with a changed message and the same attributes."""
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.args = tuple(change(one) if isinstance(one, str) else one for one in self.args)
        other.__cause__, other.__suppress_context__ = self.__cause__, self.__suppress_context__
        return other

    def facts(self) -> dict[str, Any]:
        """Return the attributes that are set and plain data, for an error of this type that is made again elsewhere."""
        facts = {name: list(value) if type(value) is tuple else value for name, value in vars(self).items()}
        return {name: value for name, value in facts.items() if _is_plain(value) and not name.startswith("_")}

    def with_facts(self, facts: Mapping[str, Any]) -> Self:
        """Set the attributes that ``facts`` of another error returned, and return this error."""
        for name, value in facts.items():
            setattr(self, name, tuple(value) if type(value) is list else value)
        return self


def _is_plain(value: object) -> bool:
    return type(value) in (str, int, bool) or (type(value) is list and all(type(one) in (str, int) for one in value))


def without_frames(error: BaseException) -> BaseException:
    """Remove the frames from ``error`` and all that led to it, and return it. They would keep memory for as long as the
    error is kept."""
    chain: list[BaseException | None] = [error]
    seen: set[int] = set()
    while chain:
        one = chain.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.with_traceback(None)
            chain += [one.__cause__, one.__context__]
    return error


# --- what the caller asked for ---------------------------------------------------------------------------------


class InvalidOptionError(SidestreamError, ValueError):
    """An option, URL or state dict has a value or a type that the call does not take."""


class UnsafeObjectError(SidestreamError, TypeError):
    """A value cannot be saved as plain data, or may not be read as more. The message has the FQN and the type."""


class UnsupportedTensorError(SidestreamError, TypeError):
    """A tensor is of a kind that cannot be staged, saved or converted."""


class UnsupportedModuleError(SidestreamError, TypeError):
    """A module holds weights in a place in which ``Live`` cannot exchange them.

    Attributes:
        offenders: One line for each such place, with its name.
    """

    def __init__(self, message: str, offenders: Sequence[str] = ()):
        super().__init__(message)
        self.offenders: tuple[str, ...] = tuple(offenders)


class KeyCollisionError(SidestreamError, ValueError):
    """Two paths of a state dict flatten to one FQN, e.g. the keys ``0`` and ``"0"``, or ``"a.b"`` and ``a -> b``."""


class UnsupportedCheckpointError(SidestreamError, ValueError):
    """A checkpoint was written in a way that this version does not read. It is not damaged."""


class MissingExtraError(SidestreamError, ImportError):
    """A package that the call needs is not installed.

    Attributes:
        extra: The extra of sidestream that installs it.
    """

    def __init__(self, message: str, *, extra: str = ""):  # a default: errors of ranks travel as pickles
        super().__init__(message)
        self.extra = extra


class UnsupportedError(SidestreamError, NotImplementedError):
    """This release of a framework, or this kind of storage, lacks something that the call needs. Nothing was
    changed."""


class ClosedError(SidestreamError, RuntimeError):
    """The stager or Checkpointer was closed before the call."""


class WrongLoopError(SidestreamError, RuntimeError):
    """A call was made without a running event loop, or blocks a loop that is running."""


class AsyncOnlyError(SidestreamError, TypeError):
    """An object that is entered with ``async with`` was entered with ``with``. Nothing was started."""


class ForkedProcessError(SidestreamError, RuntimeError):
    """A handle made before ``os.fork()`` was used in the child, where its threads do not exist."""


# --- what stands in the way --------------------------------------------------------------------------------------


class CheckpointNotFoundError(SidestreamError, FileNotFoundError):
    """No committed checkpoint is at this URL."""


class CheckpointExistsError(SidestreamError, FileExistsError):
    """The target of a save is not empty. Nothing was changed there."""


class ArenaExhaustedError(SidestreamError, MemoryError):
    """Staging memory within the budget did not suffice, or did not become free in time."""


class OutOfMemoryError(SidestreamError, MemoryError):
    """The system or torch could not allocate memory for a load, save, verification or conversion. Existing data is not
    damaged. ``written`` has what a load has changed."""


class TooManySavesError(SidestreamError, RuntimeError):
    """Every slot of a ``Checkpointer`` is taken, and its policy is to fail. Nothing was started."""


class SnapshotLostError(SidestreamError, MemoryError):
    """The staged memory that an export or a publisher was reading was taken back, because another stage needed it, and
    there is no committed checkpoint to read in its place."""


class SkippedError(SidestreamError, RuntimeError):
    """A stage or save gave way, as ``when_full=`` says: no memory or slot was free, or a newer one came. Or an export
    gave way, because its step was saved again meanwhile; or weights that waited to be served, because newer ones
    came."""


class RefusedVersionError(SidestreamError, RuntimeError):
    """Code of the program refused weights before they were served: ``accept=`` did not return True, or a hook
    raised."""


class StaleVersionError(SidestreamError, LookupError):
    """The weights that are served are older than the version that a reading asks for.

    Attributes:
        served: The version that is served; None before the first.
        wanted: The version that was asked for.
    """

    def __init__(self, message: str, *, served: int | None = None, wanted: int | None = None):
        super().__init__(message)
        self.served = served
        self.wanted = wanted


class PublisherRunningError(SidestreamError, RuntimeError):
    """Another ``Publisher`` has this home."""


class VersionNotFoundError(SidestreamError, LookupError):
    """A publisher does not hold the version that was asked for, or not any more."""


class GraphCaptureError(SidestreamError, RuntimeError):
    """Staging, or a load to a device, was called while a graph was being captured on a stream that it needs. Nothing
    was enqueued."""


class DeviceError(SidestreamError, RuntimeError):
    """An accelerator reported an error of this call or of earlier work. The stage has failed; its sources may be
    changed.

    Attributes:
        call: The call that reported the error. It may not be the cause.
    """

    def __init__(self, message: str, *, call: str | None = None):
        super().__init__(message)
        self.call = call


class DeadlineExceededError(SidestreamError, TimeoutError):
    """The time that a call was given (``timeout_s``) has passed."""


class StorageError(SidestreamError, OSError):
    """An operation of the storage failed. ``errno`` and ``filename`` are those of the cause."""


class NoSpaceError(StorageError):
    """The device or a quota is full."""


class AccessDeniedError(StorageError, PermissionError):
    """The storage denies access, or the file system is read-only."""


# --- what came of a save -------------------------------------------------------------------------------------------


class SaveAbortedError(SidestreamError, RuntimeError):
    """A save or load was given up by DCP. Nothing became visible."""


class NotDurableError(SidestreamError, OSError):
    """The checkpoint is committed and complete, but a sync failed: a power cut may still take it away."""


class WriterProcessError(SidestreamError, ChildProcessError):
    """The writer process could not be started, was killed, or did not answer any more, and the save could not be
    written again by a new one. Nothing became visible; the next save starts a new process."""


class StorageNotSharedError(SidestreamError, OSError):
    """Ranks that save together do not write to one place: what one of them wrote, or the directory itself, is not there
    for another. Nothing became visible."""


@dataclass(frozen=True, slots=True)
class RankFailure:
    """The failure of one rank.

    Attributes:
        rank: Its number in the group.
        step: The step of the operation in which it failed.
        kind: The name of the class of its error. ``"RankDied"``: the rank is gone. ``"DeadlineExceededError"``: it did
            not answer in time.
        text: The message of its error.
        error: Its error, made again, if it is one of sidestream's. None otherwise.
    """

    rank: int
    step: str
    kind: str
    text: str
    error: SidestreamError | None = field(default=None, compare=False)  # exceptions have no equality

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.step}): {self.kind}: {self.text}"


class RankFailuresError(SidestreamError, RuntimeError):
    """Ranks that save or load together have failed. Every rank that lives raises the same error. A save made nothing
    visible.

    Attributes:
        failures: One ``RankFailure`` for each rank that has failed, by rank.
    """

    def __init__(self, failures: Sequence[RankFailure]):
        self.failures: tuple[RankFailure, ...] = tuple(sorted(failures, key=lambda one: one.rank))
        shown = [str(one) for one in self.failures[:8]]
        more = [f"... and {len(self.failures) - 8} ranks more"] if len(self.failures) > 8 else []
        super().__init__("\n  ".join([f"{len(self.failures)} of the ranks failed:", *shown, *more]))

    def __reduce__(self) -> Any:
        return RankFailuresError, (self.failures,), vars(self)


class OutcomeUnknownError(SidestreamError, OSError):
    """The commit was sent and its result could not be read back. Nothing was deleted; look again before retrying."""


class LoadStateDictError(SidestreamError, RuntimeError):
    """``load_state_dict`` of an object in the target raised the error that is the cause. ``written`` has what was
    changed."""


# --- what is wrong with a checkpoint -------------------------------------------------------------------------------


class CorruptCheckpointError(SidestreamError, ValueError):
    """Bytes of a checkpoint are missing, altered, or contradict each other. ``file``, ``fqn`` and ``offset`` say
    where."""

    def __init__(self, message: str, *, file: str | None = None, fqn: str | None = None, offset: int | None = None):
        super().__init__(message)
        self.about(file=file, fqn=fqn, offset=offset)


class IncompleteCheckpointError(SidestreamError, LookupError):
    """Parts that ranks have saved independently are not a whole checkpoint, or not yet.

    Attributes:
        save_id: The id of the save that most parts have.
        missing: The ranks whose parts are missing, the first 65,536 of them.
        others: The ranks that have parts of another save, with its id.
    """

    def __init__(
        self,
        message: str,
        *,
        save_id: str = "",
        missing: Sequence[int] = (),
        others: Mapping[int, str] | None = None,
    ):
        super().__init__(message)
        self.save_id = save_id
        self.missing: tuple[int, ...] = tuple(missing)
        self.others: dict[int, str] = dict(others or {})


class BadSignatureError(SidestreamError, ValueError):
    """A checkpoint carries no signature, or one that the key does not fit or that its files do not match."""


class StateMismatchError(SidestreamError, ValueError):
    """The target of a load and the checkpoint differ. It is raised before anything is changed.

    Where all differences are of one kind the subclass of that kind is raised, otherwise this class itself.

    Attributes:
        offenders: One line for each difference, with the name.
    """

    def __init__(self, message: str, offenders: Sequence[str] = ()):
        super().__init__(message)
        self.offenders: tuple[str, ...] = tuple(offenders)


class MissingKeysError(StateMismatchError, KeyError):
    """The target asks for keys that the checkpoint does not have."""

    def _message(self) -> str:
        return Exception.__str__(self)  # KeyError would show the repr of its argument


class UnexpectedKeysError(StateMismatchError):
    """Inside a plain subtree of the target the checkpoint has keys that the target lacks."""


class ShapeMismatchError(StateMismatchError):
    """A tensor of the target has another shape than the saved one."""


class DtypeMismatchError(StateMismatchError):
    """A tensor of the target has another dtype than the saved one, and ``allow_cast=`` does not name it."""


class KindMismatchError(StateMismatchError):
    """One side has a tensor where the other has a plain value."""


class IncompleteTensorError(StateMismatchError):
    """The saved chunks of a tensor leave some of its elements out."""


_NO_MEMORY = ("can't allocate memory", "not enough memory", "cannot allocate memory", "out of memory")
"""Texts by which torch's allocators report in a plain ``RuntimeError`` that memory is exhausted."""


def out_of_memory(error: BaseException, doing: str) -> OutOfMemoryError | None:
    """Return the typed error if ``error``, raised while ``doing``, means that an allocation failed; else None."""
    if isinstance(error, SidestreamError):
        return None
    refused = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    if not refused and isinstance(error, RuntimeError):
        refused = any(words in str(error).lower() for words in _NO_MEMORY)
    if not refused:
        return None
    text = str(error).partition("\n")[0][:300] or type(error).__name__
    return OutOfMemoryError(
        f"{doing}: out of memory ({text}); free some, raise the limit of this process, or load less at once"
    )


@contextmanager
def allocating(what: str) -> Iterator[None]:
    """Raise ``OutOfMemoryError`` if an allocation in the ``with`` block fails."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if (lack := out_of_memory(error, what)) is not None:
            raise lack from error
        raise


_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_DENIED = frozenset({errno.EACCES, errno.EPERM})


def from_os_error(error: OSError, doing: str, path: str) -> StorageError:
    """The typed error for an ``OSError`` met while ``doing`` something with ``path``."""
    number = error.errno or errno.EIO
    if number in _NO_SPACE:
        kind: type[StorageError] = NoSpaceError
        remedy = "free some space or raise the quota; what this attempt wrote is removed"
    elif number == errno.EROFS:
        kind, remedy = AccessDeniedError, "the file system is mounted read-only: write elsewhere"
    elif number in _DENIED:
        kind, remedy = AccessDeniedError, "check the permissions of that path and of its parent"
    elif number == errno.ENOTDIR:
        kind, remedy = StorageError, "a part of this path is a file: choose another path"
    else:
        kind, remedy = StorageError, "older checkpoints are untouched"
    return kind(number, f"{doing} failed: {error.strerror or error} ({remedy})", path)


@contextmanager
def os_errors_as(doing: str, path: object) -> Iterator[None]:
    """Raise the typed error for an ``OSError`` in the ``with`` block. Errors of sidestream pass unchanged."""
    try:
        yield
    except SidestreamError:  # some of them are also an OSError
        raise
    except OSError as error:
        raise from_os_error(error, doing, str(path)) from error


# --- text that is safe to print and to log -----------------------------------------------------------------------
#
# The name of a tensor, a file or a rank can hold escape sequences of a terminal, line breaks that would forge a line of
# a log, characters that reverse the direction of text, and lone surrogates, which no encoding accepts.

_UNINDENTED = re.compile(r"\n(?!  |\t)")


# --- two marks on exceptions of any class, which decide how a failed save is cleaned up ---

E = TypeVar("E", bound=BaseException)

_STUCK, _UNCERTAIN = "_sidestream_stuck", "_sidestream_uncertain"


def mark_stuck(error: E) -> E:
    """Mark an error: a thread was left behind in a system call, or a request may still take effect."""
    setattr(error, _STUCK, True)
    return error


def is_stuck(error: BaseException) -> bool:
    """Return whether ``mark_stuck`` has marked ``error``."""
    return getattr(error, _STUCK, False) is True


def mark_uncertain(error: E) -> E:
    """Mark an error: an earlier attempt of the request may have taken effect, because its response was lost."""
    setattr(error, _UNCERTAIN, True)
    return error


def is_uncertain(error: BaseException) -> bool:
    """Return whether ``mark_uncertain`` has marked ``error``."""
    return getattr(error, _UNCERTAIN, False) is True


# --- text ---

# Messages hold names from checkpoints, and ``re`` keeps the GIL. So each pattern looks at a character a bounded number
# of times: a match begins where a run of these characters begins, and a URL without a query is a match, too.
_URL = r"(?<![a-z0-9+.-])[a-z0-9+.-]+://"
_USER = re.compile(rf"({_URL})[^\s/\"'<>]+@", re.IGNORECASE)
_QUERY = re.compile(rf"({_URL}[^\s\"'<>?#]+)(?:[?#][^\s\"'<>]*)?", re.IGNORECASE)


def redacted(text: str) -> str:
    """Return ``text`` without the user, password, query and fragment of the URLs in it, which may hold secrets. Local
    paths and all other text stay unchanged."""
    return _USER.sub(r"\1", _QUERY.sub(r"\1", text))


def printable(text: str) -> str:
    r"""Return ``text`` on one line: each character that is not printable is replaced by its escape, as in ``\x1b`` or
    ``\u202e``.

    A character is printable if ``str.isprintable`` says so: letters, digits, marks, symbols and the space, of any
    script. A backslash is left unchanged, so that escaping the result again does not change it.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escape(char) for char in text)


def listed(lines: Sequence[str], most: int = 50) -> str:
    """Return the first ``most`` of ``lines``, one a line, indented, and how many more there are."""
    more = [f"... and {len(lines) - most} more"] if len(lines) > most else []
    return "\n  ".join([*map(printable, lines[:most]), *more])


def printable_lines(text: str) -> str:
    """Return ``text`` as ``printable`` does, but keep a line break if the next line is indented by two spaces or a tab.

    The lists in messages are indented, so they are kept. No line after the first begins in the first column, where a
    name could forge another line of a log.
    """
    if text.isprintable():
        return text
    lines = _UNINDENTED.sub(r"\\n", text).split("\n")
    return "\n".join(("\t" if line.startswith("\t") else "") + printable(line.removeprefix("\t")) for line in lines)


def indented(text: object) -> str:
    """Return the message of an exception of foreign code, indented as a part of another message: its line breaks are
    kept."""
    return _UNINDENTED.sub("\n  ", str(text))


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")

"""The choices that callers have, checked where they enter, and the interface of their own stores. Imports no torch."""

from __future__ import annotations

import fnmatch
import operator
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar, cast, get_args

from .errors import InvalidOptionError

if TYPE_CHECKING:
    import torch

__all__ = [
    "Backing",
    "BlobInfo",
    "BlobStore",
    "BlobUpload",
    "Capabilities",
    "Commit",
    "ConvertOptions",
    "Digest",
    "DigestCheck",
    "Dtypes",
    "Durability",
    "EngineChoice",
    "Fallback",
    "FileSource",
    "Format",
    "GroupChoice",
    "IoPriority",
    "Latest",
    "Listing",
    "LoadOptions",
    "Memory",
    "Names",
    "Outcome",
    "Progress",
    "PutMode",
    "SaveOptions",
    "StageMode",
    "Storage",
    "StorePolicy",
    "Then",
    "Tolerated",
    "Trust",
    "Verify",
    "WhenFull",
    "WriterChoice",
    "WriterProcess",
    "add_prefix",
    "strip_prefix",
]

Durability = Literal["fsync", "flush"]
"""The durability of what is acknowledged. ``"fsync"``: it survives a power cut. ``"flush"``: it survives the death of
the process only."""

RANK_WAIT_S = 300.0
"""How long a rank waits by default for the other ranks to make a call of all ranks."""

_MAX_TIMEOUT_S = 10**9  # some thirty years; the system's own limit for waits is not much higher

Verify = Literal["always", "manifest"]
"""The comparison of what is read with its checksums. ``"always"``: every byte that is used is compared. ``"manifest"``:
manifest, file sizes and layout are compared, and the payload is not."""

Digest = Literal["blake3"]
"""A cryptographic digest of each block of each tensor, kept in the manifest beside its checksum."""

Trust = Literal["data", "pickle"]
"""The way in which plain values of another writer's checkpoint are read. ``"data"``: nothing that they name is imported
or called. ``"pickle"``: they are unpickled, which runs the code that their author put into them."""

Tolerated: TypeAlias = "bool | str | Collection[str]"
"""The names that ``allow_missing=``, ``allow_unexpected=`` and ``allow_cast=`` of a load accept. True: every name. A
text or a collection of texts: the names that match one of these glob patterns (``"model.head.*"``). False or nothing:
none."""

Names: TypeAlias = Callable[[str], "str | None"] | Mapping[str, str]
"""The names that ``names=`` gives: a function from an FQN in the state dict to its FQN in the checkpoint, or a mapping
from the ones to the others.

The direction is the same in every call. A load passes the names of its target, and reads each tensor under the name
that is returned. A save passes the names of its state, and writes each tensor under the name that is returned; so does
an export, with the names in the checkpoint beside it. ``convert`` has no state dict; its source takes that place. A
mapping leaves the names that it lacks as they are. None means that the name has no counterpart: a save, an export or
``convert`` leaves it out, and a load reports it as missing. Two names may become one only if they are names of the same
memory (tied tensors)."""

Dtypes: TypeAlias = "torch.dtype | Mapping[str, torch.dtype]"
"""The dtypes that ``dtype=`` takes: a floating-point dtype, or patterns of names (``{"*.norm.*": torch.float32, "*":
torch.bfloat16}``), of which the first that matches decides. A tensor that matches none keeps its dtype, and every
tensor that is not floating-point keeps its dtype. So does a tensor without dimensions, such as the ``step`` of Adam,
which would stand still in bfloat16, unless the last part of a pattern is its name (``"*.step"``). A pattern without
wildcards that is the name of no dense tensor raises ``InvalidOptionError``; another one that matches none is logged."""

Progress: TypeAlias = Callable[[int, int], object]
"""A function that is called on the event loop with the bytes done so far and the bytes to do, first with 0. What it
raises ends the call, as an error of storage would."""

WhenFull = Literal["wait", "skip", "latest", "fail"]
"""The policy of a stage that finds no memory free, and of a save of a ``Checkpointer`` that finds no slot free.
``"wait"``: wait for one. ``"skip"``: raise ``SkippedError``. ``"latest"``: wait, but raise ``SkippedError`` when a
newer stage or save comes before this one has begun; ``Checkpointer.async_save`` returns at once and its ``PendingSave``
waits. ``"fail"``: raise ``ArenaExhaustedError`` or ``TooManySavesError``."""

Fallback = Literal["never", "older"]
"""The choice of ``restore`` when the step is damaged. ``"never"``: raise ``CorruptCheckpointError``. ``"older"``: take
the newest older one that is good, log a warning, and list in the report what was passed over."""

EngineChoice = Literal["auto", "obstore", "fsspec"]
"""The client of object storage. ``"auto"``: obstore for ``s3://``, ``gs://`` and ``az://`` where it is installed and
knows all the ``storage_options``, fsspec for everything else."""

Outcome: TypeAlias = Literal["committed", "absent", "unknown"]
"""The end of a save. ``"committed"``: the checkpoint is visible. ``"absent"``: nothing is visible, and what was written
has been removed. ``"unknown"``: the commit was sent, and could not be read back; nothing was removed."""

FileSource: TypeAlias = "bytes | str | os.PathLike[str]"
"""The content of a sidecar file, or the path of a regular file on this machine."""

GroupChoice: TypeAlias = "Literal['alone'] | Any"
"""The ranks of a call, for ``process_group=``. A ``ProcessGroup`` of torch: its ranks. None: all ranks of the job, or
this process where ``torch.distributed`` is not initialized. ``"alone"``: this process alone."""

Latest = Literal["latest"]
"""The newest committed step of a run, in place of a number."""

Then = Literal["exit", "signal", "stay"]
"""The end of a program after a preemption. ``"exit"``: ``SystemExit`` out of the loop, so that every ``finally`` runs.
``"signal"``: the signal ends the process as if it had no handler; nothing else runs. ``"stay"``: the program continues,
looks at ``preempted`` and ends by itself."""

StageMode = Literal["lazy", "eager"]
"""The time at which a stage copies. ``"lazy"``: copies continue after ``stage()`` has returned, and the sources must
not change before the fence. ``"eager"``: the sources may change when ``stage()`` has returned."""

Backing = Literal["private", "shared"]
"""The memory of a stager. ``"private"``: a forked child keeps the bytes that it saw, whatever is staged later.
``"shared"``: a memfd, which another process can be handed; a forked child sees later stages in it."""

Format = Literal["dcp", "torch", "safetensors"]
"""The formats that ``convert`` writes. ``"dcp"``: a checkpoint of sidestream, which stock DCP reads. ``"torch"``: one
file, as ``torch.save`` writes it. ``"safetensors"``: one file, or a directory as transformers reads it."""

Memory: TypeAlias = "Literal['host', 'mapped'] | torch.device"
"""The place of the tensors that ``Checkpoint.state_dict`` returns: new memory of the host or of a device, or
``"mapped"``, the pages of the files."""

DigestCheck = Literal["verified", "not installed"]
"""The result for the digests in a checkpoint. ``"verified"``: they were compared. ``"not installed"``: the extra
``digest`` is missing, so only checksums were compared."""


_LEAST_BUDGET_BYTES = 96 << 20
_MIN_PART_BYTES = 5 << 20  # S3 takes no smaller ones


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePolicy:
    """The settings of the client of object storage: ``policy=`` of ``Storage``. Local directories
    ignore them.

    Args:
        engine: The client (``options.EngineChoice``).
        request_timeout_s: The limit of each request, of one part or one range, in seconds. The limit of the call holds
            in addition.
        retries: How often a failed request is sent again, with growing pauses.
        concurrency: How many requests are in progress at the same time: parts of each file of an upload, and batches of
            a load. A batch has up to 16 MiB; if it needs several requests, as many of them are in progress for it.
        part_bytes: The size of the parts of an upload, in bytes; 5 MiB at least. Parts are larger where a file would
            have too many.
        cache_dir: A directory on this host in which readers keep whole files, under fsspec's names. All processes of
            the host that have the same directory fetch each file once. Its files are trusted as if they came from the
            storage. None: no files are kept.

    Raises:
        InvalidOptionError: An argument is wrong.
    """

    engine: EngineChoice = "auto"
    request_timeout_s: float = 60.0
    retries: int = 8
    concurrency: int = 4
    part_bytes: int = 16 << 20
    cache_dir: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.cache_dir is not None:
            if not isinstance(self.cache_dir, str | os.PathLike):
                raise InvalidOptionError(f"cache_dir={self.cache_dir!r} has to be the path of a directory")
            object.__setattr__(self, "cache_dir", os.fspath(self.cache_dir))
        check_choice("engine", self.engine, EngineChoice)
        check_seconds("request_timeout_s", self.request_timeout_s)
        check_count("concurrency", self.concurrency)
        if type(self.retries) is not int or self.retries < 0:
            raise InvalidOptionError(f"retries={self.retries!r} has to be an integer, not negative")
        if type(self.part_bytes) is not int or self.part_bytes < _MIN_PART_BYTES:
            raise InvalidOptionError(
                f"part_bytes={self.part_bytes!r} has to be at least {_MIN_PART_BYTES}: S3 takes no less"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The promises of a store beyond its operations. Set only those flags whose promise holds.

    Args:
        create_only: A ``put`` with ``mode="create"`` fails if the name exists, also when several machines put at the
            same time. Of several saves to one target one succeeds, and the others raise ``CheckpointExistsError``.
            Without the flag sidestream looks before it puts, so two saves at the same time may both succeed, and the
            marker of the later one stays. The event ``GuaranteeLost`` reports that.
        listing: ``listing`` shows every name whose write has returned, and no name whose delete has returned. Without
            the flag sidestream only reads, as from a web server: a load needs the URL of a checkpoint that sidestream
            wrote, a ``Checkpointer`` fails, and a save raises ``InvalidOptionError``.
        versions: There are two more methods, which replace a blob only if it has not been written meanwhile. ``async
            def version(self, name: str) -> str`` returns what identifies the current content of a blob (an ETag, a
            generation), and raises ``FileNotFoundError`` if there is none. ``async def replace(self, name: str,
            content: bytes, version: str) -> None`` writes the blob in one atomic step if it still has this version. It
            raises ``FileExistsError`` if it has another one, and ``FileNotFoundError`` if there is none. No two
            contents of a name ever have the same version. Without the flag ``overwrite=True`` raises
            ``InvalidOptionError``.
        mapping: There is one more method, ``async def map(self, name: str, nbytes: int) -> mmap.mmap``, which maps a
            file of this machine with ``mmap.ACCESS_COPY``. Without the flag ``memory="mapped"`` raises
            ``InvalidOptionError``.
        rename: A directory becomes visible with all its files in one step, so one without a marker is damaged. Only
            local directories have this. In every other store the marker makes a checkpoint visible, and a directory
            without one is an unfinished save.
    """

    create_only: bool = False
    listing: bool = False
    versions: bool = False
    mapping: bool = False
    rename: bool = False


PutMode = Literal["create", "overwrite"]
"""The effect of a ``put`` on a blob that exists. ``"create"``: raise ``FileExistsError``. ``"overwrite"``: replace
it."""


@dataclass(frozen=True, slots=True)
class BlobInfo:
    """Size and age of a blob.

    Args:
        nbytes: The size in bytes.
        modified: The time of the last write by the clock of the storage. None if it is unknown: what a dead process
            left behind then never becomes old enough to be deleted.
    """

    nbytes: int
    modified: datetime | None = None


@dataclass(frozen=True, slots=True)
class Listing:
    """The names directly below a prefix.

    Args:
        files: The blobs, by the last component of their names.
        directories: The next component of the names that have more than one.
    """

    files: Mapping[str, BlobInfo]
    directories: Collection[str]


class BlobUpload(Protocol):
    """A blob that is written in parts, and does not exist before ``complete``. If the process dies, the store removes
    the upload by itself."""

    async def part(self, number: int, offset: int, content: bytes) -> None:
        """Store one part. Several parts are sent at once, and a part that failed is sent again.

        Args:
            number: The number of the part, from 0.
            offset: The byte of the blob at which it begins.
            content: Its bytes.
        """

    async def complete(self) -> None:
        """Make the whole blob visible, in the place of an older one of that name. Called when every part has returned,
        and again after a failure."""

    async def abort(self) -> None:
        """Remove what was stored. Called when an upload fails or is cancelled, also while ``complete`` may have taken
        effect: then the blob stays."""


class BlobStore(Protocol):
    """The operations of a store of your own, which is passed as ``Storage(filesystem=)``.

    A name is a path without a leading slash: that of the URL, followed by names that sidestream chooses. A blob becomes
    visible as a whole or not at all. When a write returns, the blob is durable.

    Methods run on an event loop in a thread of sidestream, and several run at once. Anything that belongs to a loop has
    to be made inside them. They have no timeouts and retries of their own: sidestream cancels a call after
    ``StorePolicy.request_timeout_s``, and repeats it if it raised ``ConnectionError`` or ``TimeoutError``. A call that
    was cancelled must not change anything after it has ended, so wait for the threads that it started.

    Methods raise ``FileNotFoundError`` and ``FileExistsError`` as stated below, ``PermissionError`` if the storage
    refuses access, ``ConnectionError`` or ``TimeoutError`` if a repetition may help, and any other ``OSError`` if it
    does not. After a failed write sidestream assumes that the write may have taken effect, and reads it back.
    """

    @property
    def capabilities(self) -> Capabilities:
        """The promises of the store. A class attribute is enough. The value never changes."""

    async def read(self, name: str, start: int, end: int) -> bytes | bytearray | memoryview:
        """Read a range of a blob.

        Args:
            name: The name of the blob.
            start: The first byte.
            end: The byte after the last one.

        Returns:
            The bytes, fewer if the blob ends before ``end``.

        Raises:
            FileNotFoundError: There is no such blob.
        """

    async def size(self, name: str) -> int:
        """Return the number of bytes of a blob.

        Args:
            name: The name of the blob.

        Raises:
            FileNotFoundError: There is no such blob, also where the name is a prefix of other names.
        """

    async def put(self, name: str, content: bytes, *, mode: PutMode) -> None:
        """Write a whole blob.

        Args:
            name: The name of the blob.
            content: Its bytes.
            mode: ``"create"`` is used only if ``capabilities.create_only`` is set.

        Raises:
            FileExistsError: The blob exists, with ``mode="create"``.
        """

    async def upload(self, name: str, part_bytes: int) -> BlobUpload:
        """Begin to write a large blob.

        Args:
            name: The name of the blob.
            part_bytes: The size of every part but the last one.

        Returns:
            The upload, which sidestream completes or aborts.
        """

    async def listing(self, prefix: str) -> Listing:
        """List the names directly below a prefix.

        Args:
            prefix: The prefix. ``""``: the top.

        Returns:
            Blobs and directories, an empty ``Listing`` if there are none. A directory without blobs is not listed.
        """

    async def delete(self, name: str) -> None:
        """Delete a blob.

        Args:
            name: The name of the blob.

        Raises:
            FileNotFoundError: There is no such blob. A store may also return.
        """


Commit = Literal["rename", "marker"]
"""The way in which a save to a local directory makes its files visible. ``"rename"``: it writes a hidden directory, and
renames it. ``"marker"``: it writes into the target, and creates the marker last. Such a save replaces nothing, so
``overwrite=True`` raises ``InvalidOptionError``."""


@dataclass(frozen=True, slots=True, repr=False)
class Storage:
    """The way to the storage at a URL: ``storage=`` of every call that takes a URL.

    It holds credentials, so it cannot be pickled, and ``repr`` shows neither options nor file system.

    Args:
        options: What the fsspec file system of the URL takes. The short form is ``storage_options=`` of the call.
        filesystem: In place of ``options``: an fsspec file system, or a store of your own (``options.BlobStore``).
        policy: How object storage is talked to.
        commit: How a save to a local directory makes its files visible (``options.Commit``). On object storage the
            marker always does.

    Raises:
        InvalidOptionError: An argument is wrong, or both ``options`` and ``filesystem`` are given.
    """

    options: Mapping[str, Any] | None = None
    _: KW_ONLY
    filesystem: Any = None
    policy: StorePolicy | None = None
    commit: Commit = "rename"

    def __post_init__(self) -> None:
        if self.options is not None and self.filesystem is not None:
            raise InvalidOptionError("filesystem= has its options already: leave out options=")
        _check_options("options", self.options)
        if self.policy is not None and not isinstance(self.policy, StorePolicy):
            raise InvalidOptionError(f"policy={self.policy!r} has to be a sidestream.StorePolicy")
        if self.filesystem is not None and not is_fsspec(self.filesystem):
            _check_store(self.filesystem)
        check_choice("commit", self.commit, Commit)

    def __repr__(self) -> str:
        shown = [] if self.options is None else ["options=..."]
        shown += [] if self.filesystem is None else [f"filesystem=<{type(self.filesystem).__name__}>"]
        shown += [] if self.policy is None else [f"policy={self.policy!r}"]
        return f"Storage({', '.join([*shown, f'commit={self.commit!r}'])})"

    def __reduce__(self) -> Any:
        raise TypeError("storage options hold credentials: they are not pickled")


def storage_of(options: Mapping[str, Any] | None, storage: Storage | None, prefix: str = "") -> Storage:
    """Return what a call was given as ``storage_options=`` or as ``storage=``; ``prefix`` precedes these names.

    Raises ``InvalidOptionError`` for both, and for what is neither a mapping nor a ``Storage``."""
    if storage is None:
        _check_options(f"{prefix}storage_options", options)
        return Storage(options)
    if not isinstance(storage, Storage):
        raise InvalidOptionError(
            f"{prefix}storage={type(storage).__name__} has to be a sidestream.Storage(options=, filesystem=, policy=)"
        )
    if options is not None:
        raise InvalidOptionError(
            f"{prefix}storage_options= and {prefix}storage= are both given: pass {prefix}storage=Storage(options=...)"
        )
    return storage


def is_fsspec(filesystem: object) -> bool:
    """Return True for a file system of fsspec."""
    return hasattr(filesystem, "cat_file") and not isinstance(filesystem, type)


def _check_options(name: str, options: object) -> None:
    if options is not None and not isinstance(options, Mapping):
        raise InvalidOptionError(f"{name}= has to be a dict of what the fsspec file system takes")


def _check_store(given: Any) -> None:
    """Raise ``InvalidOptionError`` for what is not a ``BlobStore``."""
    if isinstance(given, type):
        raise InvalidOptionError(f"filesystem={given.__name__} is a class: pass an instance of it")
    name = type(given).__name__
    can = getattr(given, "capabilities", None)
    if not isinstance(can, Capabilities):
        raise InvalidOptionError(
            f"filesystem={name} is neither an fsspec file system nor a sidestream.options.BlobStore: it has no "
            "capabilities of the type sidestream.options.Capabilities"
        )
    offered = *("version", "replace") * can.versions, *("map",) * can.mapping
    wanted = ("read", "size", *("put", "upload", "listing", "delete") * can.listing, *offered)
    if missing := [f"{one}()" for one in wanted if not callable(getattr(given, one, None))]:
        raise InvalidOptionError(
            f"filesystem={name} lacks methods of a sidestream.options.BlobStore: {', '.join(missing)}"
        )
    if can.rename:
        raise InvalidOptionError(
            f"filesystem={name} has capabilities.rename, which only local directories have: leave it off"
        )


IoPriority = Literal["normal", "low", "idle"]
"""The priority of a process at the disk. ``"normal"``: that of other processes. ``"low"``: after them. ``"idle"``: only
when no other process uses the disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterProcess:
    """The settings of the process that writes for the trainer: ``writer=`` of ``SaveOptions``. Saves with equal options
    share one process.

    Args:
        nice: What is added to the nice value of the trainer, from 0 to 19. On Linux it runs under ``SCHED_BATCH``.
        io_priority: The priority at the disk (``options.IoPriority``).
        affinity: The numbers of the processors that it may use. None: those of the trainer.
        max_bytes_per_second: The rate of its writes, all saves together. None: no limit.
        silence_s: How long it may be silent before it is killed, in seconds.
        retries: How often the files that a dead process was writing are written again, by a new process from the same
            staged memory.
        idle_s: How long it stays when no save uses it, in seconds.

    Raises:
        InvalidOptionError: An argument is wrong.
    """

    nice: int = 10
    io_priority: IoPriority = "normal"
    affinity: frozenset[int] | None = None
    max_bytes_per_second: float | None = None
    silence_s: float = 20.0
    retries: int = 2
    idle_s: float = 60.0

    def __post_init__(self) -> None:
        check_choice("io_priority", self.io_priority, IoPriority)
        check_seconds("silence_s", self.silence_s)
        check_seconds("idle_s", self.idle_s)
        if type(self.nice) is not int or not 0 <= self.nice <= 19:
            raise InvalidOptionError(f"nice={self.nice!r} has to be an integer from 0 to 19")
        if type(self.retries) is not int or self.retries < 0:
            raise InvalidOptionError(f"retries={self.retries!r} has to be an integer, not negative")
        rate = self.max_bytes_per_second
        if rate is not None and not (type(rate) in (int, float) and rate > 0):
            raise InvalidOptionError(f"max_bytes_per_second={rate!r} has to be a positive number of bytes")
        if self.affinity is not None:
            wanted = frozenset(self.affinity)
            if not wanted or any(type(one) is not int or one < 0 for one in wanted):
                raise InvalidOptionError(f"affinity={self.affinity!r} has to be a set of processor numbers")
            object.__setattr__(self, "affinity", wanted)


WriterChoice: TypeAlias = Literal["thread", "process", "auto"] | WriterProcess
"""The writer of a save. ``"thread"``: threads of this process. ``"process"``: a process of its own, so that the trainer
keeps the interpreter to itself. ``"auto"``: a process where one can be started, threads elsewhere. ``WriterProcess``:
``"process"``, with options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """The settings of a save: ``options=`` of ``save`` and ``async_save``, ``save=`` of a ``Checkpointer``.

    Args:
        durability: ``"fsync"``: what is acknowledged survives a power cut. ``"flush"``: nothing is synced, and it
            survives the death of the process only.
        writer: What writes. ``"thread"``: threads of this process. ``"process"``: a process of its own, which leaves
            the interpreter to the trainer. ``"auto"``: a process where one can be started, else threads. A
            ``WriterProcess``: a process with options.
        digest: ``"blake3"``: keep a cryptographic digest of each block beside its checksum (extra ``digest``).
        streaming: Pass the state through 256 MiB of memory in place of a staged copy of the whole. ``staged`` is then
            done when nearly everything is written. It is meant for weights that do not change while they are saved, and
            for hosts with less free memory than the state has.
        names: The FQN in the checkpoint of each FQN in the state (``options.Names``). None leaves an entry out.
        dtype: The dtype that floating-point tensors get in the checkpoint (``options.Dtypes``). They are converted
            while they are staged.
        timeout_s: The limit of the whole save, in seconds.
        rank_wait_s: How long a rank waits for the other ranks to make the same call, in seconds. After 5 s it logs a
            warning that names the missing ranks.

    Raises:
        InvalidOptionError: An argument is wrong.
    """

    durability: Durability = "fsync"
    writer: WriterChoice = "thread"
    digest: Digest | None = None
    streaming: bool = False
    names: Names | None = None
    dtype: Dtypes | None = None
    timeout_s: float = 600.0
    rank_wait_s: float = RANK_WAIT_S

    def __post_init__(self) -> None:
        check_choice("durability", self.durability, Durability)
        check_writer(self.writer)
        if self.digest is not None:
            check_choice("digest", self.digest, Digest)
        check_bool("streaming", self.streaming)
        check_names(self.names)
        check_dtype(self.dtype)
        check_timeout(self.timeout_s)
        check_seconds("rank_wait_s", self.rank_wait_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """The settings of a load: ``options=`` of ``load`` and ``Checkpointer.restore``, ``load=`` of a ``Checkpointer``.

    Args:
        verify: ``"always"``: compare every byte that is read with its checksum. ``"manifest"``: compare the manifest,
            the layout and the sizes of files, and not the payload.
        atomic: Read everything into memory of its own first, so that a failure leaves the target unchanged.
        progress: Called on the event loop with the bytes read so far and the bytes to read. What it raises ends the
            load.
        names: The FQN in the checkpoint of each FQN in the target (``options.Names``), where they differ:
            ``names=sidestream.add_prefix("module.")`` reads ``"weight"`` from ``"module.weight"``. It is called once
            for each name, in a thread.
        safe_globals: Types whose objects are made again, by their own code, from what another writer saved of them. No
            other code runs. Objects in files of ``torch.save`` are refused in any case.
        trust: ``"data"``: values of other writers are read as data. ``"pickle"``: they are unpickled, which runs the
            code that the file contains. Checkpoints of sidestream and files of ``torch.save`` are data in either case.
        timeout_s: The limit of the whole load, in seconds.
        rank_wait_s: How long a rank waits for the other ranks to make the same call, in seconds.

    Raises:
        InvalidOptionError: An argument is wrong.
    """

    verify: Verify = "always"
    atomic: bool = False
    progress: Progress | None = None
    names: Names | None = None
    safe_globals: Collection[type] = ()
    trust: Trust = "data"
    timeout_s: float = 600.0
    rank_wait_s: float = RANK_WAIT_S

    def __post_init__(self) -> None:
        check_verify(self.verify)
        check_bool("atomic", self.atomic)
        check_names(self.names)
        object.__setattr__(self, "safe_globals", check_types("safe_globals", self.safe_globals))
        check_choice("trust", self.trust, Trust)
        check_timeout(self.timeout_s)
        check_seconds("rank_wait_s", self.rank_wait_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """The settings of a conversion: ``options=`` of ``convert``.

    Args:
        max_shard_bytes: The size of a file above which the next one begins, in bytes, for a directory of safetensors or
            for DCP. None: one file.
        budget_bytes: The most memory for payloads, in bytes; 96 MiB at least. A tensor that cannot be read in pieces is
            held whole: compressed by stock DCP, saved by it with strides, or cut into columns.
        verify: ``"always"`` or ``"manifest"``, as for ``LoadOptions``. A source whose checksums cover whole tensors is
            read twice with ``"always"``.
        durability: ``"fsync"`` or ``"flush"``, as for ``SaveOptions``.
        progress: Called on the event loop with the bytes converted so far and the bytes to convert. What it raises ends
            the conversion.
        timeout_s: The limit of the whole conversion, in seconds.

    Raises:
        InvalidOptionError: An argument is wrong.
    """

    max_shard_bytes: int | None = 5 << 30
    budget_bytes: int = 256 << 20
    verify: Verify = "always"
    durability: Durability = "fsync"
    progress: Progress | None = None
    timeout_s: float = 3600.0

    def __post_init__(self) -> None:
        check_verify(self.verify)
        check_choice("durability", self.durability, Durability)
        check_timeout(self.timeout_s)
        check_budget(self.budget_bytes)
        if self.max_shard_bytes is not None:
            check_count("max_shard_bytes", self.max_shard_bytes)


Opt = TypeVar("Opt", SaveOptions, LoadOptions, ConvertOptions)


def options_of(given: Opt | None, kind: type[Opt]) -> Opt:
    """Return ``given``, or the defaults for None. Raises ``InvalidOptionError`` for options of another type."""
    if given is None:
        return kind()
    if not isinstance(given, kind):
        raise InvalidOptionError(f"a {type(given).__name__} was passed in place of a sidestream.{kind.__name__}(...)")
    return given


def check_writer(writer: object) -> None:
    """Raise ``InvalidOptionError`` unless it is what ``writer=`` takes."""
    if not isinstance(writer, WriterProcess) and writer not in ("thread", "process", "auto"):
        raise InvalidOptionError(
            f"writer={writer!r} has to be one of 'thread', 'process', 'auto', or a WriterProcess(...)"
        )


def check_choice(name: str, value: Any, choices: Any) -> None:
    """Raise ``InvalidOptionError`` unless ``value`` is one of the literals in ``choices``."""
    allowed = get_args(choices)
    if value not in allowed:
        choices = f"one of {', '.join(map(repr, allowed))}" if len(allowed) > 1 else repr(allowed[0])
        raise InvalidOptionError(f"{name}={value!r} has to be {choices}")


def check_types(name: str, types: Iterable[type]) -> tuple[type, ...]:
    """Return the types. Raises ``InvalidOptionError`` for anything but classes, and for metaclasses, which could make
    any class."""
    try:
        kinds: list[Any] = list(types)
    except TypeError:
        raise InvalidOptionError(f"{name}={types!r} has to be a list of types") from None
    for kind in kinds:
        if not isinstance(kind, type) or issubclass(kind, type):
            raise InvalidOptionError(f"{name}= takes types, not {kind!r}")
    return tuple(kinds)


def check_verify(verify: object) -> None:
    """Raise ``InvalidOptionError`` unless it is what ``verify=`` takes."""
    if verify == "never":
        raise InvalidOptionError(
            "verify='never' does not exist: pass verify='manifest', which checks the manifest, the layout and the "
            "sizes of files, and not the payload"
        )
    check_choice("verify", verify, Verify)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Which differences between a target and a checkpoint a load accepts: for each kind the pattern of the names that
    may differ, or None."""

    missing: re.Pattern[str] | None = None
    unexpected: re.Pattern[str] | None = None
    cast: re.Pattern[str] | None = None

    def __bool__(self) -> bool:
        return self != STRICT


STRICT = Tolerance()
"""No difference is accepted."""

_EVERY_NAME = re.compile("")


def tolerance_of(
    strict: bool, allow_missing: Tolerated, allow_unexpected: Tolerated, allow_cast: Tolerated
) -> Tolerance:
    """Return what a load accepts. ``strict=False`` accepts missing and unexpected names, as in torch.

    Raises:
        InvalidOptionError: An argument has another type.
    """
    if not isinstance(strict, bool):
        raise InvalidOptionError(
            f"strict={strict!r} has to be True or False, as in load_state_dict of torch; allow_missing=, "
            "allow_unexpected= and allow_cast= take True or patterns of names"
        )
    missing = _pattern("allow_missing", allow_missing or not strict)
    unexpected = _pattern("allow_unexpected", allow_unexpected or not strict)
    return Tolerance(missing, unexpected, _pattern("allow_cast", allow_cast))


def _pattern(name: str, tolerated: object) -> re.Pattern[str] | None:
    if isinstance(tolerated, bool):
        return _EVERY_NAME if tolerated else None
    patterns = [tolerated] if isinstance(tolerated, str) else tolerated
    if not isinstance(patterns, Collection) or any(type(one) is not str or not one for one in patterns):
        raise InvalidOptionError(
            f"{name}={tolerated!r} has to be True, or one or several glob patterns of names, as in "
            f'{name}=["model.head.*"]'
        )
    return re.compile("|".join(map(fnmatch.translate, patterns))) if patterns else None


def check_names(names: object) -> None:
    """Raise ``InvalidOptionError`` for what is neither a function nor a mapping, nor None."""
    if names is not None and not callable(names) and not isinstance(names, Mapping):
        raise InvalidOptionError(f"names={names!r} has to be a function of a name, or a mapping of names")


def check_dtype(dtype: object) -> None:
    """Raise ``InvalidOptionError`` for what is neither a floating-point dtype nor a mapping of patterns to some."""
    for pattern in dtype if isinstance(dtype, Mapping) else ():
        if not isinstance(pattern, str):
            raise InvalidOptionError(f"dtype={dtype!r}: {pattern!r} has to be a pattern of names")
    for one in dtype.values() if isinstance(dtype, Mapping) else () if dtype is None else (dtype,):
        if not getattr(one, "is_floating_point", False):
            raise InvalidOptionError(f"dtype={one!r} has to be a floating-point dtype of torch")


def strip_prefix(*prefixes: str, after: str | Collection[str] = "") -> Callable[[str], str]:
    """Return a function for ``names=`` that removes prefixes from a name, one after the other.

    A name that does not begin with a prefix keeps its beginning. ``strip_prefix("module.", after="model.")`` turns
    ``"model.module.weight"`` into ``"model.weight"``.

    Args:
        prefixes: The prefixes, with their dots: ``strip_prefix("model.", "module.")``.
        after: The beginning of a name that stays before the prefix, or several. Names without it do not change.
    """
    heads = (after,) if isinstance(after, str) else tuple(after)

    def names(name: str) -> str:
        for head in heads:
            if name.startswith(head):
                rest = name[len(head) :]
                for prefix in prefixes:
                    rest = rest.removeprefix(prefix)
                return head + rest
        return name

    return names


def add_prefix(prefix: str, *, after: str | Collection[str] = "") -> Callable[[str], str]:
    """Return a function for ``names=`` that puts a prefix before a name.

    ``add_prefix("module.", after="model.")`` turns ``"model.weight"`` into ``"model.module.weight"``.

    Args:
        prefix: The prefix, with its dot: ``add_prefix("module.")``.
        after: The beginning of a name that the prefix follows, or several. Names without it do not change.
    """
    heads = (after,) if isinstance(after, str) else tuple(after)

    def names(name: str) -> str:
        head = next((one for one in heads if name.startswith(one)), None)
        return name if head is None else f"{head}{prefix}{name[len(head) :]}"

    return names


def check_bool(name: str, value: object) -> None:
    """Raise ``InvalidOptionError`` unless the option is True or False."""
    if not isinstance(value, bool):
        raise InvalidOptionError(f"{name}={value!r} has to be True or False")


def check_timeout(timeout_s: object) -> None:
    """Raise ``InvalidOptionError`` unless it is what ``timeout_s=`` takes."""
    check_seconds("timeout_s", timeout_s)


def check_seconds(name: str, seconds: object) -> None:
    """Raise ``InvalidOptionError`` unless the option is a positive number of seconds."""
    number = seconds if isinstance(seconds, int | float) and not isinstance(seconds, bool) else 0
    if not 0 < number <= _MAX_TIMEOUT_S:
        raise InvalidOptionError(f"{name}={seconds!r} has to be a positive number of seconds, {_MAX_TIMEOUT_S} at most")


def check_budget(budget_bytes: object) -> None:
    """Raise ``InvalidOptionError`` unless it suffices for the payloads of a conversion or a copy."""
    check_count("budget_bytes", budget_bytes)
    if cast("int", budget_bytes) < _LEAST_BUDGET_BYTES:
        raise InvalidOptionError(f"budget_bytes={budget_bytes} has to be {_LEAST_BUDGET_BYTES} at least")


def check_count(name: str, value: object) -> None:
    """Raise ``InvalidOptionError`` unless the option is a positive integer."""
    if type(value) is not int or value < 1:
        raise InvalidOptionError(f"{name}={value!r} has to be a positive integer")


def step_number(step: object) -> int:
    """Return the number of a step, which may be an integer of another type, such as numpy's. Raises
    ``InvalidOptionError`` for anything else."""
    number = plain_integer(step)
    if type(number) is not int or not 0 <= number < 10**18:
        raise InvalidOptionError(f"step={step!r} has to be an integer of at most 18 digits, not negative")
    return number


def plain_integer(number: Any) -> Any:
    """Return an integer of another type as an int, and anything else unchanged."""
    try:
        return number if isinstance(number, bool) else operator.index(number)
    except TypeError:
        return number


for _public in (
    ConvertOptions,
    LoadOptions,
    SaveOptions,
    WriterProcess,
    Storage,
    StorePolicy,
    add_prefix,
    strip_prefix,
):
    _public.__module__ = "sidestream"  # users import them from there; the decorator `public` belongs to a higher floor

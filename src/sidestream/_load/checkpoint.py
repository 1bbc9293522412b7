"""The function ``open_checkpoint``, and ``Checkpoint``, which reads parts of a checkpoint."""

from __future__ import annotations

import os
from collections import ChainMap
from collections.abc import AsyncIterator, Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from .._engine.calls import as_operation, in_operation
from .._foreign.items import read_values, refuse_opaque
from .._format.records import (
    CompositeEntry,
    EmptyEntry,
    Entry,
    Manifest,
    OpaqueEntry,
    TensorEntry,
    ValueEntry,
    all_parts,
)
from .._layout.ranges import Box
from .._layout.values import Allowed, allowed_types, decode_metadata
from .._runtime.public import Displayed, Table, public, readable_bytes
from .._runtime.threads import Deadline, io_threads, pause_point, report, time_limit
from .._runtime.torch_probes import dtype_from_name
from .._staging.streams import Streams, streams_of
from .._storage import Location, RangeSource, locate_by_caller
from ..errors import (
    CorruptCheckpointError,
    InvalidOptionError,
    MissingKeysError,
    UnsupportedCheckpointError,
)
from ..options import (
    Dtypes,
    Memory,
    Progress,
    Storage,
    Trust,
    Verify,
    check_choice,
    check_dtype,
    check_timeout,
    check_verify,
)
from .composites import build_composites, check_types
from .kinds import Kinds, chosen_of, indices_of, nested
from .new_tensors import NewTensors, new_tensors, tensors_in
from .open.manifest import all_there, check_not_replaced, is_gone, open_manifest, replaced
from .open.mmap import make_present, map_tensors
from .operation import LoadLifecycle, ReadCall, reading
from .reader import Reader, Wanted
from .verification import VerifyReport
from .verify import verify_manifest

_MISSING = "is missing"


@public
@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A saved tensor.

    A tensor that consists of others, such as a sparse one or a subclass, has ``kind``, ``parts`` and ``context``. They
    are empty for all other tensors.

    Attributes:
        dtype: The dtype. That of a tensor with parts is what the tensor reports itself.
        shape: The global shape, of all ranks together.
        nbytes: The bytes of its elements. Those of a tensor with parts are the bytes of the parts. Those of a tensor of
            a kind that this version does not read are the bytes of its items.
        kind: The layout of a sparse tensor, or the class of a subclass.
        parts: The FQNs of the tensors that it consists of.
        context: The rest of what the manifest has about it, as plain data.
    """

    dtype: torch.dtype
    shape: torch.Size
    nbytes: int
    kind: str = ""
    parts: tuple[str, ...] = ()
    context: object = None


@public
async def open_checkpoint(
    url: str | os.PathLike[str],
    *,
    verify: Verify = "always",
    timeout_s: float = 600.0,
    safe_globals: Iterable[type] = (),
    trust: Trust = "data",
    storage_options: Mapping[str, Any] | None = None,
    storage: Storage | None = None,
) -> Checkpoint:
    """Read and validate what the checkpoint at ``url`` says about itself, and none of its tensors.

    A cancel leaves nothing behind.

    Args:
        url: A directory, prefix or single file, as for ``load``.
        verify: What the calls on the result compare with checksums, as ``LoadOptions.verify``.
        timeout_s: The limit of this call, and of each call on the result, in seconds.
        safe_globals: Types whose objects and tensor subclasses the result makes again, as ``LoadOptions.safe_globals``.
        trust: How values of other writers are read, as ``LoadOptions.trust``.
        storage_options: What the fsspec file system of ``url`` takes; short for ``storage=Storage(options=...)``.
        storage: How the storage at ``url`` is reached.

    Returns:
        The checkpoint. No file is open behind it, so it is not closed.

    Raises:
        InvalidOptionError, MissingExtraError: An argument is wrong, or a package is missing.
        CheckpointNotFoundError: There is no committed checkpoint at ``url``.
        CorruptCheckpointError: What the checkpoint says about itself is damaged.
        UnsupportedCheckpointError: This version does not read it.
        StorageError, DeadlineExceededError: The storage failed, or the time did not suffice.
    """
    location = await locate_by_caller(url, storage_options, storage)
    return await in_operation(
        partial(open_from, location, verify=verify, timeout_s=timeout_s, safe_globals=safe_globals, trust=trust),
        "open_checkpoint",
    )


async def open_from(
    location: Location,
    *,
    verify: Verify,
    timeout_s: float,
    safe_globals: Iterable[type],
    trust: Trust,
    run: str | None = None,
) -> Checkpoint:
    """Open the checkpoint at a resolved location. ``run`` is the URL of the run that it belongs to."""
    check_verify(verify)
    check_choice("trust", trust, Trust)
    check_timeout(timeout_s)
    allowed = allowed_types(safe_globals)
    with time_limit(Deadline.after(timeout_s)):
        async with reading("open_checkpoint", location.url, run) as lifecycle:
            source, manifest = await open_manifest(location)
            await report(lifecycle.opened, manifest)
            # An open ``Checkpoint`` holds nothing open, so it needs no ``close`` and no loop. Each call opens the files
            # anew, and compares the marker with the manifest first where another checkpoint could have taken their
            # names.
            versions = {} if manifest.own else await source.versions(manifest.files)
            await source.aclose()
    return Checkpoint(replace(location, name=source.name), manifest, verify, timeout_s, allowed, trust, versions)


@dataclass(frozen=True, slots=True)
class _Files:
    """The source of the files for one call on a ``Checkpoint``, and the lifecycle of the call."""

    source: RangeSource
    lifecycle: LoadLifecycle


@public
class Checkpoint(Displayed, Mapping[str, TensorInfo | None]):
    """A checkpoint that can be read in parts: a mapping from FQNs to ``TensorInfo``, or None for a plain value.

    ``open_checkpoint`` and ``Checkpointer.reading`` return it. Its mapping is in memory. Each call that reads opens the
    files, and closes them when it returns. If the checkpoint was replaced or removed meanwhile, it raises
    ``CheckpointNotFoundError``, which names the save.

    A tensor that consists of others (sparse, a subclass) is listed as one. Its parts are not listed, and can be read by
    their names (``"w.values"``).
    """

    def __init__(
        self,
        location: Location,
        manifest: Manifest,
        verify: Verify,
        timeout_s: float,
        allow: Allowed,
        trust: Trust,
        versions: Mapping[str, Hashable],
    ) -> None:
        self._location = location
        self._versions = versions
        self._manifest = manifest
        self._verify: Verify = verify
        self._timeout_s = timeout_s
        self._allow = allow
        self._trust: Trust = trust

    def _summary(self) -> str:
        step = "" if self.step is None else f", step {self.step}"
        entries = self._manifest.entries.values()
        tensors = sum(isinstance(one, TensorEntry) for one in entries)
        return f"{self.url}{step}: {tensors:,} tensors, {len(self) - tensors:,} values"

    def _table(self) -> Table:
        def row(fqn: str) -> list[str]:
            info = self[fqn]
            if info is None:
                return [fqn, "value", "", ""]
            return [fqn, str(info.dtype).removeprefix("torch."), str(list(info.shape)), readable_bytes(info.nbytes)]

        return Table(("name", "dtype", "shape", "bytes"), map(row, self), len(self))

    @property
    def url(self) -> str:
        """The URL of the checkpoint."""
        return self._location.url

    @property
    def save_id(self) -> str:
        """The id of the save that wrote it. Empty if another writer did."""
        return self._manifest.save_id

    @property
    def step(self) -> int | None:
        """The number in the name of its directory, as in ``step-100``. Elsewhere the step as which a ``Checkpointer``
        saved it; None if none did."""
        return self._manifest.step

    @property
    def metadata(self) -> dict[str, Any]:
        """The ``metadata=`` of the save. Empty if it had none."""
        return decode_metadata(self._manifest.metadata)

    @property
    def files(self) -> dict[str, int]:
        """The sizes, in bytes, of the sidecar files that were saved with ``files=``, by name."""
        return {name: entry.nbytes for name, entry in self._manifest.sidecars.items()}

    @as_operation
    async def file(self, name: str) -> bytes:
        """Read a sidecar file. With ``verify="always"`` it is compared with its checksums. A cancel leaves nothing
        behind.

        Args:
            name: The name that the file has in ``files``.

        Returns:
            The content.

        Raises:
            MissingKeysError: The checkpoint has no such file.
            CorruptCheckpointError: The file is missing or altered.
            StorageError, DeadlineExceededError: The storage failed, or the time did not suffice.
        """
        entry = self._manifest.sidecars.get(name)
        if entry is None:
            there = ", ".join(self.files) or "none"
            raise MissingKeysError(f"{self.url} has no file {name!r}; its sidecar files: {there}", [name])
        content = bytearray(entry.nbytes)
        wanted = []
        # ``frombuffer`` refuses an empty buffer, and an empty file has nothing to compare.
        if content:
            wanted.append(Wanted(name, entry, Box.whole(entry.shape), torch.frombuffer(content, dtype=torch.uint8)))
        async with self._files("file") as files:
            await self._read(files, NewTensors({}, wanted), Streams())
        return await io_threads().run(bytes, content)

    def __getitem__(self, fqn: str) -> TensorInfo | None:
        entry = self._entry(fqn)
        if isinstance(entry, OpaqueEntry):
            return _opaque_info(fqn, entry) if entry.dtype else None
        if isinstance(entry, CompositeEntry):
            found = [self._manifest.entries[part] for part in self._manifest.parts_of(fqn)]
            nbytes = sum(part.nbytes for part in found if isinstance(part, TensorEntry))
            parts = tuple(f"{fqn}.{part}" for part in entry.parts)
            return TensorInfo(
                dtype_from_name(entry.dtype), torch.Size(entry.shape), nbytes, entry.type, parts, entry.context
            )
        if not isinstance(entry, TensorEntry):
            return None
        dtype = dtype_from_name(entry.dtype)
        shape = torch.Size(entry.shape)
        return TensorInfo(dtype, shape, shape.numel() * dtype.itemsize)

    def __iter__(self) -> Iterator[str]:
        entries = self._manifest.entries
        parts = all_parts(entries)
        return (fqn for fqn, entry in entries.items() if not isinstance(entry, EmptyEntry) and fqn not in parts)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def info(self, fqn: str) -> TensorInfo:
        """Return dtype, shape and size of a tensor. Nothing is read.

        Args:
            fqn: The name of the tensor.

        Raises:
            MissingKeysError: The checkpoint has no entry of this name.
            InvalidOptionError: The entry is a plain value.
            UnsupportedCheckpointError, CorruptCheckpointError: The checkpoint has its name only.
        """
        info = self[fqn]
        if info is None:
            one = self._entry(fqn)
            refusal = one.refusal(fqn) if isinstance(one, OpaqueEntry) else None
            raise refusal or InvalidOptionError(f"{fqn} is a plain value; await value({fqn!r})")
        return info

    @as_operation
    async def tensor(self, fqn: str, rows: slice | None = None, *, device: torch.device | str = "cpu") -> torch.Tensor:
        """Read a tensor, or some of its rows.

        Only the rows that are named are read, extended to whole checksum blocks of 1 MiB. A cancel leaves nothing
        behind.

        Args:
            fqn: The name of the tensor.
            rows: A slice of the first dimension, without a step. None: the whole tensor. A tensor that consists of
                others has no rows.
            device: Where the tensor is made.

        Returns:
            A new tensor with the saved dtype. Its first dimension has the length of ``rows``.

        Raises:
            MissingKeysError: The checkpoint has no entry of this name.
            InvalidOptionError: The entry is a plain value, the slice has a step, or this machine has no such device.
            UnsupportedCheckpointError: This version does not read tensors of this kind.
            UnsafeObjectError: The tensor is a subclass that ``safe_globals`` does not name.
            CorruptCheckpointError: Bytes are missing or altered.
            StorageError, DeadlineExceededError, OutOfMemoryError: The storage, the time or the memory did not suffice.
        """
        # This version cannot read it, but it says why, which takes a look into the file. So the files are opened before
        # the error is raised.
        if isinstance(one := self._entry(fqn), OpaqueEntry):
            async with self._files("tensor") as files:
                await self._refuse(files.source, {fqn: one})
        if isinstance(one, CompositeEntry):
            return await self._composite(fqn, rows, _device(device))
        info = self.info(fqn)
        where = _device(device)
        entry = self._manifest.entries[fqn]
        assert isinstance(entry, TensorEntry)
        box = Box.whole(entry.shape) if rows is None else _rows(fqn, entry.shape, rows)

        async with self._files("tensor") as files:
            # Memory of a device is allocated on the stream that the copy will use. The caching allocator reuses memory
            # in the order of one stream, so work of another stream could still be reading what was there before.
            streams = await streams_of([where])

            def new() -> torch.Tensor:
                with streams.current():
                    return torch.empty(box.sizes, dtype=info.dtype, device=where)

            target = await io_threads().run(new)
            await self._read(files, NewTensors({}, [Wanted(fqn, entry, box, target)]), streams)
            return target

    async def _composite(self, fqn: str, rows: slice | None, device: torch.device) -> torch.Tensor:
        if rows is not None:
            raise InvalidOptionError(f"{fqn}: rows={rows} of a tensor that consists of others; read it as a whole")
        entries = self._manifest.entries
        wanted = {name: entries[name] for name in (fqn, *self._manifest.parts_of(fqn))}
        async with self._files("tensor") as files:
            leaves = await self._leaves(files, wanted, "host", device, None)
        found: torch.Tensor = leaves[fqn]
        return found

    @as_operation
    async def value(self, fqn: str) -> Any:
        """Read a plain value, or a tensor as ``tensor()`` does. A cancel leaves nothing behind.

        Args:
            fqn: The name of the entry.

        Returns:
            The value, or a new tensor in host memory.

        Raises:
            MissingKeysError: The checkpoint has no entry of this name.
            UnsafeObjectError: The value was saved by another writer, and is more than data.
            UnsupportedCheckpointError, CorruptCheckpointError, StorageError, DeadlineExceededError, OutOfMemoryError:
                As for ``tensor()``.
        """
        entry = self._entry(fqn)
        if isinstance(entry, TensorEntry | OpaqueEntry | CompositeEntry):
            return await self.tensor(fqn)
        if not isinstance(entry, ValueEntry):
            return {}
        async with self._files("value") as files:
            await report(files.lifecycle.planned)
            values = await read_values(files.source, self._manifest, {fqn: entry}, self._allow, self._trust)
            await report(files.lifecycle.read, 0)
            return values[fqn]

    @as_operation
    async def state_dict(
        self,
        *,
        memory: Memory = "host",
        progress: Progress | None = None,
        select: str | Collection[str] | None = None,
        dtype: Dtypes | None = None,
    ) -> dict[Any, Any]:
        """Read everything, nested as it was saved. Tied tensors are tied again.

        Sparse tensors are made again, and so are subclasses that ``safe_globals`` or a fixed list of this version
        names. No file names code that is imported. A checkpoint of stock DCP records neither its empty containers nor
        which keys were integers. A cancel leaves nothing behind.

        Args:
            memory: ``"host"``: new memory of the host. A ``torch.device``: new memory of the device. ``"mapped"``:
                tensors over the pages of the files, without a copy, for a checkpoint on this machine. Mapped tensors
                may be written to, which changes private copies of their pages, and never the file. With
                ``verify="always"`` all pages are read and compared before this returns; otherwise a page is read when
                it is first touched. A file that is truncated later ends the process (SIGBUS). A tensor that is not in
                one piece, or not aligned, gets memory of its own; in checkpoints of other writers that may be all of
                them.
            progress: Called on the event loop with the bytes read so far and the bytes to read. What it raises ends the
                call.
            select: Patterns of FQNs (``"model.*"``). Only what matches is read. A list of which elements before
                others are left out becomes a dict by index. None: everything.
            dtype: What floating-point tensors are converted to, or patterns of FQNs and what those are converted to
                (``options.Dtypes``). Converted tensors are not mapped. Tensors that consist of others keep their dtype.

        Returns:
            The state dict: nested dicts and lists of new tensors and values.

        Raises:
            InvalidOptionError: An argument is wrong, or ``"mapped"`` is asked for a checkpoint on another machine.
            MissingKeysError: A pattern matches nothing.
            UnsupportedCheckpointError: A tensor of a kind that this version does not read was selected.
            UnsafeObjectError: A subclass or a value of another writer is more than data, and ``safe_globals`` does not
                name its type.
            UnsupportedTensorError: Torch does not make this conversion.
            CorruptCheckpointError: Bytes are missing or altered.
            StorageError, DeadlineExceededError, OutOfMemoryError: The storage, the time or the memory did not suffice.
        """
        check_dtype(dtype)
        device = None if memory == "host" else _memory(memory)
        async with self._files("state_dict") as files:
            entries = await io_threads().run(self._selected, select)
            leaves = await self._leaves(files, entries, memory, device, progress, dtype)
            return await io_threads().run(nested, entries, leaves, select is not None)

    async def fetch(
        self, dtypes: Mapping[str, torch.dtype], memory: Callable[[int], Any], *, mapped: bool
    ) -> dict[str, torch.Tensor]:
        """Return the tensors that ``dtypes`` names, in these dtypes, for weights that are served. Part of an operation.

        With ``mapped``, tensors that lie whole in a local file in their dtype are maps of it, whose pages are in memory
        when this returns. The others are read into a buffer of the size that ``memory`` is called with, in a thread.
        Raises what ``state_dict`` raises."""
        async with self._files("state_dict") as files:
            entries = {fqn: self._manifest.entries[fqn] for fqn in dtypes}
            await self._refuse(files.source, {f: one for f, one in entries.items() if isinstance(one, OpaqueEntry)})
            alike = [fqn for fqn, dtype in dtypes.items() if self.info(fqn).dtype == dtype]
            maps = mapped and self._location.store.capabilities.mapping
            found = await map_tensors(files.source, self._manifest, alike if maps else ())

            def prepare() -> NewTensors:
                copied = {fqn: dtype for fqn, dtype in dtypes.items() if fqn not in found}
                new = tensors_in(entries, copied, memory)
                if self._verify == "always":
                    new.wanted.extend(_verified(entries, found))
                return new

            new = await io_threads().run(prepare)
            await self._read(files, new, Streams())
            await io_threads().run(make_present, found)
            return {**found, **new.tensors}

    async def _leaves(
        self,
        files: _Files,
        entries: Mapping[str, Entry],
        memory: Memory,
        device: torch.device | None,
        progress: Progress | None,
        dtype: Dtypes | None = None,
    ) -> Mapping[str, Any]:
        """Return the content of ``entries``, which include the parts of composite tensors."""
        source = files.source
        kinds = await io_threads().run(Kinds.of, entries)
        fqns, composites = kinds.tensors, kinds.composites
        await io_threads().run(check_types, entries, composites, self._allow)
        await self._refuse(source, kinds.opaque)
        dtypes = {} if dtype is None else await io_threads().run(kinds.converted, dtype, self.url)
        values = await read_values(source, self._manifest, kinds.values, self._allow, self._trust)
        mapped = {}
        if memory == "mapped":
            if not self._location.store.capabilities.mapping:
                raise InvalidOptionError(f'{self.url} is not on this machine; use memory="host"')
            taken = fqns.keys() - indices_of(composites) - dtypes.keys()
            mapped = await map_tensors(source, self._manifest, taken)
        streams = await streams_of([] if device is None else [device])

        def prepare() -> NewTensors:
            with streams.current():
                missing = (fqn for fqn in fqns if fqn not in mapped)
                new = new_tensors(entries, missing, device, dtypes, direct=True)
            if self._verify == "always":
                new.wanted.extend(_verified(entries, mapped))
            return new

        new = await io_threads().run(prepare)
        tensors = new.tensors
        await self._read(files, new, streams, progress)
        leaves = ChainMap(mapped, tensors, values)
        if not composites:
            return leaves

        def build() -> Mapping[str, Any]:
            with streams.current():
                return leaves.new_child(build_composites(entries, composites, leaves, self._allow))

        return await io_threads().run(build)

    @as_operation
    async def verify(self, *, progress: Progress | None = None) -> VerifyReport:
        """Read everything and compare it with all that is known about it, as ``sidestream.verify`` does, whatever
        ``verify=`` is. A cancel leaves nothing behind.

        Args:
            progress: Called on the event loop with the bytes read so far and the bytes to read. What it raises ends the
                call.

        Returns:
            The report. Damage is in it, and is not raised: see ``ok``.

        Raises:
            CheckpointNotFoundError: The checkpoint was replaced or removed.
            StorageError, DeadlineExceededError: The storage failed, or the time did not suffice.
        """
        with time_limit(Deadline.after(self._timeout_s)):
            async with self._unless_replaced(), aclosing(self._location.source()) as source:
                found = await verify_manifest(source, self.url, self._manifest, progress)
            # Bytes without checksums are not read, so the report of an export is good although its files are gone.
            good = found.ok and self._manifest.own
            if not good and await is_gone(self._location, self._manifest, self._versions):
                raise replaced(self.url, self._manifest)
            return found

    @asynccontextmanager
    async def _files(self, call: ReadCall) -> AsyncIterator[_Files]:
        """Open the files of the checkpoint for one call, with its time limit. Raises ``CorruptCheckpointError``, also
        if a file is missing that was there when the checkpoint was opened, and ``CheckpointNotFoundError``."""
        with time_limit(Deadline.after(self._timeout_s)):
            async with (
                reading(call, self.url) as lifecycle,
                self._unless_replaced(),
                aclosing(self._location.source()) as source,
            ):
                await check_not_replaced(source, self._location, self._manifest, self._versions)
                await report(lifecycle.opened, self._manifest)
                yield _Files(source, lifecycle)

    @asynccontextmanager
    async def _unless_replaced(self) -> AsyncIterator[None]:
        """Raise ``CheckpointNotFoundError`` instead of a ``CorruptCheckpointError`` of the body if the checkpoint was
        replaced or removed."""
        try:
            with all_there(self.url, _MISSING):
                yield
        except CorruptCheckpointError as error:
            if await is_gone(self._location, self._manifest, self._versions):
                raise replaced(self.url, self._manifest) from error
            raise

    def _selected(self, select: str | Collection[str] | None) -> Mapping[str, Entry]:
        entries = self._manifest.entries
        if select is None:
            return entries
        return chosen_of(self._manifest, select, self.url)

    async def _refuse(self, source: RangeSource, opaque: Mapping[str, OpaqueEntry]) -> None:
        several = "; {} such tensors were requested: leave them out with select="
        await refuse_opaque(source, self.url, opaque, several)

    def _entry(self, fqn: str) -> Entry:
        try:
            return self._manifest.entries[fqn]
        except KeyError:
            raise MissingKeysError(f"{self.url} has no {fqn!r}", [fqn]) from None

    async def _read(self, files: _Files, new: NewTensors, streams: Streams, progress: Progress | None = None) -> None:
        reader = Reader(files.source, self._verify, progress, streams, new.direct)
        await report(files.lifecycle.planned)
        await reader.read(new.wanted, own=self._manifest.own)
        await report(files.lifecycle.read, reader.nbytes)
        if self._verify == "always":
            await report(files.lifecycle.verified, len(reader.unverified))


def _opaque_info(fqn: str, entry: OpaqueEntry) -> TensorInfo:
    try:
        dtype = dtype_from_name(entry.dtype)
    except KeyError:
        raise UnsupportedCheckpointError(f"{fqn} has dtype {entry.dtype}, which this torch does not know") from None
    return TensorInfo(dtype, torch.Size(entry.shape), sum(chunk.item_bytes for chunk in entry.chunks))


def _device(device: object) -> torch.device:
    try:
        found: torch.device = torch.device(device)  # type: ignore[call-overload]
    except (RuntimeError, TypeError) as error:
        raise InvalidOptionError(f"device={device!r} is not a device: {error}") from None
    if found.type == "meta":
        raise InvalidOptionError('device="meta" has no memory to load into')
    return found


def _memory(memory: object) -> torch.device | None:
    if memory == "mapped":
        return None
    if isinstance(memory, torch.device):
        return _device(memory)
    raise InvalidOptionError(f'memory={memory!r} has to be "host", "mapped" or a torch.device')


def _verified(entries: Mapping[str, Entry], mapped: Mapping[str, torch.Tensor]) -> list[Wanted]:
    """Return one read for each piece of mapped memory, to verify it."""
    wanted: dict[int, Wanted] = {}
    for fqn, tensor in mapped.items():
        pause_point()
        if id(tensor) not in wanted:
            entry = entries[fqn]
            assert isinstance(entry, TensorEntry)
            wanted[id(tensor)] = Wanted(fqn, entry, Box.whole(entry.shape), None)
    return list(wanted.values())


def _rows(fqn: str, shape: tuple[int, ...], rows: slice) -> Box:
    if not isinstance(rows, slice):
        raise InvalidOptionError(f"{fqn}: rows={rows!r} has to be a slice, such as slice(0, 8)")
    if not shape or rows.step not in (None, 1):
        raise InvalidOptionError(f"{fqn}: rows={rows} needs at least one dimension and no step")
    try:
        start, stop, _ = rows.indices(shape[0])
    except TypeError as error:
        raise InvalidOptionError(f"{fqn}: rows={rows}: {error}") from None
    return Box((start, *(0 for _ in shape[1:])), (max(0, stop - start), *shape[1:]))

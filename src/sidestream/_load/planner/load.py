"""Loads that a ``LoadPlanner`` of the caller plans. The planner is called as DCP calls it, in the same order. Reading
and verification are those of other loads.

Planners receive a validated manifest as the ``Metadata`` of DCP. They request tensors, which are read into their
targets, and values, which they receive as bytes. By default these bytes are made again from data, and are not the bytes
in the checkpoint. Nothing is unpickled.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from ..._format.records import (
    Chunk,
    DictKey,
    Key,
    Manifest,
    OpaqueEntry,
    TensorEntry,
    ValueEntry,
    itemsize,
    written_dtype,
)
from ..._group import Operation
from ..._layout.names import castable
from ..._layout.ranges import Box
from ..._layout.torch_planner import Asked, packed, unpacked
from ..._layout.values import Allowed, decode_value
from ..._runtime.caller import run_in_calling_thread
from ..._runtime.state_dict_calls import call_load_state_dict, objects_in, with_state_dicts
from ..._runtime.threads import by_size, clear_gradually, io_threads, run_sliced, yielding_gil
from ..._runtime.torch_probes import Stateful, check_tensor, dtype_from_name, dtype_name, storage_info
from ..._storage import Location, RangeSource
from ...errors import (
    CorruptCheckpointError,
    DtypeMismatchError,
    InvalidOptionError,
    MissingKeysError,
    PlannerError,
    ShapeMismatchError,
    UnsafeObjectError,
    UnsupportedCheckpointError,
)
from ...options import Trust
from ..device_streams import streams_of
from ..foreign.items import read_as_saved, read_values
from ..group import one_checkpoint
from ..open.manifest import open_manifest, was_replaced
from ..reader import Reader, Wanted
from ..report import Loaded, LoadRequest

__all__ = ["PlannerTarget", "in_batches", "metadata_of", "read_bytes", "targets_of", "values_of"]


_VERSION = "1.0.0"
_BATCH_BYTES = 1 << 30  # limits the memory of planners that make a tensor for each item


@dataclass(frozen=True, slots=True)
class AskedFor:
    """The tensors of some items. ``names`` maps the name of each tensor during the read to its FQN in the
    checkpoint."""

    targets: list[tuple[ReadItem, torch.Tensor]]
    wanted: list[Wanted]
    names: dict[str, str]

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Add the FQN in the checkpoint to errors that are raised in this context."""
        try:
            yield
        except CorruptCheckpointError as error:
            error.fqn = self.names.get(error.fqn or "", error.fqn)
            raise

    def commit(self, planner: LoadPlanner) -> None:
        """Pass the tensors, which have been read, to ``commit_tensor`` of the planner."""
        for item, target in self.targets:
            if not target.is_inference():
                torch.autograd.graph.increment_version(target)
            planner.commit_tensor(item, target)


def targets_of(items: Iterable[ReadItem], planner: LoadPlanner, manifest: Manifest, url: str) -> AskedFor:
    """Ask the planner for the target of each item. Raises ``MissingKeysError``, ``ShapeMismatchError``,
    ``DtypeMismatchError``, ``UnsupportedTensorError``, ``UnsupportedCheckpointError``."""
    items = list(items)
    fqns = {item.storage_index.fqn for item in items}
    chunks = _chunks_by_place(manifest, fqns)
    found = AskedFor([], [], {})
    for item in items:
        fqn, entry = item.storage_index.fqn, manifest.entries.get(item.storage_index.fqn)
        chunk = chunks.get((fqn, tuple(item.storage_index.offset or ())))
        if isinstance(entry, OpaqueEntry):
            raise UnsupportedCheckpointError(
                f"{fqn}: in {url} it is a quantized tensor or a tensor subclass, which this version does not read; "
                "load it with DCP's own FileSystemReader, or leave it out of the state dict"
            )
        if not isinstance(entry, TensorEntry) or chunk is None:
            raise _missing(url, item)
        target = planner.resolve_tensor(item).detach()
        if written_dtype(entry.dtype) == dtype_name(target.dtype):
            entry = replace(entry, dtype=written_dtype(entry.dtype))  # as stock DCP reads it
        _check_target(item, entry, target)
        name, number = fqn, len(found.names)
        while name in found.names or (name != fqn and name in fqns):
            name, number = f"{fqn} (part {number})", number + 1
        found.names[name] = fqn
        offsets = tuple(map(sum, zip(chunk.offsets, item.storage_offsets, strict=True)))
        box = Box(offsets, tuple(item.lengths))
        found.targets.append((item, target))
        found.wanted.append(Wanted(name, replace(entry, chunks=(chunk,)), box, target))
    return found


def values_of(items: Iterable[ReadItem], manifest: Manifest, url: str) -> dict[str, ValueEntry]:
    """Return the values that the items request, by FQN. Raises ``MissingKeysError``."""
    entries: dict[str, ValueEntry] = {}
    for item in items:
        entry = manifest.entries.get(item.storage_index.fqn)
        if not isinstance(entry, ValueEntry):
            raise _missing(url, item)
        entries[item.storage_index.fqn] = entry
    return entries


async def read_bytes(
    source: RangeSource,
    manifest: Manifest,
    entries: Mapping[str, ValueEntry],
    *,
    allow: Allowed,
    trust: Trust,
    options: Literal["LoadOptions", "StorageReader"],
) -> dict[str, bytes]:
    """Return for each of ``entries`` bytes from which ``torch.load`` makes the value. With ``trust="pickle"`` these are
    the bytes in the checkpoint. Raises ``UnsafeObjectError``, which says what to pass to ``options``, and
    ``CorruptCheckpointError``."""
    if trust == "pickle" and not any(entry.inline for entry in entries.values()):
        return {fqn: await read_as_saved(source, entry) for fqn, entry in entries.items()}
    try:
        values = await read_values(source, manifest, entries, allow)
    except UnsafeObjectError as error:
        error.add_note(f'{options}(safe_globals=[...]) takes its type, trust="pickle" hands its bytes to the planner')
        raise
    return await io_threads().run(_saved, values)


def _saved(values: Mapping[str, Any]) -> dict[str, bytes]:
    saved = {}
    for fqn, value in values.items():
        buffer = io.BytesIO()
        torch.save(value, buffer)
        saved[fqn] = buffer.getvalue()
    return saved


def _check_target(item: ReadItem, entry: TensorEntry, target: torch.Tensor) -> None:
    fqn = item.dest_index.fqn
    check_tensor(target, fqn, "load into")
    if target.shape != torch.Size(item.lengths):
        given = tuple(target.shape)
        raise ShapeMismatchError(f"{fqn}: the planner gave a tensor of shape {given} for {tuple(item.lengths)}", [fqn])
    if dtype_name(target.dtype) != entry.dtype and not castable(entry.dtype, dtype_name(target.dtype)):
        raise DtypeMismatchError(
            f"{fqn}: {entry.dtype} was saved, the target is {dtype_name(target.dtype)}, and a cast would not keep what "
            "the values mean; make the target of the saved kind and convert it afterwards",
            [fqn],
        )


def _missing(url: str, item: ReadItem) -> MissingKeysError:
    index = item.storage_index
    where = "" if index.offset is None else f" at {tuple(index.offset)}"
    return MissingKeysError(f"{url} has no {index.fqn!r}{where}, which the planner asks for", [index.fqn])


def in_batches(items: Iterable[ReadItem]) -> Iterator[list[ReadItem]]:
    return by_size(yielding_gil(items), lambda item: math.prod(item.lengths), _BATCH_BYTES // 4)


# --- the metadata for planners ---


def metadata_of(manifest: Manifest, url: str) -> Metadata:
    """Return the metadata of a manifest. Empty dicts and composite tensors are left out, because DCP does not have
    them, and tensors of which only the name is known. Called in a worker thread.

    Raises ``UnsupportedCheckpointError``."""
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, object] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    for fqn, entry in yielding_gil(manifest.entries.items()):
        if isinstance(entry, OpaqueEntry) and not entry.dtype:
            continue
        if isinstance(entry, TensorEntry | OpaqueEntry):
            described[fqn] = _tensor(fqn, entry)
            for number, chunk in enumerate(entry.chunks):
                places[MetadataIndex(fqn, torch.Size(chunk.offsets), number)] = _place(chunk)
        elif isinstance(entry, ValueEntry):
            described[fqn] = BytesStorageMetadata()
            places[MetadataIndex(fqn)] = _place(entry)
        else:
            continue
        paths[fqn] = tuple(map(_step, entry.path))
    noted = paths if manifest.planner_data is None else run_sliced(decode_value(manifest.planner_data, "planner_data"))
    meta = StorageMeta(checkpoint_id=url, save_id=manifest.save_id or None)
    return Metadata(described, noted, places, meta, _VERSION)


def _tensor(fqn: str, entry: TensorEntry | OpaqueEntry) -> TensorStorageMetadata:
    try:
        properties = TensorProperties(dtype=dtype_from_name(written_dtype(entry.dtype)))
    except KeyError:
        raise UnsupportedCheckpointError(f"{fqn!r} has dtype {entry.dtype}, which this torch does not know") from None
    chunks = [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in entry.chunks]
    return TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)


def _place(item: Chunk | ValueEntry) -> object:
    return storage_info(item.file, item.item_offset, item.item_bytes, [item.transform] if item.transform else [])


def _step(key: Key) -> str | int:
    """Return a step of a path as DCP has it, which turns every dict key into a string."""
    return str(key.value) if isinstance(key, DictKey) else key


def _chunks_by_place(manifest: Manifest, fqns: set[str]) -> Mapping[tuple[str, tuple[int, ...]], Chunk]:
    """Return the chunks of some tensors, by FQN and offsets."""
    entries = ((fqn, manifest.entries.get(fqn)) for fqn in fqns)
    return {
        (fqn, chunk.offsets): chunk
        for fqn, entry in entries
        if isinstance(entry, TensorEntry)
        for chunk in entry.chunks
    }


@dataclass(slots=True)
class PlannerTarget:
    """A target whose reads are planned by the planner in ``request``. ``together`` is set if several ranks load."""

    location: Location
    state: Mapping[str, Any]
    request: LoadRequest
    together: Operation | None
    nbytes: int = field(default=0, init=False)
    unverified: set[str] = field(default_factory=set, init=False)
    _planner: Asked = field(init=False)
    _set_up: bool = field(default=False, init=False)
    _state_dict: dict[str, Any] = field(init=False)
    _source: RangeSource | None = field(default=None, init=False)
    _manifest: Manifest = field(init=False)
    _plan: LoadPlan = field(init=False)
    _values: Mapping[str, bytes] = field(default_factory=dict, init=False)
    _touched: dict[str, None] = field(default_factory=dict, init=False)
    _cast: dict[str, None] = field(default_factory=dict, init=False)
    _total: int = field(default=0, init=False)

    async def ask(self) -> None:
        """Make the state dict that DCP passes to its planners."""
        if not isinstance(self.state, Mapping):
            raise InvalidOptionError(f"state is a mapping, not a {type(self.state).__name__}")
        try:
            keys = sorted(self.state)
        except TypeError:
            raise InvalidOptionError(
                "a planner is given the keys of the state in order, and these cannot be compared"
            ) from None
        self._planner = Asked(self.request.options.planner, LoadPlanner)
        answers = with_state_dicts(self.state)
        self._state_dict = {key: answers[key] for key in keys}

    async def open(self) -> Manifest:
        await self.aclose()
        self._source, self._manifest = await open_manifest(self.location)
        return self._manifest

    async def plan(self) -> None:
        threads = io_threads()
        if self.together is not None:
            url, part = self.location.url, {"planner": True}
            await one_checkpoint(self.together, self._manifest, url, self.replaced, part, lambda _: None)
        self._set_up = True
        merged = await self._merge(await threads.run(self._local))
        self._plan = await threads.run(self._planner.finish_plan, merged)
        values = (item.dest_index.fqn for item in _kinds(self._plan)[0])
        self._check_takes([fqn for fqn in values if fqn in self.state and not isinstance(self.state[fqn], Stateful)])

    async def read(self) -> None:
        threads, manifest, source = io_threads(), self._manifest, self._source
        assert source is not None
        values, tensors = await threads.run(_kinds, self._plan)
        entries = await threads.run(values_of, values, manifest, self.location.url)
        if entries:
            allow, trust = self.request.allowed, self.request.options.trust
            self._values = await read_bytes(source, manifest, entries, allow=allow, trust=trust, options="LoadOptions")
        self._total, batches = await threads.run(_apportioned, tensors, manifest)
        for batch in batches:
            await self._read_batch(source, batch)

    async def replaced(self) -> bool:
        """Return whether another checkpoint has taken the place of the one that was opened; always False after the
        planner was set up. A planner keeps state, and may have added what was read to a tensor. Planning again could
        change the tensor twice."""
        return not self._set_up and await was_replaced(self.location, self._manifest)

    async def apply(self) -> None:
        await io_threads().run(self._hand_over_values)
        self._hand_over()

    async def aclose(self) -> None:
        if self._source is not None:
            await self._source.aclose()

    def finish(self) -> Loaded:
        entries, items = self._manifest.entries, self._plan.items
        loaded = tuple(dict.fromkeys(item.dest_index.fqn for item in items))
        used = {item.storage_index.fqn for item in items}
        rest = tuple(fqn for fqn in entries if fqn not in used)
        clear_gradually(entries)
        return Loaded(loaded, rest, cast=tuple(self._cast))

    def written(self) -> tuple[str, ...]:
        return tuple(self._touched)

    # --- the plan ---

    def _local(self) -> LoadPlan:
        first = self.together is None or self.together.rank == 0
        self._planner.set_up_planner(self._state_dict, metadata_of(self._manifest, self.location.url), first)
        self._check_added()
        plan: LoadPlan = self._planner.create_local_plan()
        return plan

    def _check_added(self) -> None:
        """Check keys that the planner has added, as planners that load without a template do. Raises
        ``InvalidOptionError`` if ``state`` does not accept new keys."""
        self._check_takes([key for key in self._state_dict if key not in self.state], "adds")

    def _check_takes(self, keys: Sequence[str], verb: str = "sets") -> None:
        """Raise ``InvalidOptionError`` if the planner sets some ``keys`` of ``state``, and it cannot be changed."""
        if keys and not isinstance(self.state, MutableMapping):
            name = type(self._planner.planner).__qualname__
            raise InvalidOptionError(
                f"{name} {verb} {', '.join(map(repr, keys[:4]))} in the state, which is a {type(self.state).__name__} "
                "and cannot be changed: pass a dict to load()"
            )

    async def _merge(self, local: LoadPlan) -> LoadPlan:
        """Return the plan of this rank from the plans that rank 0 has merged."""
        if self.together is None:
            return (await io_threads().run(self._merged, [local]))[0]

        async def merge(parts: Sequence[bytes]) -> Sequence[bytes]:
            return await io_threads().run(self._merge_all, parts)

        mine = await io_threads().run(packed, self._planner, local)
        raw = await self.together.aexchange("merge plans", mine, merge)
        plan: LoadPlan = await io_threads().run(unpacked, self._planner, raw)
        return plan

    def _merge_all(self, parts: Sequence[bytes]) -> list[bytes]:
        plans = self._merged([unpacked(self._planner, part) for part in parts])
        return [packed(self._planner, plan) for plan in plans]

    def _merged(self, local: list[LoadPlan]) -> Sequence[LoadPlan]:
        plans: Sequence[LoadPlan] = self._planner.create_global_plan(local)
        if len(plans) != len(local):
            name = type(self._planner.planner).__qualname__
            raise PlannerError(f"{name}.create_global_plan made {len(plans)} plans of {len(local)}")
        return plans

    # --- reading ---

    async def _read_batch(self, source: RangeSource, items: Sequence[ReadItem]) -> None:
        threads, planner, url, manifest = io_threads(), self._planner, self.location.url, self._manifest
        asked_for = await threads.run(targets_of, items, planner, manifest, url)  # type: ignore[arg-type]
        devices = {target.device for _, target in asked_for.targets}
        streams = await streams_of(devices)
        reader = Reader(source, self.request.options.verify, self._tell, streams)
        dest = {name: item.dest_index.fqn for name, (item, _) in zip(asked_for.names, asked_for.targets, strict=True)}
        try:
            with asked_for.naming():
                await reader.read(asked_for.wanted, own=manifest.own)
        finally:
            self._touched.update((dest[name], None) for name in reader.touched)
        self.nbytes += reader.nbytes
        self.unverified.update(dest[name] for name in reader.unverified)
        await threads.run(self._commit, asked_for)

    def _commit(self, asked_for: AskedFor) -> None:
        for item, target in yielding_gil(asked_for.targets):
            entry = self._manifest.entries[item.storage_index.fqn]
            self._touched[item.dest_index.fqn] = None
            if isinstance(entry, TensorEntry) and entry.dtype != dtype_name(target.dtype):
                self._cast[item.dest_index.fqn] = None
        asked_for.commit(self._planner)  # type: ignore[arg-type]

    def _tell(self, done: int, _: int) -> None:
        if self.request.options.progress is not None:
            run_in_calling_thread(
                self.request.options.progress, self.nbytes + done, max(self._total, self.nbytes + done)
            )

    # --- the end ---

    def _hand_over_values(self) -> None:
        for item in _kinds(self._plan)[0]:
            self._planner.load_bytes(item, io.BytesIO(self._values[item.storage_index.fqn]))

    def _hand_over(self) -> None:
        """Put the values into the state as DCP does: objects receive their state dict, and every other value is
        replaced. Keys that the planner has added are added to the state."""
        self._check_added()  # a planner may also add keys while it receives values
        state: Any = self.state
        objects = objects_in(self.state)
        known = {id(one.instance) for one in objects}
        for key, item in self._state_dict.items():
            owner = state.get(key)
            if id(owner) not in known and (owner is not item or key not in state):
                self._check_takes([key])
                state[key] = item
        by_name = {str(key): item for key, item in self._state_dict.items()}
        for one in objects:
            if one.name in by_name:
                call_load_state_dict(one.name, one.instance, by_name[one.name])


def _kinds(plan: LoadPlan) -> tuple[list[ReadItem], list[ReadItem]]:
    """Return the items of values, and those of tensors."""
    values = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
    return values, [item for item in plan.items if item.type != LoadItemType.BYTE_IO]


def _apportioned(items: Sequence[ReadItem], manifest: Manifest) -> tuple[int, list[list[ReadItem]]]:
    """Return about how many bytes the items have, and the batches in which they are read."""
    return sum(_nbytes(item, manifest) for item in yielding_gil(items)), list(in_batches(items))


def _nbytes(item: ReadItem, manifest: Manifest) -> int:
    """Return about how many bytes an item has. More may be read, because whole rows and whole blocks are read."""
    entry = manifest.entries.get(item.storage_index.fqn)
    size = itemsize(entry.dtype) if isinstance(entry, TensorEntry) else 0
    return int(torch.Size(item.lengths).numel()) * size

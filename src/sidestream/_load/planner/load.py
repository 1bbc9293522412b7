"""Loads that a ``LoadPlanner`` of the caller plans. The planner is called as DCP calls it, in the same order. Reading
and verification are those of other loads."""

from __future__ import annotations

import io
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from ..._format.records import Manifest, TensorEntry, itemsize
from ..._group import Operation
from ..._layout.torch_planner import Asked, asked_load_planner, packed, unpacked
from ..._runtime.caller import run_in_calling_thread
from ..._runtime.state_dict_calls import FoundObject, call_state_dict, in_order, key_order, monitored
from ..._runtime.threads import clear_gradually, io_threads, yielding_gil
from ..._runtime.torch_probes import Stateful, dtype_name
from ..._storage import Location, RangeSource
from ...errors import InvalidOptionError, LoadStateDictError, PlannerError, indented
from ..device_streams import streams_of
from ..group import one_checkpoint
from ..open.manifest import open_manifest, was_replaced
from ..reader import Reader
from ..report import Loaded, LoadRequest
from .items import AskedFor, in_batches, metadata_of, read_bytes, targets_of, values_of

__all__ = ["PlannerTarget"]


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
        self._planner = asked_load_planner(self.request.options.planner)
        answers = {id(one.instance): call_state_dict(one) for one in self._objects()}
        self._state_dict = {key: answers.get(id(self.state[key]), self.state[key]) for key in keys}

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

    async def read(self) -> None:
        threads, manifest, source = io_threads(), self._manifest, self._source
        assert source is not None
        values, tensors = await threads.run(_kinds, self._plan)
        entries = await threads.run(values_of, values, manifest, self.location.url)
        if entries:
            allow, trust = self.request.allowed, self.request.options.trust
            self._values = await read_bytes(source, manifest, entries, allow=allow, trust=trust)
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

    def _objects(self) -> list[FoundObject]:
        """Return the objects in the order in which every rank calls them."""
        return in_order(
            FoundObject((key_order(key),), str(key), one)
            for key, one in self.state.items()
            if isinstance(one, Stateful)
        )

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
        added = [key for key in self._state_dict if key not in self.state]
        if added and not isinstance(self.state, MutableMapping):
            name = type(self._planner.planner).__qualname__
            raise InvalidOptionError(
                f"{name} adds {', '.join(map(repr, added[:4]))} to the state, which is a {type(self.state).__name__} "
                "and does not accept new keys: pass a dict to load()"
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
            with asked_for.naming(url):
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
        objects = self._objects()
        known = {id(one.instance) for one in objects}
        for key, item in self._state_dict.items():
            owner = state.get(key)
            if id(owner) not in known and (owner is not item or key not in state):
                state[key] = item
        by_name = {str(key): item for key, item in self._state_dict.items()}
        for one in objects:
            if one.name in by_name:
                with monitored(one.name, one.instance, "load_state_dict"):
                    run_in_calling_thread(_load_state_dict, one, by_name[one.name])


def _load_state_dict(one: FoundObject, state_dict: Any) -> None:
    try:
        one.instance.load_state_dict(state_dict)
    except Exception as error:
        raise LoadStateDictError(
            f"{one.name}: {type(one.instance).__qualname__}.load_state_dict raised {type(error).__name__}: "
            f"{indented(error)}"
        ) from error


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

"""A load that a ``LoadPlanner`` of the caller plans: DCP's calls in DCP's order, read and verified as any other."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from ..._format.digest import digest_check
from ..._format.records import Manifest, TensorEntry, itemsize
from ..._group import Operation
from ..._layout.torch_planner import Asked, asked_load_planner, packed, unpacked
from ..._runtime.caller import call
from ..._runtime.state_dict_calls import Found, ask, in_order, key_order, watched
from ..._runtime.tasks import finish
from ..._runtime.threads import io_threads, politely, time_limit
from ..._runtime.torch_probes import Stateful, dtype_name
from ..._storage import Location, RangeSource
from ...errors import InvalidOption, NotShared, PlannerFailed, SidestreamError, StatefulRefused, indented, printable
from ..device_streams import streams_of
from ..group import stoppable
from ..open.manifest import open_manifest
from ..reader import Reader
from ..report import LoadOptions, LoadReport
from .items import AskedFor, in_batches, read_bytes, targets_of, values_of
from .metadata import metadata_of

__all__ = ["load_planned"]


async def load_planned(
    location: Location,
    state: Mapping[str, Any],
    options: LoadOptions,
    operation: Operation | None,
) -> LoadReport:
    """``load`` with ``options.planner``. ``operation`` is there where several ranks load."""
    if not isinstance(state, Mapping):
        raise InvalidOption(f"state is a mapping, not a {type(state).__name__}")
    try:
        sorted(state)
    except TypeError:
        raise InvalidOption("a planner is given the keys of the state in order, and these cannot be compared") from None
    work = _Load(state, options, operation, asked_load_planner(options.planner))
    try:
        return await work.run(location)
    except (Exception, asyncio.CancelledError) as error:
        written = work.written()
        if written:
            names = printable(", ".join(written[:20]))
            error.add_note(f"{len(written)} tensors of the target were written already: {names}")
        if isinstance(error, SidestreamError):
            error.written = written
        raise


@dataclass(slots=True)
class _Load:
    state: Mapping[str, Any]
    options: LoadOptions
    operation: Operation | None
    planner: Asked
    nbytes: int = 0
    unverified: set[str] = field(default_factory=set)
    touched: dict[str, None] = field(default_factory=dict)
    total: int = 0
    cast: dict[str, None] = field(default_factory=dict)

    async def run(self, location: Location) -> LoadReport:
        threads, operation = io_threads(), self.operation
        state_dict = self._state_dict()
        work = self._plan_and_read(location, state_dict)
        if operation is None:
            manifest, plan, values = await work
        else:
            manifest, plan, values = await stoppable(operation, work)
            await operation.agree("read")  # before anything changes that is more than bytes
            operation.step = "hand over"

        async def install() -> None:
            await threads.run(self._hand_over_values, plan, values)
            self._hand_over(state_dict)

        with time_limit(None):  # the target changes as a whole
            await finish(install)
        if operation is not None:
            await operation.agree("hand over")
        return await threads.run(self._report, location, manifest, plan)

    def written(self) -> tuple[str, ...]:
        return tuple(self.touched)

    def _objects(self) -> list[Found]:
        """Return the objects in the order in which all ranks call them."""
        return in_order(
            Found((key_order(key),), str(key), one) for key, one in self.state.items() if isinstance(one, Stateful)
        )

    def _state_dict(self) -> dict[str, Any]:
        """Return the state dict that DCP passes to its planners."""
        answers = {id(one.instance): ask(one) for one in self._objects()}
        return {key: answers.get(id(self.state[key]), self.state[key]) for key in sorted(self.state)}

    # --- what is read ---

    async def _plan_and_read(
        self, location: Location, state_dict: dict[str, Any]
    ) -> tuple[Manifest, LoadPlan, Mapping[str, bytes]]:
        source, manifest = await open_manifest(location)
        with closing(source):
            plan, found = await self._read(source, location.url, manifest, state_dict)
        return manifest, plan, found

    async def _read(
        self, source: RangeSource, url: str, manifest: Manifest, state_dict: dict[str, Any]
    ) -> tuple[LoadPlan, Mapping[str, bytes]]:
        threads = io_threads()
        local = await threads.run(self._local, state_dict, manifest, url)
        merged = await self._merge(local, manifest, url)
        plan = await threads.run(self.planner.finish_plan, merged)
        values, tensors = await threads.run(_kinds, plan)
        entries = await threads.run(values_of, values, manifest, url)
        if self.operation is not None:
            self.operation.step = "read"
        found: Mapping[str, bytes] = {}
        if entries:
            allow, trust = self.options.allow, self.options.trust
            found = await read_bytes(source, manifest, entries, allow=allow, trust=trust)
        self.total, batches = await threads.run(_apportioned, tensors, manifest)
        for batch in batches:
            await self._read_batch(source, url, manifest, batch)
        return plan, found

    def _local(self, state_dict: dict[str, Any], manifest: Manifest, url: str) -> LoadPlan:
        first = self.operation is None or self.operation.rank == 0
        self.planner.set_up_planner(state_dict, metadata_of(manifest, url), first)
        self._check_added(state_dict)
        plan: LoadPlan = self.planner.create_local_plan()
        return plan

    def _check_added(self, state_dict: Mapping[str, Any]) -> None:
        """Check keys that the planner has added, as planners that load without a template do. Raises ``InvalidOption``
        if ``state`` does not accept new keys."""
        added = [key for key in state_dict if key not in self.state]
        if added and not isinstance(self.state, MutableMapping):
            name = type(self.planner.planner).__qualname__
            raise InvalidOption(
                f"{name} adds {', '.join(map(repr, added[:4]))} to the state, which is a {type(self.state).__name__} "
                "and does not accept new keys: pass a dict to load()"
            )

    async def _merge(self, local: LoadPlan, manifest: Manifest, url: str) -> LoadPlan:
        """What rank 0 makes of the plans of all."""
        if self.operation is None:
            return (await io_threads().run(self._merged, [local]))[0]
        said = {"save_id": manifest.save_id, "entries": len(manifest.entries), "planner": True}

        async def agree(parts: Sequence[bytes]) -> bytes:
            for rank, part in enumerate(parts):
                told = json.loads(part)
                if not told.get("planner"):
                    raise InvalidOption(f"ranks that load together all give planner=, or none: rank {rank} gives none")
                if {name: told[name] for name in said} != said:
                    raise NotShared(2, f"rank {rank} reads another checkpoint at this URL than rank 0", url)
            return b""

        async def merge(parts: Sequence[bytes]) -> Sequence[bytes]:
            return await io_threads().run(self._merge_all, parts)

        await self.operation.aexchange("match", json.dumps(said).encode(), agree)
        mine = await io_threads().run(packed, self.planner, local)
        raw = await self.operation.aexchange("merge plans", mine, merge)
        plan: LoadPlan = await io_threads().run(unpacked, self.planner, raw)
        return plan

    def _merge_all(self, parts: Sequence[bytes]) -> list[bytes]:
        plans = self._merged([unpacked(self.planner, part) for part in parts])
        return [packed(self.planner, plan) for plan in plans]

    def _merged(self, local: list[LoadPlan]) -> Sequence[LoadPlan]:
        plans: Sequence[LoadPlan] = self.planner.create_global_plan(local)
        if len(plans) != len(local):
            name = type(self.planner.planner).__qualname__
            raise PlannerFailed(f"{name}.create_global_plan made {len(plans)} plans of {len(local)}")
        return plans

    async def _read_batch(self, source: RangeSource, url: str, manifest: Manifest, items: Sequence[ReadItem]) -> None:
        threads, planner = io_threads(), self.planner
        asked_for = await threads.run(targets_of, items, planner, manifest, url)  # type: ignore[arg-type]
        devices = {target.device for _, target in asked_for.targets}
        streams = await streams_of(devices)
        reader = Reader(source, self.options.verify, self._tell, streams)
        dest = {name: item.dest_index.fqn for name, (item, _) in zip(asked_for.names, asked_for.targets, strict=True)}
        try:
            with asked_for.telling(url):
                await reader.read(asked_for.wanted, own=manifest.own)
        finally:
            self.touched.update((dest[name], None) for name in reader.touched)
        self.nbytes += reader.nbytes
        self.unverified.update(dest[name] for name in reader.unverified)
        await threads.run(self._commit, asked_for, manifest)

    def _commit(self, asked_for: AskedFor, manifest: Manifest) -> None:
        for item, target in politely(asked_for.targets):
            entry = manifest.entries[item.storage_index.fqn]
            self.touched[item.dest_index.fqn] = None
            if isinstance(entry, TensorEntry) and entry.dtype != dtype_name(target.dtype):
                self.cast[item.dest_index.fqn] = None
        asked_for.commit(self.planner)  # type: ignore[arg-type]

    def _tell(self, done: int, _: int) -> None:
        if self.options.progress is not None:
            call(self.options.progress, self.nbytes + done, max(self.total, self.nbytes + done))

    # --- the end ---

    def _hand_over_values(self, plan: LoadPlan, values: Mapping[str, bytes]) -> None:
        for item in _kinds(plan)[0]:
            self.planner.load_bytes(item, io.BytesIO(values[item.storage_index.fqn]))

    def _hand_over(self, state_dict: Mapping[str, Any]) -> None:
        """Hand over the values as DCP does: objects receive their state dict, and every other value is replaced. Keys
        that the planner has added are added."""
        self._check_added(state_dict)  # a planner may also add keys while it receives values
        state: Any = self.state
        objects = self._objects()
        known = {id(one.instance) for one in objects}
        for key, item in state_dict.items():
            owner = state.get(key)
            if id(owner) not in known and (owner is not item or key not in state):
                state[key] = item
        by_name = {str(key): item for key, item in state_dict.items()}
        for one in objects:
            if one.name in by_name:
                with watched(one.name, one.instance, "load_state_dict"):
                    call(_load_state_dict, one, by_name[one.name])

    def _report(self, location: Location, manifest: Manifest, plan: LoadPlan) -> LoadReport:
        loaded = tuple(dict.fromkeys(item.dest_index.fqn for item in plan.items))
        used = {item.storage_index.fqn for item in plan.items}
        return LoadReport(
            url=location.url,
            save_id=manifest.save_id,
            step=manifest.step,
            generation=manifest.generation,
            nbytes=self.nbytes,
            loaded=loaded,
            not_asked_for=tuple(fqn for fqn in manifest.entries if fqn not in used),
            unverified=tuple(sorted(self.unverified)),
            missing=(),
            cast=tuple(self.cast),
            ignored=(),
            digest=digest_check(manifest.digest) if self.options.verify == "always" else None,
        )


def _load_state_dict(one: Found, state_dict: Any) -> None:
    try:
        one.instance.load_state_dict(state_dict)
    except Exception as error:
        raise StatefulRefused(
            f"{one.name}: {type(one.instance).__qualname__}.load_state_dict raised {type(error).__name__}: "
            f"{indented(error)}"
        ) from error


def _kinds(plan: LoadPlan) -> tuple[list[ReadItem], list[ReadItem]]:
    """Values, and tensors."""
    values = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
    return values, [item for item in plan.items if item.type != LoadItemType.BYTE_IO]


def _apportioned(items: Sequence[ReadItem], manifest: Manifest) -> tuple[int, list[list[ReadItem]]]:
    """About how many bytes they are, and what is read of them at a time."""
    return sum(_nbytes(item, manifest) for item in politely(items)), list(in_batches(items))


def _nbytes(item: ReadItem, manifest: Manifest) -> int:
    """About: whole rows are read, in whole blocks."""
    entry = manifest.entries.get(item.storage_index.fqn)
    size = itemsize(entry.dtype) if isinstance(entry, TensorEntry) else 0
    return int(torch.Size(item.lengths).numel()) * size

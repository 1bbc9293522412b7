"""``load``: a checkpoint into a live state dict, in place."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ._tasks import running_loop
from ._threads import Deadline, io_threads
from ._torch import dtype_from_name
from .catalog import read_manifest
from .errors import CheckpointNotFound, Corrupt, SidestreamError
from .foreign import read_nodes
from .format.records import DictKey, EmptyEntry, Entry, Key, Manifest, TensorEntry, ValueEntry
from .options import Verify, check_choice, check_timeout
from .plan.assemble import assemble
from .plan.match import LoadPlan, StatefulLoad, match, plain_path
from .plan.values import decode_value
from .reading import Reader, Wanted, whole
from .storage import Location, locate_directory

__all__ = ["LoadReport", "load", "load_from", "new_tensors"]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load did: ``loaded`` FQNs in order, ``nbytes`` read for them, keys that were ``not_asked_for``, and those
    of which some bytes were ``unverified`` for want of a checksum (only in files of other writers)."""

    url: str
    save_id: str
    step: int | None
    generation: int
    nbytes: int
    loaded: tuple[str, ...]
    not_asked_for: tuple[str, ...]
    unverified: tuple[str, ...]


async def load(
    state: Mapping[str, Any],
    url: str | os.PathLike[str],
    *,
    verify: Verify = "always",
    atomic: bool = False,
    timeout_s: float = 600.0,
) -> LoadReport:
    """Load the checkpoint at ``url`` into ``state``, in place: ours, or one that stock DCP wrote.

    Tensors of ``state`` are read into; plain values are replaced in their dict or list. An object with
    ``load_state_dict`` is handed everything saved below its key: tensors of its own ``state_dict()`` are read in place
    first, those that it lacks (the moments of a fresh optimizer) come as new tensors.

    Everything is checked before anything is changed: a ``Mismatch`` lists every missing key, unexpected key (inside the
    top-level keys of ``state``), shape, dtype and kind that differs; nothing is ever cast. Raises
    ``CheckpointNotFound``; ``Corrupt``, also for altered bytes (``verify``), which may be found after some tensors were
    written: ``error.written`` lists them. With ``atomic=True`` everything is read into memory of its own first, so
    that a failure leaves ``state`` untouched. The same holds for a cancel, ``StorageError`` and ``DeadlineExceeded``.
    """
    running_loop("load")
    return await load_from(locate_directory(url), state, verify=verify, atomic=atomic, timeout_s=timeout_s)


async def load_from(
    location: Location, state: Mapping[str, Any], *, verify: Verify, atomic: bool, timeout_s: float
) -> LoadReport:
    """``load`` from a resolved location."""
    check_choice("verify", verify, Verify)
    check_timeout(timeout_s)
    deadline = Deadline.after(timeout_s)
    manifest = await read_manifest(location.store, location.name, location.url, deadline)
    plan = match(state, manifest, location.url)
    reader = Reader(location.store, location.name, verify, deadline)
    try:
        return await _Load(location, manifest, plan, reader, atomic).run()
    except FileNotFoundError as error:
        if isinstance(error, CheckpointNotFound):
            raise
        raise Corrupt(f"{location.url}: {error.filename} is missing") from error
    except (SidestreamError, asyncio.CancelledError) as error:
        written = () if atomic else tuple(fqn for fqn in plan.tensors if fqn in reader.touched)
        if isinstance(error, SidestreamError):
            error.written = written
        if written:
            error.add_note(f"{len(written)} tensors of the target were written already: {', '.join(written[:20])}")
        raise


def new_tensors(entries: Mapping[str, Entry], fqns: Iterable[str]) -> dict[str, torch.Tensor]:
    """Memory for tensors that have no place yet. Tied ones (one item in the file) share it."""
    shared: dict[object, torch.Tensor] = {}
    tensors = {}
    for fqn in fqns:
        entry = entries[fqn]
        assert isinstance(entry, TensorEntry)
        identity = (entry.dtype, entry.chunks) if entry.chunks and entry.chunks[0].payload_offset is not None else fqn
        if identity not in shared:
            shared[identity] = torch.empty(entry.shape, dtype=dtype_from_name(entry.dtype))
        tensors[fqn] = shared[identity]
    return tensors


@dataclass(frozen=True, slots=True)
class _Load:
    location: Location
    manifest: Manifest
    plan: LoadPlan
    reader: Reader
    atomic: bool

    async def run(self) -> LoadReport:
        plan, entries = self.plan, self.manifest.entries
        deadline = self.reader.deadline
        fresh = await io_threads().run(new_tensors, entries, plan.new, deadline=deadline)
        places = await io_threads().run(self._places, deadline=deadline)
        nodes = await read_nodes(
            self.location.store, self.location.name, self.manifest, self._value_entries(), deadline
        )
        values = {fqn: decode_value(node, fqn) for fqn, node in nodes.items()}
        await self.reader.read(self._wanted(places, fresh), own=self.manifest.own)
        if self.atomic:
            await io_threads().run(_copy_over, places, plan.tensors)
        for tensor in plan.tensors.values():
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)
        self._hand_over(values, {**fresh, **plan.tensors})
        return LoadReport(
            url=self.location.url,
            save_id=self.manifest.save_id,
            step=self.manifest.step,
            generation=self.manifest.generation,
            nbytes=self.reader.nbytes,
            loaded=tuple(fqn for fqn in entries if fqn in plan.tensors or fqn in fresh or fqn in values),
            not_asked_for=plan.not_asked_for,
            unverified=tuple(sorted(self.reader.unverified)),
        )

    def _places(self) -> Mapping[str, torch.Tensor]:
        """Where the tensors of the target are read to."""
        if not self.atomic:
            return self.plan.tensors
        return {fqn: torch.empty(tensor.shape, dtype=tensor.dtype) for fqn, tensor in self.plan.tensors.items()}

    def _wanted(self, places: Mapping[str, torch.Tensor], fresh: Mapping[str, torch.Tensor]) -> list[Wanted]:
        """One read for each distinct piece of memory: tied tensors are read once."""
        wanted: dict[object, Wanted] = {}
        for fqn, tensor in (*places.items(), *fresh.items()):
            entry = self.manifest.entries[fqn]
            assert isinstance(entry, TensorEntry)
            identity = (tensor.data_ptr(), tensor.stride(), entry.chunks) if tensor.numel() else fqn
            wanted.setdefault(identity, Wanted(fqn, entry, whole(entry), tensor))
        return list(wanted.values())

    def _value_entries(self) -> dict[str, ValueEntry]:
        found = {leaf.fqn: entry for leaf, entry in self.plan.values}
        for stateful in self.plan.statefuls:
            found.update((fqn, entry) for fqn, entry in stateful.entries.items() if isinstance(entry, ValueEntry))
        return found

    def _hand_over(self, values: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        for leaf, _ in self.plan.values:
            leaf.holder[leaf.slot] = values[leaf.fqn]
        for stateful in self.plan.statefuls:
            leaves = []
            for fqn, entry in stateful.entries.items():
                path = entry.path if self.manifest.own else _with_integer_keys(entry.path, stateful)
                value = {} if isinstance(entry, EmptyEntry) else tensors[fqn] if fqn in tensors else values[fqn]
                leaves.append((path[stateful.depth :], value))
            # A Stateful whose own state dict is empty stands as one empty entry at its own path.
            stateful.instance.load_state_dict(assemble(leaf for leaf in leaves if leaf[0]))


def _copy_over(sources: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for fqn, target in targets.items():
            target.copy_(sources[fqn])


def _with_integer_keys(path: tuple[Key, ...], stateful: StatefulLoad) -> tuple[Key, ...]:
    """DCP turns the integer keys of an optimizer's state into strings; the template, or the class, says where."""
    plain = plain_path(path)
    in_optimizer = isinstance(stateful.instance, torch.optim.Optimizer)
    keys: list[Key] = []
    for depth, key in enumerate(path):
        known = plain[:depth] in stateful.integer_keys
        state = in_optimizer and depth == stateful.depth + 1 and plain[depth - 1] == "state"
        keys.append(DictKey(int(key)) if (known or state) and isinstance(key, str) and key.isdecimal() else key)
    return tuple(keys)

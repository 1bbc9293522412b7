"""``load``: a checkpoint into a live state dict, in place."""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ._tasks import finish, running_loop
from ._threads import Deadline, io_threads
from ._torch import dtype_from_name
from .catalog import read_manifest
from .errors import Corrupt, Mismatch, SidestreamError, StatefulRefused
from .foreign import read_values
from .format.records import DictKey, EmptyEntry, Entry, Key, Manifest, TensorEntry, ValueEntry
from .options import Verify, check_choice, check_timeout
from .plan.assemble import assemble
from .plan.match import LoadPlan, StatefulLoad, match, plain_path
from .plan.objects import NOTHING_ALLOWED, Allowed, allowed_types
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
    allow: Iterable[type] = (),
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

    Of other writers' values only plain data is read, and objects of the types in ``allow``: those, and no others, are
    made again by their own code from what was saved. Anything else raises ``UnsafeObject``.
    """
    running_loop("load")
    location, allowed = locate_directory(url), allowed_types(allow)
    return await load_from(location, state, verify=verify, atomic=atomic, timeout_s=timeout_s, allow=allowed)


async def load_from(
    location: Location,
    state: Mapping[str, Any],
    *,
    verify: Verify,
    atomic: bool,
    timeout_s: float,
    allow: Allowed = NOTHING_ALLOWED,
) -> LoadReport:
    """``load`` from a resolved location."""
    check_choice("verify", verify, Verify)
    check_timeout(timeout_s)
    deadline = Deadline.after(timeout_s)
    manifest = await read_manifest(location.store, location.name, location.url, deadline)
    plan = match(state, manifest, location.url)
    work = _Load(location, manifest, plan, Reader(location.store, location.name, verify, deadline), atomic, allow)
    try:
        return await work.run()
    except (Exception, asyncio.CancelledError) as error:
        written = work.written()
        if written:
            error.add_note(f"{len(written)} tensors of the target were written already: {', '.join(written[:20])}")
        if isinstance(error, FileNotFoundError) and not isinstance(error, SidestreamError):
            raise _tell(Corrupt(f"{location.url}: {error.filename} is missing"), written) from error
        if isinstance(error, SidestreamError):
            _tell(error, written)
        raise


def _tell(error: SidestreamError, written: tuple[str, ...]) -> SidestreamError:
    error.written = written
    return error


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


@dataclass(slots=True)
class _Load:
    location: Location
    manifest: Manifest
    plan: LoadPlan
    reader: Reader
    atomic: bool
    allow: Allowed
    handing_over: bool = False

    async def run(self) -> LoadReport:
        plan, entries = self.plan, self.manifest.entries
        deadline = self.reader.deadline
        store, directory = self.location.store, self.location.name
        values = await read_values(store, directory, self.manifest, self._value_entries(), deadline, self.allow)
        fresh = await io_threads().run(new_tensors, entries, plan.new, deadline=deadline)
        places = await io_threads().run(self._places, deadline=deadline)
        wanted, again = await io_threads().run(self._wanted, places, fresh, deadline=deadline)
        await self.reader.read([*wanted, *again], own=self.manifest.own)
        await io_threads().run(self._check_ties, again, places, deadline=deadline)
        # From here on the target changes as a whole: a cancel is raised when it has.
        self.handing_over = True
        cancelled = await self._copy_over(places) if self.atomic else None
        for tensor in plan.tensors.values():
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)
        self._hand_over(values, {**fresh, **plan.tensors})
        if cancelled is not None:
            raise cancelled
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

    def written(self) -> tuple[str, ...]:
        """Which tensors of the target have been written to, under all the names that they have."""
        if self.handing_over:
            return tuple(self.plan.tensors)
        if self.atomic:
            return ()
        touched = {self.plan.tensors[fqn].data_ptr() for fqn in self.reader.touched if fqn in self.plan.tensors}
        return tuple(fqn for fqn, tensor in self.plan.tensors.items() if tensor.data_ptr() in touched)

    def _places(self) -> dict[str, torch.Tensor]:
        """Where the tensors of the target are read to, by leader."""
        leaders = {leader: self.plan.tensors[leader] for leader in self.plan.leaders.values()}
        if not self.atomic:
            return leaders
        return {fqn: torch.empty(tensor.shape, dtype=tensor.dtype) for fqn, tensor in leaders.items()}

    def _wanted(
        self, places: Mapping[str, torch.Tensor], fresh: Mapping[str, torch.Tensor]
    ) -> tuple[list[Wanted], list[Wanted]]:
        """One read for each piece of memory, and those of tensors that are tied in the target and were saved one by
        one, as stock DCP does: these are read aside, to be compared."""
        distinct = {id(tensor): (fqn, tensor) for fqn, tensor in reversed((*places.items(), *fresh.items()))}
        first = [self._want(fqn, tensor) for fqn, tensor in reversed(distinct.values())]
        again = [
            self._want(fqn, torch.empty(self.plan.tensors[fqn].shape, dtype=self.plan.tensors[fqn].dtype))
            for fqn, leader in self.plan.leaders.items()
            if fqn != leader and not self.manifest.own
        ]
        return first, again

    def _want(self, fqn: str, tensor: torch.Tensor) -> Wanted:
        entry = self.manifest.entries[fqn]
        assert isinstance(entry, TensorEntry)
        return Wanted(fqn, entry, whole(entry), tensor)

    def _check_ties(self, again: Iterable[Wanted], places: Mapping[str, torch.Tensor]) -> None:
        for one in again:
            leader = self.plan.leaders[one.fqn]
            if not torch.equal(_bits(one.target), _bits(places[leader])):
                raise Mismatch(
                    f"{one.fqn} shares its memory with {leader}, but they were saved with different values: "
                    "untie them, or load only one",
                    [one.fqn],
                )

    def _value_entries(self) -> dict[str, ValueEntry]:
        found = {leaf.fqn: entry for leaf, entry in self.plan.values}
        for stateful in self.plan.statefuls:
            found.update((fqn, entry) for fqn, entry in stateful.entries.items() if isinstance(entry, ValueEntry))
        return found

    async def _copy_over(self, places: Mapping[str, torch.Tensor]) -> asyncio.CancelledError | None:
        """All of it, whatever comes; returns the cancel that came meanwhile."""

        async def copy() -> None:
            await io_threads().run(_copy_all, places, self.plan.tensors)

        try:
            await finish(copy)
        except asyncio.CancelledError as cancelled:
            return cancelled
        return None

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
            _load_stateful(stateful, assemble(leaf for leaf in leaves if leaf[0]))


def _load_stateful(stateful: StatefulLoad, state_dict: dict[Any, Any]) -> None:
    if stateful.versions is not None:  # without it a module takes its state dict for one of its first version
        state_dict = OrderedDict(state_dict)
        state_dict._metadata = stateful.versions  # type: ignore[attr-defined]
    inference = isinstance(stateful.instance, torch.nn.Module) and any(
        parameter.is_inference() for parameter in stateful.instance.parameters()
    )
    try:
        with torch.inference_mode(inference):
            stateful.instance.load_state_dict(state_dict)
    except Exception as error:
        raise StatefulRefused(
            f"{stateful.fqn}: {type(stateful.instance).__name__}.load_state_dict raised {type(error).__name__}: {error}"
        ) from error


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8) if plain.numel() else plain


def _copy_all(sources: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> None:
    for fqn, source in sources.items():
        target = targets[fqn]
        with torch.inference_mode(target.is_inference()), torch.no_grad():
            target.copy_(source)


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

"""``StateTarget``: a state dict into which a checkpoint is loaded, in place.

At the end of a load plain values are put into their places, and objects receive their new state.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, filterfalse, islice
from typing import Any, TypeVar

import torch

from .._foreign.items import read_values, refuse_opaque
from .._format.records import DictKey, EmptyEntry, Key, Manifest, OpaqueEntry, TensorEntry, ValueEntry
from .._group import Operation
from .._layout.assemble import assemble
from .._layout.findings import accepts
from .._layout.flatten import CompositeLeaf, Leaf, PlainPath, StateDicts, plain_path
from .._layout.match import LoadPlan, StatefulLoad, match
from .._layout.ranges import Box
from .._runtime.caller import run_by_caller
from .._runtime.containers import empty_container
from .._runtime.state_dict_calls import call_load_state_dict, key_order
from .._runtime.threads import Deadline, clear_gradually, collected, io_threads, paced, pause_point, time_limit
from .._runtime.torch_probes import addresses, copyable, neg_view, plain_bytes
from .._staging.streams import streams_of
from .._storage import Location, RangeSource
from ..errors import LoadStateDictError, StateMismatchError, allocating, listed
from ..options import Tolerance
from .composites import build_composites, check_types, fill_sparse
from .group import ManifestOutline, agree_on, open_outline
from .new_tensors import new_tensors
from .open.manifest import open_manifest, was_replaced
from .reader import Reader, Wanted
from .report import Loaded, LoadRequest

T = TypeVar("T")

_SLICE = 1024
_LISTED = 4
_ALIGN_BYTES = 16  # of the largest element
_INTEGER = re.compile("0|[1-9][0-9]*")  # what str() of an integer returns: "007" and digits of other scripts are names
_DONE = object()
_PLAIN = frozenset({dict, list, OrderedDict})


@dataclass(frozen=True, slots=True)
class Handover:
    """The plain values with the leaves that they replace, and the state dict for each object.

    ``assigned`` are the values that are put into containers of the caller's own classes. These values and the objects
    are in the same order on all ranks, because the code of the caller may run a collective."""

    values: tuple[tuple[Leaf, Any], ...]
    assigned: tuple[tuple[Leaf, Any], ...]
    statefuls: tuple[tuple[StatefulLoad, dict[Any, Any]], ...]


def prepare(plan: LoadPlan, values: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], *, own: bool) -> Handover:
    """Return the values and state dicts to hand over. Called in a thread before anything is read into ``tensors``, and
    again if composite tensors were made from what was read. Raises ``CorruptCheckpointError`` for paths that contradict
    each other."""
    plain: list[tuple[Leaf, Any]] = []
    assigned: list[tuple[Leaf, Any]] = []
    for leaf, _ in plan.values:
        pause_point()
        (plain if type(leaf.holder) in _PLAIN else assigned).append((leaf, values[leaf.fqn]))
    statefuls = [(stateful, _state_dict(stateful, values, tensors, own, plan)) for stateful in plan.statefuls]
    assigned.sort(key=lambda one: _order(one[0].path))
    statefuls.sort(key=lambda one: _order(one[0].path))
    return Handover(tuple(plain), tuple(assigned), tuple(statefuls))


def _order(path: tuple[Key, ...]) -> tuple[str, ...]:
    """Return the sort key of a path. It gives the order in which ``state_dict()`` of objects is called."""
    keys = (key.value if isinstance(key, DictKey) else key for key in path)
    return tuple(key_order(key, index=type(place) is int) for key, place in zip(keys, path, strict=True))


async def hand_over(handover: Handover, timeout_s: float) -> tuple[list[str], list[str]]:
    """Put the values into their places, and call ``load_state_dict`` of the objects: in the caller's task or thread,
    because containers and objects are those of the caller, and within ``timeout_s`` for each call to begin. May be
    repeated.

    Returns the names that modules missed, and those that they did not take."""

    async def in_caller(code: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        with time_limit(Deadline.after(timeout_s)):
            return await run_by_caller(code, *args, **kwargs)

    missing: list[str] = []
    unexpected: list[str] = []
    for start in range(0, len(handover.values), _SLICE):
        # The containers are the caller's, so the caller sets their items, in slices. No other thread may meet them.
        await in_caller(_assign, handover.values[start : start + _SLICE])
    # One iteration of the caller's loop for each object: its code may take long, and nothing of ours can divide it.
    for leaf, value in handover.assigned:
        await in_caller(leaf.holder.__setitem__, leaf.slot, value)
    for stateful, state_dict in handover.statefuls:
        options = {"strict": False} if stateful.lenient else {}
        answer = await in_caller(call_load_state_dict, stateful.fqn, stateful.instance, state_dict, **options)
        if stateful.lenient:
            missing += [f"{stateful.fqn}.{key}" for key in answer.missing_keys]
            unexpected += [f"{stateful.fqn}.{key}" for key in answer.unexpected_keys]
    return missing, unexpected


def _assign(values: Sequence[tuple[Leaf, Any]]) -> None:
    for leaf, value in values:
        leaf.holder[leaf.slot] = value


def _state_dict(
    stateful: StatefulLoad,
    values: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    own: bool,
    plan: LoadPlan,
) -> dict[Any, Any]:
    def leaves() -> Iterator[tuple[tuple[Key, ...], Any]]:
        for fqn, entry in stateful.entries.items():
            if fqn in plan.parts:
                continue
            path = entry.path if own else _with_integer_keys(entry.path, stateful)
            yield path, {} if isinstance(entry, EmptyEntry) else tensors[fqn] if fqn in tensors else values[fqn]
        for leaf in stateful.kept:
            if leaf.whole is None:
                yield leaf.path, leaf.value.tensor if isinstance(leaf.value, CompositeLeaf) else leaf.value

    place = plain_path(stateful.path)
    # A Stateful whose own state dict is empty was saved as one empty entry at its own path.
    below = ((path[len(place) :], value) for path, value in leaves())
    saved = plan.names.manifest.containers

    def like(path: PlainPath) -> Mapping[Any, Any] | None:
        """Return a mapping of the type that was saved, or else the one in the object's own state."""
        full = (*place, *path)
        recorded = empty_container(saved.get(".".join(map(str, full)))) if saved else None
        return stateful.containers.get(full) if recorded is None else recorded

    return assemble(((path, value) for path, value in below if path), like=like)


def _with_integer_keys(path: tuple[Key, ...], stateful: StatefulLoad) -> tuple[Key, ...]:
    """Return ``path`` with integers for those keys that DCP has turned into strings, such as the keys of the state of
    an optimizer. The template, or the class of the object, shows which keys were integers."""
    plain = plain_path(path)
    in_optimizer = isinstance(stateful.instance, torch.optim.Optimizer)
    start = len(stateful.path)
    keys: list[Key] = []
    for depth, key in enumerate(path):
        known = plain[:depth] in stateful.integer_keys
        state = in_optimizer and depth == start + 1 and plain[depth - 1] == "state"
        integer = (known or state) and isinstance(key, str) and _INTEGER.fullmatch(key)
        keys.append(DictKey(int(str(key))) if integer else key)
    return tuple(keys)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The plan, and the memory that is allocated before the first byte of a tensor is read.

    ``places`` has the memory into which the tensors of the target are read, by leader. ``copied`` are tensors in other
    memory, which are copied to the target when everything has been read. ``fresh`` are tensors in new memory, from
    which composite tensors are made when they have been read.
    """

    plan: LoadPlan
    reader: Reader
    places: Mapping[str, torch.Tensor]
    wanted: list[Wanted]
    copied: Mapping[str, torch.Tensor]
    fresh: Mapping[str, torch.Tensor]
    values: Mapping[str, Any]
    handover: Handover
    loaded: tuple[str, ...]


@dataclass(slots=True)
class StateTarget:
    """A state dict that a load changes. Each of its tensors is matched with an entry of the checkpoint. ``together`` is
    set if several ranks load.

    ``call_state_dicts``, ``open``, ``plan``, ``read``, ``apply`` and ``finish`` are called in this order. If the load
    starts over, ``open``, ``plan`` and ``read`` are called again. That happens after ``replaced`` has returned True on
    this rank or on another one.
    """

    location: Location
    state: Mapping[str, Any]
    request: LoadRequest
    together: Operation | None
    _state_dicts: StateDicts = field(default_factory=StateDicts, init=False)
    _source: RangeSource | None = field(default=None, init=False)
    _outline: ManifestOutline | None = field(default=None, init=False)
    _manifest: Manifest = field(init=False)
    _prepared: _Prepared | None = field(default=None, init=False)
    _applying: bool = field(default=False, init=False)
    _made: Mapping[str, torch.Tensor] = field(default_factory=dict, init=False)
    _left: tuple[tuple[str, ...], tuple[str, ...]] = field(default=((), ()), init=False)
    """The names that modules missed and did not take, as far as that is accepted."""
    _written: tuple[str, ...] = field(default=(), init=False)
    """The tensors that were written from another checkpoint, before the load started over."""

    async def call_state_dicts(self) -> None:
        """Call the methods of the caller's objects that return what they need, in the same order on all ranks."""
        calls = self._state_dicts.collect(self.state)
        done = False
        while not done:
            done = await run_by_caller(next, calls, _DONE) is _DONE

    async def open(self) -> Manifest:
        """Read the manifest of the checkpoint. Raises ``CheckpointNotFoundError`` and ``CorruptCheckpointError``."""
        # A load that starts over may have written to tensors. These stay in the list, whatever the next checkpoint
        # contains.
        self._written, self._prepared = self.written(), None
        await self.aclose()
        if self.together is None:
            self._source, self._manifest = await open_manifest(self.location)
        else:  # each rank compares its template with an outline, and then reads only the parts that it needs
            self._source, self._outline = await open_outline(self.location)
            self._manifest = self._outline.manifest
        return self._manifest

    async def plan(self) -> None:
        """Decide what is read, and into which memory. When this raises, the target is unchanged."""
        threads, url, source = io_threads(), self.location.url, self._source
        assert source is not None
        # In a group this match needs names and shapes only. The places of the bytes are read afterwards, from those
        # parts of the manifest that this rank needs, and it is matched again with them.
        plan, devices, entries = await threads.run(self._match)
        # All of this comes before the first byte of a tensor is read: what differs, what is not understood, which
        # values there are, and the memory. When ``plan`` raises, the target is unchanged.
        if plan.findings.opaque:
            opaque = await threads.run(_opaque, plan)
            several = "; the target requests {} such tensors"
            await refuse_opaque(source, url, opaque, several, " (nothing was changed)")
        if self.together is not None:
            assert self._outline is not None
            await agree_on(self.together, self._manifest, plan, url, self.replaced)
            manifest = await self._outline.read_needed(source, plan, entries, url)
            if manifest is not self._manifest:
                self._manifest = manifest
                plan, devices, entries = await threads.run(self._match)
        streams = await streams_of(devices)
        verify, progress = self.request.options.verify, self.request.options.progress
        direct = plan.direct
        if self.request.options.atomic:
            direct = replace(direct, tensors=await threads.run(_empty, direct.tensors))
        reader = Reader(source, verify, progress, streams, direct)
        allow, trust = self.request.allowed, self.request.options.trust
        values = await read_values(source, self._manifest, entries, allow, trust)
        self._prepared = await threads.run(self._prepare, plan, reader, values)

    async def read(self) -> None:
        """Read and verify. When this raises, the tensors in ``written`` may have changed."""
        prepared = self._ready
        # Before anything is written: tensors that share memory here, and were saved with different values, would
        # overwrite each other.
        compared = await self._check_ties(prepared)
        await prepared.reader.read(prepared.wanted, own=self._manifest.own)
        prepared.reader.nbytes += compared
        if prepared.plan.shared:
            await io_threads().run(_check_shared, prepared)
        # Composite tensors are made from parts that were read into new memory. They enter the target with the values,
        # at the end.
        if prepared.plan.composites:
            await io_threads().run(self._build)

    async def replaced(self) -> bool:
        """Return whether another checkpoint has taken the place of the one that was opened, so that ``open`` has to be
        called again."""
        if await was_replaced(self.location, self._manifest):
            return True
        # An export has no marker. When it is replaced, another directory has its name.
        return self._source is not None and await self._source.moved()

    async def apply(self) -> None:
        """Change the parts of the target other than the bytes of tensors. The caller shields this from cancels."""
        # From here on ``written`` names every tensor: values, objects and copies change one after the other, and an
        # error leaves the state between two checkpoints.
        self._applying = True
        prepared = self._ready
        if prepared.copied:
            await io_threads().run(_copy_all, prepared)
        # The versions count all writes at once, after the last of them. Autograd then refuses a backward pass that
        # would use the old values.
        await io_threads().run(self._end_tensors)
        missing, unexpected = await hand_over(prepared.handover, self.request.options.timeout_s)
        unexpected = [prepared.plan.names.saved_name(fqn) for fqn in unexpected]
        _check_left(missing, unexpected, self.request.tolerance)
        self._left = tuple(missing), tuple(unexpected)

    async def aclose(self) -> None:
        """Release the files of the checkpoint. Called at the end of every load, also if nothing was opened."""
        if self._source is not None:
            await self._source.aclose()

    def finish(self) -> Loaded:
        """Return what was loaded, and free the manifest of the checkpoint. Called in a worker thread."""
        prepared, plan = self._ready, self._ready.plan
        clear_gradually(self._manifest.entries)
        clear_gradually(plan.names.manifest.entries)
        missing = dict.fromkeys([*plan.findings.missing, *self._left[0]])
        ignored = dict.fromkeys([*plan.findings.ignored, *self._left[1]])
        return Loaded(prepared.loaded, plan.not_requested, tuple(missing), tuple(plan.findings.cast), tuple(ignored))

    def written(self) -> tuple[str, ...]:
        """Return the tensors of the target that may have been changed, under all their names."""
        if self._prepared is None:
            return self._written
        plan, reader = self._prepared.plan, self._prepared.reader
        if self._applying:
            return (*plan.tensors, *(leaf.fqn for leaf in plan.sparse))
        if self.request.options.atomic:
            return ()
        touched = reader.touched.difference(*plan.shared)  # those are read into other memory first
        direct = [fqn for fqn in plan.direct.tensors if fqn in touched]
        local = [plan.local[name].fqn for name, leader in plan.leaders.items() if leader in touched]
        return tuple(dict.fromkeys([*self._written, *direct, *local]))

    @property
    def nbytes(self) -> int:
        """The number of bytes that were read."""
        return self._ready.reader.nbytes

    @property
    def unverified(self) -> set[str]:
        """The tensors that were read although some of their bytes have no checksum."""
        found, leaders = self._ready.reader.unverified, self._ready.plan.leaders
        return found | {fqn for fqn, leader in leaders.items() if leader in found} if found else found

    @property
    def _ready(self) -> _Prepared:
        assert self._prepared is not None
        return self._prepared

    async def _check_ties(self, prepared: _Prepared) -> int:
        """Compare tensors that are tied in the target, and were saved separately, as stock DCP does. They are read into
        other memory, before the target is changed. Returns how many bytes that reads. Raises
        ``StateMismatchError``."""
        if self._manifest.exact and not self._manifest.ranks:  # tied tensors were saved once
            return 0
        plan = prepared.plan
        tied = {fqn: leader for fqn, leader in plan.leaders.items() if fqn != leader}
        if tied:
            tied = await io_threads().run(_saved_apart, plan, tied)
        if not tied:
            return 0
        assert self._source is not None
        aside = await io_threads().run(self._aside, plan, dict.fromkeys([*tied, *tied.values()]))
        reader = Reader(self._source, self.request.options.verify)
        await reader.read(list(aside.values()), own=self._manifest.own)
        prepared.reader.unverified |= reader.unverified
        await io_threads().run(_compare_ties, tied, aside)
        return reader.nbytes

    # --- in threads ---

    def _match(self) -> tuple[LoadPlan, set[torch.device], dict[str, ValueEntry]]:
        """Return the plan, the devices of its tensors, and the values that it needs."""
        tolerance, names = self.request.tolerance, self.request.options.names
        found, url, others = self._manifest, self.location.url, self.together is not None
        plan = match(self.state, self._state_dicts, found, url, tolerance, others=others, names=names)
        return plan, _devices(plan), _value_entries(plan)

    def _build(self) -> None:
        """Make the composite tensors from the tensors that were read into new memory."""
        prepared = self._ready
        plan, values = prepared.plan, prepared.values
        entries = plan.names.manifest.entries
        parts = {**prepared.fresh, **plan.tensors}
        made = build_composites(entries, plan.composites, parts, self.request.allowed)
        handover = prepare(plan, values, {**parts, **plan.wholes, **made}, own=self._manifest.exact)
        self._prepared = replace(prepared, handover=handover)
        self._made = made

    def _end_tensors(self) -> None:
        _count_versions(self._ready.plan)
        for leaf in self._ready.plan.sparse:
            fill_sparse(leaf.fqn, leaf.value.tensor, self._made[leaf.fqn])

    def _prepare(self, plan: LoadPlan, reader: Reader, values: Mapping[str, Any]) -> _Prepared:
        manifest = plan.names.manifest
        entries = manifest.entries
        check_types(entries, plan.composites, self.request.allowed)
        new = new_tensors(entries, plan.new)
        fresh = new.tensors
        places = {leader: plan.local[leader].tensor for leader in plan.leaders.values()}
        aside = {name: places[name] for group in plan.shared for name in group}
        copied = _empty(places if self.request.options.atomic else aside)
        places |= copied
        if self.request.options.atomic:
            copied |= reader.direct.tensors
        distinct = {id(tensor): (fqn, tensor) for fqn, tensor in reversed(places.items())}
        wanted = collected(self._want(plan, fqn, tensor) for fqn, tensor in reversed(distinct.values()))
        wanted += new.wanted
        blank = dict.fromkeys(plan.composites, torch.empty(0))  # replaced when they are made
        there = {**fresh, **plan.tensors, **plan.wholes, **blank}
        handover = prepare(plan, values, there, own=manifest.exact)
        inside = {part for fqn in (*plan.wholes, *plan.composites) for part in manifest.parts_of(fqn)}
        names = (fqn for fqn in paced(entries) if fqn not in inside)
        loaded = tuple(fqn for fqn in names if fqn in there or fqn in values)
        return _Prepared(plan, reader, places, wanted, copied, fresh, values, handover, loaded)

    def _aside(self, plan: LoadPlan, fqns: Iterable[str]) -> dict[str, Wanted]:
        there = _empty({fqn: plan.local[fqn].tensor for fqn in fqns})
        return {fqn: self._want(plan, fqn, tensor) for fqn, tensor in there.items()}

    def _want(self, plan: LoadPlan, name: str, tensor: torch.Tensor) -> Wanted:
        local = plan.local.get(name)
        entry = plan.names.manifest.entries[name if local is None else local.fqn]
        assert isinstance(entry, TensorEntry)
        return Wanted(name, entry, Box.whole(entry.shape) if local is None or local.box is None else local.box, tensor)


def _check_left(missing: list[str], unexpected: list[str], tolerance: Tolerance) -> None:
    """Raise ``LoadStateDictError`` for names that code of a module missed or did not take, unless that is accepted."""
    lines = [f"{fqn}: missed by its module" for fqn in missing if not accepts(tolerance.missing, fqn)]
    lines += [f"{fqn}: not taken by its module" for fqn in unexpected if not accepts(tolerance.unexpected, fqn)]
    if lines:
        raise LoadStateDictError(f"names that allow_missing= and allow_unexpected= do not accept:\n  {listed(lines)}")


def _empty(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return new memory for tensors that are read before the target is changed."""
    with allocating("memory to load into before the target is changed"):
        return dict(collected((fqn, torch.empty(one.shape, dtype=one.dtype)) for fqn, one in tensors.items()))


def _copy_all(prepared: _Prepared) -> None:
    plan, reader = prepared.plan, prepared.reader
    with reader.streams.current():
        for fqn, source in prepared.copied.items():
            pause_point()
            target = plan.local[fqn].tensor if fqn in plan.local else plan.direct.tensors[fqn]
            with torch.inference_mode(target.is_inference()), torch.no_grad():
                copyable(target).copy_(copyable(source))
    reader.streams.finish()


def _saved_apart(plan: LoadPlan, tied: Mapping[str, str]) -> dict[str, str]:
    """Return those of ``tied`` whose bytes are at another place than those of their leaders."""
    entries = plan.names.manifest.entries

    def place(name: str) -> object:
        entry = entries[plan.local[name].fqn]
        assert isinstance(entry, TensorEntry)
        return entry.dtype, entry.chunks

    return {fqn: leader for fqn, leader in paced(tied.items()) if place(fqn) != place(leader)}


def _compare_ties(tied: Mapping[str, str], aside: Mapping[str, Wanted]) -> None:
    for fqn, leader in tied.items():
        one, other = aside[fqn].target, aside[leader].target
        assert one is not None
        assert other is not None
        if not torch.equal(plain_bytes(one), plain_bytes(other)):
            raise StateMismatchError(
                f"{fqn} shares its memory with {leader}, but they were saved with different values: "
                "untie them, or load only one",
                [fqn],
            )


def _check_shared(prepared: _Prepared) -> None:
    """Copy the tensors of each group to memory that has the layout of the target, and compare them afterwards. Raises
    ``StateMismatchError``."""
    for group in prepared.plan.shared:
        views = _laid_out([prepared.plan.local[name].tensor for name in group])
        for name, view in zip(group, views, strict=True):
            copyable(view).copy_(copyable(prepared.places[name]))
        for name, view in zip(group, views, strict=True):
            if not torch.equal(plain_bytes(view), plain_bytes(prepared.places[name])):
                others = ", ".join(other for other in group[:_LISTED] if other != name) or "itself"
                raise StateMismatchError(
                    f"{name} shares some of its memory with {others}, but other values were saved there: clone() it, "
                    "or load only one",
                    [name],
                )


def _laid_out(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors in new memory that lie to each other as these do."""
    starts, ends = zip(*map(addresses, tensors), strict=True)
    first = min(starts) // _ALIGN_BYTES * _ALIGN_BYTES
    with allocating("memory to compare tensors that share memory"):
        memory = torch.empty(max(ends) - first, dtype=torch.uint8).untyped_storage()
    found = []
    for start, one in zip(starts, tensors, strict=True):
        view = torch.empty(0, dtype=one.dtype)
        view.set_(memory, (start - first) // one.itemsize, one.shape, one.stride())
        view = view.conj() if one.is_conj() else view
        found.append(neg_view(view) if one.is_neg() else view)
    return found


def _opaque(plan: LoadPlan) -> dict[str, OpaqueEntry]:
    entries = plan.names.manifest.entries
    found = ((fqn, entries[fqn]) for fqn in paced(plan.findings.opaque))
    return {fqn: entry for fqn, entry in found if isinstance(entry, OpaqueEntry)}


def _value_entries(plan: LoadPlan) -> dict[str, ValueEntry]:
    found = dict(collected((leaf.fqn, entry) for leaf, entry in plan.values))
    for stateful in plan.statefuls:
        entries = paced(stateful.entries.items())
        found.update((fqn, entry) for fqn, entry in entries if isinstance(entry, ValueEntry))
    return found


def _devices(plan: LoadPlan) -> set[torch.device]:
    return set(collected(one.tensor.device for one in plan.local.values()))


def _count_versions(plan: LoadPlan) -> None:
    """Increment the versions of the tensors that were written to, for autograd."""
    tensors = chain(plan.direct.tensors.values(), (one.tensor for one in plan.local.values()))
    while some := list(islice(tensors, 64)):
        torch.autograd.graph.increment_version(list(filterfalse(torch.Tensor.is_inference, some)))
        pause_point()

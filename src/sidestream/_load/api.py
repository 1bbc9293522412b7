"""``load``: a checkpoint into a live state dict, in place."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any, TypeVar

import torch

from .._format.digest import digest_check
from .._format.records import Entry, ForeignPayload, Manifest, OpaqueEntry, TensorEntry, ValueEntry
from .._group import GroupChoice, Operation, Part, deadline_of, group_of
from .._layout.ask import Answers
from .._layout.local_shards import Local
from .._layout.match import LoadPlan, match
from .._layout.objects import allowed_types
from .._runtime.abandoned import noted, watch
from .._runtime.public import public
from .._runtime.tasks import finish, running_loop
from .._runtime.threads import (
    Deadline,
    Steps,
    gathered,
    io_threads,
    let_go,
    politely,
    run_sliced,
    sliced,
    time_limit,
)
from .._runtime.torch_probes import dtype_from_name, plain_bytes
from .._storage import Location, RangeSource, Where, locate_directory
from ..errors import Corrupt, Mismatch, SidestreamError, allocating, printable
from ..options import (
    RANK_WAIT_S,
    Allowance,
    Progress,
    StorePolicy,
    Trust,
    Verify,
    check_seconds,
    check_strict,
)
from .apply import Handover, hand_over, prepare
from .device_streams import streams_of
from .foreign.values import read_values, why_opaque
from .group import agree_on, outline, read_needed, stoppable
from .open.manifest import open_manifest, open_root
from .reader import Reader, Wanted, whole
from .report import LoadOptions, LoadReport, PassedOver

__all__ = ["LoadOptions", "LoadReport", "NewTensors", "PassedOver", "load", "load_from", "new_tensors", "together"]

T = TypeVar("T")


@public
async def load(
    state: Mapping[str, Any],
    url: str | os.PathLike[str],
    *,
    strict: Collection[Allowance] = (),
    verify: Verify = "always",
    atomic: bool = False,
    progress: Progress | None = None,
    timeout_s: float = 600.0,
    rank_wait_s: float = RANK_WAIT_S,
    allow: Iterable[type] = (),
    trust: Trust = "data",
    storage_options: Mapping[str, Any] | None = None,
    filesystem: Any = None,
    store_policy: StorePolicy | None = None,
    process_group: GroupChoice = None,
    planner: Any = None,
) -> LoadReport:
    """Load the checkpoint at ``url`` into ``state``, in place: ours, or one that stock DCP wrote.

    Tensors of ``state`` are read into; plain values are replaced in their dict or list. An object with
    ``load_state_dict`` is handed everything saved below its key: tensors of its own ``state_dict()`` are read in place
    first, those that it lacks (the moments of a fresh optimizer) come as new tensors. Those two methods are called on
    the event loop, everything else happens in threads; leave the structure of ``state`` alone until this returns.

    Everything is checked before anything is changed: a ``Mismatch`` lists every missing key, unexpected key (inside the
    top-level keys of ``state``), shape, dtype and kind that differs. ``strict`` names what may differ, ``"partial"``,
    ``"cast"``, ``"ignore_unexpected"``, and the report lists what did. ``progress(done, total)`` is called on the loop
    with bytes. Raises ``CheckpointNotFound``; ``Corrupt``, also for altered bytes (``verify``), which may be found
    after some tensors were written: ``error.written`` lists them. With ``atomic=True`` everything is read into memory
    of its own first, so that a failure leaves ``state`` untouched. The same holds for a cancel, ``StorageError`` and
    ``DeadlineExceeded``; a cancel that comes when all has been read is raised after ``state`` has changed as a whole.

    Of other writers' values only plain data is read, and objects of the types in ``allow``: those, and no others, are
    made again by their own code from what was saved. Anything else raises ``UnsafeObject``. ``trust="pickle"``
    unpickles those values instead, and so runs whatever code the file brings: only for files that you would run as a
    program. It concerns values of other writers alone; metadata, tensors and our own checkpoints are data all the same.

    Where ``torch.distributed`` is initialized this is a call of all ranks together, as ``save`` is: each reads what its
    own tensors need, and all ranks raise the same ``RankFailures``. ``process_group="alone"`` loads into this process
    only; ``rank_wait_s`` is as for ``save``.

    ``planner``, a ``LoadPlanner`` of torch, decides what is read, and into what: names, missing keys and dtypes are its
    affair then (``docs/ranks.md``). It is asked in threads, one call after the other; ``PlannerFailed`` is what it
    raises.

    ``storage_options``, ``filesystem`` and ``store_policy`` are as for ``save``; ``http(s)://`` can be read too.
    """
    running_loop("load")
    member = group_of(process_group)

    async def run(operation: Operation | None) -> LoadReport:
        check_seconds("rank_wait_s", rank_wait_s)
        allowed = allowed_types(allow)
        options = LoadOptions(verify, check_strict(strict), atomic, progress, timeout_s, allowed, trust, planner)
        where = Where(storage_options, filesystem, store_policy)
        return await load_from(locate_directory(url, where), state, options, operation)

    if member is None or member.group.world == 1:
        return await run(None)
    return await together(run, member.begin("load", deadline_of(timeout_s), rank_wait_s))


async def together(work: Callable[[Operation], Awaitable[T]], operation: Operation) -> T:
    """What all ranks do, so that it ends alike for all. Raises ``RankFailures``; its own cancel."""
    watched = watch(Part(operation))
    try:
        result = await work(operation)
    except BaseException as error:
        verdict = await operation.failed(error)
        if not isinstance(error, Exception):
            raise
        verdict.written = getattr(error, "written", ())
        raise verdict from error
    finally:
        watched.end()
    operation.close()
    return result


async def load_from(
    location: Location, state: Mapping[str, Any], options: LoadOptions, operation: Operation | None = None
) -> LoadReport:
    """``load`` from a resolved location. ``operation`` is there where several ranks load."""
    deadline = Deadline.after(options.timeout_s)
    changed = "its threads have stopped; tensors may have been changed"
    with time_limit(deadline), noted(f"loading {location.url}", changed, deadline.at):
        return await _load_by(location, state, options, operation)


async def _load_by(
    location: Location,
    state: Mapping[str, Any],
    options: LoadOptions,
    operation: Operation | None,
) -> LoadReport:
    if options.planner is not None:
        from .planner.load import load_planned  # imports DCP, as the planner has done

        return await load_planned(location, state, options, operation)
    with ExitStack() as opened:
        if operation is None:
            source, manifest = await open_manifest(location)
            opened.enter_context(closing(source))
            answers = await _ask(state)
            strict, in_place = options.strict, not options.atomic
            plan = await io_threads().run_sliced(match, state, answers, manifest, location.url, strict, in_place)
            await _refuse_opaque(source, location.url, manifest, plan)
        else:
            work = _match_together(location, state, await _ask(state), options, operation, opened)
            source, manifest, plan = await stoppable(operation, work)
        report = await _load(source, location.url, manifest, plan, options, operation)
    with time_limit(None):  # the load has succeeded
        await io_threads().run(let_go, manifest.entries)
    return report


async def _ask(state: Mapping[str, Any]) -> Answers:
    answers = Answers()
    for _ in answers.ask(state):
        await asyncio.sleep(0)
    return answers


async def _match_together(
    location: Location,
    state: Mapping[str, Any],
    answers: Answers,
    options: LoadOptions,
    operation: Operation,
    opened: ExitStack,
) -> tuple[RangeSource, Manifest, LoadPlan]:
    """Each rank compares its template with an outline of the checkpoint, and reads of its description what it needs.
    ``opened`` closes the source."""
    threads, url = io_threads(), location.url

    def compare(manifest: Manifest) -> LoadPlan:
        return run_sliced(match(state, answers, manifest, url, options.strict, not options.atomic, others=True))

    source, root = await open_root(location)
    opened.enter_context(closing(source))
    found = await outline(root)
    plan = await threads.run(compare, found)
    await _refuse_opaque(source, url, found, plan)
    await agree_on(operation, found, plan, url)
    manifest = await read_needed(source, root, plan)
    if manifest is not found:
        plan = await threads.run(compare, manifest)
    return source, manifest, plan


async def _refuse_opaque(source: RangeSource, url: str, manifest: Manifest, plan: LoadPlan) -> None:
    """Raise an error if the target requests tensors that cannot be read. It names the first and says how many."""
    if not plan.opaque:
        return
    fqn = plan.opaque[0]
    entry = manifest.entries[fqn]
    assert isinstance(entry, OpaqueEntry)
    error = await why_opaque(source, fqn, entry)
    others = f"; the target requests {len(plan.opaque)} such tensors" if len(plan.opaque) > 1 else ""
    error.args = (f"{url}: {error.args[0]}{others} (nothing was changed)",)
    raise error


async def _load(
    source: RangeSource,
    url: str,
    manifest: Manifest,
    plan: LoadPlan,
    options: LoadOptions,
    operation: Operation | None,
) -> LoadReport:
    threads = io_threads()
    streams = await streams_of(await threads.run(_devices, plan.local))
    reader = Reader(source, options.verify, options.progress, streams, plan.straight)
    return await _telling(_Load(url, manifest, plan, reader, options, operation))


async def _telling(work: _Load) -> LoadReport:
    """``work``; an error says what of the target was written."""
    try:
        return await work.run()
    except (Exception, asyncio.CancelledError) as error:
        written = work.written()
        if written:
            names = printable(", ".join(written[:20]))
            error.add_note(f"{len(written)} tensors of the target were written already: {names}")
        if isinstance(error, FileNotFoundError) and not isinstance(error, SidestreamError):
            raise _tell(Corrupt(f"{work.url}: {error.filename} is missing"), written) from error
        if isinstance(error, SidestreamError):
            _tell(error, written)
        raise


def _tell(error: SidestreamError, written: tuple[str, ...]) -> SidestreamError:
    error.written = written
    return error


@dataclass(frozen=True, slots=True)
class NewTensors:
    """Tensors in new memory, by FQN, and the reads that fill all of them."""

    tensors: dict[str, torch.Tensor]
    wanted: list[Wanted]


@sliced
def new_tensors(
    entries: Mapping[str, Entry], fqns: Iterable[str], device: torch.device | None = None
) -> Steps[NewTensors]:
    """Allocate memory for tensors that have none yet. Tied tensors (one item in the file) share memory, and so do
    several views of one storage, which is read once, as a whole. Called in a worker thread. Raises ``OutOfMemory``."""
    new = NewTensors({}, [])
    shared: dict[object, torch.Tensor] = {}
    storages: dict[tuple[str, int], list[str]] = {}
    for fqn in fqns:
        yield
        entry = entries[fqn]
        assert isinstance(entry, TensorEntry)
        if len(entry.chunks) == 1 and entry.chunks[0].told is not None and 0 not in entry.shape:
            storages.setdefault((entry.chunks[0].file, entry.chunks[0].item_offset), []).append(fqn)
            continue
        identity = (entry.dtype, entry.chunks) if entry.chunks and entry.chunks[0].payload_offset is not None else fqn
        if identity not in shared:
            shared[identity] = _new(fqn, entry, device)
            new.wanted.append(Wanted(fqn, entry, whole(entry), shared[identity]))
        new.tensors[fqn] = shared[identity]
    for views in storages.values():
        yield
        _add_views(new, entries, views, device)
    return new


@sliced
def _add_views(
    new: NewTensors, entries: Mapping[str, Entry], fqns: list[str], device: torch.device | None
) -> Steps[None]:
    """Add the tensors of one storage. If they are all the same view, only its elements are kept."""
    views = [entry for fqn in fqns if isinstance(entry := entries[fqn], TensorEntry)]
    first = views[0]
    if all(gathered(one.dtype == first.dtype and one.chunks == first.chunks for one in views)):
        tensor = _new(fqns[0], first, device)
        new.tensors.update(dict.fromkeys(fqns, tensor))
        new.wanted.append(Wanted(fqns[0], first, whole(first), tensor))
        return
    (chunk,) = first.chunks
    assert chunk.told is not None
    nbytes = chunk.told.payload_bytes
    told = ForeignPayload(chunk.told.crc, nbytes)
    storage = TensorEntry(first.path, "uint8", (nbytes,), (replace(chunk, offsets=(0,), sizes=(nbytes,), told=told),))
    memory = _new(fqns[0], storage, device)
    new.wanted.append(Wanted(fqns[0], storage, whole(storage), memory))
    for fqn, view in zip(fqns, views, strict=True):
        yield
        dtype = dtype_from_name(view.dtype)
        elements = memory[: nbytes // dtype.itemsize * dtype.itemsize].view(dtype)
        payload = view.chunks[0].told
        assert payload is not None
        strides = torch.empty(view.shape, device="meta").stride() if payload.strides is None else payload.strides
        new.tensors[fqn] = elements.as_strided(view.shape, strides, payload.first_element)


def _new(fqn: str, entry: TensorEntry, device: torch.device | None) -> torch.Tensor:
    with allocating(f"memory for {fqn}"):
        return torch.empty(entry.shape, dtype=dtype_from_name(entry.dtype), device=device)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What is decided and allocated before the first byte is read.

    ``places``: where the tensors of the target are read to, by leader. ``again``: tensors that are tied in the target
    and were saved one by one, as stock DCP does, are read aside too, to be compared.
    """

    places: Mapping[str, torch.Tensor]
    wanted: list[Wanted]
    again: tuple[Wanted, ...]
    handover: Handover
    loaded: tuple[str, ...]
    pointers: Mapping[str, int]


@dataclass(slots=True)
class _Load:
    url: str
    manifest: Manifest
    plan: LoadPlan
    reader: Reader
    options: LoadOptions
    operation: Operation | None = None
    pointers: Mapping[str, int] = field(default_factory=dict)
    handing_over: bool = False

    async def run(self) -> LoadReport:
        threads = io_threads()
        entries = await threads.run(self._value_entries)
        allow, trust = self.options.allow, self.options.trust
        values = await read_values(self.reader.source, self.manifest, entries, allow, trust)
        prepared = await threads.run(self._prepare, values)
        self.pointers = prepared.pointers
        if self.operation is None:
            await self._read(prepared)
        else:
            self.operation.step = "read"
            await stoppable(self.operation, self._read(prepared))
            await self.operation.agree("read")  # before anything changes that is more than bytes
            self.operation.step = "hand over"

        async def install() -> None:
            if self.options.atomic:
                await threads.run(self._copy_all, prepared.places)
            await threads.run(_count_versions, self.plan)
            await hand_over(prepared.handover)

        # From here on the target changes as a whole: a cancel is raised when it has, and no deadline ends it.
        self.handing_over = True
        with time_limit(None):
            await finish(install)
        if self.operation is not None:
            await self.operation.agree("hand over")
        return LoadReport(
            url=self.url,
            save_id=self.manifest.save_id,
            step=self.manifest.step,
            generation=self.manifest.generation,
            nbytes=self.reader.nbytes,
            loaded=prepared.loaded,
            not_asked_for=self.plan.not_asked_for,
            unverified=tuple(sorted(self.reader.unverified)),
            missing=self.plan.missing,
            cast=self.plan.cast,
            ignored=self.plan.ignored,
            digest=digest_check(self.manifest.digest) if self.options.verify == "always" else None,
        )

    async def _read(self, prepared: _Prepared) -> None:
        await self.reader.read(prepared.wanted, own=self.manifest.own)
        if prepared.again:
            await io_threads().run(self._check_ties, prepared.again, prepared.places)

    def written(self) -> tuple[str, ...]:
        """Which tensors of the target have been written to, under all the names that they have."""
        if self.handing_over:
            return tuple(self.plan.tensors)
        if self.options.atomic:
            return ()
        straight = {fqn: tensor.data_ptr() for fqn, tensor in self.plan.straight.tensors.items()}
        pointers = {**straight, **self.pointers}
        touched = {pointers[name] for name in self.reader.touched if name in pointers}
        names = (name for name, pointer in pointers.items() if pointer in touched)
        return tuple(dict.fromkeys(name if name in straight else self.plan.local[name].fqn for name in names))

    def _prepare(self, values: Mapping[str, Any]) -> _Prepared:
        plan, entries = self.plan, self.manifest.entries
        new = new_tensors(entries, plan.new)
        fresh = new.tensors
        places = {leader: plan.local[leader].tensor for leader in plan.leaders.values()}
        if self.options.atomic:
            with allocating("memory to load into before the target is changed"):
                empty = gathered((fqn, torch.empty(one.shape, dtype=one.dtype)) for fqn, one in places.items())
                places = dict(empty)
        distinct = {id(tensor): (fqn, tensor) for fqn, tensor in reversed(places.items())}
        wanted = gathered(self._want(fqn, tensor) for fqn, tensor in reversed(distinct.values()))
        wanted += new.wanted
        ties_known = self.manifest.exact and not self.manifest.ranks
        again = () if ties_known else tuple(self._aside(fqn) for fqn, to in plan.leaders.items() if fqn != to)
        handover = prepare(plan, values, {**fresh, **plan.tensors}, own=self.manifest.exact)
        loaded = tuple(fqn for fqn in politely(entries) if fqn in plan.tensors or fqn in fresh or fqn in values)
        pointers = dict(gathered((name, one.tensor.data_ptr()) for name, one in plan.local.items()))
        return _Prepared(places, [*wanted, *again], again, handover, loaded, pointers)

    def _aside(self, fqn: str) -> Wanted:
        tensor = self.plan.local[fqn].tensor
        return self._want(fqn, torch.empty(tensor.shape, dtype=tensor.dtype))

    def _want(self, name: str, tensor: torch.Tensor) -> Wanted:
        local = self.plan.local.get(name)
        entry = self.manifest.entries[name if local is None else local.fqn]
        assert isinstance(entry, TensorEntry)
        return Wanted(name, entry, whole(entry) if local is None or local.box is None else local.box, tensor)

    @sliced
    def _copy_all(self, places: Mapping[str, torch.Tensor]) -> Steps[None]:
        with self.reader.streams.current():
            for fqn, source in places.items():
                yield
                target = self.plan.local[fqn].tensor
                with torch.inference_mode(target.is_inference()), torch.no_grad():
                    target.copy_(source)
        self.reader.streams.finish()

    def _check_ties(self, again: Iterable[Wanted], places: Mapping[str, torch.Tensor]) -> None:
        for one in again:
            leader = self.plan.leaders[one.fqn]
            assert one.target is not None
            if not torch.equal(plain_bytes(one.target.cpu()), plain_bytes(places[leader].cpu())):
                raise Mismatch(
                    f"{one.fqn} shares its memory with {leader}, but they were saved with different values: "
                    "untie them, or load only one",
                    [one.fqn],
                )

    def _value_entries(self) -> dict[str, ValueEntry]:
        found = dict(gathered((leaf.fqn, entry) for leaf, entry in self.plan.values))
        for stateful in self.plan.statefuls:
            entries = politely(stateful.entries.items())
            found.update((fqn, entry) for fqn, entry in entries if isinstance(entry, ValueEntry))
        return found


def _devices(tensors: Mapping[str, Local]) -> set[torch.device]:
    return set(gathered(one.tensor.device for one in tensors.values()))


@sliced
def _count_versions(plan: LoadPlan) -> Steps[None]:
    """Autograd sees that the tensors were written to."""
    tensors = chain(plan.straight.tensors.values(), (one.tensor for one in plan.local.values()))
    while some := list(islice(tensors, 64)):
        torch.autograd.graph.increment_version([tensor for tensor in some if not tensor.is_inference()])
        yield

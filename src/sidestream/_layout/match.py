"""The comparison of a target (the state dict to load into) with a manifest. It returns a plan, or raises one error with
all differences."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from operator import itemgetter
from typing import Any, TypeAlias, TypeVar

import torch
from torch.nn.parameter import is_lazy

from .._format.records import (
    CompositeEntry,
    DictKey,
    EmptyEntry,
    Entry,
    Key,
    Manifest,
    OpaqueEntry,
    Row,
    TensorEntry,
    ValueEntry,
    path_of,
)
from .._runtime.pauses import chunked, collected, paced, pause_point
from .._runtime.public import shortened
from .._runtime.torch_probes import Stateful, addresses, check_tensor, dtype_name, lazy_bits
from ..errors import (
    KindMismatchError,
    ShapeMismatchError,
    StateMismatchError,
    UnsupportedTensorError,
)
from ..options import Tolerance
from .composites.matching import CompositeTargets, kind_of, saved_composites
from .findings import Findings, accepts, dtype_fits
from .flatten import CompositeLeaf, Leaf, PlainPath, StateDicts, StatefulRoot, leaves_of, plain_path
from .local_shards import Local, global_shape, is_distributed, locals_of
from .names import Names, Renamed, castable, renamed
from .objects import LoadedAsSaved, containers_of, loaded_as_saved, unsaved_leaves
from .ranges import Candidate, DirectReads

T = TypeVar("T")
_Box: TypeAlias = list[tuple[int, int]]
_Extents: TypeAlias = Mapping[str, tuple[int, int]]
"""The first address of each tensor that has elements, and the one after the last."""

_NOTHING = LoadedAsSaved(whole=False)
_MANY = 256
_FEW = 32  # leaves, which take some microseconds each


@dataclass(frozen=True, slots=True)
class StatefulLoad:
    """The load of an object. ``instance`` gets everything that was saved below ``path``: ``entries``, by FQN. ``kept``
    are the leaves of its own state that were not saved and may keep their values.

    ``containers`` are the mappings in the instance's own state that are not plain dicts, by path. ``integer_keys`` are
    the plain paths of dicts in it whose keys are integers. DCP saves such keys as strings. ``lenient``: a module whose
    ``load_state_dict`` is called with ``strict=False``.
    """

    instance: Stateful
    fqn: str
    path: tuple[Key, ...]
    entries: Mapping[str, Entry]
    kept: tuple[Leaf, ...]
    containers: Mapping[PlainPath, Mapping[Any, Any]]
    integer_keys: frozenset[PlainPath]
    lenient: bool


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The plan of a load.

    - ``names`` has the checkpoint with the FQNs of the target. Only ``not_requested``, ``ignored`` and ``unexpected``
      are names of the checkpoint.
    - ``tensors`` are the tensors that are overwritten in place, by FQN. Those in ``direct`` are read as they are in
      the file. For the others, ``local`` has their memory in this process by name (the FQN for plain tensors), and
      ``leaders`` the first name of the same memory (tied tensors have one leader).
    - ``new`` are the FQNs of tensors that are read into new memory. ``composites`` are the FQNs of composite tensors
      that are made of them. ``sparse`` are the leaves that then get the content of theirs. ``wholes`` are the composite
      tensors of the target whose parts are read in place.
    - ``values`` are leaves whose holder gets a new value.
    - ``not_requested`` are keys of the checkpoint that are not read. ``findings`` has the differences that were
      accepted. It has the keys below top-level keys of the target that this rank does not request, which are an error
      unless another rank requests them, and the tensors that cannot be read: if there are any, nothing is changed.
    """

    names: Renamed
    tensors: Mapping[str, torch.Tensor]
    direct: DirectReads
    local: Mapping[str, Local]
    leaders: Mapping[str, str]
    new: tuple[str, ...]
    composites: tuple[str, ...]
    sparse: tuple[Leaf, ...]
    wholes: Mapping[str, torch.Tensor]
    values: tuple[tuple[Leaf, ValueEntry], ...]
    statefuls: tuple[StatefulLoad, ...]
    not_requested: tuple[str, ...]
    findings: Findings
    parts: frozenset[str]
    """All parts of composite tensors in the checkpoint, by their names in ``names``."""
    shared: tuple[tuple[str, ...], ...]
    """Groups of names in ``local`` of different views that may share elements, such as a tensor and its transpose. They
    are read into other memory, compared, and then copied."""


def match(
    state: Mapping[str, Any],
    state_dicts: StateDicts,
    manifest: Manifest,
    url: str,
    tolerance: Tolerance,
    *,
    others: bool = False,
    names: Names | None = None,
) -> LoadPlan:
    """Flatten the target and find its leaves in the checkpoint. ``others``: other ranks load with this one, so
    unexpected keys are recorded in the plan and are not an error. ``names`` maps names in ``state`` to names in the
    checkpoint.

    Raises a ``StateMismatchError`` that lists every missing or unexpected key and every tensor of another shape, dtype
    or kind, as far as ``tolerance`` does not accept them. Raises ``KeyCollisionError`` if ``names`` gives one name to
    several.
    """
    saved_names, renames = manifest.entries.keys(), Renamed(manifest)
    # From here on everything has the names of the target, as if the checkpoint had been saved with them. Only what is
    # reported to the caller is translated back.
    if names is not None:
        renames = renamed(manifest, leaves_of(state, state_dicts), names, url, same=_same, others=others)
        manifest = renames.manifest
    findings = Findings(tolerance, renames, unexpected=[] if others else None)
    # Computed once, before any leaf. An empty dict of this rank may be the place of entries that only other ranks
    # request, so its contents are not a finding.
    filled = _filled_by_others(leaves_of(state, state_dicts), manifest) if others else frozenset()
    matching = _Matching(manifest, findings, filled)
    for leaves in chunked(leaves_of(state, state_dicts), _FEW):
        pause_point()
        matching.take(leaves)
    # Only after all leaves: what an object gets includes entries that are not among its leaves, such as the moments
    # that a fresh optimizer does not have yet.
    statefuls = matching.statefuls()
    top = {str(key) for key, _ in state_dicts.items(state)}
    rest = _not_requested(renames, matching.requested, top, findings, matching.parts)
    local, leaders, shared = matching.memory()
    _check_fresh(statefuls, matching.tensors)
    findings.raise_if_any(url, lambda: _names_in(state, state_dicts), saved_names)
    new, made = matching.new(statefuls)
    composites = matching.composites
    return LoadPlan(
        names=renames,
        tensors=matching.tensors,
        direct=matching.direct,
        local=local,
        leaders=leaders,
        new=new,
        composites=made,
        sparse=tuple(leaf for leaf in composites.sparse if leaf.owner is None),
        wholes=composites.wholes,
        values=tuple(matching.values),
        statefuls=statefuls,
        not_requested=rest,
        findings=findings,
        parts=matching.parts,
        shared=shared,
    )


class _Matching:
    """The leaves of one target that were found in ``manifest``. ``take`` is called with all of them, in their order.

    ``filled`` are the empty dicts of this rank whose contents other ranks request."""

    def __init__(self, manifest: Manifest, findings: Findings, filled: frozenset[str]) -> None:
        self._manifest, self._findings, self._filled = manifest, findings, filled
        self._saved_composites, self.parts = saved_composites(manifest)
        self.composites = CompositeTargets(manifest, findings, self._saved_composites)
        self.requested: set[str] = set()
        self.tensors: dict[str, torch.Tensor] = {}
        self.values: list[tuple[Leaf, ValueEntry]] = []
        self.direct = DirectReads()
        self._roots: dict[int, Leaf] = {}
        self._owned: dict[int, list[Leaf]] = {}
        """The leaves of each object."""
        self._as_saved: dict[int | None, LoadedAsSaved] = {None: _NOTHING}
        self._held: dict[str, list[tuple[str, Local]]] = {}

    @cached_property
    def _sorted_names(self) -> list[str]:
        """Made for a leaf that is missing, which most loads do not have."""
        return sorted(self._manifest.entries)

    def take(self, leaves: Sequence[Leaf]) -> None:
        """Match some leaves."""
        # Objects first. A root comes before its own leaves, in this chunk or in an earlier one, and the leaves are
        # compared by what their object takes.
        for root in leaves:
            if isinstance(root.value, StatefulRoot):
                number = root.value.number
                self._roots[number], self._owned[number] = root, []
                self._as_saved[number] = loaded_as_saved(root)
        # The common case is decided for all of them at once: a plain tensor with one row in the manifest needs none of
        # the branches in ``_take``. A tensor that code of a module takes apart is not among them, since that code gets
        # new memory.
        plain = [
            leaf
            for leaf in leaves
            if leaf.whole is None
            and leaf.fqn not in self._saved_composites
            and leaf.fqn not in self._filled
            and not self._as_saved[leaf.owner].covers(leaf.fqn)
        ]
        added = self.direct.add(_candidates(plain, self._manifest.stored))
        for leaf in leaves:
            self.requested.add(leaf.fqn)
            if isinstance(leaf.value, StatefulRoot) or leaf.fqn in self._filled:
                continue
            if leaf.owner is not None:
                self._owned[leaf.owner].append(leaf)
            if leaf.fqn in added:
                self.tensors[leaf.fqn] = leaf.value
            else:
                self._take(leaf)

    def _take(self, leaf: Leaf) -> None:
        """Match a leaf that is not a plain tensor with one row. Each branch excludes those before it."""
        fqn, value, owner = leaf.fqn, leaf.value, leaf.owner
        entry, findings = self._manifest.entries.get(fqn), self._findings
        as_saved = self._as_saved[owner]
        # A part of a module that has loading code of its own. That code may exchange what was saved of two parameters.
        # If these were read in place, one would be overwritten before the code copies it, so the code gets new memory.
        if as_saved.covers(fqn) and not _has_shards(value):
            if isinstance(value, torch.Tensor) and not is_lazy(value) and value.is_meta:
                check_tensor(value, fqn, "load into")  # load_state_dict would silently keep the meta tensor
            _fits_object(leaf, entry, findings)
            return
        # A composite, whose parts are leaves as well and are compared in its place.
        composite = leaf.whole is not None or fqn in self._saved_composites or type(value) is CompositeLeaf
        if composite and self.composites.take(leaf, compare=not as_saved.whole):
            return
        if composite and self.direct.add(_candidates([leaf], self._manifest.stored)):
            self.tensors[fqn] = value
        # One value of the caller where a container was saved. This is for the caller's own state only: an object
        # decides itself what it makes of its containers.
        elif owner is None and entry is None and not composite and (below := _names_below(fqn, self._sorted_names)):
            self.requested.update(below)
            _add_container(leaf, below, findings)
        elif isinstance(value, torch.Tensor):
            # In an object that takes everything whole, a tensor that does not fit is not a finding: it is read into new
            # memory. A distributed tensor is compared in any case, since only its shards say what this rank reads.
            pieces = list(locals_of(fqn, value))
            if as_saved.whole and not is_distributed(value):
                fits = _fits_object(leaf, entry, findings)
            else:
                fits = _tensor_fits(leaf, pieces, entry, findings)
            if fits:
                self.tensors[fqn], self._held[fqn] = value, pieces
        elif owner is None:  # an object checks its values itself
            _match_value(leaf, entry, self._manifest.exact, self.values, findings)

    def statefuls(self) -> tuple[StatefulLoad, ...]:
        """Return the loads of all objects, when all leaves were taken. What they get is requested from then on."""
        manifest, findings, parts = self._manifest, self._findings, self.parts
        below = _claimed(manifest, self._roots, self._owned)
        found = (
            _match_stateful(root, self._as_saved[number], self._owned[number], below[number], manifest, findings, parts)
            for number, root in self._roots.items()
        )
        statefuls = tuple(stateful for stateful in found if stateful is not None)
        self.requested.update(fqn for entries in below.values() for fqn in entries)
        self.requested.update(part for fqn in self.composites.met for part in manifest.parts_of(fqn))
        return statefuls

    def memory(self) -> tuple[dict[str, Local], dict[str, str], tuple[tuple[str, ...], ...]]:
        """Return ``local``, ``leaders`` and ``shared`` of the plan. Tensors of objects that share memory are removed
        from ``tensors``."""
        # Last, since overlaps need the memory of every tensor. Three cases share memory. Leaves of an object that were
        # not saved so are read into new memory, and the object copies. The same view twice is a tie: one leader is
        # read. Different views that may overlap are read into other memory, compared, and copied.
        manifest = self._manifest
        local, extents = _locals(self.tensors, self._held, self.direct, manifest)
        objects = (leaf for number, leaves in self._owned.items() if self._as_saved[number].whole for leaf in leaves)
        for fqn in _sharing_of_objects(local, extents, objects, manifest):
            del self.tensors[fqn], local[fqn]
        leaders = _tied(local, extents, manifest, self._findings)
        return local, leaders, _sharing(local, extents, dict.fromkeys(leaders.values()))

    def new(self, statefuls: Iterable[StatefulLoad]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the tensors and the composite tensors that are made for objects, and not read in place."""
        sparse = self.composites.sparse
        new = dict.fromkeys(part for leaf in sparse for part in self._manifest.parts_of(leaf.fqn))
        made = dict.fromkeys(leaf.fqn for leaf in sparse)
        for stateful in statefuls:
            for fqn, entry in paced(stateful.entries.items()):
                if isinstance(entry, TensorEntry) and fqn not in self.tensors:
                    new[fqn] = None
                elif isinstance(entry, CompositeEntry) and fqn not in self.composites.wholes:
                    made[fqn] = None
        return tuple(new), tuple(made)


def _candidates(leaves: Iterable[Leaf], found: Mapping[str, Entry | Row]) -> list[Candidate]:
    """Return the tensors that the checkpoint has as rows."""
    rows = ((leaf, found.get(leaf.fqn)) for leaf in leaves)
    return [
        (leaf.fqn, leaf.value, row)
        for leaf, row in rows
        if isinstance(row, tuple) and isinstance(leaf.value, torch.Tensor)
    ]


def _names_in(state: Mapping[str, Any], state_dicts: StateDicts) -> list[str]:
    return [leaf.fqn for leaf in leaves_of(state, state_dicts) if not isinstance(leaf.value, StatefulRoot)]


def _same(one: object, other: object) -> bool:
    """Return whether two values of the target are tensors over the same memory."""
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return False
    views = ([(_view(local.tensor), local.box) for _, local in locals_of("", each)] for each in (one, other))
    return one is other or (one.numel() > 0 and next(views) == next(views))


def _view(tensor: torch.Tensor) -> object:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), lazy_bits(tensor)


def _locals(
    tensors: Mapping[str, torch.Tensor],
    held: Mapping[str, Iterable[tuple[str, Local]]],
    direct: DirectReads,
    manifest: Manifest,
) -> tuple[dict[str, Local], _Extents]:
    """Return the memory of the tensors that are not ``direct``, and its extents. Tensors that share memory are
    removed from ``direct`` first. ``held`` has the pieces of tensors that are known already."""

    def others() -> Iterator[tuple[str, Local]]:
        for fqn, tensor in tensors.items():
            if fqn not in direct.tensors:
                for name, piece in held.get(fqn) or locals_of(fqn, tensor):
                    # The name of a shard is made up, and may be that of an entry. ``local`` is keyed by these names.
                    while name != fqn and (name in tensors or name in manifest.entries):
                        name += "+"  # noqa: PLW2901  # an entry of its own has the name of this part
                    yield name, piece

    local = dict(collected(others()))
    extents = _extents(local)
    shared = direct.shared(extents.values())
    if not shared:
        return local, extents
    direct.remove(shared)
    local = dict(collected(others()))
    return local, _extents(local)


def _sharing_of_objects(
    local: Mapping[str, Local], extents: _Extents, leaves: Iterable[Leaf], manifest: Manifest
) -> set[str]:
    """Return the names of those ``leaves`` of objects that share memory with other tensors of the target and were not
    saved so. The object gets what was saved in new memory."""
    placed = collected((*extent, name) for name, extent in extents.items())
    groups = [group for group in _separated(placed) if len(group) > 1]
    if not groups:
        return set()
    whole = (leaf.fqn for leaf in leaves if leaf.whole is None and not _has_shards(leaf.value))
    names = set(collected(whole))
    found: set[str] = set()
    for group in paced(groups):
        mine = [name for name in group if name in names]
        if mine and not _saved_tied([local[name] for name in group], manifest):
            # The other members of the group keep the memory. If all members belong to objects, the first of them keeps
            # it.
            found.update(mine[len(mine) == len(group) :])  # one of them may keep the memory
    return found


def _saved_tied(pieces: Sequence[Local], manifest: Manifest) -> bool:
    first, *others = pieces
    view = _view(first.tensor), first.box
    # ``exact`` and no parts of ranks: only then do equal checksums say that contents are equal. DCP has no checksums of
    # blocks, and parts of ranks may hold different replicas.
    same = all((_view(one.tensor), one.box) == view for one in others)
    exact = manifest.exact and not manifest.ranks
    return same and exact and all(_same_content(manifest, one.fqn, first.fqn) for one in others)


def _extents(local: Mapping[str, Local]) -> _Extents:
    pieces = ((name, one.tensor) for name, one in local.items())
    return dict(collected((name, addresses(tensor)) for name, tensor in pieces if tensor.numel()))


def _filled_by_others(leaves: Iterable[Leaf], manifest: Manifest) -> frozenset[str]:
    """Return the empty dicts of this rank that are not empty in the checkpoint. Other ranks request their contents."""
    empty = {
        plain_path(leaf.path): leaf.fqn
        for leaf in paced(leaves, 16)
        if leaf.owner is None and leaf.kind == "empty" and leaf.fqn not in manifest.entries
    }
    if not empty:
        return frozenset()
    found: set[str] = set()
    for entry in paced(manifest.stored.values()):
        path = plain_path(path_of(entry))
        found.update(empty[path[:depth]] for depth in range(1, len(path)) if path[:depth] in empty)
    return frozenset(found)


def _check_fresh(statefuls: Iterable[StatefulLoad], tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise ``UnsupportedTensorError`` for state that an optimizer of sharded parameters does not have yet. Every rank
    would read it whole."""
    for stateful in statefuls:
        if not isinstance(stateful.instance, torch.optim.Optimizer):
            continue
        if not any(is_distributed(one) for group in stateful.instance.param_groups for one in group["params"]):
            continue
        for fqn, entry in stateful.entries.items():
            if isinstance(entry, TensorEntry) and entry.shape and fqn not in tensors:
                raise UnsupportedTensorError(
                    f"{fqn}: the optimizer of sharded parameters does not have this state yet, so its sharding is not "
                    "known: load what torch.distributed.checkpoint.state_dict.get_optimizer_state_dict() gives "
                    "instead of the optimizer"
                )


def _not_requested(
    renames: Renamed, requested: set[str], top: set[str], findings: Findings, parts: frozenset[str]
) -> tuple[str, ...]:
    """Return the keys of the checkpoint that are not requested. Below top-level keys of the target they are findings.
    Parts are requested with their tensor. A tensor is also requested by all of its parts, as stock DCP does."""
    rest = []
    for number, (fqn, entry) in enumerate(renames.manifest.stored.items()):
        if number % 64 == 0:
            pause_point()
        if fqn in requested or fqn in parts:
            continue
        if isinstance(entry, CompositeEntry) and requested.issuperset(renames.manifest.parts_of(fqn)):
            continue
        if fqn in renames.inside or str(plain_path(path_of(entry))[0]) in top:
            findings.add_unexpected(fqn, "target")
        else:
            rest.append(renames.saved_name(fqn))
    return tuple(rest)


def _tensor_fits(leaf: Leaf, pieces: Iterable[tuple[str, Local]], entry: Entry | None, findings: Findings) -> bool:
    tensor = leaf.value
    distributed = is_distributed(tensor)
    for _, piece in pieces:
        check_tensor(piece.tensor, leaf.fqn, "load into")
    if entry is None:
        findings.add_missing(leaf.fqn)
    elif isinstance(entry, OpaqueEntry):
        findings.opaque.append(leaf.fqn)
    elif isinstance(entry, CompositeEntry):
        findings.add(KindMismatchError, f"{leaf.fqn}: a plain tensor in the target, a {entry.type} in the checkpoint")
    elif not isinstance(entry, TensorEntry):
        findings.add(
            KindMismatchError, f"{leaf.fqn}: a tensor in the target, a plain value in the checkpoint (put None there)"
        )
    elif global_shape(tensor) != entry.shape:
        findings.add(ShapeMismatchError, f"{leaf.fqn}: shape {global_shape(tensor)} in the target, {entry.shape} saved")
    elif not distributed and _is_expanded(tensor):
        findings.add(
            StateMismatchError, f"{leaf.fqn}: expanded in the target (several elements share memory); clone() it"
        )
    else:
        return dtype_fits(leaf.fqn, dtype_name(tensor.dtype), entry.dtype, findings)
    return False


def _fits_object(leaf: Leaf, entry: Entry | None, findings: Findings) -> bool:
    """Return whether a tensor of an object can be read in place. If not, the object gets what was saved in new memory.
    A tensor that differs in its dtype alone is compared as elsewhere."""
    tensor = leaf.value
    if not isinstance(tensor, torch.Tensor) or not isinstance(entry, TensorEntry) or is_lazy(tensor) or tensor.is_meta:
        return False
    dtype = dtype_name(tensor.dtype)
    if tuple(tensor.shape) != entry.shape or _is_expanded(tensor) or not castable(entry.dtype, dtype):
        return False
    return dtype_fits(leaf.fqn, dtype, entry.dtype, findings)


def _has_shards(value: object) -> bool:
    return isinstance(value, torch.Tensor) and is_distributed(value)


def _is_expanded(tensor: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _tied(tensors: Mapping[str, Local], extents: _Extents, manifest: Manifest, findings: Findings) -> dict[str, str]:
    """Return the leader of each tensor. Tied tensors must have been saved with the same bytes; for other writers that
    is only known when they are read. Row-major tensors that overlap in another way are findings, because one would be
    read over the other. ``_sharing`` finds other overlaps."""
    first: dict[object, str] = {}
    leaders: dict[str, str] = {}
    row_major: list[tuple[int, int, str]] = []
    exact = manifest.exact and not manifest.ranks
    for fqn, (whole, tensor, box) in tensors.items():
        pause_point()
        # Tensors without elements share nothing, although all of them may have the address 0.
        view = (_view(tensor), box) if fqn in extents else fqn
        leaders[fqn] = leader = first.setdefault(view, fqn)
        if leader != fqn and exact and not _same_content(manifest, whole, tensors[leader].fqn):
            findings.add(
                StateMismatchError, f"{fqn}: shares its memory with {leader}, but they were saved with different values"
            )
        if leader == fqn and fqn in extents and tensor.is_contiguous() and not lazy_bits(tensor):
            row_major.append((*extents[fqn], fqn))
    # Neighbours suffice: of extents that are sorted by their starts, if any two overlap, then so do two neighbours.
    row_major.sort()
    for (_, end, fqn), (start, _, other) in pairwise(row_major):
        if start < end:
            findings.add(
                StateMismatchError, f"{other}: overlaps with {fqn} in the memory of the target; clone() one of them"
            )
    return leaders


def _sharing(tensors: Mapping[str, Local], extents: _Extents, names: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """Return the groups of ``names`` of tensors that may share elements with each other, or have elements that share
    memory."""
    placed = collected((*extents[name], name) for name in names if name in extents)
    groups = map(tuple, _separated(placed))
    return tuple(group for group in groups if not _all_disjoint([tensors[name].tensor for name in group]))


def _all_disjoint(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether these tensors certainly have no element in common, and each has none twice. They are sorted by
    address. Several must be boxes of one array."""
    first = tensors[0]
    if len(tensors) == 1:
        return _is_distinct(first)
    # More than this is not worth the comparison: the tensors are then read into other memory, which is right for any of
    # them.
    if len(tensors) > _MANY:
        return False
    boxes: list[_Box] = []
    for one in tensors:
        pause_point()
        # Columns of one matrix interleave in memory without a common element. Their extents overlap, so only their
        # places in the common array tell them apart.
        box = _box_in(one, first.data_ptr())
        if box is None or one.stride() != first.stride() or one.itemsize != first.itemsize:
            return False
        boxes.append(box)
    return _are_separable(boxes)


def _is_distinct(tensor: torch.Tensor) -> bool:
    """Return whether no two elements can have the same address. False if that is not certain."""
    if tensor.is_contiguous():
        return True
    reached = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reached:
            return False
        reached += (size - 1) * stride
    return True


def _box_in(tensor: torch.Tensor, begin: int) -> _Box | None:
    """Return where ``tensor`` starts and ends in each dimension of the row-major array at ``begin`` that has its
    strides. None if it is not a box in such an array."""
    offset, rest = divmod(tensor.data_ptr() - begin, tensor.itemsize)
    if rest:
        return None
    box: _Box = []
    # From the largest stride down. Each dimension takes its index out of the offset, and has to end within one step of
    # the dimension before it. Otherwise the tensor would wrap into the next row, and two boxes could be apart by their
    # indexes and still share an element.
    outer = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True), reverse=True):
        if stride == 0:
            return None
        start, offset = divmod(offset, stride)
        if outer and (outer % stride or start + size > outer // stride):
            return None
        box.append((start, start + size))
        outer = stride
    return [*box, (offset, offset + 1)]


def _are_separable(boxes: list[_Box]) -> bool:
    """Return whether all boxes can be separated by cuts in one dimension at a time, each through the whole of a part.
    That takes some sorting, and no comparison of all pairs."""
    uncut = [boxes]
    while uncut:
        some = uncut.pop()
        for dimension in range(len(some[0])):
            parts = _separated([(*box[dimension], box) for box in some])
            if len(parts) > 1:
                break
        else:
            return False
        uncut += [part for part in parts if len(part) > 1]
    return True


def _separated(extents: list[tuple[int, int, T]]) -> list[list[T]]:
    """Return the groups of what has a start and an end, such that extents of different groups do not overlap."""
    groups: list[list[T]] = []
    reached = 0
    for some in chunked(sorted(extents, key=itemgetter(0)), _FEW):
        for start, end, one in some:
            if start >= reached:
                groups.append([])
            groups[-1].append(one)
            reached = max(reached, end)
        pause_point()
    return groups


def _same_content(manifest: Manifest, fqn: str, other: str) -> bool:
    contents = []
    for entry in (manifest.entries[fqn], manifest.entries[other]):
        assert isinstance(entry, TensorEntry)
        contents.append([(chunk.offsets, chunk.sizes, chunk.crcs) for chunk in entry.chunks])
    return contents[0] == contents[1]


def _match_stateful(
    root: Leaf,
    as_saved: LoadedAsSaved,
    leaves: list[Leaf],
    below: dict[str, Entry],
    manifest: Manifest,
    findings: Findings,
    parts: frozenset[str],
) -> StatefulLoad | None:
    """Return what an object gets of the entries ``below`` it. None if there are none. The object itself checks whether
    something is missing; of a module only the plain values."""
    empty = [leaf for leaf in leaves if leaf.kind == "empty"]
    # Stock DCP leaves out empty dicts, and ``load_state_dict`` of an object expects them. So the ones that the object
    # has now are added, unless something was saved inside of them.
    if not manifest.exact:  # stock DCP has no entries for empty dicts, and the object expects them
        ours = {
            plain_path(leaf.path) for leaf in empty
        }  # no dict has saved paths as keys, because a file can choose their hashes
        saved: set[PlainPath] = set()
        for entry in paced(below.values()):
            path = plain_path(entry.path)
            saved.update(path[:depth] for depth in range(len(path) + 1) if path[:depth] in ours)
        below.update((leaf.fqn, EmptyEntry(leaf.path)) for leaf in empty if plain_path(leaf.path) not in saved)
    instance = root.value.instance
    compared = (torch.Tensor, CompositeLeaf)
    if not below:
        for leaf in leaves:
            if isinstance(leaf.value, compared) and (as_saved.whole or as_saved.covers(leaf.fqn)):
                findings.add_missing(leaf.fqn)
        keys = collected((fqn.partition(".")[0] for fqn in manifest.entries), _MANY)  # makes no entries
        # Nothing at all was saved below the name of the object: most often the top-level key has another name. So the
        # message lists the keys of the checkpoint.
        found = shortened(sorted(set(keys)))
        findings.add_missing(root.fqn, f"nothing of it in the checkpoint, whose keys are {found}")
        return None
    tensors = {
        leaf.fqn
        for leaf in leaves
        if isinstance(leaf.value, compared) and not (as_saved.whole or as_saved.covers(leaf.fqn))
    }  # they are reported where they are compared
    accepted = findings.tolerance.missing
    absent = [leaf for leaf in leaves if leaf.fqn not in below and accepts(accepted, leaf.fqn)] if accepted else []
    kept: list[Leaf] = []
    entries = below
    # An object and a module differ in who decides. An object may drop or convert anything, so it gets all that was
    # saved, and what it has besides stays if ``allow_missing`` accepts it. A module would refuse names that it does not
    # know, in a message of its own. So names are compared here, where all differences of the load are reported
    # together.
    if as_saved.whole:
        kept = unsaved_leaves(absent, len(root.path), below.values())
        findings.missing.extend(leaf.fqn for leaf in kept)
    else:
        findings.missing.extend(
            leaf.fqn for leaf in absent if leaf.fqn not in tensors and not as_saved.covers(leaf.fqn)
        )
        entries = _of_module(as_saved, leaves, below, findings, parts)
    findings.opaque += [
        fqn for fqn, entry in paced(entries.items()) if isinstance(entry, OpaqueEntry) and fqn not in tensors
    ]
    # With ``strict=True`` torch would refuse what was accepted here.
    lenient = not as_saved.whole and (accepted or findings.tolerance.unexpected) is not None
    containers, integer_keys = root.value.containers, _integer_keys(leaves)
    return StatefulLoad(instance, root.fqn, root.path, entries, tuple(kept), containers, integer_keys, lenient)


def _of_module(
    as_saved: LoadedAsSaved, leaves: list[Leaf], below: dict[str, Entry], findings: Findings, parts: frozenset[str]
) -> dict[str, Entry]:
    """Return the entries that a module takes."""
    known = {leaf.fqn for leaf in leaves}
    entries: dict[str, Entry] = {}
    extra_states = set(as_saved.extra_states)
    for fqn, entry in below.items():
        pause_point()
        if extra_states:
            # An extra state may be a container itself, so an entry below its name counts as well.
            extra_states.difference_update(containers_of(fqn))
        if fqn in known or fqn in parts or as_saved.covers(fqn):
            entries[fqn] = entry
        else:
            findings.add_unexpected(fqn, "module")
    for name in sorted(extra_states):
        findings.add_missing(name)
    return entries


def _names_below(fqn: str, names: list[str]) -> list[str]:
    """Return those of the sorted ``names`` that are below ``fqn``."""
    first, last = (bisect_left(names, f"{fqn}{after}") for after in (".", "/"))  # the character after the dot
    return names[first:last]


def _add_container(leaf: Leaf, inside: list[str], findings: Findings) -> None:
    """Add the finding that the caller's own state has one value where a container was saved."""
    # An accepted difference still has two sides. The name of the target is missing, and the names below it are
    # unexpected, which the caller has to accept too.
    if accepts(findings.tolerance.missing, leaf.fqn):
        findings.add_missing(leaf.fqn)
        for fqn in inside:
            findings.add_unexpected(fqn, "target")
        return
    here = "a tensor" if isinstance(leaf.value, torch.Tensor) else _described(leaf)
    saved = [findings.names.saved_name(fqn) for fqn in inside]
    how = f'open_checkpoint(url).state_dict(select="{leaf.fqn}.*") reads it' if saved == inside else ""
    findings.add(
        KindMismatchError,
        f"{leaf.fqn}: {here} in the target, a container in the checkpoint ({shortened(saved)}); a load does not change "
        f"the structure of your own dicts and lists{': ' * bool(how)}{how}",
    )


def _described(leaf: Leaf) -> str:
    return "an empty dict" if leaf.kind == "empty" else f"a {type(leaf.value).__name__}"


def _match_value(
    leaf: Leaf, entry: Entry | None, exact: bool, values: list[tuple[Leaf, ValueEntry]], findings: Findings
) -> None:
    """Match a value that does not belong to a ``Stateful`` object. Such an object checks its values itself."""
    empty = leaf.kind == "empty"
    if entry is None:
        if exact or not empty:  # stock DCP has no entry for an empty dict
            findings.add_missing(leaf.fqn)
    elif isinstance(entry, OpaqueEntry):
        findings.opaque.append(leaf.fqn)
    elif isinstance(entry, ValueEntry) and not empty:
        if isinstance(leaf.holder, MutableMapping | list):
            values.append((leaf, entry))
        else:
            findings.add(
                StateMismatchError, f"{leaf.fqn}: its {type(leaf.holder).__name__} in the target cannot be changed"
            )
    elif not (isinstance(entry, EmptyEntry) and empty):
        there, remedy = kind_of(entry), ""
        if isinstance(entry, TensorEntry):
            there, remedy = "a tensor", f" (put torch.empty({entry.shape}, dtype=torch.{entry.dtype}) there)"
        findings.add(
            KindMismatchError, f"{leaf.fqn}: {_described(leaf)} in the target, {there} in the checkpoint{remedy}"
        )


def _claimed(
    manifest: Manifest, roots: Mapping[int, Leaf], owned: Mapping[int, list[Leaf]]
) -> dict[int, dict[str, Entry]]:
    """Return, for each ``Stateful``, all entries below its path, and the entries of its own leaves. For a writer that
    saved no paths, an entry gets the path of the leaf with its name."""
    below: dict[int, dict[str, Entry]] = {number: {} for number in roots}
    if not roots:
        return below
    # Paths decide, not names: with a key that contains a dot the name of another entry could begin with the name of the
    # object. Only writers that saved no paths are found by the names of the leaves.
    prefixes: dict[PlainPath, int] = {plain_path(root.path): number for number, root in roots.items()}
    lengths = sorted({len(prefix) for prefix in prefixes})
    own_leaves = {leaf.fqn: leaf for leaves in owned.values() for leaf in leaves}
    for fqn, one in manifest.stored.items():
        pause_point()
        path = plain_path(path_of(one))
        # One look-up for each length of a prefix, so the cost does not grow with the number of objects.
        number = next((prefixes[path[:n]] for n in lengths if path[:n] in prefixes), None)
        if number is None and fqn not in own_leaves:
            continue
        entry = manifest.entries[fqn]
        if number is not None:
            below[number][fqn] = entry
        elif (leaf := own_leaves.get(fqn)) is not None and leaf.owner is not None:
            below[leaf.owner][fqn] = entry if manifest.exact else replace(entry, path=leaf.path)
    return below


def _integer_keys(leaves: list[Leaf]) -> frozenset[PlainPath]:
    return frozenset(
        plain_path(leaf.path[:depth])
        for leaf in paced(leaves)
        for depth, key in enumerate(leaf.path)
        if isinstance(key, DictKey) and type(key.value) is int
    )

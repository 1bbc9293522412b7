"""What is private about torch, or depends on its version. Nothing else asks torch such things."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch

from ..errors import UnsupportedTensorError

__all__ = [
    "TORCH_VERSION",
    "HeldShard",
    "Stateful",
    "TransformedStreams",
    "attributes_of",
    "check_tensor",
    "convert_all",
    "cuda_library",
    "dtype_from_name",
    "dtype_name",
    "empty_kernel",
    "extent_bytes",
    "group_store",
    "has_shards",
    "lazy_bits",
    "neg_view",
    "outside_compile",
    "plain_bytes",
    "shard_attributes",
    "shard_runs",
    "shards_held",
    "storage_info",
    "storage_key",
    "tensor_class",
    "view_key",
    "with_attributes",
    "with_shards_of",
]

TORCH_VERSION = torch.__version__.split("+")[0]


@runtime_checkable
class Stateful(Protocol):
    """What DCP calls Stateful: an object that gives and takes its own state dict (modules, optimizers, loaders)."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...


def cuda_library() -> ctypes.CDLL | None:
    """Return the functions of the CUDA runtime that torch is linked with, which release the GIL; None if there is no
    such runtime."""
    library = ctypes.CDLL(torch._C.__file__)  # a name is also looked up in the libraries that this one depends on
    try:
        library.cudaGetErrorString.restype = ctypes.c_char_p
        library.cudaHostRegister.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
        library.cudaHostUnregister.argtypes = (ctypes.c_void_p,)
        library.cudaEventSynchronize.argtypes = (ctypes.c_void_p,)
    except AttributeError:
        return None
    return library


def empty_kernel() -> None:
    """Launch a kernel that does nothing and needs no memory on CUDA's current stream."""
    torch.cuda._sleep(0)  # type: ignore[no-untyped-call]


_NAMES = {value: name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
# Aliases (torch.float, torch.half ...) map to the same object: the spelling of repr() is the canonical one.
_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in _NAMES}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """``"bfloat16"`` for ``torch.bfloat16``."""
    return _NAMES[dtype]


def dtype_from_name(name: str) -> torch.dtype:
    """Raises ``KeyError`` for a name that this version of torch has no dtype for."""
    return _DTYPES[name]


def convert_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each of ``sources`` into its target, whose dtype it gets, with one release of the GIL for all of them."""
    torch._foreach_copy_(targets, sources)  # type: ignore[arg-type]


def storage_key(tensor: torch.Tensor) -> int:
    """Which storage ``tensor`` is a view of, as long as somebody refers to that: its address changes when it is
    resized, and two storages may lie at one address (``torch.from_numpy`` of two slices)."""
    return int(tensor.untyped_storage()._cdata)


def view_key(tensor: torch.Tensor) -> tuple[object, ...]:
    """Which view of which storage it is: equal for tied tensors of one dtype. Not by address: that of each storage that
    was freed is 0, and what was copied from them before is not the same."""
    place = (storage_key(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
    return (*place, lazy_bits(tensor))


def check_tensor(tensor: torch.Tensor, fqn: str, verb: str = "save", *, held: bool = False) -> None:
    """Refuse by name what bytes alone cannot represent. Of a tensor whose bytes are ``held`` elsewhere already the
    storage may be gone."""
    kind = type(tensor)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        problem = _plain_problem(tensor, held)
    elif (dtensor := tensor_class("torch.distributed.tensor", "DTensor")) and isinstance(tensor, dtensor):
        problem = "a DTensor: this version loads into one process; load into tensor.to_local()"
    elif (fake := tensor_class("torch._subclasses.fake_tensor", "FakeTensor")) and isinstance(tensor, fake):
        problem = "a fake tensor: it has no bytes"
    elif hasattr(tensor, "__tensor_flatten__"):
        problem = f"the wrapper subclass {kind.__name__}: name the tensors that it wraps"
    elif torch.nn.parameter.is_lazy(tensor):
        problem = f"an uninitialized {kind.__name__}: run the module once first"
    else:
        problem = _plain_problem(tensor, held)
    if problem is not None and tensor.is_meta and verb != "save":
        problem = 'a meta tensor, which has no bytes: allocate them with module.to_empty(device="cpu")'
    if problem is not None:
        raise UnsupportedTensorError(f"{fqn}: cannot {verb} {problem}")


attributes_of: Callable[[torch.Tensor], Any] = object.__getstate__
"""Return the attributes that were set on a plain tensor as a new dict, or None. Implemented in C: 0.05 us if there are
none. ``vars()`` would create a dict on every tensor."""


def with_attributes(tensor: torch.Tensor, attributes: Mapping[str, Any]) -> torch.Tensor:
    if attributes:
        vars(tensor).update(attributes)
    return tensor


def tensor_class(module: str, name: str) -> type[torch.Tensor] | None:
    """A class of tensors, without importing ``module`` (a second or more): while nobody has, there are none."""
    return getattr(sys.modules.get(module), name, None)


def _plain_problem(tensor: torch.Tensor, held: bool) -> str | None:
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}: save its indices and values, or tensor.to_dense()"
    if tensor.is_meta:
        return "a meta tensor: it has no bytes; materialize it first"
    if tensor.is_quantized:
        return "a quantized tensor: save tensor.int_repr() with its scale and zero point"
    if tensor.is_nested:
        return "a nested tensor: save its components"
    if not held and tensor.untyped_storage().nbytes() < extent_bytes(tensor):
        return "a tensor whose storage was freed or shrunk (a sharded FSDP parameter?): unshard it first"
    return None


def extent_bytes(tensor: torch.Tensor) -> int:
    """How much of its storage the tensor reaches into."""
    if tensor.numel() == 0:
        return 0
    if tensor.is_contiguous():
        return int(tensor.storage_offset()) * tensor.itemsize + tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (int(tensor.storage_offset()) + int(last) + 1) * tensor.itemsize


_keys_of = torch._C._dispatch_keys
_LAZY = sum(
    torch._C.DispatchKeySet(key).raw_repr() for key in (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative)
)


def lazy_bits(tensor: torch.Tensor) -> int:
    """Whether its elements are to be read conjugated or negated: not 0 then, and another number for each.

    ``is_conj()`` and ``is_neg()`` let go of the GIL (torch 2.13): asked for each of 10,000 tensors, beside a loop that
    waits for it, that costs more than all else.
    """
    return int(_keys_of(tensor).raw_repr()) & _LAZY


def _plain_keys() -> frozenset[int]:
    """The dispatch keys of dense tensors in host memory: those that autograd follows, and those of inference mode."""
    with torch.inference_mode():
        inference = torch.empty(0, device="cpu")
    with torch.inference_mode(False):
        ordinary = torch.empty(0, device="cpu")
    return frozenset(int(_keys_of(one).raw_repr()) for one in (ordinary, inference))


_PLAIN_KEYS = _plain_keys()


def on_host_as_is(tensor: torch.Tensor) -> bool:
    """Whether a tensor is dense, in host memory, and neither conjugated nor negated lazily. One comparison, which knows
    no more than that: False for a tensor of a kind that it has not heard of."""
    return int(_keys_of(tensor).raw_repr()) in _PLAIN_KEYS


def plain_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of ``tensor``, which is in host memory, row by row as bytes, without lazy conjugation or
    negation. A new tensor only if they are not in memory like that."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # Not reshape(-1): it keeps the stride of a tensor with one element, and view() wants 1.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def neg_view(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` with the bit that says that its elements are to be read negated."""
    view: torch.Tensor = torch._neg_view(tensor)
    return view


def outside_compile(work: Callable[[], None]) -> Callable[..., None]:
    """A hook that calls ``work`` as it is written, also from code that ``torch.compile`` traces.

    What ``torch.compiler.disable`` does, without its import of the compiler (a second or more) by those who do not
    compile: the attribute keeps a trace from inlining the hook, the frame evaluator is off while it runs.
    """
    evaluator = torch._C._dynamo.eval_frame

    def hook(*_: Any) -> None:
        before = evaluator.set_eval_frame(None)
        try:
            work()
        finally:
            evaluator.set_eval_frame(before)

    hook._torchdynamo_disable = True  # type: ignore[attr-defined]
    return hook


# --- of torch.distributed, for those that have it ---

_SHARD_ATTRIBUTES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


def has_shards(tensor: torch.Tensor) -> bool:
    """Whether a tensor says that it holds shards of a larger one, as torch's ``CheckpointableTensor`` does (a protocol,
    from 2.14 on): any tensor with these attributes is one."""
    return hasattr(tensor, "global_shape") and all(hasattr(tensor, name) for name in _SHARD_ATTRIBUTES)


class HeldShard(NamedTuple):
    """One shard: where it begins in the whole, its sizes, and where it begins in the tensor that holds it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local: tuple[int, ...]


def shards_held(tensor: Any, fqn: str) -> tuple[tuple[int, ...], tuple[HeldShard, ...]]:
    """The shape of the whole, and the shards of it in ``tensor``, of which ``has_shards`` is true. Raises
    ``UnsupportedTensorError`` where the attributes contradict each other or the tensor."""
    try:
        shape = tuple(map(int, tensor.global_shape))
        told = zip(tensor.global_offsets, tensor.local_sizes, tensor.local_offsets, strict=True)
        shards = tuple(HeldShard(*(tuple(map(int, one)) for one in shard)) for shard in told)
        for shard in shards:
            for limits, begins in ((shape, shard.offsets), (tuple(tensor.shape), shard.local)):
                inside = zip(begins, shard.sizes, limits, strict=True)
                if any(begin < 0 or size < 0 or begin + size > limit for begin, size, limit in inside):
                    raise ValueError("a shard that lies outside")
    except (TypeError, ValueError) as error:
        raise UnsupportedTensorError(
            f"{fqn}: its attributes {', '.join(_SHARD_ATTRIBUTES)} do not describe shards of one tensor in a tensor of "
            f"shape {tuple(tensor.shape)}: {error}"
        ) from error
    return shape, shards


def with_shards_of(tensor: torch.Tensor, attributes: Sequence[Any]) -> torch.Tensor:
    """``tensor`` with the attributes that ``shard_attributes`` has read of another one."""
    for name, value in zip(_SHARD_ATTRIBUTES, attributes, strict=True):
        setattr(tensor, name, value)
    return tensor


def shard_attributes(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(getattr(tensor, name) for name in _SHARD_ATTRIBUTES)


def group_store(process_group: Any) -> tuple[Any, str]:
    """The store that the job's default group was made with, and a name in it that only ``process_group`` has."""
    from torch.distributed import distributed_c10d

    store = distributed_c10d.PrefixStore("sidestream", distributed_c10d._get_default_store())
    ranks = distributed_c10d.get_process_group_ranks(process_group)
    return store, f"{process_group.group_name}/{ranks[0]}-{ranks[-1]}-{len(ranks)}"


Run: TypeAlias = tuple[int, int, int]
"""Of one dimension of a sharded tensor: where the run begins in the whole, its length, where it begins in the local
tensor."""


def shard_runs(shape: tuple[int, ...], mesh: Any, placements: Sequence[Any]) -> tuple[tuple[Run, ...], ...] | None:
    """Which elements of a ``DTensor`` this rank has, as runs along each dimension; None if it is not in the mesh.

    Placements apply from left to right, as torch does it; those that cut a dimension in strides may leave several runs.
    """
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    runs: list[tuple[Run, ...]] = [((0, size, 0),) for size in shape]
    for dim, (placement, place) in enumerate(zip(placements, coordinate, strict=True)):
        if not hasattr(placement, "dim"):  # a replica
            continue
        axis, shards = placement.dim % len(shape), mesh.size(dim)
        length = sum(run[1] for run in runs[axis])
        if hasattr(placement, "split_factor"):
            local = torch.arange(length).reshape((1,) * axis + (-1,))
            parts = placement._split_tensor(local, shards, with_padding=False, contiguous=False)[0]
            pieces = list(_runs_of(parts[place].reshape(-1).tolist()))
        else:
            size = -(-length // shards)
            start = min(size * place, length)
            pieces = [(start, min(size, length - start), 0)]
        runs[axis] = tuple(_picked(runs[axis], pieces))
    return tuple(runs)


def _runs_of(indices: list[int]) -> Iterator[Run]:
    start = 0
    for position in range(1, len(indices) + 1):
        if position == len(indices) or indices[position] != indices[position - 1] + 1:
            yield indices[start], position - start, start
            start = position


def _picked(runs: Sequence[Run], pieces: Sequence[Run]) -> Iterator[Run]:
    """Those parts of ``runs`` whose places in the local tensor are in ``pieces``, with new places."""
    for low, count, new in pieces:
        for start, size, at in runs:
            first, last = max(low, at), min(low + count, at + size)
            if first < last:
                yield start + first - at, last - first, new + first - low


# --- of torch.distributed.checkpoint, whose import takes a second: only who works inside of it asks for these ---


def storage_info(file: str, offset: int, nbytes: int, transforms: Sequence[str] = ()) -> Any:
    """What stock DCP's ``.metadata`` says about the place of an item."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, offset, nbytes, list(transforms) or None)


class TransformedStreams:
    """What DCP's stream extensions make of the bytes of an item."""

    def __init__(self, extensions: Sequence[Any]) -> None:
        from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms

        self._transforms = _StorageWriterTransforms(list(extensions))

    def transform(self, item: Any, stream: Any) -> tuple[Any, tuple[str, ...]]:
        """A stream that writes to ``stream`` until it is closed, which leaves that one open, and the descriptors for
        whoever reads the item."""
        transformed, descriptors = self._transforms.transform_save_stream(item, stream)
        return transformed, tuple(descriptors)

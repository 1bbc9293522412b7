"""Private names of torch, and what depends on its version. No other module uses such names."""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch

from ..errors import UnsupportedTensorError

PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
"""The types of tensors whose bytes are all that they consist of, unless they are sparse or have attributes."""

TORCH_VERSION = torch.__version__.split("+")[0]


@runtime_checkable
class Stateful(Protocol):
    """DCP's protocol of an object with a state dict of its own (modules, optimizers, data loaders)."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...


def cuda_library() -> ctypes.CDLL | None:
    """Return the functions of the CUDA runtime that torch is linked with, which release the GIL; None if there is no
    such runtime."""
    # The runtime that torch itself uses, and not one that is found by its name: another one would have other contexts.
    library = ctypes.CDLL(torch._C.__file__)  # a name is also looked up in the libraries that this one depends on
    try:
        library.cudaGetErrorString.restype = ctypes.c_char_p
        library.cudaHostRegister.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
        library.cudaHostUnregister.argtypes = (ctypes.c_void_p,)
        library.cudaEventSynchronize.argtypes = (ctypes.c_void_p,)
    except AttributeError:
        return None
    return library


# Aliases (torch.float, torch.half ...) map to the same object: the spelling of repr() is the canonical one.
_NAMES = {value: str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype: ``"bfloat16"`` for ``torch.bfloat16``."""
    return _NAMES[dtype]


def dtype_from_name(name: str) -> torch.dtype:
    """Return the dtype of this name. Raises ``KeyError`` if this version of torch has none."""
    return _DTYPES[name]


def convert_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each of ``sources`` into its target, converted to the target's dtype, with one release of the GIL for
    all."""
    torch._foreach_copy_(targets, sources)  # type: ignore[arg-type]


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that identifies the storage of ``tensor`` while a reference to the storage exists. The address
    does not: it changes when the storage is resized, and two storages may have the same address (``torch.from_numpy``
    of two slices)."""
    return int(tensor.untyped_storage()._cdata)


def view_key(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key of the storage and the view of it, which is equal for tied tensors of one dtype. It does not use
    addresses: each freed storage has the address 0, and what was copied from two of them earlier may differ."""
    place = (storage_key(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
    return (*place, lazy_bits(tensor))


def check_tensor(tensor: torch.Tensor, fqn: str, verb: str = "save", *, held: bool = False) -> None:
    """Raise ``UnsupportedTensorError``, which names ``fqn``, for a tensor that bytes alone cannot represent. ``held``:
    the bytes are kept elsewhere already, so the storage may have been freed."""
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
    """Set ``attributes`` on ``tensor`` and return it."""
    if attributes:
        vars(tensor).update(attributes)
    return tensor


def tensor_class(module: str, name: str) -> type[torch.Tensor] | None:
    """Return a class of tensors, or None if ``module`` has not been imported: then no tensor of this class exists. The
    import would take a second or more."""
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
    """Return the number of bytes from the beginning of the storage to the last element of ``tensor``."""
    if tensor.numel() == 0:
        return 0
    return int(tensor.storage_offset()) * tensor.itemsize + _spanned_bytes(tensor)


def addresses(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of the first element of ``tensor``, which has one, and the address after the last."""
    start = tensor.data_ptr()
    return start, start + _spanned_bytes(tensor)


def _spanned_bytes(tensor: torch.Tensor) -> int:
    if tensor.is_contiguous():
        return tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (int(last) + 1) * tensor.itemsize


_keys_of = torch._C._dispatch_keys
_RAW_KEYS: Callable[[torch._C.DispatchKeySet], int] = torch._C.DispatchKeySet.raw_repr
_LAZY = sum(
    torch._C.DispatchKeySet(key).raw_repr() for key in (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative)
)


def lazy_bits(tensor: torch.Tensor) -> int:
    """Return the bits that say that the elements of ``tensor`` are to be read conjugated or negated; 0 for neither.

    ``is_conj()`` and ``is_neg()`` release the GIL (torch 2.13). Called for each of 10,000 tensors, beside a loop that
    waits for the GIL, they would take longer than everything else.
    """
    return int(_keys_of(tensor).raw_repr()) & _LAZY


def guard_of(tensors: Sequence[torch.Tensor]) -> Callable[[Sequence[torch.Tensor]], bool] | None:
    """Return a function that compares as many tensors with ``tensors``: their types, dtypes, devices, shapes, strides
    and lazy bits. It takes 0.1 us for each, refers to none, and may find a difference where there is none. None: this
    version of torch has none that is known to work.

    It is what compiled code asks before it runs. Nothing of the compiler is imported for it.
    """
    return _guard(tensors) if _guards_work() else None


def _guard(tensors: Sequence[torch.Tensor]) -> Callable[[Sequence[torch.Tensor]], bool]:
    # Private classes of the compiler, whose arguments have changed between releases. ``_guards_work`` tries them on
    # tensors with known answers, once, and plans are compared in Python where they fail.
    shapes, strides = [list(one.shape) for one in tensors], [list(one.stride()) for one in tensors]
    guards: Any = torch._C._dynamo.guards
    made = guards.TensorGuards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides)
    return lambda others: bool(made.check(*others))


@cache
def _guards_work() -> bool:
    with torch.inference_mode(False):
        plain, wave = torch.zeros(2, 3, device="cpu"), torch.zeros(2, dtype=torch.complex64, device="cpu")
        others = [plain[:1], plain[0], plain.t().contiguous().t(), plain.view(torch.int32), neg_view(plain)]
        try:
            same, waves = _guard([plain, wave]), _guard([wave])
            return (
                same([plain.data, wave.data])
                and not any(same([other, wave]) for other in others)
                and not waves([wave.conj()])
            )
        except (AttributeError, TypeError, RuntimeError, SystemError):
            return False


def _plain_keys() -> frozenset[int]:
    """Return the dispatch keys of dense tensors in host memory, created with autograd and in inference mode."""
    with torch.inference_mode():
        inference = torch.empty(0, device="cpu")
    with torch.inference_mode(False):
        ordinary = torch.empty(0, device="cpu")
    return frozenset(_RAW_KEYS(_keys_of(one)) for one in (ordinary, inference))


_PLAIN_KEYS = _plain_keys()


def on_host_as_is(tensors: Iterable[torch.Tensor]) -> list[bool]:
    """Return of each tensor whether it is dense, in host memory, and neither conjugated nor negated lazily. This is one
    comparison for each; the result is False for tensors of unknown kinds."""
    return [keys in _PLAIN_KEYS for keys in map(_RAW_KEYS, map(_keys_of, tensors))]


def plain_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of ``tensor``, which is in host memory, as bytes in row-major order, without lazy conjugation
    or negation. The result is a copy only if they are not in memory in this form."""
    plain = copyable(tensor.detach()).resolve_conj().resolve_neg().contiguous()
    # Not reshape(-1): it keeps the stride of a tensor with one element, and view() wants 1.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


_NOT_COPIED = frozenset(
    dtype
    for name, dtype in _DTYPES.items()
    if name in {f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8)}
)


def copyable(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, or its bytes in the same shape where torch has no kernel that copies elements of its dtype
    (``torch.int4``)."""
    return tensor.view(torch.uint8) if tensor.dtype in _NOT_COPIED else tensor


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each of ``sources`` to one of ``targets``, on one device, with few kernels."""
    torch._foreach_copy_(list(targets), list(sources))


def neg_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of ``tensor`` whose elements are read negated."""
    view: torch.Tensor = torch._neg_view(tensor)
    return view


def outside_compile(work: Callable[[], None]) -> Callable[..., None]:
    """Return a hook that calls ``work`` uncompiled, also from code that ``torch.compile`` traces.

    It does what ``torch.compiler.disable`` does, without importing the compiler (a second or more) in programs that do
    not compile: the attribute keeps a trace from inlining the hook, and the frame evaluator is off while it runs.
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


# --- torch.distributed, where it is available ---

_SHARD_ATTRIBUTES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


def has_shards(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds shards of a larger one, by the attributes of torch's protocol
    ``CheckpointableTensor`` (from 2.14 on): any tensor with these attributes does."""
    return hasattr(tensor, "global_shape") and all(hasattr(tensor, name) for name in _SHARD_ATTRIBUTES)


class HeldShard(NamedTuple):
    """One shard: its offsets in the whole tensor, its sizes, and its offsets in the tensor that holds it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local: tuple[int, ...]


def shards_held(tensor: Any, fqn: str) -> tuple[tuple[int, ...], tuple[HeldShard, ...]]:
    """Return the shape of the whole tensor, and the shards of it in ``tensor``, for which ``has_shards`` is true.
    Raises ``UnsupportedTensorError`` if the attributes contradict each other or the tensor."""
    try:
        shape = tuple(map(int, tensor.global_shape))
        described = zip(tensor.global_offsets, tensor.local_sizes, tensor.local_offsets, strict=True)
        shards = tuple(HeldShard(*(tuple(map(int, one)) for one in shard)) for shard in described)
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
    """Set on ``tensor`` the attributes that ``shard_attributes`` has read from another tensor, and return it."""
    for name, value in zip(_SHARD_ATTRIBUTES, attributes, strict=True):
        setattr(tensor, name, value)
    return tensor


def shard_attributes(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the attributes that describe the shards in ``tensor``, for ``with_shards_of``."""
    return tuple(getattr(tensor, name) for name in _SHARD_ATTRIBUTES)


def group_store(process_group: Any) -> tuple[Any, str]:
    """Return the store that the job's default group was made with, and a key in it that only ``process_group`` uses."""
    from torch.distributed import distributed_c10d

    store = distributed_c10d.PrefixStore("sidestream", distributed_c10d._get_default_store())
    ranks = distributed_c10d.get_process_group_ranks(process_group)
    return store, f"{process_group.group_name}/{ranks[0]}-{ranks[-1]}-{len(ranks)}"


Run: TypeAlias = tuple[int, int, int]
"""A run of indices along one dimension of a sharded tensor: its start in the whole tensor, its length, and its start in
the local tensor."""


def shard_runs(shape: tuple[int, ...], mesh: Any, placements: Sequence[Any]) -> tuple[tuple[Run, ...], ...] | None:
    """Return the elements of a ``DTensor`` that this rank has, as runs along each dimension; None if the rank is not in
    the mesh.

    Placements apply from left to right, as in torch. A strided placement may leave several runs in a dimension.
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
        # A strided shard (FSDP over tensor parallelism) interleaves the parts of an inner dimension of the mesh.
        # Torch's own code divides a tensor of indices, which then says which elements this rank has.
        if hasattr(placement, "split_factor"):
            local = torch.arange(length).reshape((1,) * axis + (-1,))
            parts = placement._split_tensor(local, shards, with_padding=False, contiguous=False)[0]
            pieces = list(_runs_of(parts[place].reshape(-1).tolist()))
        else:
            # As ``torch.chunk`` divides: all shards but the last ones have the rounded-up length, and some may be
            # empty.
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
    """Yield the parts of ``runs`` whose local indices are in ``pieces``, with new local indices."""
    for low, count, new in pieces:
        for start, size, at in runs:
            first, last = max(low, at), min(low + count, at + size)
            if first < last:
                yield start + first - at, last - first, new + first - low


# --- torch.distributed.checkpoint, whose import takes a second: only code that needs it anyway calls these ---


def storage_info(file: str, offset: int, nbytes: int, transforms: Sequence[str] = ()) -> Any:
    """Return the record in stock DCP's ``.metadata`` of the file, offset and size of an item."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, offset, nbytes, list(transforms) or None)


def transformed_stream(extensions: Sequence[Any], item: Any, stream: Any) -> tuple[Any, tuple[str, ...]]:
    """Return a stream that writes to ``stream`` the bytes of ``item`` as DCP's stream extensions transform them, and
    the descriptors that readers of the item need. Closing the returned stream leaves ``stream`` open."""
    from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms

    transformed, descriptors = _StorageWriterTransforms(list(extensions)).transform_save_stream(item, stream)
    return transformed, tuple(descriptors)


def dcp_logger() -> logging.Logger:
    """Return the logger that DCP logs its calls to, with the handlers that are registered for it."""
    from torch.distributed.checkpoint.logger import _dcp_logger

    logger: logging.Logger = _dcp_logger
    return logger

"""The copies of a load to devices: through registered host memory, on streams of their own, without a wait for each.

A thread that has read and verified a batch enqueues its copies and takes the next slot. What is small is one copy to
the device, where it is split, cast and laid out.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from .._format.records import TensorEntry, row_major_strides
from .._layout.ranges import Box
from .._runtime.torch_probes import copy_all, copyable, dtype_from_name, lazy_bits
from .._staging.ring import Slot
from .._staging.streams import Streams
from ..errors import SidestreamError
from .ranges import Range, Scatter

_LARGE_BYTES = 1 << 20
"""From this size on a payload is copied to its place directly."""


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """Ranges of one file that one thread reads, for tensors on ``device``."""

    device: Hashable
    ranges: list[Range]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A range whose bytes are at ``start`` of a slot, and the tensor that gets them."""

    one: Range
    start: int
    entry: TensorEntry
    target: torch.Tensor

    def content(self, slot: torch.Tensor) -> torch.Tensor:
        return slot[self.start : self.start + self.one.nbytes]


class DeviceCopies:
    """The copies of one load, which are ordered after the work that the caller had enqueued on ``streams``. Threads of
    the load call the methods."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._own = streams.apart()

    def slot(self, batch: DeviceBatch) -> tuple[Slot, list[int]]:
        """Return memory for the ranges of a batch, and where each of them begins. The small ones lie side by side."""
        order = sorted(range(len(batch.ranges)), key=lambda number: batch.ranges[number].nbytes >= _LARGE_BYTES)
        slot, ordered = self._own.of(batch.device).slot([batch.ranges[number].nbytes for number in order])
        starts = [0] * len(order)
        for number, start in zip(order, ordered, strict=True):
            starts[number] = start
        return slot, starts

    def copy(self, device: Hashable, slot: Slot, arrivals: Sequence[Arrival]) -> None:
        """Enqueue the copies of ``arrivals``, which are verified, and give the slot back."""
        own = self._own.of(device)
        with own.current(arrivals[0].one.fqn):
            small = [arrival for arrival in arrivals if arrival.one.nbytes < _LARGE_BYTES]
            _copy_small(slot.bytes, small)
            for arrival in arrivals:
                if arrival.one.nbytes >= _LARGE_BYTES:
                    _copy_one(slot.bytes, arrival)
            own.give_back(slot)

    def finish(self) -> None:
        """Wait until all copies have ended, and order the streams of the caller after them."""
        self._streams.join(self._own)
        self._own.finish()

    def cancel(self) -> None:
        """Wait until all copies have ended, after a failure: the memory of their targets may be used again."""
        with suppress(SidestreamError, torch.AcceleratorError):
            self.finish()


def _copy_small(slot: torch.Tensor, small: Sequence[Arrival]) -> None:
    """Enqueue one copy of the small ranges, which begin the slot, to the device, and their copies from there."""
    if len(small) < 2:
        for arrival in small:
            _copy_one(slot, arrival)
        return
    whole = _on_device(slot[: small[-1].start + small[-1].one.nbytes], small[0].target.device)
    alike: dict[bool, list[tuple[torch.Tensor, torch.Tensor]]] = {False: [], True: []}
    for arrival in small:
        into, source = _ends(arrival.one, arrival.content(whole), arrival.entry, arrival.target)
        if whole.is_cpu or not _is_plain(into, source):
            _copy(into, source)
        else:
            with torch.inference_mode(into.is_inference()):
                alike[into.is_inference()].append((_bytes(into), _bytes(source)))
    for inference, pairs in alike.items():
        if pairs:
            with torch.inference_mode(inference), torch.no_grad():
                copy_all(*zip(*pairs, strict=True))


def _copy_one(slot: torch.Tensor, arrival: Arrival) -> None:
    """Enqueue the copy of one range to its place, over new memory of the device if it is cast or laid out there."""
    content = arrival.content(slot)
    into, source = _ends(arrival.one, content, arrival.entry, arrival.target)
    if not _is_plain(into, source):
        into, source = _ends(arrival.one, _on_device(content, into.device), arrival.entry, arrival.target)
    _copy(into, source)


def _on_device(content: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Enqueue a copy of ``content`` to new memory of the device, and return that. If there is too little, return
    ``content``: then there is one copy for each range, and what has to be done to it is done in host memory."""
    try:
        whole = torch.empty(content.nbytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return content
    whole.copy_(content, non_blocking=True)
    return whole


def _is_plain(into: torch.Tensor, source: torch.Tensor) -> bool:
    """Return whether the bytes of ``source`` are copied as they are."""
    alike = into.dtype == source.dtype and not lazy_bits(into)
    return alike and into.is_contiguous() and source.is_contiguous()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def place(one: Range, content: torch.Tensor, entry: TensorEntry, target: torch.Tensor) -> None:
    """Enqueue the copy of a range, whose bytes are ``content`` in host memory, to its place in ``target`` on the
    current stream."""
    _copy(*_ends(one, content, entry, target))


def _copy(into: torch.Tensor, source: torch.Tensor) -> None:
    # A tensor that was made in inference mode may be changed only in that mode, and any other one only outside of it.
    with torch.inference_mode(into.is_inference()), torch.no_grad():
        into.copy_(source, non_blocking=True)


def _ends(
    one: Range, content: torch.Tensor, entry: TensorEntry, target: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the part of ``target`` that the range fills, and the elements for it in ``content``."""
    into = one.into
    assert isinstance(into, Scatter)
    dtype, target = dtype_from_name(entry.written_dtype), copyable(target)
    elements = content[into.skip :]
    elements = elements[: elements.nbytes // dtype.itemsize * dtype.itemsize]
    if elements.storage_offset() % dtype.itemsize:
        elements = elements.clone()
    source = elements.view(dtype).as_strided(into.shape, into.strides or row_major_strides(into.shape))
    with torch.inference_mode(target.is_inference()):
        return target[_slices(Box(into.target, into.source.sizes))], source[_slices(into.source)]


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))

"""The calls that staging makes on an accelerator: streams, events, copies. All decisions are in ``device``.

``TorchDriver`` uses what ``torch.accelerator`` has for any device, and ``CudaDriver`` what CUDA has. The tests have a
third driver, whose copies and events complete when the test triggers them.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from .._runtime.torch_probes import copy_all, copyable
from ..errors import ArenaExhaustedError, UnsupportedTensorError
from .registration import Pinner
from .runtime import CudaRuntime

_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL

_streams: dict[Any, tuple[Any, Any]] = {}
"""The streams of the process on each device, made once: torch gives the 32 streams of its pool to the program too, so
one of them could be captured while it copies."""
_streams_lock = threading.Lock()


class TorchDriver:
    """The operations of one kind of accelerator that staging needs, as ``torch.accelerator`` has them for any kind.

    A device is any hashable. Streams and events are objects of the driver. Host memory is not registered, so copies may
    block their thread, which is one of sidestream.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def device_of(self, tensor: torch.Tensor) -> Hashable | None:
        """Return the device of ``tensor``, or None for host memory."""
        return None if tensor.is_cpu else tensor.device

    def capturing(self, stream: Any) -> bool:
        """Return whether a graph is being captured on ``stream``."""
        return False

    def enter(self, device: Any) -> None:
        """Make ``device`` the current one. Called by a thread of sidestream before its first call on the device.
        Idempotent and cheap."""
        torch.accelerator.set_device_index(device)

    def current_stream(self, device: Any) -> Any:
        return torch.accelerator.current_stream(device)

    def side_stream(self, device: Any) -> Any:
        """Return the stream on which all stages and loads of the process copy from and to ``device``."""
        return self._streams(device)[0]

    def _streams(self, device: Any) -> tuple[Any, Any]:
        """Return the side stream of ``device``, and the stream that makes its pauses."""
        key = type(self), device  # the streams of one driver are of no use to another
        with _streams_lock:
            if key not in _streams:
                _streams[key] = self._new_stream(device), self._new_stream(device)
            return _streams[key]

    def _new_stream(self, device: Any) -> Any:
        return torch.Stream(device)

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context in which ``copy``, ``contiguous``, ``converted`` and ``gap`` use ``stream`` in place of the
        current stream."""
        context: AbstractContextManager[Any] = stream
        return context

    def record(self, stream: Any) -> Any:
        """Return a new event that occurs after everything that has been enqueued on ``stream`` so far."""
        event = torch.Event(self._kind)
        event.record(stream)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        """Make ``stream`` wait for ``event``. Does not block the host."""
        stream.wait_event(event)

    def synchronize(self, event: Any) -> None:
        """Block this thread until ``event`` occurs, without the GIL and without spinning. Raises errors of the
        device."""
        event.synchronize()

    def has_occurred(self, event: Any) -> bool:
        """Return whether ``event`` has occurred, without a wait."""
        return bool(event.query())

    def laid_out(self, pieces: Sequence[torch.Tensor], starts: Sequence[int], nbytes: int) -> torch.Tensor:
        """Copy each of ``pieces`` (uint8, of one device) to one of ``starts`` in ``nbytes`` of new device memory, whose
        other bytes are undefined. Raises ``ArenaExhaustedError`` if there is too little memory."""
        with _device_memory(pieces[0].device, nbytes), torch.no_grad():
            whole = torch.empty(nbytes, dtype=torch.uint8, device=pieces[0].device)
            copy_all([whole[start : start + one.nbytes] for one, start in zip(pieces, starts, strict=True)], pieces)
            return whole

    def gather(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        """Join the bytes of ``sources`` (row-major, of one dtype and device) in new device memory, as uint8. Raises
        ``ArenaExhaustedError`` if there is too little memory."""
        with _device_memory(sources[0].device, sum(source.nbytes for source in sources)):
            return torch.cat([copyable(source).view(-1) for source in sources]).view(torch.uint8)

    def clone(self, source: torch.Tensor) -> torch.Tensor:
        """Copy ``source`` to new device memory. Raises ``ArenaExhaustedError`` if there is too little memory."""
        with _device_memory(source.device, source.nbytes):
            return copyable(source).clone().view(source.dtype)

    def contiguous(self, source: torch.Tensor) -> torch.Tensor:
        """Return the elements of ``source`` row by row, in device memory, without lazy conjugation or negation."""
        with _device_memory(source.device, source.nbytes):
            return copyable(source.resolve_conj().resolve_neg()).contiguous().view(source.dtype)

    def converted(self, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Convert the elements of ``source``, row by row, to another dtype in new device memory. Raises
        ``ArenaExhaustedError`` if there is too little memory."""
        with _device_memory(source.device, source.numel() * dtype.itemsize), torch.no_grad():
            return source.to(dtype, memory_format=torch.contiguous_format)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy of ``source`` (uint8) to ``target`` (uint8, host memory)."""
        copyable(target).copy_(copyable(source), non_blocking=True)

    def gap(self, device: Any) -> None:
        """Enqueue a pause on the side stream, in which the copy engine can serve other streams."""
        # The copy engine prefers the stream that has a copy ready. The next copy is not ready before another stream has
        # answered. A kernel would do as well, but it waits for a free multiprocessor.
        stream, other = self._streams(device)
        self.wait(other, self.record(stream))
        self.wait(stream, self.record(other))

    @property
    def pinner(self) -> Pinner | None:
        """The object that registers host memory with these devices. None if they copy to memory that is not
        registered."""
        return None


class CudaDriver(TorchDriver):
    """The operations of CUDA, with blocking events and registered host memory.

    Calls that may block for long are made without torch (``runtime``).
    """

    def __init__(self) -> None:
        super().__init__("cuda")
        self._entered = threading.local()
        self._runtime = CudaRuntime()

    def capturing(self, stream: Any) -> bool:
        # With its device as the current one, because a query of a stream may create a context on the current device.
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            return torch.cuda.is_current_stream_capturing()

    def enter(self, device: Any) -> None:
        torch.cuda.set_device(device)
        if not hasattr(self._entered, "mode"):
            self._entered.mode = _leave_captures_alone()

    def current_stream(self, device: Any) -> Any:
        return torch.cuda.current_stream(device)

    def _new_stream(self, device: Any) -> Any:
        # High priority, so that the kernels that gather do not wait behind those of the program (torchrec #1076).
        return self._runtime.new_stream(device)

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def record(self, stream: Any) -> Any:
        # torch.Event(blocking=True) ignores the flag on CUDA and spins (vllm #47081).
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def synchronize(self, event: Any) -> None:
        self._runtime.synchronize(event)

    @property
    def pinner(self) -> Pinner:
        return self

    def register(self, device: Any, address: int, nbytes: int) -> bool:
        # In a thread of its own: a failure remains the last error of the thread, and its next kernel would raise it.
        outcome: Future[bool] = Future()
        thread = threading.Thread(
            target=self._register, args=(device, address, nbytes, outcome), name="sidestream-register", daemon=True
        )
        thread.start()
        return outcome.result()

    def _register(self, device: Any, address: int, nbytes: int, outcome: Future[bool]) -> None:
        try:
            self.enter(device)
            outcome.set_result(self._runtime.register(address, nbytes))
        except Exception as error:  # the edge of the thread
            outcome.set_exception(error)

    def unregister(self, device: Any, address: int) -> None:
        self.enter(device)
        self._runtime.unregister(address)


@contextmanager
def _device_memory(device: torch.device, nbytes: int) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ArenaExhaustedError(
            f"{device} does not have {nbytes} bytes left for copies of tensors that must not wait: free device memory"
        ) from error


def _leave_captures_alone() -> int | None:
    """Set the capture mode of this thread to thread-local. Returns the mode before, or None if the driver library
    cannot be loaded.

    In global mode, a wait of this thread would break a capture in another thread (pytorch #104487)."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        mode = ctypes.c_int(_THREAD_LOCAL)
        library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    except (OSError, AttributeError):
        return None
    return mode.value


def driver_for(device: torch.device) -> TorchDriver:
    """Return the driver for tensors on ``device``. Raises ``UnsupportedTensorError`` if torch has no streams for it."""
    if device.type == "cuda":
        return CudaDriver()
    current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if current is None or current.type != device.type:
        raise UnsupportedTensorError(f"torch.accelerator does not know {device}: save tensor.cpu()")
    try:
        torch.Stream(device)
        torch.Event(device.type)
    except (RuntimeError, NotImplementedError) as error:
        raise UnsupportedTensorError(f"torch has no streams and events for {device}: save tensor.cpu()") from error
    return TorchDriver(device.type)

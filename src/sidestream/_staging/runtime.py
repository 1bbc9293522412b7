"""The calls of the CUDA runtime that may block for long, without C++ frames of torch around them.

A daemon thread that is in such a frame when the interpreter ends aborts the process (``TorchThreads``). If the runtime
does not export these names (ROCm), torch makes the calls.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from .._runtime.torch_probes import cuda_library
from ..errors import ArenaExhaustedError, DeviceError

_PORTABLE = 1  # cudaHostRegisterPortable: for every device of the process
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
_CANNOT = {304, 801}  # cudaErrorOperatingSystem, cudaErrorNotSupported
_NON_BLOCKING = 1  # cudaStreamNonBlocking: not ordered with the default stream
_HIGH_PRIORITY = -1


class CudaRuntime:
    """The CUDA runtime, for threads of sidestream that have entered the device. Errors are raised, and not left as the
    last error of the thread."""

    def __init__(self) -> None:
        self._library = cuda_library()

    def synchronize(self, event: Any) -> None:
        """Block until ``event``, which has been recorded, has completed. Raises ``DeviceError``."""
        if self._library is None:
            event.synchronize()
        else:
            self._check(self._library.cudaEventSynchronize(event.cuda_event), "cudaEventSynchronize")

    def new_stream(self, device: torch.device) -> torch.cuda.Stream:
        """Return a new stream, which is never destroyed. Raises ``DeviceError``."""
        if self._library is None:
            return torch.cuda.Stream(device, priority=_HIGH_PRIORITY)  # type: ignore[no-untyped-call]
        stream = ctypes.c_void_p()
        with torch.cuda.device(device):
            code = self._library.cudaStreamCreateWithPriority(ctypes.byref(stream), _NON_BLOCKING, _HIGH_PRIORITY)
            self._check(code, "cudaStreamCreateWithPriority")
        assert stream.value is not None
        return torch.cuda.ExternalStream(stream.value, device)  # type: ignore[no-untyped-call]

    def register(self, address: int, nbytes: int) -> bool:
        """Register memory. Returns False if this system cannot. Raises ``ArenaExhaustedError`` if there is too little
        memory, ``DeviceError``."""
        library: Any = self._library or torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = int(library.cudaHostRegister(address, nbytes, _PORTABLE))
        try:
            self._check(code, f"cudaHostRegister of {nbytes} bytes")
        except DeviceError as error:
            if code in _CANNOT:
                return False
            if code != _OUT_OF_MEMORY:
                raise
            raise ArenaExhaustedError(
                f"{error}: lower budget_bytes=, or raise the memory limit of the container"
            ) from None
        return True

    def unregister(self, address: int) -> None:
        """End a registration. Raises ``DeviceError``."""
        library: Any = self._library or torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self._check(int(library.cudaHostUnregister(address)), "cudaHostUnregister")

    def _check(self, code: int, call: str) -> None:
        if code == 0:
            return
        if self._library is None:
            text = torch.cuda.cudart().cudaGetErrorString(code)  # type: ignore[no-untyped-call]
        else:
            self._library.cudaGetLastError()  # clears it; otherwise the next kernel of this thread raises it
            text = self._library.cudaGetErrorString(code).decode()
        raise DeviceError(f"{call}: CUDA error: {text} (cudaError {code})")

"""``BlockingAsyncStager``: what torch's stager of that name does, over the arena."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from io import BytesIO
from typing import Any

from .._runtime.public import public
from ..errors import DeadlineExceededError, UnsafeObjectError
from .stager import AsyncStager
from .tree import StagedState

_EXPECTED = (int, float, str, bytes, BytesIO)


@public
class BlockingAsyncStager:
    """Stages in the calling thread: ``stage()`` returns the copy itself, and the sources may change then.

    DCP takes it as ``dcp.async_save(..., async_stager=stager)``, as it takes torch's stager of this name. A copy that
    is still in use is never overwritten: the next stage takes other memory, within ``budget_bytes``.

    Args:
        cache_staged_state_dict: Keep the host memory from stage to stage, as in torch.
        type_check: Refuse values other than tensors, numbers, strings, bytes, dicts, lists and tuples, as in torch.
        budget_bytes: The most host memory that is mapped at any time, in bytes. None: half of the machine's memory,
            divided by ``LOCAL_WORLD_SIZE``, the number of ranks on the host, if that is set (torchrun sets it).
        timeout_s: The limit of each stage, in seconds.

    Raises:
        InvalidOptionError: An argument is wrong.
    """

    _synchronize_after_execute = False  # read by DCP: when stage() has returned, all copies are complete

    def __init__(
        self,
        cache_staged_state_dict: bool = False,
        type_check: bool = False,
        *,
        budget_bytes: int | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.cache_staged_state_dict = cache_staged_state_dict
        self.type_check = type_check
        self._timeout_s = timeout_s
        self._stager = AsyncStager(budget_bytes=budget_bytes, timeout_s=timeout_s)

    def stage(self, state_dict: Mapping[str, Any]) -> StagedState:
        """Copy ``state_dict`` to host memory, and return the copy. Blocks.

        Args:
            state_dict: Nested dicts, lists and tuples of tensors and values.

        Returns:
            The copy, with the same structure, shapes, strides and shared storages.

        Raises:
            UnsafeObjectError: A value cannot be copied, or ``type_check`` refuses it.
            UnsupportedTensorError: A tensor has no bytes.
            ArenaExhaustedError: The budget does not suffice.
            ClosedError, ForkedProcessError, GraphCaptureError, InvalidOptionError: The stager or the state cannot be
                used here.
            DeadlineExceededError: The copies were not done within ``timeout_s``.
        """
        if not self.cache_staged_state_dict:
            self._stager.trim()
        future = self._stager.stage(state_dict, copy_value=_check_type if self.type_check else copy.deepcopy)
        try:
            return future.result(self._timeout_s)
        except TimeoutError as error:
            if future.done():
                raise
            raise DeadlineExceededError(
                f"the state dict was not copied within timeout_s={self._timeout_s:g}"
            ) from error

    @property
    def should_synchronize_after_execute(self) -> bool:
        """False: DCP has nothing to wait for when ``stage()`` has returned."""
        return self._synchronize_after_execute

    def synchronize_staging(self) -> None:
        """Return at once, because ``stage()`` returns when everything has been copied."""

    def close(self) -> None:
        """Take no more stages. Copies that are in use stay valid.

        Raises:
            DeadlineExceededError: Memory could not be given back within ``timeout_s``.
        """
        self._stager.close()


def _check_type(value: Any) -> Any:
    if value is not None and not isinstance(value, _EXPECTED):
        raise UnsafeObjectError(
            f"type_check expects tensors, numbers, strings, bytes and containers, not {type(value)}"
        )
    return copy.deepcopy(value)

"""``BlockingAsyncStager``: what torch's stager of that name does, over the arena."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from io import BytesIO
from typing import Any

from .._runtime.public import public
from .._runtime.threads import Deadline
from ..errors import DeadlineExceededError, UnsafeObjectError
from .stager import AsyncStager
from .tree import StagedState

__all__ = ["BlockingAsyncStager"]

_EXPECTED = (int, float, str, bytes, BytesIO)


@public
class BlockingAsyncStager:
    """Stages on the calling thread's time: ``stage()`` returns the copy itself, and the sources may change then.

    ``cache_staged_state_dict`` keeps the host memory from stage to stage, as in torch; unlike there, a copy that
    somebody still reads is never overwritten: the next stage takes other memory, within ``budget_bytes``.
    ``type_check`` refuses values that are no tensor, number, string, bytes, dict, list or tuple. DCP takes it as
    ``async_stager=``. Other options as in ``AsyncStager``.
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
        """A copy of ``state_dict`` in host memory. Blocks. Raises what ``AsyncStager.stage`` and its future raise, and
        ``UnsafeObjectError`` for a value that ``type_check`` refuses."""
        if not self.cache_staged_state_dict:
            self._stager.trim()
        future = self._stager.stage(state_dict, convert=_check_type if self.type_check else copy.deepcopy)
        deadline = Deadline.after(self._timeout_s)
        try:
            return future.result(deadline.remaining_s())
        except TimeoutError as error:
            if future.done():
                raise
            raise DeadlineExceededError(
                f"the state dict was not copied within timeout_s={self._timeout_s:g}"
            ) from error

    @property
    def should_synchronize_after_execute(self) -> bool:
        return self._synchronize_after_execute

    def synchronize_staging(self) -> None:
        """Nothing: ``stage()`` returns when everything has been copied."""

    def close(self) -> None:
        """Take no more stages. Copies that somebody holds stay valid."""
        self._stager.close()


def _check_type(value: Any) -> Any:
    if value is not None and not isinstance(value, _EXPECTED):
        raise UnsafeObjectError(
            f"type_check expects tensors, numbers, strings, bytes and containers, not {type(value)}"
        )
    return copy.deepcopy(value)

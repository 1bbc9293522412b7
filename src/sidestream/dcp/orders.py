"""The order of rank 0 to each rank of a save, which says where to write. It is sent in the plan that DCP sends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

__all__ = ["SentOrder", "forget_order", "order_received"]

_here = threading.local()


@dataclass(frozen=True, slots=True)
class SentOrder:
    """The order of rank 0 to write into the attempt of the save ``save_id`` of ``target``, with files of number
    ``rank``.

    DCP sends it in the plan of each rank. A planner that caches its plans drops that plan and uses the one of an
    earlier save, so unpickling an order also records it for the current thread (``order_received``).
    """

    save_id: str
    target: str
    rank: int

    def __reduce__(self) -> tuple[Callable[..., SentOrder], tuple[Any, ...]]:
        return _receive, astuple(self)


def _receive(*fields: Any) -> SentOrder:
    order = SentOrder(*fields)
    # Noted when it is unpickled, in the thread of the call. The plan that carries the order may never reach
    # ``write_data``: a planner that caches continues with the plan of an earlier save, which carries an earlier order.
    _here.order = order
    return order


def order_received() -> SentOrder | None:
    """Return the last order that this thread has received since ``forget_order``, or None."""
    return getattr(_here, "order", None)


def forget_order() -> None:
    """Drop the order that this thread has received."""
    _here.order = None

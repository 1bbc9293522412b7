"""What travels between the ranks of a save in DCP's own messages: the order of rank 0, in the plan of each rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

__all__ = ["SentOrder", "forget_order", "order_received"]

_here = threading.local()


@dataclass(frozen=True, slots=True)
class SentOrder:
    """Rank 0's word: write into its attempt to save ``target``, with files of number ``rank``.

    DCP sends it in the plan of each rank. A planner that caches its plans throws that plan away and goes on with the
    one of an earlier save, so whoever receives an order notes it in passing (``order_received``).
    """

    save_id: str
    target: str
    rank: int

    def __reduce__(self) -> tuple[Callable[..., SentOrder], tuple[Any, ...]]:
        return _receive, astuple(self)


def _receive(*fields: Any) -> SentOrder:
    order = SentOrder(*fields)
    _here.order = order
    return order


def order_received() -> SentOrder | None:
    """The last one that came to this thread, since ``forget_order``."""
    return getattr(_here, "order", None)


def forget_order() -> None:
    _here.order = None

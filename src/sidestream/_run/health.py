"""How a run is doing, as one frozen record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .._runtime.public import public
from .pruning import Pruned

__all__ = ["Health"]


@public
@dataclass(frozen=True, slots=True)
class Health:
    """What a ``Checkpointer`` knows about itself; nothing is looked up for it.

    ``in_flight`` saves are on their way. ``last_saved`` is the step that it last committed, ``since_saved_s`` seconds
    ago. ``failures`` has the errors of saves that nobody has awaited, ``retention`` why the last pass of retention
    failed, ``sweeping`` why what dead writers left could not be looked for or deleted, ``damaged`` the directories that
    did not verify, ``passed_over`` those that ``restore`` took an older step for, ``leases`` what went wrong with
    leases. ``pruned`` is the last pass that succeeded.
    """

    in_flight: int
    last_saved: int | None
    since_saved_s: float | None
    failures: tuple[str, ...]
    retention: str | None
    sweeping: str | None
    damaged: Mapping[str, str]
    passed_over: Mapping[str, str]
    leases: Mapping[str, str]
    pruned: Pruned

    @property
    def ok(self) -> bool:
        """Whether there is nothing to look after."""
        wrong = (self.failures, self.retention, self.sweeping, self.damaged, self.passed_over, self.leases)
        return not any(wrong)

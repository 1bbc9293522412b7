"""Retention: policies that choose the steps to keep, and the choice of the steps to delete. This module does not access
storage."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from .._runtime.public import public, shortened
from ..errors import InvalidOptionError
from ..options import check_choice, check_count


@public
@dataclass(frozen=True, slots=True)
class SavedStep:
    """A committed generation of a step, as a retention policy sees it.

    Attributes:
        step: The number of the step.
        generation: How many saves of the step came before, plus 1.
        saved_at: When it was saved, in seconds since 1970 by the clock of its writer.
        metadata: The ``metadata=`` of the save. Empty where no policy needs it.
    """

    step: int
    generation: int = 1
    saved_at: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def order(self) -> tuple[int, int]:
        """The pair by which generations are ordered: step and generation."""
        return self.step, self.generation


@public
@runtime_checkable
class Retention(Protocol):
    """A policy for ``keep=``: any object with this method.

    ``KeepLast(3) | policy`` and ``policy | KeepLast(3)`` keep what either of them keeps. One of the policies of such an
    expression has to be one of sidestream.

    ``kept`` has no side effects, and does not keep a step that it did not keep before.
    """

    def kept(self, steps: Sequence[SavedStep]) -> AbstractSet[int]:
        """Return the numbers of the steps that stay.

        Args:
            steps: The committed steps in order, each by its highest generation.
        """


class _Policy:
    __slots__ = ()

    def __or__(self: Retention, other: Retention) -> _Either:
        if not isinstance(other, Retention):
            return NotImplemented
        return _Either((self, other))

    def __ror__(self: Retention, other: Retention) -> _Either:
        if not isinstance(other, Retention):
            return NotImplemented
        return _Either((other, self))


@dataclass(frozen=True, slots=True)
class _Either(_Policy):
    """A policy that keeps the steps that at least one of several policies keeps."""

    policies: tuple[Retention, ...]

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.policies))

    def kept(self, steps: Sequence[SavedStep]) -> AbstractSet[int]:
        # Each policy judges all steps, and not what the others left. Otherwise the result would depend on their order.
        return frozenset[int]().union(*(_kept_by(policy, steps) for policy in self.policies))


@public
@dataclass(frozen=True, slots=True)
class KeepAll(_Policy):
    """A policy that keeps everything, superseded generations included."""

    def kept(self, steps: Sequence[SavedStep]) -> AbstractSet[int]:
        """Return the numbers of the steps that stay.

        Args:
            steps: The committed steps in order, each by its highest generation.
        """
        return {each.step for each in steps}


def retention_of(keep: Retention | None) -> Retention:
    """Return the policy for ``keep=``. Raises ``InvalidOptionError``."""
    if keep is None:
        return KeepAll()
    if isinstance(keep, type) or not isinstance(keep, Retention):
        raise InvalidOptionError(f"keep={keep!r} has to be a policy, such as sidestream.KeepLast(3)")
    return keep


@public
@dataclass(frozen=True, slots=True)
class KeepLast(_Policy):
    """A policy that keeps the highest steps.

    Args:
        n: How many, at least 1.

    Raises:
        InvalidOptionError: ``n`` is not a positive integer.
    """

    n: int

    def __post_init__(self) -> None:
        check_count("KeepLast(n)", self.n)

    def kept(self, steps: Sequence[SavedStep]) -> AbstractSet[int]:
        """Return the numbers of the steps that stay.

        Args:
            steps: The committed steps in order, each by its highest generation.
        """
        return {each.step for each in steps[-self.n :]}


@public
@dataclass(frozen=True, slots=True, kw_only=True)
class KeepEvery(_Policy):
    """A policy that keeps the first step of each span. It takes one of the two arguments.

    Args:
        steps: The length of a span in steps: with 1000 the spans are 0-999, 1000-1999 and so on.
        seconds: The length of a span in seconds, counted from 1970 by the clocks of the writers.

    Raises:
        InvalidOptionError: Both are given or none, or the length is not a positive integer.
    """

    steps: int | None = None
    seconds: int | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            raise InvalidOptionError("KeepEvery takes either steps= or seconds=")
        check_count("KeepEvery(steps or seconds)", self.steps if self.seconds is None else self.seconds)

    def kept(self, steps: Sequence[SavedStep]) -> AbstractSet[int]:
        """Return the numbers of the steps that stay.

        Args:
            steps: The committed steps in order, each by its highest generation.
        """
        first: dict[int, int] = {}
        for each in steps:
            span = each.saved_at // self.seconds if self.seconds is not None else each.step // (self.steps or 1)
            # The first step of a span, and not the last one: later saves in the same span then change nothing about
            # what stays.
            first.setdefault(span, each.step)
        return set(first.values())


@public
@dataclass(frozen=True, slots=True)
class KeepBest(_Policy):
    """A policy that keeps the steps with the best metric. Of equal ones it keeps the newer.

    A step that lacks the metric, or for which it is not a number (NaN included), is not kept by this policy. If all
    steps lack it, the policy cannot judge and keeps all of them, and a warning says so.

    Args:
        metric: A key of the ``metadata=`` of a save, or a path of keys joined by dots.
        n: How many steps, at least 1.
        mode: ``"min"``: the lowest values are best. ``"max"``: the highest are.

    Raises:
        InvalidOptionError: An argument is wrong.
    """

    metric: str
    n: int = 1
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if type(self.metric) is not str or not self.metric:
            raise InvalidOptionError(f"KeepBest: metric={self.metric!r} has to be a key of the metadata")
        check_count("KeepBest(n)", self.n)
        check_choice("mode", self.mode, Literal["min", "max"])

    def kept(self, steps: Sequence[SavedStep]) -> AbstractSet[int]:
        """Return the numbers of the steps that stay.

        Args:
            steps: The committed steps in order, each by its highest generation.
        """
        sign = 1 if self.mode == "min" else -1
        found = [(_metric(each.metadata, self.metric), each) for each in steps]
        # Of equal values the higher step comes first.
        ranked = sorted((sign * value, -each.step) for value, each in found if value is not None)
        # A metric that no step has is most often a spelling mistake. Deleting every step for it could not be undone.
        if not ranked:
            return {each.step for each in steps}
        return {-step for _, step in ranked[: self.n]}


def _policies(keep: Retention) -> Iterator[Retention]:
    """Yield the policies of which ``keep`` consists."""
    if not isinstance(keep, _Either):
        yield keep
        return
    for policy in keep.policies:
        yield from _policies(policy)


def unknown_metrics(keep: Retention, steps: Collection[SavedStep]) -> list[str]:
    """Return the metrics of ``keep`` that none of ``steps`` has, if steps are kept for that reason alone."""
    metrics = [one.metric for one in _policies(keep) if isinstance(one, KeepBest) and len(steps) > one.n]
    return [metric for metric in metrics if all(_metric(each.metadata, metric) is None for each in steps)]


def metrics_in(metadata: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the paths of the numbers in ``metadata``."""
    for key, value in metadata.items():
        if isinstance(value, Mapping):
            yield from metrics_in(value, f"{prefix}{key}.")
        elif _metric(metadata, key) is not None:
            yield f"{prefix}{key}"


def _metric(metadata: Mapping[str, Any], path: str) -> float | None:
    value: Any = metadata
    # A key that contains dots goes before a path of keys.
    for key in [path] if path in metadata else path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    # NaN compares with nothing, so a sort would put it anywhere. ``bool`` is an ``int`` in Python, and is not a metric.
    if isinstance(value, float):
        return None if math.isnan(value) else value
    return value if isinstance(value, int) and not isinstance(value, bool) else None


@public
@dataclass(frozen=True, slots=True)
class Pruned:
    """The result of one pass of retention. The fields are names of directories in the run.

    Attributes:
        deleted: Steps that were deleted.
        leased: Steps that are deleted later, because a process has a lease on them.
        verified: The step whose bytes were all read and compared before an older one was deleted. None if no step could
            go.
        damaged: Steps that did not verify. They count for no policy, and are not deleted.
        abandoned: Attempts of dead writers, and interrupted deletions, that were deleted.
    """

    deleted: tuple[str, ...] = ()
    leased: tuple[str, ...] = ()
    verified: str | None = None
    damaged: tuple[str, ...] = ()
    abandoned: tuple[str, ...] = ()


def needs_metadata(keep: Retention) -> bool:
    """Return whether ``keep`` may use the metadata of steps, which have to be read from storage. A policy of the user
    always gets them."""
    # By the exact type: a subclass may override ``kept``, and then needs what any policy of the user needs.
    return any(type(one) not in (KeepAll, KeepLast, KeepEvery) for one in _policies(keep))


def uses_only_numbers(keep: Retention) -> bool:
    """Return whether ``keep`` uses nothing of a step but its number."""
    return not needs_metadata(keep) and all(getattr(one, "seconds", None) is None for one in _policies(keep))


def deletable_steps(
    saved: Sequence[SavedStep], keep: Retention, protected: AbstractSet[int] = frozenset()
) -> list[SavedStep]:
    """Return those of ``saved`` that may be deleted when a newer one has been verified, oldest first.

    A policy sees only the highest generation of each step. Lower generations are deleted with every policy except
    ``KeepAll``. The newest step and those in ``protected`` are kept in any case.
    """
    ordered = sorted(saved, key=lambda each: each.order)
    if not ordered or keeps_all(keep):
        return []
    highest = {each.step: each for each in ordered}
    # The newest step stays whatever a policy returns. It is the one that a restore takes, and every later pass compares
    # with it.
    stay = set(_kept_by(keep, list(highest.values()))) | protected | {ordered[-1].step}
    return [each for each in ordered if each.step not in stay or each is not highest[each.step]]


def _kept_by(policy: Retention, steps: Sequence[SavedStep]) -> AbstractSet[int]:
    """Return the steps that a policy keeps. Raises ``InvalidOptionError`` unless it returns a set of numbers."""
    kept: object = policy.kept(steps)
    if not isinstance(kept, AbstractSet) or not all(type(step) is int for step in kept):
        raise InvalidOptionError(
            f"keep={policy!r:.200} returned {kept!r:.100} from kept(), which has to return a set of step numbers"
        )
    return kept


def keeps_all(keep: Retention) -> bool:
    """Return whether ``keep`` never deletes a step, so that the run need not be listed."""
    return any(type(one) is KeepAll for one in _policies(keep))


def best_of(steps: Sequence[SavedStep], metric: str, mode: Literal["min", "max"]) -> int | None:
    """Return the step that ``KeepBest(metric, 1, mode)`` keeps; None without steps. Raises ``InvalidOptionError`` if no
    step has the metric."""
    policy = KeepBest(metric, 1, mode)
    judged = [each for each in steps if _metric(each.metadata, metric) is not None]
    if steps and not judged:
        there = sorted({name for each in steps for name in metrics_in(each.metadata)})
        raise InvalidOptionError(
            f"no step has the metric {metric!r} in its metadata; the metrics of this run are: {shortened(there, 20)}"
        )
    return next(iter(policy.kept(judged)), None)

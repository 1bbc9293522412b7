"""The differences between a target and a checkpoint, collected for one error."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from ..errors import (
    DtypeMismatchError,
    MissingKeysError,
    ShapeMismatchError,
    StateMismatchError,
    UnexpectedKeysError,
    listed,
)
from ..options import Tolerance
from .names import Renamed, castable
from .prefixes import prefix_hint

_ABSENT = "not in the checkpoint"
_ADVICE: dict[type[StateMismatchError], str] = {
    MissingKeysError: "allow_missing=True, or patterns of names, leaves what the checkpoint lacks as it is",
    UnexpectedKeysError: "allow_unexpected=True, or patterns of names, leaves out what the target lacks",
    ShapeMismatchError: "build the tensors with the saved shapes, or take their names out of the target and pass "
    "allow_unexpected=",
}


def accepts(pattern: re.Pattern[str] | None, fqn: str) -> bool:
    """Return whether a difference of this name is accepted."""
    return pattern is not None and pattern.match(fqn) is not None


@dataclass(slots=True)
class Findings:
    """The differences between target and checkpoint: those that ``tolerance`` accepts, and the others by kind."""

    tolerance: Tolerance
    names: Renamed
    offenders: dict[type[StateMismatchError], list[str]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    cast: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    opaque: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    """Names of leaves that are missing in the checkpoint, if that is an error."""
    unexpected: list[str] | None = None
    """Keys that this rank does not request, for a load in which other ranks may request them. None in other loads."""

    def add(self, kind: type[StateMismatchError], line: str) -> None:
        self.offenders.setdefault(kind, []).append(line)

    def add_missing(self, fqn: str, what: str = _ABSENT) -> None:
        accepted = accepts(self.tolerance.missing, fqn)
        if what != _ABSENT:  # nothing of an object was saved: the pattern "optimizer.*" also accepts "optimizer"
            accepted = accepted or accepts(self.tolerance.missing, f"{fqn}.")
        if accepted:
            self.missing.append(fqn)
        else:
            if what == _ABSENT:
                self.absent.append(fqn)
            name = self.names.saved.get(fqn, fqn)
            saved_as = "" if name == fqn else f" as {name}" if name else ": names= gives no name for it"
            self.add(MissingKeysError, f"{fqn}: in the target, {what}{saved_as}")

    def add_unexpected(self, fqn: str, where: str) -> None:
        fqn = self.names.saved_name(fqn)
        if accepts(self.tolerance.unexpected, fqn):
            self.ignored.append(fqn)
        elif self.unexpected is not None:
            self.unexpected.append(fqn)
        else:
            self.add(UnexpectedKeysError, f"{fqn}: in the checkpoint, not in the {where}")

    def raise_if_any(self, url: str, targets: Callable[[], Collection[str]], saved: Collection[str]) -> None:
        """Raise an error if there are findings. ``targets`` returns the names of the target, ``saved`` are those in the
        checkpoint."""
        if not self.offenders:
            return
        lines = [line for found in self.offenders.values() for line in found]
        kind = next(iter(self.offenders)) if len(self.offenders) == 1 else StateMismatchError
        hint = prefix_hint(self.absent, targets(), saved) if self.absent else ""
        advice = [text for one, text in _ADVICE.items() if one in self.offenders]
        if hint:  # the same for one name alone may be chance, so that gets the other advice too
            advice = [hint] if len(self.absent) > 1 else [hint, *advice]
        differences = "\n  ".join([listed(lines), *advice])
        raise kind(
            f"the target does not fit the checkpoint at {url} (nothing was changed):\n  {differences}",
            lines,
        )


def dtype_fits(fqn: str, here: str, saved: str, findings: Findings) -> bool:
    if here == saved:
        return True
    possible = castable(saved, here)
    if possible and accepts(findings.tolerance.cast, fqn):
        findings.cast.append(fqn)
        return True
    remedy = "allow_cast=True converts" if possible else f"which torch does not convert into it: build it as {saved}"
    findings.add(DtypeMismatchError, f"{fqn}: dtype {here} in the target, {saved} saved ({remedy})")
    return False

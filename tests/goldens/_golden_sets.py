"""The recorded sets and how they are compared.

``sets/2026-11-28-promises`` is the base: one JSON file per area, ``{"reason": ..., "entries": {name: entry}}``. Every
other directory of ``sets`` is an overlay with the entries that were changed on purpose since, or recorded for the first
time, and the reason. Overlays apply in the order of their names; an entry of ``null`` removes one. An area that the
base does not have begins with the first set that has a file of it.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SETS = HERE / "sets"
BASE = "2026-11-28-promises"
_SHOWN_LINES = 40


@dataclass(frozen=True)
class Expected:
    """The recorded ``entry``, and the set it comes from."""

    origin: str
    entry: Any


def overlays(sets: Path = SETS) -> list[str]:
    """The names of all sets, the base first."""
    return [BASE, *sorted(path.name for path in sets.iterdir() if path.is_dir() and path.name != BASE)]


def expected(area: str, *, without: str = "", sets: Path = SETS) -> dict[str, Expected]:
    """What the sets together say of ``area``; the set ``without`` is left out."""
    merged: dict[str, Expected] = {}
    for name in overlays(sets):
        path = sets / name / f"{area}.json"
        if name == without or not path.exists():
            continue
        for key, entry in json.loads(path.read_text())["entries"].items():
            if entry is None:
                merged.pop(key, None)
            else:
                merged[key] = Expected(name, entry)
    return merged


def write(name: str, area: str, entries: Mapping[str, Any], reason: str, sets: Path = SETS) -> None:
    """Write the entries of one area into the set ``name``; no entries, no file."""
    path = sets / name / f"{area}.json"
    if not entries:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"reason": reason, "entries": dict(sorted(entries.items()))}
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def same(recorded: Any, found: Any) -> bool:
    """Whether an entry is as it was recorded. Events may be added; nothing else may differ."""
    if isinstance(recorded, dict) and isinstance(found, dict) and "events" in recorded and "events" in found:
        rest = {key: value for key, value in recorded.items() if key != "events"}
        return rest == {key: value for key, value in found.items() if key != "events"} and _contains(
            found["events"], recorded["events"]
        )
    return bool(recorded == found)


def _contains(events: list[Any], wanted: list[Any]) -> bool:
    """Whether ``wanted`` are among ``events``, in this order."""
    rest = iter(events)
    return all(any(event == one for event in rest) for one in wanted)


def changed(recorded: Mapping[str, Expected], found: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that an overlay has to have so that ``found`` is what is expected."""
    differing = {
        key: entry for key, entry in found.items() if key not in recorded or not same(recorded[key].entry, entry)
    }
    return differing | dict.fromkeys(key for key in recorded if key not in found)


def differences(area: str, recorded: Mapping[str, Expected], found: Mapping[str, Any]) -> list[str]:
    """One text for every entry that is not as it was recorded."""
    told = []
    for key, entry in sorted(changed(recorded, found).items()):
        if key not in recorded:
            told.append(f"{area}: {key}: no set has this entry")
        elif entry is None and key not in found:
            told.append(f"{area}: {key}: recorded in {recorded[key].origin}, and no longer found")
        else:
            lines = difflib.unified_diff(
                _lines(recorded[key].entry), _lines(entry), recorded[key].origin, "found now", n=2, lineterm=""
            )
            told.append("\n  ".join([f"{area}: {key}:", *list(lines)[:_SHOWN_LINES]]))
    return told


def _lines(entry: Any) -> list[str]:
    return json.dumps(entry, indent=1, ensure_ascii=False).splitlines()

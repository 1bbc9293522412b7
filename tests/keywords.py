"""Flat options of parametrized tests, sorted into the keywords of a call and its options object."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from sidestream import ConvertOptions, LoadOptions, SaveOptions

__all__ = ["for_convert", "for_load", "for_run", "for_save"]

_SAVE = {one.name for one in fields(SaveOptions)}
_CONVERT = {one.name for one in fields(ConvertOptions)}
_LOAD = {one.name for one in fields(LoadOptions)}


def for_save(**flat: Any) -> dict[str, Any]:
    """Return the keywords of ``save`` and ``async_save``."""
    return _sorted("options", SaveOptions, _SAVE, flat)


def for_convert(**flat: Any) -> dict[str, Any]:
    """Return the keywords of ``convert``."""
    return _sorted("options", ConvertOptions, _CONVERT, flat)


def for_load(**flat: Any) -> dict[str, Any]:
    """Return the keywords of ``load`` and ``restore``."""
    return _sorted("options", LoadOptions, _LOAD, flat)


def for_run(**flat: Any) -> dict[str, Any]:
    """Return the keywords of a ``Checkpointer``. Limits of time are those of its saves and loads, too."""
    both = {name: flat[name] for name in ("timeout_s", "rank_wait_s") if name in flat}
    saves = {
        name: flat.pop(name)
        for name in ("durability", "writer", "digest", "streaming", "names", "dtype")
        if name in flat
    }
    loads = {name: flat.pop(name) for name in ("verify", "safe_globals", "trust") if name in flat}
    flat.pop("rank_wait_s", None)
    if saves or both:
        flat["save"] = SaveOptions(**saves, **both)
    if loads or both:
        flat["load"] = LoadOptions(**loads, **both)
    return flat


def _sorted(name: str, kind: Callable[..., Any], known: set[str], flat: dict[str, Any]) -> dict[str, Any]:
    options = {key: flat.pop(key) for key in list(flat) if key in known}
    return {**flat, name: kind(**options)} if options else flat

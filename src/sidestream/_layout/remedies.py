"""Advice on what to save instead of an object that is not plain data."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime as dt
import enum
import os
import random
import types
from collections.abc import Callable
from typing import Any

import torch

_REMEDIES: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (lambda value: isinstance(value, argparse.Namespace | types.SimpleNamespace), "save vars(value)"),
    (dataclasses.is_dataclass, "save dataclasses.asdict(value)"),
    (lambda value: isinstance(value, os.PathLike), "save str(value)"),
    (lambda value: isinstance(value, enum.Enum), "save value.value"),
    (lambda value: isinstance(value, dt.timedelta), "save value.total_seconds()"),
    (lambda value: isinstance(value, dt.date | dt.time), "save value.isoformat()"),
    (lambda value: isinstance(value, tuple) and hasattr(value, "_asdict"), "save value._asdict()"),
    (lambda value: isinstance(value, torch.Generator), "save value.get_state()"),
    (lambda value: isinstance(value, random.Random), "save value.getstate()"),
    (lambda value: isinstance(value, dict), "save dict(value)"),
    (lambda value: isinstance(value, list | range | collections.deque), "save list(value)"),
    (lambda value: isinstance(value, tuple), "save tuple(value)"),
    (lambda value: isinstance(value, str), "save str(value)"),
    (lambda value: callable(getattr(value, "model_dump", None)), "save value.model_dump()"),
    (lambda value: callable(getattr(value, "to_dict", None)), "save value.to_dict()"),
)


def remedy_for(value: object) -> str:
    """Return the advice for ``value``, to end an error message with."""
    if not isinstance(value, type):
        for fits, remedy in _REMEDIES:
            if fits(value):
                return f"{remedy}, and construct the object from it after a load"
    return (
        "turn it into numbers, strings, tensors and containers of those, or give it state_dict() and load_state_dict()"
    )

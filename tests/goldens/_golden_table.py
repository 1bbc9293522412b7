"""How one call is recorded: what it returned or raised, and which events and warnings it emitted; of texts only what a
reader acts on, and nothing that differs from run to run."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import inspect
import itertools
import json
import logging
import os
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from _golden_checkpoints import CHECKPOINTS
from _golden_states import raw_bytes
from torch.distributed.checkpoint.api import CheckpointException

import sidestream
from sidestream import errors, events

_SKIPPED = frozenset({"seconds", "since_saved_s", "save_id", "message"})
"""Fields whose value differs from run to run, or is a text."""
_COUNT_METADATA = (sidestream.CopyReport, sidestream.VerifyReport)
"""Their bytes include those of .metadata, whose length varies by the digits of a checksum in it."""
_PATTERNS = (
    (re.compile(r"127\.0\.0\.1:\d+|localhost:\d+"), "{address}"),
    (re.compile(r"bucket-[0-9a-f]{12}"), "{bucket}"),
    (re.compile(r"(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])"), "{id}"),
    (re.compile(r"(?<![0-9a-f])[0-9a-f]{16}(?=\.(manifest|distcp))"), "{short id}"),
    (re.compile(r"\bpid=\d+"), "pid={pid}"),
    (re.compile(r"Error performing \w+ .*?(?=\); check|: '|$)", re.DOTALL), "{the client's words}"),
)
_NAMED = re.compile(
    r"""
    (?P<quoted>(?<!\w)(?P<mark>['"])(?P<inside>[^'"\n]*)(?P=mark)(?!\w)) # 'auto', "blake3"
    | \{\w+\}[^\s'",;:()\[\]]* | \w+://[^\s'",;()]+                     # a path, a URL
    | --[a-z][\w-]*                                                     # an option of the command line
    | \b[a-z_]+=(?:'[^'\s]*'|"[^"\s]*"|[\w.]*)                          # a keyword, and the value to give it
    | [\w.]*\w(?=\()                                                    # a call
    | \b(?:CLASSES)\b
    | [\w.-]*[A-Za-z_]\w*\.[\w.]*\w | (?<!\w)\.[A-Za-z_]\w*              # an FQN, a file
    | \b__[\w{}.-]+ | \bmanifest-[\w{}.]+ | \bstep-[\w.]+
    | (?:(?<=Error:\ )|(?<=\n\ \ )|\A)[\w.]+(?=:\ )                       # an FQN before what is said of it
    """.replace("CLASSES", "|".join(errors.__all__)),
    re.VERBOSE,
)
_NOTHING: tuple[Any, ...] = (None, "", [], {})
"""Fields with such a value are left out."""
_WITH_REASONS = ("damaged", "passed_over")
"""Fields that may map directories to texts."""


@contextmanager
def fixed(first: int = 1, *, one: bool = False) -> Iterator[None]:
    """Identifiers count from ``first`` and the clock stands still, so sizes and checksums are the same each time.

    With ``one`` every identifier is the same, so the files do not depend on how many are made, and in which order."""
    numbers = itertools.repeat(first) if one else itertools.count(first)

    def number() -> uuid.UUID:
        return uuid.UUID(int=(0xA3C8103 << 96) + next(numbers), version=4)

    with mock.patch.object(uuid, "uuid4", number), mock.patch.object(time, "time", return_value=1_790_000_000.0):
        yield


class Table:
    """Entries of one area, of calls that use files below ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.entries: dict[str, Any] = {}

    async def tries(self, name: str, call: Callable[[], Any] | Awaitable[Any]) -> Any:
        """Call or await, and record the outcome. Returns the result, or None if it raised."""
        assert name not in self.entries, name
        seen: list[events.Event] = []
        records = _Records()
        logger = logging.getLogger("sidestream")
        logger.addHandler(records)
        result = None
        try:
            with events.observe(seen.append):
                try:
                    result = call() if callable(call) else call
                    if inspect.isawaitable(result):
                        result = await result
                    entry: dict[str, Any] = {"returns": self.plain(result)}
                except (Exception, asyncio.CancelledError, CheckpointException) as error:
                    result = None
                    entry = {"raises": self.error(error)}
        finally:
            logger.removeHandler(records)
        # They have times, or depend on them; tests of their own compare them.
        phases = (events.SaveEvent, events.LoadEvent, events.CallerWaited)
        told = {
            "events": [self._event(event) for event in seen if not isinstance(event, phases)],
            "log": [[line.partition(" ")[0], *self.names(line)] for line in records.lines],
        }
        told["events"] = [event for event, _ in groupby(told["events"])]  # how often it is tried again is free
        self.entries[name] = entry | {key: lines for key, lines in told.items() if lines}
        return result

    def note(self, name: str, value: Any) -> None:
        assert name not in self.entries, name
        self.entries[name] = {"noted": self.plain(value)}

    def text(self, text: str) -> str:
        text = text.replace(str(self.folder), "{folder}").replace(str(CHECKPOINTS), "{checkpoints}")
        for pattern, placeholder in _PATTERNS:
            text = pattern.sub(placeholder, text)
        return text

    def names(self, text: str) -> list[str]:
        """What a reader of the text acts on: paths, names in the state, options with their values, calls, classes. How
        it is worded is free."""
        found = (match["inside"] or match[0] for match in _NAMED.finditer(self.text(text)))
        return sorted({name.rstrip(".:") for name in found} - {""})

    def _event(self, event: events.Event) -> str:
        return f"{type(event).__name__} {self.text(getattr(event, 'url', ''))}".rstrip()

    def error(self, error: BaseException) -> dict[str, Any]:
        """Its class, what its message and notes name, and the public attributes of ours."""
        if isinstance(error, CheckpointException):  # of DCP: its message has tracebacks
            failures = {str(rank): self.error(failed[0]) for rank, failed in error.failures.items()}
            return {"type": type(error).__name__, "failures": failures}
        told: dict[str, Any] = {
            "type": type(error).__name__,
            "names": self.names("\n".join([str(error), *getattr(error, "__notes__", ())])),
        }
        for name in ("errno", "file", "fqn", "offset", "written", "missing", "others", "extra"):
            if isinstance(error, errors.SidestreamError) and getattr(error, name, None) not in (None, ()):
                told[name] = self.plain(getattr(error, name))
        if isinstance(error, errors.StateMismatchError):
            told["offenders"] = [self.names(one) for one in error.offenders]
        if isinstance(error, BaseExceptionGroup):
            told["errors"] = [self.error(one) for one in error.exceptions]
        return told

    def plain(self, value: Any) -> Any:
        """``value`` as JSON holds it."""
        if value is None or isinstance(value, (bool, int, float)):
            return value
        if isinstance(value, (str, os.PathLike)):
            return self.text(os.fspath(value))
        if isinstance(value, BaseException):
            return self.error(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            told = {
                name: self.plain(list(item) if name in _WITH_REASONS else item)
                for name, item in fields.items()
                if name not in _SKIPPED and name[0] != "_"
            }
            if "files" in told:  # in the order in which the file system lists them
                told["files"] = sorted(told["files"])
            if isinstance(value, _COUNT_METADATA) and "{checkpoints}" not in told["url"]:
                told["nbytes"] = "{nbytes}"
            return {"type": type(value).__name__} | {name: item for name, item in told.items() if item not in _NOTHING}
        if isinstance(value, torch.Tensor):
            content = hashlib.sha256(raw_bytes(value)).hexdigest()[:12]
            return {"tensor": str(value.dtype), "shape": list(value.shape), "sha256": content}
        if isinstance(value, Mapping):
            return {self.text(str(key)): self.plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            items = [self.plain(item) for item in value]
            found_in_parallel = any(isinstance(item, sidestream.Damage) for item in value)
            return sorted(items, key=json.dumps) if found_in_parallel else items
        if isinstance(value, (set, frozenset)):
            return sorted(self.plain(item) for item in value)
        return str(value) if isinstance(value, (torch.dtype, torch.device)) else f"<{type(value).__name__}>"


def by_folder(paths: Iterable[str]) -> dict[str, str]:
    """The names in each folder."""
    folders: dict[str, list[str]] = {}
    for path in sorted(paths):
        folder, _, name = path.rpartition("/")
        folders.setdefault(folder, []).append(name)
    return {folder: " ".join(names) for folder, names in folders.items()}


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")

"""What a publisher holds: versions, and channels that point at them. Used on the operation loop only."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any, Literal, NamedTuple

from ..errors import InvalidOptionError, SkippedError, VersionNotFoundError
from .images import SealedImage

_MOST_NAME = 200


def check_channel(channel: object) -> None:
    """Raise ``InvalidOptionError`` unless ``channel`` is a name."""
    if not isinstance(channel, str) or not 0 < len(channel) <= _MOST_NAME:
        raise InvalidOptionError(f"channel={channel!r:.300} has to be a text of at most {_MOST_NAME} characters")


def told_apart(names: Iterable[str]) -> list[str]:
    """Return the names of subscribers with a number where one of them comes again."""
    found: dict[str, None] = {}
    for name in names:
        numbered = (f"{name} ({number})" for number in count(2))
        found[next(one for one in chain([name], numbered) if one not in found)] = None
    return list(found)


class Answer(NamedTuple):
    """The answer of one subscriber to a version. ``skipped``: it has taken a later one."""

    subscriber: str
    outcome: Literal["applied", "refused", "skipped"]
    reason: str = ""


@dataclass(eq=False, slots=True)
class HeldVersion:
    """A version that was published. ``channels`` are those that have pointed at it, and ``answers`` are by the ids of
    the subscribers."""

    epoch: int
    version: int
    image: SealedImage
    save_id: str
    metadata: Mapping[str, Any]
    channels: set[str] = field(default_factory=set)
    answers: dict[str, Answer] = field(default_factory=dict)

    @property
    def stamp(self) -> str:
        return f"e{self.epoch}.v{self.version}"


class Channels:
    """The held versions, the highest ``keep`` and those that channels point at, and the channels: for each the versions
    that it has pointed at, the present one last.

    ``revision`` counts the changes of all channels. Only ``promote`` and ``roll_back`` lower a channel."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self.held: dict[int, HeldVersion] = {}
        self.pointers: dict[str, list[int]] = {}
        self._latest: dict[str, int] = {}
        """The highest version that was published to each channel."""
        self.revision = 0
        self._waiting: list[asyncio.Future[None]] = []

    def target(self, channel: str) -> HeldVersion | None:
        """Return what a channel points at; None if nothing was published to it."""
        pointers = self.pointers.get(channel)
        return self.held[pointers[-1]] if pointers else None

    def publish(self, one: HeldVersion, channel: str | None) -> None:
        """Hold a version, and point the channel at it. Raises ``SkippedError`` if a later one came first: to the
        channel, or without a channel ``keep`` of them."""
        latest = -1 if channel is None else self._latest.get(channel, -1)
        if one.version <= latest:
            raise SkippedError(f"{one.stamp} was not published: version {latest} was complete before it")
        self.held[one.version] = one
        if channel is not None:
            self._latest[channel] = one.version
            self._point(channel, one.version)
        self._drop_unneeded()
        if one.version not in self.held:
            raise SkippedError(f"{one.stamp} was not published: {self._keep} later versions were complete before it")

    def promote(self, channel: str, version: int) -> None:
        """Point a channel at a held version. Raises ``VersionNotFoundError``."""
        if version not in self.held:
            raise VersionNotFoundError(
                f"version {version} is not held: {sorted(self.held) or 'none'} are; the newest keep={self._keep} and "
                "those that channels point at stay"
            )
        self._point(channel, version)
        self._drop_unneeded()

    def roll_back(self, channel: str) -> HeldVersion:
        """Point a channel at what it pointed at before, and return that. Raises ``VersionNotFoundError``."""
        pointers = self.pointers.get(channel, [])
        before = [version for version in pointers[:-1] if version in self.held and version != pointers[-1]]
        if not before:
            raise VersionNotFoundError(
                f"nothing that {channel!r} pointed at before is held any more: publish to it, or raise keep="
            )
        while pointers[-1] != before[-1]:
            pointers.pop()
        self.revision += 1
        self._drop_unneeded()
        return self.held[before[-1]]

    def answer(self, held: HeldVersion, subscriber: str, answer: Answer) -> None:
        """Note the answer of the subscriber with this id. One that serves a version does not skip it later."""
        if answer.outcome != "skipped" or subscriber not in held.answers:
            held.answers[subscriber] = answer
            self.wake()

    async def answered(self) -> None:
        """Wait for a further answer to any version, or for ``wake()``."""
        answered = asyncio.get_running_loop().create_future()
        self._waiting.append(answered)
        await answered

    def wake(self) -> None:
        """End all waits for answers."""
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            if not one.done():
                one.set_result(None)

    def _point(self, channel: str, version: int) -> None:
        self.held[version].channels.add(channel)
        pointers = self.pointers.setdefault(channel, [])
        if pointers[-1:] != [version]:
            pointers.append(version)
            self.revision += 1

    def _drop_unneeded(self) -> None:
        needed = {*sorted(self.held)[-self._keep :], *(pointers[-1] for pointers in self.pointers.values())}
        for version in self.held.keys() - needed:
            self.held.pop(version).image.drop()
        for pointers in self.pointers.values():
            pointers[:] = [version for version in pointers if version in self.held]

"""What a disk may hold after a power cut, by POSIX alone.

A file system may keep more than it was asked to, and ext4 and xfs do. This one does not: content is safe when its file
was synced after it was written, a name when its directory was synced after the name came to be. Everything else is
there, or is not, as the ``Cut`` has it. Operations are recorded while they really happen, with what they wrote: those
of this process and of its writer process, in one order.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pickle
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from _operations import Intercept, Operation

Keeps = Literal["nothing", "everything", "names", "content", "chance"]
"""What of the unsynced reaches the disk: of names and of content. ``everything`` is what a killed process leaves."""

Tree = frozenset[tuple[str, bytes]]
"""What a cut left, to compare: for each path a digest of its content, for a directory nothing."""


@dataclass(eq=False)
class File:
    content: bytearray = field(default_factory=bytearray)
    safe: bytes = b""


@dataclass(eq=False)
class Folder:
    """``pairs``: names that were exchanged since the last sync."""

    names: dict[str, File | Folder] = field(default_factory=dict)
    safe: dict[str, File | Folder] = field(default_factory=dict)
    pairs: list[tuple[str, str]] = field(default_factory=list)


T = TypeVar("T", bound=File | Folder)


@dataclass(frozen=True)
class Event:
    """A change of the tree. ``operation`` is the name of the call, ``index`` its number in ``process``.

    A sync is two events, of which the first is only ``begun``.
    """

    process: int
    index: int
    operation: str
    path: str
    target: str = ""
    flags: int = 0
    at: int = 0
    content: bytes = b""
    begun: bool = False


@dataclass(frozen=True)
class Acknowledged:
    """The save to the directory ``name``, of the state of ``seed``, returned."""

    name: str
    seed: int


class Model:
    """The tree below ``root``: what is there, and what is safe."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.top = _loaded(root)
        self.begun: dict[tuple[int, int], Any] = {}  # what a sync that has not ended will have made safe

    def find(self, path: str) -> File | Folder | None:
        node: File | Folder | None = self.top
        for part in Path(path).relative_to(self.root).parts:
            node = node.names.get(part) if isinstance(node, Folder) else None
        return node

    def folder(self, path: str) -> Folder:
        node = self.find(os.path.dirname(path))
        assert isinstance(node, Folder), path
        return node

    def happen(self, event: Event) -> None:
        """Change as the tree did."""
        getattr(self, f"_{event.operation}")(event)

    def _open(self, event: Event) -> None:
        file = self.find(event.path)
        if not isinstance(file, File):
            file = self._add(event.path, File())
        if event.flags & os.O_TRUNC:
            file.content = bytearray()

    def _mkdir(self, event: Event) -> None:
        self._add(event.path, Folder())

    def _pwrite(self, event: Event) -> None:
        file = self.find(event.path)
        if isinstance(file, File):
            file.content += bytes(max(0, event.at - len(file.content)))
            file.content[event.at : event.at + len(event.content)] = event.content

    _write = _pwrite

    def _posix_fallocate(self, event: Event) -> None:
        file = self.find(event.path)
        if isinstance(file, File):
            file.content += bytes(max(0, event.at - len(file.content)))

    def _fsync(self, event: Event) -> None:
        """What is safe afterwards is what was there when it began."""
        node, sync = self.find(event.path), (event.process, event.index)
        if node is None:
            return
        if event.begun:
            self.begun[sync] = bytes(node.content) if isinstance(node, File) else dict(node.names)
        elif sync in self.begun:
            node.safe = self.begun.pop(sync)
            if isinstance(node, Folder) and node.safe == node.names:
                node.pairs.clear()

    _fdatasync = _fsync

    def _rename(self, event: Event) -> None:
        self._add(event.target, self.folder(event.path).names.pop(os.path.basename(event.path)))

    _replace = _rename

    def _exchange(self, event: Event) -> None:
        """Both names in one step."""
        one, other = self.folder(event.path), self.folder(event.target)
        names = os.path.basename(event.path), os.path.basename(event.target)
        assert one is other, f"{event.path} and {event.target} are not in one directory"
        one.names[names[0]], one.names[names[1]] = one.names[names[1]], one.names[names[0]]
        one.pairs.append(names)

    def _link(self, event: Event) -> None:
        node = self.find(event.path)
        assert node is not None
        self._add(event.target, node)

    def _unlink(self, event: Event) -> None:
        del self.folder(event.path).names[os.path.basename(event.path)]

    _remove = _unlink
    _rmdir = _unlink

    def _add(self, path: str, node: T) -> T:
        self.folder(path).names[os.path.basename(path)] = node
        return node

    def write_to(self, folder: Path, keeps: Keeps, random: Any) -> Tree:
        """Make ``folder`` what a cut leaves now."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return frozenset(
            (str(path.relative_to(folder)), digest) for path, digest in _write(self.top, folder, keeps, random)
        )


def _loaded(path: Path) -> Folder:
    folder = Folder()
    for entry in os.scandir(path):
        if entry.is_dir():
            folder.names[entry.name] = _loaded(Path(entry.path))
        else:
            content = Path(entry.path).read_bytes()
            folder.names[entry.name] = File(bytearray(content), content)
    folder.safe = dict(folder.names)
    return folder


def _write(folder: Folder, path: Path, keeps: Keeps, random: Any) -> Iterator[tuple[Path, bytes]]:
    for name, node in _names(folder, keeps, random).items():
        if isinstance(node, Folder):
            (path / name).mkdir()
            yield path / name, b""
            yield from _write(node, path / name, keeps, random)
        else:
            content = _content(node, keeps, random)
            (path / name).write_bytes(content)
            yield path / name, hashlib.blake2b(content).digest()


def _names(folder: Folder, keeps: Keeps, random: Any) -> dict[str, File | Folder]:
    if keeps in ("everything", "names"):
        return folder.names
    if keeps != "chance" or folder.names == folder.safe:
        return folder.safe
    kept = dict(folder.safe)
    chosen = {name: random.random() < 0.5 for name in sorted(folder.names.keys() | folder.safe.keys())}
    for one, other in folder.pairs:
        chosen[other] = chosen.get(one, chosen.get(other, False))
    for name in sorted(folder.names.keys() | folder.safe.keys()):
        if folder.names.get(name) is not folder.safe.get(name) and chosen[name]:
            if name in folder.names:
                gone = next((old for old, node in kept.items() if node is folder.names[name]), None)
                if gone is not None and gone not in folder.names:  # one rename is one step
                    del kept[gone]
                kept[name] = folder.names[name]
            else:
                kept.pop(name, None)
    return kept


def _content(file: File, keeps: Keeps, random: Any) -> bytes:
    if keeps in ("everything", "content") or bytes(file.content) == file.safe:
        return bytes(file.content)
    if keeps != "chance":
        return file.safe
    choice = random.random()
    if choice < 0.3:
        return file.safe
    if choice < 0.6:
        return bytes(file.content[: random.randint(0, len(file.content))])
    torn = bytearray(file.content)  # pages that never reached the disk
    for at in range(0, len(torn), 4096):
        if random.random() < 0.5:
            old = file.safe[at : at + 4096]
            torn[at : at + 4096] = old.ljust(len(torn[at : at + 4096]), b"\0")
    return bytes(torn)


# --- recording --------------------------------------------------------------------------------------------------------


class Journal:
    """A file to which all processes that take part add what they did, one at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab")
        self._lock = threading.Lock()  # flock(2) excludes other processes, not other threads

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else changes the tree, or adds to the journal, within this."""
        with self._lock:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def add(self, entry: Event | Acknowledged) -> None:
        """Within ``alone()``."""
        pickle.dump(entry, self._file)
        self._file.flush()

    def entries(self) -> Iterator[Event | Acknowledged]:
        with self._path.open("rb") as file:
            while file.peek(1):
                yield pickle.load(file)

    def close(self) -> None:
        self._file.close()


class Recorder:
    """A hook for ``Intercept`` that adds every change to a journal, in the order in which they take effect."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._process = os.getpid()

    def __call__(self, operation: Operation) -> Any:
        record = getattr(self, f"_{operation.name}", None)
        if record is None:
            return operation.call()
        return record(operation)

    def _event(self, operation: Operation, **what: Any) -> Event:
        return Event(self._process, operation.index, operation.name, operation.path, **what)

    def _changing(self, operation: Operation, **what: Any) -> Any:
        """The call and its event are one step: another operation on the same names is before or after it."""
        with self._journal.alone():
            result = operation.call()
            self._journal.add(self._event(operation, **what))
            return result

    def _open(self, operation: Operation) -> Any:
        flags = operation.args[1]
        if not flags & (os.O_CREAT | os.O_TRUNC):
            return operation.call()
        return self._changing(operation, flags=flags)

    def _written(self, operation: Operation, content: bytes, at: int) -> Any:
        with self._journal.alone():
            count = operation.call()
            self._journal.add(self._event(operation, at=at, content=content[:count]))
            return count

    def _pwrite(self, operation: Operation) -> Any:
        _, buffer, at = operation.args
        return self._written(operation, bytes(buffer), at)

    def _write(self, operation: Operation) -> Any:
        descriptor, buffer = operation.args
        return self._written(operation, bytes(buffer), os.lseek(descriptor, 0, os.SEEK_CUR))

    def _posix_fallocate(self, operation: Operation) -> Any:
        return self._changing(operation, at=operation.args[1] + operation.args[2])

    def _fsync(self, operation: Operation) -> Any:
        with self._journal.alone():
            self._journal.add(self._event(operation, begun=True))
        result = operation.call()
        with self._journal.alone():
            self._journal.add(self._event(operation))
        return result

    _fdatasync = _fsync

    def _rename(self, operation: Operation) -> Any:
        return self._changing(operation, target=_target(operation))

    _replace = _rename
    _exchange = _rename
    _link = _rename
    _mkdir = _changing
    _unlink = _changing
    _remove = _changing
    _rmdir = _changing


def _target(operation: Operation) -> str:
    target = os.fsdecode(operation.args[1])
    if os.path.isabs(target):
        return target
    descriptor = operation.options.get("dst_dir_fd")
    base = os.getcwd() if descriptor is None else os.readlink(f"/proc/self/fd/{descriptor}")
    return f"{base}/{target}"


@dataclass(frozen=True)
class Recording:
    """``before``: a copy of the tree as it was; ``events``: what happened; ``acked``: after how many of them each
    acknowledgement came."""

    root: Path
    before: Path
    events: list[Event]
    acked: list[tuple[int, Acknowledged]]

    def moments(self) -> Iterator[tuple[int, Model]]:
        """The model after each number of events, from none to all; it is one object that changes."""
        model = self.model(0)
        yield 0, model
        for number, event in enumerate(self.events, 1):
            model.happen(event)
            yield number, model

    def model(self, number: int) -> Model:
        """The model after so many events."""
        model = Model(self.before)
        model.root = self.root
        for event in self.events[:number]:
            model.happen(event)
        return model

    def acknowledged(self, number: int) -> dict[str, int]:
        return {one.name: one.seed for at, one in self.acked if at <= number}


Work = Callable[[Callable[[str, int], None], Path], Any]


async def record(root: Path, before: Path, work: Work) -> Recording:
    """Run ``work`` in ``root``. It is handed a function that notes an acknowledgement (directory, seed), and the path
    of the journal, for another process that changes the tree."""
    shutil.copytree(root, before)
    path = before.with_suffix(".journal")
    journal = Journal(path)

    def acknowledge(name: str, seed: int) -> None:
        with journal.alone():
            journal.add(Acknowledged(name, seed))

    try:
        with Intercept(root, Recorder(journal)).installed():
            await work(acknowledge, path)
        events: list[Event] = []
        acked: list[tuple[int, Acknowledged]] = []
        for entry in journal.entries():
            if isinstance(entry, Event):
                events.append(entry)
            else:
                acked.append((len(events), entry))
    finally:
        journal.close()
    return Recording(root, before, events, acked)

"""What a disk may hold after a power cut, by POSIX alone.

A file system may keep more than it was asked to, and ext4 and xfs do. This one does not: content is safe when its file
was synced after it was written, a name when its directory was synced after the name came to be. Everything else is
there, or is not, as the ``Cut`` has it. Operations are recorded while they really happen, with what they wrote.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from _operations import Intercept, Operation

Keeps = Literal["nothing", "everything", "names", "content", "chance"]
"""What of the unsynced reaches the disk: of names and of content. ``everything`` is what a killed process leaves."""


@dataclass(eq=False)
class File:
    content: bytearray = field(default_factory=bytearray)
    safe: bytes = b""


@dataclass(eq=False)
class Folder:
    names: dict[str, File | Folder] = field(default_factory=dict)
    safe: dict[str, File | Folder] = field(default_factory=dict)


@dataclass(frozen=True)
class Event:
    """Something that happened to the model; ``operation`` is the name of the call, ``index`` its number."""

    index: int
    operation: str
    happen: Callable[[Model], None]


class Model:
    """The tree below ``root``: what is there, and what is safe."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.top = _loaded(root)
        self.begun: dict[int, Any] = {}  # what a sync that has not ended will have made safe

    def find(self, path: str) -> File | Folder | None:
        node: File | Folder | None = self.top
        for part in Path(path).relative_to(self.root).parts:
            node = node.names.get(part) if isinstance(node, Folder) else None
        return node

    def folder(self, path: str) -> Folder:
        node = self.find(os.path.dirname(path))
        assert isinstance(node, Folder), path
        return node

    def write_to(self, folder: Path, keeps: Keeps, random: Any) -> None:
        """Make ``folder`` what a cut leaves now."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        _write(self.top, folder, keeps, random)


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


def _write(folder: Folder, path: Path, keeps: Keeps, random: Any) -> None:
    for name, node in _names(folder, keeps, random).items():
        if isinstance(node, Folder):
            (path / name).mkdir()
            _write(node, path / name, keeps, random)
        else:
            (path / name).write_bytes(_content(node, keeps, random))


def _names(folder: Folder, keeps: Keeps, random: Any) -> dict[str, File | Folder]:
    if keeps in ("everything", "names"):
        return folder.names
    if keeps != "chance" or folder.names == folder.safe:
        return folder.safe
    kept = dict(folder.safe)
    for name in folder.names.keys() | folder.safe.keys():
        if folder.names.get(name) is not folder.safe.get(name) and random.random() < 0.5:
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


class Recorder:
    """A hook for ``Intercept`` that notes every change. ``events`` are in the order in which they took effect."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._lock = threading.Lock()

    def __call__(self, operation: Operation) -> Any:
        record = getattr(self, f"_{operation.name}", None)
        if record is None:
            return operation.call()
        return record(operation)

    def _note(self, operation: Operation, happen: Callable[[Model], None]) -> None:
        self.events.append(Event(operation.index, operation.name, happen))

    def _changing(self, operation: Operation, happen: Callable[[Model], None]) -> Any:
        """The call and its event are one step: another thread's operation on the same names is before or after it."""
        with self._lock:
            result = operation.call()
            self._note(operation, happen)
            return result

    def _open(self, operation: Operation) -> Any:
        path, flags = operation.path, operation.args[1]
        if not flags & (os.O_CREAT | os.O_TRUNC):
            return operation.call()

        def happen(model: Model) -> None:
            file = model.find(path)
            if not isinstance(file, File):
                file = model.folder(path).names[os.path.basename(path)] = File()
            if flags & os.O_TRUNC:
                file.content = bytearray()

        return self._changing(operation, happen)

    def _mkdir(self, operation: Operation) -> Any:
        path = operation.path

        def happen(model: Model) -> None:
            model.folder(path).names[os.path.basename(path)] = Folder()

        return self._changing(operation, happen)

    def _written(self, operation: Operation, content: bytes, at: int) -> Any:
        path = operation.path
        with self._lock:
            count = operation.call()

            def happen(model: Model) -> None:
                file = model.find(path)
                if isinstance(file, File):
                    missing = at - len(file.content)
                    file.content += bytes(max(0, missing))
                    file.content[at : at + count] = content[:count]

            self._note(operation, happen)
            return count

    def _pwrite(self, operation: Operation) -> Any:
        _, buffer, at = operation.args
        return self._written(operation, bytes(buffer), at)

    def _write(self, operation: Operation) -> Any:
        descriptor, buffer = operation.args
        return self._written(operation, bytes(buffer), os.lseek(descriptor, 0, os.SEEK_CUR))

    def _posix_fallocate(self, operation: Operation) -> Any:
        path, nbytes = operation.path, operation.args[1] + operation.args[2]

        def happen(model: Model) -> None:
            file = model.find(path)
            if isinstance(file, File):
                file.content += bytes(max(0, nbytes - len(file.content)))

        return self._changing(operation, happen)

    def _fsync(self, operation: Operation) -> Any:
        """What is safe afterwards is what was there when it began."""
        path, index = operation.path, operation.index

        def begin(model: Model) -> None:
            node = model.find(path)
            if node is not None:
                model.begun[index] = bytes(node.content) if isinstance(node, File) else dict(node.names)

        def end(model: Model) -> None:
            node = model.find(path)
            if node is not None and index in model.begun:
                node.safe = model.begun.pop(index)

        with self._lock:
            self._note(operation, begin)
        result = operation.call()
        with self._lock:
            self._note(operation, end)
        return result

    _fdatasync = _fsync

    def _rename(self, operation: Operation) -> Any:
        source, target = operation.path, _target(operation)

        def happen(model: Model) -> None:
            node = model.folder(source).names.pop(os.path.basename(source))
            model.folder(target).names[os.path.basename(target)] = node

        return self._changing(operation, happen)

    _replace = _rename

    def _link(self, operation: Operation) -> Any:
        source, target = operation.path, _target(operation)

        def happen(model: Model) -> None:
            node = model.find(source)
            assert node is not None
            model.folder(target).names[os.path.basename(target)] = node

        return self._changing(operation, happen)

    def _unlink(self, operation: Operation) -> Any:
        path = operation.path

        def happen(model: Model) -> None:
            del model.folder(path).names[os.path.basename(path)]

        return self._changing(operation, happen)

    _remove = _unlink
    _rmdir = _unlink


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
    acked: list[tuple[int, str, int]]

    def moments(self) -> Iterator[tuple[int, Model]]:
        """The model after each number of events, from none to all; it is one object that changes."""
        model = Model(self.before)
        model.root = self.root
        yield 0, model
        for number, event in enumerate(self.events, 1):
            event.happen(model)
            yield number, model

    def acknowledged(self, number: int) -> dict[str, int]:
        return {name: seed for at, name, seed in self.acked if at <= number}


async def record(root: Path, before: Path, work: Callable[[Callable[[str, int], None]], Any]) -> Recording:
    """Run ``work`` in ``root``; it is handed a function that notes an acknowledgement (directory, seed)."""
    shutil.copytree(root, before)
    recorder = Recorder()
    acked: list[tuple[int, str, int]] = []
    with Intercept(root, recorder).installed():
        await work(lambda name, seed: acked.append((len(recorder.events), name, seed)))
    return Recording(root, before, recorder.events, acked)

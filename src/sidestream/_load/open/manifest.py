"""Finding what is committed: the marker of a checkpoint, its manifest, the steps of a run."""

from __future__ import annotations

import heapq
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ..._format.checksum import crc32
from ..._format.manifest import parse_manifest, parse_metadata_line
from ..._format.marker import METADATA_NAME, TAIL_BYTES, Marker, find_marker, manifest_name
from ..._format.records import Manifest
from ..._format.shared import Part, Root, join, parse_part, part_name
from ..._format.validate import validate
from ..._layout.metadata import decode_metadata
from ..._runtime.threads import Deadline, io_threads, politely
from ..._storage import Location, Store
from ...errors import CheckpointNotFound, Corrupt, Incomplete, InvalidOption, SidestreamError, UnsupportedCheckpoint
from ..foreign.independent_parts import check_sizes, is_whole, read_apart, read_part_markers
from ..foreign.manifests import is_foreign, read_file, read_foreign_manifest
from ..foreign.single_file import FILE_SUFFIXES, TORCH_SUFFIXES, read_file_manifest

E = TypeVar("E", bound=SidestreamError)

__all__ = [
    "Step",
    "attempt_name",
    "check_run",
    "list_generations",
    "list_steps",
    "look_at",
    "metadata_of",
    "named_steps",
    "next_generation",
    "open_manifest",
    "open_root",
    "read_manifest",
    "read_marker",
    "read_metadata",
    "read_parts",
    "read_root",
    "step_name",
    "still_listed",
    "target_of_attempt",
]

_NUMBER = "0|[1-9][0-9]{0,17}"  # as Python formats it: another spelling would be a second directory for the same step
_GENERATION = "[2-9]|[1-9][0-9]{1,8}"
_STEP = re.compile(rf"step-({_NUMBER})(?:\.g({_GENERATION}))?")
_TARGET = re.compile(rf"\.?(step-(?:{_NUMBER})(?:\.g(?:{_GENERATION}))?)(?:[./].*)?")


_FEW_NAMES = 256


@dataclass(frozen=True, slots=True)
class Step:
    """Generation ``generation`` of ``step``, in the directory ``name``; ``damage`` says why it cannot be read,
    ``marker`` is None for that reason or because another writer made it."""

    step: int
    generation: int
    name: str
    damage: Corrupt | None = None
    marker: Marker | None = None

    @property
    def order(self) -> tuple[int, int]:
        return self.step, self.generation


def step_name(step: int, generation: int) -> str:
    return f"step-{step}" if generation == 1 else f"step-{step}.g{generation}"


def attempt_name(target: str, save_id: str) -> str:
    """The hidden sibling in which ``target`` is written before it is published; names end at 255 bytes."""
    return f".{target.encode()[:160].decode(errors='ignore')}.{save_id}.partial"


def target_of_attempt(name: str) -> str | None:
    """The step's directory that an attempt would have become; None if it was no step's."""
    match = _TARGET.fullmatch(name)
    return match[1] if match else None


async def read_marker(store: Store, directory: str, deadline: Deadline) -> Marker | None:
    """The marker of a checkpoint; None if another writer made it. Raises ``FileNotFoundError``, ``Corrupt``."""
    return find_marker(await store.read_tail(f"{directory}/{METADATA_NAME}", TAIL_BYTES, deadline=deadline))


async def read_metadata(store: Store, directory: str, deadline: Deadline) -> dict[str, Any]:
    """What the user noted about a checkpoint, without reading the rest of it; empty for one of another writer.

    Raises ``FileNotFoundError``, ``Corrupt``."""
    try:
        marker = await read_marker(store, directory, deadline)
    except FileNotFoundError:
        if not await is_whole(store, directory, await store.sizes(directory, deadline=deadline), deadline):
            raise
        return decode_metadata((await read_manifest(store, directory, directory, deadline)).metadata)
    return {} if marker is None else await metadata_of(store, directory, marker, deadline)


async def metadata_of(store: Store, directory: str, marker: Marker, deadline: Deadline) -> dict[str, Any]:
    """``read_metadata`` of a checkpoint whose marker is known."""
    if not marker.metadata_bytes:
        return {}
    name = manifest_name(marker.save_id)
    line = await store.read_tail(f"{directory}/{name}", marker.metadata_bytes, deadline=deadline)
    if crc32(line) != marker.metadata_crc:
        raise Corrupt(f"{directory}: the metadata line of {name} was altered", file=name)
    return decode_metadata(parse_metadata_line(line))


async def next_generation(store: Store, step: int, deadline: Deadline) -> int:
    """The first generation of ``step`` for which nothing stands in the way, be it committed, damaged or foreign."""
    found = await named_steps(store, deadline, step)
    return max((found.generation for found in found), default=0) + 1


async def list_steps(store: Store, deadline: Deadline) -> list[Step]:
    """The committed steps, oldest first; of each step its highest generation, whether it is damaged or not.

    Whoever deletes a step has committed a newer one before, and a listing from before that shows neither: where the
    newest that was listed is gone when it is looked at, the run is listed again."""
    while True:
        deadline.check("listing the steps of a run")
        steps: dict[int, Step] = {}
        hollow: list[str] = []
        for found in await named_steps(store, deadline):
            if found.step in steps:
                continue
            if (step := await look_at(store, found, deadline)) is not None:
                steps[found.step] = step
            elif not steps:
                hollow.append(found.name)
        if await still_listed(store, hollow, deadline):
            return list(steps.values())[::-1]  # examined newest first


async def still_listed(store: Store, names: Collection[str], deadline: Deadline) -> bool:
    """Whether all of these directories, which were listed and then turned out to be no checkpoints, are there still:
    they never were any, or are none yet. The others have been deleted meanwhile."""
    return not names or set(names) <= set(await store.directories(deadline=deadline))


async def list_generations(store: Store, known: Mapping[str, Step], deadline: Deadline) -> list[Step]:
    """Everything that is committed, or was once and is damaged, oldest first. A marker never changes, so what is in
    ``known`` by its name is not read again."""
    steps = []
    for found in await named_steps(store, deadline):
        step = known[found.name] if found.name in known else await look_at(store, found, deadline)
        if step is not None:
            steps.append(step)
    return steps[::-1]


async def named_steps(store: Store, deadline: Deadline, step: int | None = None) -> list[Step]:
    """Return every directory that is named like a step, or like ``step``; newest step and highest generation first.
    Raises ``InvalidOption`` if there is none because the root is a checkpoint and not a run."""
    names = await store.directories(deadline=deadline)
    found = await io_threads().run(_steps_among, names, deadline=deadline)
    if not found:
        await check_run(store, deadline)
    return [each for each in found if step in (None, each.step)]


def _steps_among(names: Iterable[str]) -> list[Step]:
    """Return the steps, newest step and highest generation first. Called in a worker thread."""
    matches = ((_STEP.fullmatch(name), name) for name in politely(names))
    found = (Step(int(match[1]), int(match[2] or 1), name) for match, name in matches if match is not None)
    return sorted(found, key=lambda each: each.order, reverse=True)


async def check_run(store: Store, deadline: Deadline) -> None:
    """Raise ``InvalidOption`` if the root of ``store`` is a checkpoint: the checkpoints of a run are in directories."""
    try:
        names = await store.sizes(".", deadline=deadline)
    except FileNotFoundError:
        return
    if METADATA_NAME not in names and not await io_threads().run(_has_manifest, names, deadline=deadline):
        return
    run = store.url.rstrip("/").rpartition("/")[0]
    raise InvalidOption(
        f"{store.url} is a checkpoint, not a run. A run is the directory that contains its checkpoints, here {run}: "
        "use that url, or read this checkpoint with sidestream.load or open_checkpoint"
    )


async def look_at(store: Store, found: Step, deadline: Deadline) -> Step | None:
    """``found`` if it is a committed checkpoint, ours or one that stock DCP wrote under such a name; with ``damage`` if
    it was one of ours once. None for what never was: where directories appear whole, none of that name has a manifest
    before it is published."""
    try:
        marker = await read_marker(store, found.name, deadline)
    except FileNotFoundError:
        marker = None
        missing = True
    except Corrupt as damage:
        return replace(found, damage=_told(damage, found.name))
    else:
        missing = False
    if marker is None:
        try:
            names = await store.sizes(found.name, deadline=deadline)
        except FileNotFoundError:  # removed since it was listed
            return None
        few = len(names) <= _FEW_NAMES  # checked faster than a thread starts
        ours = _manifest_among(names) if few else await io_threads().run(_manifest_among, names, deadline=deadline)
        if ours is not None and (store.appears_whole or not missing):
            return replace(found, damage=Corrupt(f"{found.name}: its {METADATA_NAME} is missing or was altered"))
        if not missing:
            return found
        try:
            return found if await is_whole(store, found.name, names, deadline) else None
        except Incomplete:
            return None
        except Corrupt as damage:
            return replace(found, damage=_told(damage, found.name))
    if (marker.step, marker.generation) != found.order:
        return replace(found, damage=Corrupt(f"{found.name}: its marker says step {marker.step}; was it renamed?"))
    return replace(found, marker=marker)


def _has_manifest(names: Iterable[str]) -> bool:
    """In a worker thread: whether a save of sidestream has written its manifest."""
    return any(_MANIFEST.fullmatch(name) for name in politely(names))


def _manifest_among(names: Iterable[str]) -> str | None:
    """The first name of a file that only sidestream writes."""
    return next((name for name in politely(names) if name.startswith("manifest-")), None)


async def open_manifest(location: Location, deadline: Deadline) -> tuple[Location, Manifest]:
    """``read_manifest`` of what stands at ``location``, be it a directory or a single file, and the directory that its
    files are in.

    Where nothing is listed, a name that ends as those of files do is taken for a file."""
    location, root = await open_root(location, deadline)
    if isinstance(root, Manifest):
        return location, root
    return location, await _whole(location.store, location.name, location.url, root, deadline)


async def open_root(location: Location, deadline: Deadline) -> tuple[Location, Manifest | Root]:
    """As ``open_manifest``; but of a checkpoint that several ranks wrote only the root, which is not yet validated."""
    store, name, url = location.store, location.name, location.url
    listed = await _listed(store, name, deadline)
    if listed is None and (store.lists or name.endswith(FILE_SUFFIXES)):
        try:
            nbytes = await store.size(name, deadline=deadline)
            manifest = await read_file_manifest(store, name, nbytes, deadline)
            await io_threads().run(validate, manifest, deadline=deadline)
        except FileNotFoundError as error:
            what = await _instead(store, name, url, {}, deadline) if store.lists else ""
            raise CheckpointNotFound(
                f"no committed checkpoint at {url}: there is no {METADATA_NAME}, and no file of that name. "
                f"{what or _INTERRUPTED}"
            ) from error
        except SidestreamError as error:
            raise _told(error, url) from error
        return replace(location, name="."), manifest
    return location, await read_root(store, name, url, deadline, listed)


async def _listed(store: Store, name: str, deadline: Deadline) -> Mapping[str, int] | None:
    """The files of a directory and their sizes; None if there is no such directory, or nothing is listed here."""
    if not store.lists:
        return None
    try:
        return await store.sizes(name, deadline=deadline)
    except FileNotFoundError:
        return None


async def read_manifest(store: Store, directory: str, url: str, deadline: Deadline) -> Manifest:
    """Everything about the committed checkpoint in ``directory``, validated against the sizes of its files.

    Raises ``CheckpointNotFound`` if there is none, ``Corrupt`` or ``UnsupportedCheckpoint``.
    """
    root = await read_root(store, directory, url, deadline)
    if isinstance(root, Manifest):
        return root
    return await _whole(store, directory, url, root, deadline)


async def _whole(store: Store, directory: str, url: str, root: Root, deadline: Deadline) -> Manifest:
    with _telling(url):
        parts = await read_parts(store, directory, root, range(len(root.parts)), deadline)
        manifest = await io_threads().run(join, root, parts, deadline=deadline)
        await io_threads().run(validate, manifest, deadline=deadline)
    return manifest


async def read_root(
    store: Store, directory: str, url: str, deadline: Deadline, listed: Mapping[str, int] | None = None
) -> Manifest | Root:
    """As ``read_manifest``; but of a checkpoint that several ranks wrote only the root, which is not yet validated.
    ``listed`` are the sizes of its files, if they are known."""
    if not store.lists:
        return await _read_unlisted(store, directory, url, deadline)
    sizes: Mapping[str, int] = {}
    try:
        sizes = await store.sizes(directory, deadline=deadline) if listed is None else listed
        unmarked = METADATA_NAME not in sizes and await io_threads().run(is_foreign, sizes, deadline=deadline)
        marker = None if unmarked else await read_marker(store, directory, deadline)
    except FileNotFoundError as error:
        what = await _instead(store, directory, url, sizes, deadline)
        raise CheckpointNotFound(
            f"no committed checkpoint at {url}: there is no {METADATA_NAME}. {what or _INTERRUPTED}"
        ) from error
    except Corrupt as error:
        raise _told(error, url) from error
    with _telling(url):
        if marker is None:
            ours = await io_threads().run(_manifest_among, sizes, deadline=deadline)
            if ours is not None:
                what = f"it names no manifest, but {ours} is there"
                raise Corrupt(f"{METADATA_NAME} was altered: {what}", file=METADATA_NAME)
            manifest: Manifest | Root = await _read_unmarked(store, directory, sizes, deadline)
        else:
            manifest = await _own_manifest(store, directory, marker, sizes, deadline)
        if isinstance(manifest, Manifest):
            await io_threads().run(validate, manifest, deadline=deadline)
    return manifest


_INTERRUPTED = "An interrupted save leaves no such file"
_MOST_LOOKED_AT = 8
_MANIFEST = re.compile("manifest-[0-9a-f]{32}")


async def _instead(store: Store, name: str, url: str, files: Mapping[str, int], deadline: Deadline) -> str:
    """Describe what is at a place that has no checkpoint: a run, directories with checkpoints, or files. Empty if that
    is unknown. ``files`` are the files in the directory."""
    with suppress(SidestreamError, FileNotFoundError):  # the caller raises its own error, with or without this advice
        names = await store.directories(name, deadline=deadline)
        steps = await _newest_committed(store, name, names, deadline)
        if steps:
            return (
                f"This is a run with {_steps(steps)}: load {url}/{step_name(*steps[-1].order)}, or restore with "
                f"sidestream.Checkpointer({url!r})"
            )
        visible = await io_threads().run(_first_visible, names, deadline=deadline)
        found = [one for one in visible if await _holds_checkpoint(store, f"{name}/{one}", deadline)]
        if found:
            return f"Use one of the checkpoints in {', '.join(f'{url}/{one}' for one in found)}"
        single = await io_threads().run(_first_files, files, deadline=deadline)
        if single:
            return f"It has files that are checkpoints by themselves: {', '.join(single)}; use the path of one"
        if _STEP.fullmatch(name) is not None:
            steps = await _newest_committed(store, ".", await store.directories(deadline=deadline), deadline)
            return f"The run of this step has {_steps(steps)}" if steps else ""
    return ""


def _first_visible(names: Iterable[str]) -> list[str]:
    return heapq.nsmallest(_MOST_LOOKED_AT, (one for one in politely(names) if not one.startswith(".")))


def _first_files(names: Iterable[str]) -> list[str]:
    return heapq.nsmallest(_MOST_LOOKED_AT, (one for one in politely(names) if one.endswith(TORCH_SUFFIXES)))


async def _newest_committed(store: Store, run: str, names: Iterable[str], deadline: Deadline) -> list[Step]:
    """The directories of a run that are named like steps, oldest first, up to the newest that is committed."""
    steps = (await io_threads().run(_steps_among, names, deadline=deadline))[::-1]
    for _ in range(_MOST_LOOKED_AT):
        if not steps or await look_at(store, replace(steps[-1], name=f"{run}/{steps[-1].name}"), deadline) is not None:
            return steps
        steps.pop()
    return []


def _steps(steps: Sequence[Step]) -> str:
    numbers = sorted({step.step for step in steps})
    return f"step {numbers[0]}" if len(numbers) == 1 else f"{len(numbers)} steps, from {numbers[0]} to {numbers[-1]}"


async def _holds_checkpoint(store: Store, directory: str, deadline: Deadline) -> bool:
    """Whether a directory is a checkpoint, or a run that has checkpoints."""
    with suppress(FileNotFoundError):
        files = await store.sizes(directory, deadline=deadline)
        if METADATA_NAME in files or await io_threads().run(is_foreign, files, deadline=deadline):
            return True
    names = await store.directories(directory, deadline=deadline)
    return bool(await io_threads().run(_steps_among, names, deadline=deadline))


async def _read_unmarked(store: Store, directory: str, sizes: Mapping[str, int], deadline: Deadline) -> Manifest:
    """What ranks saved apart, or what another writer made. Raises ``Incomplete``."""
    if METADATA_NAME not in sizes:
        markers = await read_part_markers(store, directory, sizes, deadline)
        if any(markers.values()):
            return await read_apart(store, directory, sizes, markers, deadline)
    return await read_foreign_manifest(store, directory, sizes, deadline)


async def read_parts(
    store: Store, directory: str, root: Root, ranks: Iterable[int], deadline: Deadline
) -> dict[int, Part]:
    """The parts of these ranks. Raises ``Corrupt``, ``FileNotFoundError``."""
    parts: dict[int, Part] = {}
    for rank in ranks:
        nbytes, crc = root.parts[rank]
        if not nbytes:
            parts[rank] = Part({}, {})
            continue
        name = part_name(manifest_name(root.manifest.save_id), rank)
        raw = await read_file(store, f"{directory}/{name}", nbytes, deadline)
        parts[rank] = await io_threads().run(_parse_part, name, raw, crc, deadline=deadline)
    return parts


def _parse_part(name: str, raw: bytearray, crc: int) -> Part:
    if crc32(raw) != crc:
        raise Corrupt(f"{name} was altered: its checksum is not the one in the manifest", file=name)
    return parse_part(raw)


@contextmanager
def _telling(url: str) -> Iterator[None]:
    """What is raised says which checkpoint it is about."""
    try:
        yield
    except FileNotFoundError as error:
        raise Corrupt(f"{url}: {error.filename} is missing") from error
    except SidestreamError as error:
        raise _told(error, url) from error


async def _read_unlisted(store: Store, directory: str, url: str, deadline: Deadline) -> Manifest | Root:
    """Where nothing is listed, the marker says how large the manifest is, and the manifest which files there are."""
    try:
        sizes = {METADATA_NAME: await store.size(f"{directory}/{METADATA_NAME}", deadline=deadline)}
        marker = await read_marker(store, directory, deadline)
    except FileNotFoundError as error:
        raise CheckpointNotFound(f"no committed checkpoint at {url}: there is no {METADATA_NAME}") from error
    except Corrupt as error:
        raise _told(error, url) from error
    if marker is None:
        raise UnsupportedCheckpoint(
            f"{url} was written by another writer, and a server without listings does not say which files it has: copy "
            "it to a directory first"
        )
    with _telling(url):
        name = manifest_name(marker.save_id)
        sizes[name] = await store.size(f"{directory}/{name}", deadline=deadline)
        raw = await read_file(store, f"{directory}/{name}", marker.manifest_bytes, deadline)
        named = await io_threads().run(_parse, name, raw, marker, deadline=deadline)
        for file in _head(named).files:
            sizes[file] = await store.size(f"{directory}/{file}", deadline=deadline)
        manifest = await _own_manifest(store, directory, marker, sizes, deadline)
        if isinstance(manifest, Manifest):
            await io_threads().run(validate, manifest, deadline=deadline)
    return manifest


async def _own_manifest(
    store: Store, directory: str, marker: Marker, sizes: Mapping[str, int], deadline: Deadline
) -> Manifest | Root:
    name = manifest_name(marker.save_id)
    if sizes.get(name) != marker.manifest_bytes:
        raise Corrupt(f"{name} has {sizes.get(name, 0)} bytes, the marker says {marker.manifest_bytes}", file=name)
    raw = await read_file(store, f"{directory}/{name}", marker.manifest_bytes, deadline)
    manifest = await io_threads().run(_parse, name, raw, marker, deadline=deadline)
    head = _head(manifest)
    if (head.save_id, head.step, head.generation) != (marker.save_id, marker.step, marker.generation):
        raise Corrupt(f"{name} belongs to another save than the marker", file=name)
    await io_threads().run(check_sizes, head.files, sizes, deadline=deadline)
    return manifest


def _head(manifest: Manifest | Root) -> Manifest:
    return manifest if isinstance(manifest, Manifest) else manifest.manifest


def _parse(name: str, raw: bytearray, marker: Marker) -> Manifest | Root:
    if crc32(raw) != marker.manifest_crc:
        raise Corrupt(f"{name} was altered: its checksum is not the one in the marker", file=name)
    return parse_manifest(raw)


def _told(error: E, url: str) -> E:
    """The same error, saying which checkpoint it is about."""
    error.args = (f"{url}: {error.args[0]}", *error.args[1:])
    return error

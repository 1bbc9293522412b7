"""Opening a checkpoint: its marker, its manifest, and the metadata of the user, or advice if there is no checkpoint."""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from itertools import takewhile
from typing import Any, TypeVar

from ..._foreign.manifests import (
    FILE_SUFFIXES,
    TORCH_SUFFIXES,
    is_foreign,
    read_file_manifest,
    read_foreign_manifest,
)
from ..._foreign.transforms import check_expansion
from ..._format.checksum import crc32
from ..._format.manifest import parse_metadata_line
from ..._format.marker import METADATA_NAME, Marker
from ..._format.records import Manifest
from ..._format.shared import RankPart, Root
from ..._format.validate import validate
from ..._layout.values import decode_metadata
from ..._runtime.threads import io_threads, paced
from ..._storage import Location, RangeSource, Store, parse_step, step_name
from ...errors import CheckpointNotFoundError, CorruptCheckpointError, SidestreamError, UnsupportedCheckpointError
from .parts import check_sizes, is_whole, read_apart, read_own_manifest, read_part_markers
from .steps import Step, newest_committed, own_manifest_among

_MOST_LOOKED_AT = 8
_MOST_RESTARTS = 8

T = TypeVar("T")


async def what_is_there(store: Store, name: str, url: str, files: Mapping[str, int]) -> str:
    """Return a description of a place without a checkpoint: a run, directories with checkpoints, or files. The result
    is empty if that is unknown. ``files`` are the files in the directory."""
    with suppress(SidestreamError, FileNotFoundError):  # the caller raises its own error, with or without this advice
        # The caller may have named the run and not a step, its parent, or a file in it. These are looked for in this
        # order, and a few of each are enough for an advice.
        names = await store.directories(name)
        steps = await newest_committed(store, name, names)
        if steps:
            return (
                f"This is a run with {_steps(steps)}: load {url}/{step_name(*steps[-1].order)}, or restore with "
                f"sidestream.Checkpointer({url!r})"
            )
        visible = await io_threads().run(_first_visible, names)
        found = [one for one in visible if await _holds_checkpoint(store, f"{name}/{one}")]
        if found:
            return f"Use one of the checkpoints in {', '.join(f'{url}/{one}' for one in found)}"
        single = await io_threads().run(_first_files, files)
        if single:
            return f"It has files that are checkpoints by themselves: {', '.join(single)}; use the path of one"
        if parse_step(name) is not None:
            steps = await newest_committed(store, ".", await store.directories())
            return f"The run of this step has {_steps(steps)}" if steps else ""
    return ""


async def _beside(store: Store, name: str) -> str:
    """Return which checkpoints and runs are where ``name`` would be. Empty if there are none, or if that is unknown."""
    with suppress(SidestreamError, FileNotFoundError):
        visible = await io_threads().run(_first_visible, await store.directories(), name)
        found = [one for one in visible if await _holds_checkpoint(store, one)]
        return f"Beside it: {', '.join(found)}" if found else ""
    return ""


def _first_visible(names: Iterable[str], wanted: str = "") -> list[str]:
    """Return a few names, first those that begin as ``wanted`` does."""

    def order(one: str) -> tuple[int, str]:
        alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, wanted, strict=False)))
        return -alike, one

    return heapq.nsmallest(_MOST_LOOKED_AT, (one for one in paced(names) if not one.startswith(".")), key=order)


def _first_files(names: Iterable[str]) -> list[str]:
    return heapq.nsmallest(_MOST_LOOKED_AT, (one for one in paced(names) if one.endswith(TORCH_SUFFIXES)))


def _steps(steps: Sequence[Step]) -> str:
    numbers = sorted({step.step for step in steps})
    return f"step {numbers[0]}" if len(numbers) == 1 else f"{len(numbers)} steps, from {numbers[0]} to {numbers[-1]}"


async def _holds_checkpoint(store: Store, directory: str) -> bool:
    """Return whether a directory is a checkpoint, or a run that has checkpoints."""
    with suppress(FileNotFoundError):
        files = await store.sizes(directory)
        if METADATA_NAME in files or await io_threads().run(is_foreign, files):
            return True
    names = await store.directories(directory)
    return bool(await io_threads().run(Step.among, names))


@contextmanager
def all_there(url: str, what: str = "was deleted while it was read") -> Iterator[None]:
    """Raise ``CorruptCheckpointError`` if a file is missing that was there when the source was opened. ``what`` is the
    text of the error after the name of the file."""
    try:
        yield
    except FileNotFoundError as error:
        if isinstance(error, SidestreamError):
            raise
        raise CorruptCheckpointError(f"{url}: {error.filename} {what}") from error


async def read_metadata(store: Store, directory: str) -> dict[str, Any]:
    """Return the ``metadata=`` of a checkpoint without reading the rest of it. The result is empty for a checkpoint of
    another writer.

    Raises ``FileNotFoundError``, ``CorruptCheckpointError``."""
    async with aclosing(store.source(directory)) as source:
        try:
            marker = await source.marker()
        except FileNotFoundError:
            # Parts of ranks have no common marker. Only a set of all parts is a checkpoint, whose metadata is in one of
            # them.
            if not await is_whole(source, await source.sizes()):
                raise
            return decode_metadata((await read_manifest(source, Location(store, directory, directory))).metadata)
        return {} if marker is None else await metadata_of(source, marker)


async def metadata_of(source: RangeSource, marker: Marker) -> dict[str, Any]:
    """Do ``read_metadata`` for a checkpoint whose marker is known."""
    if not marker.metadata_bytes:
        return {}
    name = marker.manifest_name
    # The metadata is the last line of the manifest, and the marker has its size and checksum. So a list of the metrics
    # of a run reads a few hundred bytes of each step, and no manifest.
    line = await source.read_tail(name, marker.metadata_bytes)
    if crc32(line) != marker.metadata_crc:
        raise CorruptCheckpointError(f"{source.name}: the metadata line of {name} was altered", file=name)
    return decode_metadata(parse_metadata_line(line))


async def open_manifest(location: Location) -> tuple[RangeSource, Manifest]:
    """Read the manifest of the checkpoint at ``location``, which is a directory or a single file. Return it with the
    source of the files. The caller closes the source. When this raises, nothing is left open.

    On storage without listings, a name with the ending of a file is taken for a file."""
    while True:
        source, root = await open_root(location)
        if isinstance(root, Manifest):
            return source, root
        # The second read, of the parts, is later than the first, so the directory may have been exchanged between them.
        with suppress(_Moved):
            async with _closed_on_error(source):
                return source, await _whole(source, location.url, root)


async def open_root(location: Location) -> tuple[RangeSource, Manifest | Root]:
    """Do ``open_manifest``, but read only the root of the manifest of a checkpoint that several ranks wrote. The root
    is not validated yet."""
    while True:
        # A save may exchange the directory while it is being opened. The files that were read then belong to two
        # checkpoints, or are gone. So every failure asks whether the name has moved, and opens again if it has.
        with suppress(_Moved):
            return await _open_root(location)


async def _open_root(location: Location) -> tuple[RangeSource, Manifest | Root]:
    source, store = location.source(), location.store
    async with _closed_on_error(source):
        listed = await _listed(store, source)
        # There are three cases. A directory of that name: read as a checkpoint. No directory, but the storage lists, or
        # the name ends like a file: it may be a single file. Storage without listings, and another name: only a marker
        # could be there.
        if listed is not None or not (store.capabilities.listing or location.name.endswith(FILE_SUFFIXES)):
            return source, await read_root(source, location, listed)
    # Nothing of that name, or it is a file. The directory above is opened in its place, and read as a single file.
    await source.aclose()
    source = store.source(".")
    async with _closed_on_error(source):
        try:
            return source, await _read_single(source, location)
        except CorruptCheckpointError as error:  # of a save that has made the directory since the listing, for example
            async with aclosing(location.source()) as directory:
                if await _listed(store, directory) is not None:
                    raise _Moved from error
            raise


class _Moved(Exception):  # caught in this module
    """The error if another checkpoint has taken the place of the one that was being opened, whose files may be
    deleted, or the place where there was none."""


@asynccontextmanager
async def _closed_on_error(source: RangeSource) -> AsyncIterator[None]:
    """Close ``source`` if the body raises. Raises ``_Moved`` instead of an error that an exchange of directories may
    have caused."""
    try:
        yield
    except (CorruptCheckpointError, CheckpointNotFoundError) as error:
        try:
            # Asked before the source is closed: the answer compares the name with the directory that this source has
            # open.
            moved = await source.moved()
        finally:
            await source.aclose()
        if moved:
            raise _Moved from error
        raise
    except BaseException:
        await source.aclose()
        raise


async def _listed(store: Store, source: RangeSource) -> Mapping[str, int] | None:
    """Return the files of a directory with their sizes; None if there is no such directory, or the storage has no
    listings."""
    if not store.capabilities.listing:
        return None
    try:
        return await source.sizes()
    except FileNotFoundError:
        return None


async def _read_single(source: RangeSource, location: Location) -> Manifest:
    """Return the manifest of the file that ``location`` names. ``source`` is the directory that contains it."""
    store, name, url = location.store, location.name, location.url
    try:
        manifest = await read_file_manifest(source, name, await source.size(name))
        await io_threads().run(validate, manifest)
    except FileNotFoundError as error:
        if store.capabilities.listing:
            what = await what_is_there(store, name, url, {}) or await _beside(store, name)
            lacking = f"there is nothing of that name. {what}".rstrip()
        else:
            lacking = f"there is no {METADATA_NAME}, and no file of that name. {_INTERRUPTED}"
        raise CheckpointNotFoundError(f"no committed checkpoint at {url}: {lacking}") from error
    except SidestreamError as error:
        raise error.within(url) from error
    return manifest


async def check_not_replaced(
    source: RangeSource, location: Location, manifest: Manifest, versions: Mapping[str, Hashable]
) -> None:
    """Raise ``CheckpointNotFoundError`` if the checkpoint that is now at ``location`` is not the one of ``manifest``.

    This is only checked if the files of the two checkpoints may have the same names. On object storage, which has no
    rename, names contain the id of the save, and so do the names of parts everywhere. The files of other writers and of
    exports carry no id: their ``versions`` are those of the files when the checkpoint was opened."""
    if not manifest.own and await source.versions(versions) != versions:
        raise replaced(location.url, manifest)
    if not location.store.capabilities.rename or not manifest.own or manifest.parts:
        return
    marker = await source.marker()
    if marker is None or marker.save_id != manifest.save_id:
        raise replaced(location.url, manifest)


def replaced(url: str, manifest: Manifest) -> CheckpointNotFoundError:
    """Return the error for the checkpoint of ``manifest``, which was opened at ``url`` and is not there any more."""
    which = f"the save {manifest.save_id}" if manifest.save_id else "the checkpoint that was opened"
    return CheckpointNotFoundError(f"{url}: {which} is not there any more, it was replaced or removed: open it again")


async def is_gone(location: Location, manifest: Manifest, versions: Mapping[str, Hashable]) -> bool:
    """Return whether another checkpoint, or nothing, has taken the place of the one that was opened, which may be of
    another writer. ``versions`` as in ``check_not_replaced``."""
    if manifest.own:
        return await was_replaced(location, manifest)
    if location.name == ".":  # the location of a single file names its directory
        location = replace(location, name=next(iter(manifest.files)))
    try:
        source, found = await open_manifest(location)
    except SidestreamError as error:
        return isinstance(error, CheckpointNotFoundError)
    async with aclosing(source):
        # Entries are not compared: those that cannot be read hold errors, and no error equals another one.
        return found.files != manifest.files or await source.versions(versions) != versions


async def was_replaced(location: Location, manifest: Manifest) -> bool:
    """Return whether another checkpoint, or nothing, has taken the place of this one, if it is of sidestream."""
    if not manifest.own:
        return False
    async with aclosing(location.source()) as source:
        try:
            marker = await source.marker()
        except FileNotFoundError:  # parts that ranks saved independently have no common marker
            return not manifest.parts or await source.moved()
        except SidestreamError:
            return await source.moved()  # if not, the caller raises its own error
    return marker is None or marker.save_id != manifest.save_id


async def from_one_checkpoint(location: Location, work: Callable[[RangeSource, Manifest], Awaitable[T]]) -> T:
    """Open the checkpoint at ``location``, and do ``work`` with it. If its files are deleted meanwhile because another
    save has replaced it, do that again with the new one, up to a limit. Raises what ``work`` raises, and
    ``CheckpointNotFoundError``, which names the last save that was replaced, beyond the limit."""
    for left in reversed(range(_MOST_RESTARTS)):
        files, manifest = await open_manifest(location)
        async with aclosing(files):
            try:
                return await work(files, manifest)
            except CorruptCheckpointError as error:
                # Damage and replacement look the same to the code that reads. Only here, after a failure, is the marker
                # compared. An export has none: when it is replaced, another directory has its name.
                if not (await was_replaced(location, manifest) or await files.moved()):
                    raise
                if not left:
                    raise replaced(location.url, manifest) from error
    raise AssertionError("unreachable")


async def read_manifest(source: RangeSource, location: Location) -> Manifest:
    """Return the manifest of the committed checkpoint in the directory ``source``, which is at ``location``. It is
    validated against the sizes of the files.

    Raises ``CheckpointNotFoundError`` if there is no checkpoint, ``CorruptCheckpointError``, and
    ``UnsupportedCheckpointError``.
    """
    root = await read_root(source, location)
    if isinstance(root, Manifest):
        return root
    return await _whole(source, location.url, root)


async def _whole(source: RangeSource, url: str, root: Root) -> Manifest:
    with naming(url):
        parts = await read_parts(source, root, range(len(root.parts)))
        manifest = await io_threads().run(root.join, parts)
        await io_threads().run(validate, manifest)
    return manifest


async def read_root(
    source: RangeSource, location: Location, listed: Mapping[str, int] | None = None
) -> Manifest | Root:
    """Do ``read_manifest``, but read only the root of the manifest of a checkpoint that several ranks wrote. The root
    is not validated yet. ``listed`` are the sizes of the files, if they are known."""
    store, url = location.store, location.url
    if not store.capabilities.listing:
        return _numbered(await _read_unlisted(source, url), location.name)
    sizes: Mapping[str, int] = {}
    try:
        sizes = await source.sizes() if listed is None else listed
        # There are three kinds of directories. With a marker: a checkpoint of sidestream. With ``.metadata`` and no
        # marker: one of stock DCP. Without ``.metadata``: parts, or a format of other programs, which is known by its
        # files. The order of listing and marker matters for the first: see ``_own_manifest_listed``.
        unmarked = METADATA_NAME not in sizes and await io_threads().run(is_foreign, sizes)
        marker = None if unmarked else await source.committed_marker()
    except FileNotFoundError as error:
        what = await what_is_there(store, location.name, url, sizes)
        raise CheckpointNotFoundError(
            f"no committed checkpoint at {url}: {_lacking(error)}. {what or _INTERRUPTED}"
        ) from error
    except CorruptCheckpointError as error:
        raise error.within(url) from error
    with naming(url):
        if marker is None:
            # A ``.metadata`` without a marker looks like one of stock DCP. With a manifest beside it the marker was
            # lost, and reading it as a foreign checkpoint would skip every checksum.
            ours = await io_threads().run(own_manifest_among, sizes)
            if ours is not None:
                what = f"it names no manifest, but {ours} is there"
                raise CorruptCheckpointError(f"{METADATA_NAME} was altered: {what}", file=METADATA_NAME)
            manifest: Manifest | Root = await _read_unmarked(source, sizes)
        else:
            manifest = await _own_manifest_listed(source, marker, sizes)
        if isinstance(manifest, Manifest):
            await io_threads().run(validate, manifest)
            if not manifest.own:
                await io_threads().run(check_expansion, manifest.entries.values())
    return _numbered(manifest, location.name)


def _numbered(manifest: Manifest | Root, directory: str) -> Manifest | Root:
    """Return ``manifest`` with the step and the generation that the name of its ``directory`` has, if it has them. The
    checkpoint may have been saved under another name, or outside of a run."""
    # The name alone decides which step of a run a checkpoint is, wherever it was saved first. A checkpoint that was
    # copied into a run under the name of a step is that step. The number in the marker is a record, which counts where
    # the name has no number.
    order = parse_step(directory.rpartition("/")[2])
    if order is None:
        return manifest
    if isinstance(manifest, Root):
        return replace(manifest, manifest=replace(manifest.manifest, step=order[0], generation=order[1]))
    return replace(manifest, step=order[0], generation=order[1])


def _lacking(error: FileNotFoundError) -> str:
    if "incomplete" in str(error.strerror):
        return f"its {METADATA_NAME} is incomplete: a save is committing it at this moment, or died while it did"
    return f"there is no {METADATA_NAME}"


_INTERRUPTED = "Its save was interrupted, or it is not a checkpoint"


async def _read_unmarked(source: RangeSource, sizes: Mapping[str, int]) -> Manifest:
    """Return the manifest of a checkpoint that ranks saved in separate parts, or of one of another writer. Raises
    ``IncompleteCheckpointError``."""
    if METADATA_NAME not in sizes:
        markers = await read_part_markers(source, sizes)
        if any(markers.values()):
            return await read_apart(source, sizes, markers)
    return await read_foreign_manifest(source, sizes)


async def read_parts(source: RangeSource, root: Root, ranks: Iterable[int]) -> dict[int, RankPart]:
    """Return the parts of the manifest of these ranks. Raises ``CorruptCheckpointError``, ``FileNotFoundError``."""
    parts: dict[int, RankPart] = {}
    for rank in ranks:
        nbytes, crc = root.parts[rank]
        # A rank that wrote nothing has no file.
        if not nbytes:
            parts[rank] = RankPart({}, {})
            continue
        name = root.manifest.part_name(rank)
        raw = await source.read_file(name, nbytes)
        parts[rank] = await io_threads().run(_parse_part, name, raw, crc)
    return parts


def _parse_part(name: str, raw: bytearray, crc: int) -> RankPart:
    if crc32(raw) != crc:
        raise CorruptCheckpointError(f"{name} was altered: its checksum is not the one in the manifest", file=name)
    return RankPart.parse(raw)


@contextmanager
def naming(url: str) -> Iterator[None]:
    """Add the URL of the checkpoint to errors that are raised in this context."""
    try:
        yield
    except FileNotFoundError as error:
        raise CorruptCheckpointError(f"{url}: {error.filename} is missing") from error
    except SidestreamError as error:
        raise error.within(url) from error


async def _read_unlisted(source: RangeSource, url: str) -> Manifest | Root:
    """Read the manifest on storage without listings. The marker has the size of the manifest, and the manifest has the
    names of the files."""
    try:
        marker = await source.marker()
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"no committed checkpoint at {url}: there is no {METADATA_NAME}") from error
    except CorruptCheckpointError as error:
        raise error.within(url) from error
    if marker is None:
        raise UnsupportedCheckpointError(
            f"{url} was written by another writer, and a server without listings does not say which files it has: "
            "download it to a directory first"
        )
    with naming(url):
        manifest = await _read_marked(source, marker, await source.size(marker.manifest_name))
        files = _head(manifest).files
        await io_threads().run(check_sizes, files, {file: await source.size(file) for file in files})
        if isinstance(manifest, Manifest):
            await io_threads().run(validate, manifest)
    return manifest


async def _own_manifest_listed(source: RangeSource, marker: Marker, sizes: Mapping[str, int]) -> Manifest | Root:
    """Read the manifest that ``marker`` names. If files are missing, list the directory again. A save may have written
    the marker between the listing and the read of the marker; its files were complete before that."""
    try:
        return await _own_manifest(source, marker, sizes)
    except CorruptCheckpointError:
        listed = await source.sizes()
        if listed == sizes:
            raise
    return await _own_manifest(source, marker, listed)


async def _own_manifest(source: RangeSource, marker: Marker, sizes: Mapping[str, int]) -> Manifest | Root:
    return await _read_marked(source, marker, sizes.get(marker.manifest_name, 0), sizes)


async def _read_marked(
    source: RangeSource, marker: Marker, nbytes: int, sizes: Mapping[str, int] | None = None
) -> Manifest | Root:
    """Return the manifest that ``marker`` names, whose file has ``nbytes``. Compare the ``sizes`` of its files, if they
    are known."""

    def belongs(manifest: Manifest | Root) -> bool:
        head = _head(manifest)
        if (head.save_id, head.step, head.generation) != (marker.save_id, marker.step, marker.generation):
            return False
        if sizes is not None:  # here, because this is a thread
            check_sizes(head.files, sizes)
        return True

    return await read_own_manifest(source, marker.manifest_name, marker, nbytes, belongs)


def _head(manifest: Manifest | Root) -> Manifest:
    return manifest if isinstance(manifest, Manifest) else manifest.manifest

"""Opening a checkpoint: its marker, its manifest, and the metadata that its user noted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from typing import Any

from ..._format.checksum import crc32
from ..._format.manifest import parse_manifest, parse_metadata_line
from ..._format.marker import METADATA_NAME, Marker, manifest_name
from ..._format.records import Manifest
from ..._format.shared import RankPart, Root, join, parse_part, part_name
from ..._format.validate import validate
from ..._layout.metadata import decode_metadata
from ..._runtime.threads import io_threads, run_sliced
from ..._storage import Location, RangeSource, Store
from ...errors import CheckpointNotFoundError, CorruptCheckpointError, SidestreamError, UnsupportedCheckpointError
from ..foreign.independent_parts import check_sizes, is_whole, read_apart, read_part_markers
from ..foreign.manifests import FILE_SUFFIXES, is_foreign, read_file, read_file_manifest, read_foreign_manifest
from .instead import what_is_there
from .steps import about, committed_marker, own_manifest_among, read_marker

__all__ = [
    "all_there",
    "check_not_replaced",
    "metadata_of",
    "open_manifest",
    "open_root",
    "read_manifest",
    "read_metadata",
    "read_parts",
    "read_root",
    "replaced",
    "was_replaced",
]


@contextmanager
def all_there(url: str) -> Iterator[None]:
    """Raise ``CorruptCheckpointError`` for a file of the source that was there when it was opened, and is not any
    more."""
    try:
        yield
    except FileNotFoundError as error:
        if isinstance(error, SidestreamError):
            raise
        raise CorruptCheckpointError(f"{url}: {error.filename} was deleted while it was read") from error


async def read_metadata(store: Store, directory: str) -> dict[str, Any]:
    """What the user noted about a checkpoint, without reading the rest of it; empty for one of another writer.

    Raises ``FileNotFoundError``, ``CorruptCheckpointError``."""
    async with aclosing(store.source(directory)) as source:
        try:
            marker = await read_marker(source)
        except FileNotFoundError:
            if not await is_whole(source, await source.sizes()):
                raise
            return decode_metadata((await read_manifest(source, Location(store, directory, directory))).metadata)
        return {} if marker is None else await metadata_of(source, marker)


async def metadata_of(source: RangeSource, marker: Marker) -> dict[str, Any]:
    """``read_metadata`` of a checkpoint whose marker is known."""
    if not marker.metadata_bytes:
        return {}
    name = manifest_name(marker.save_id)
    line = await source.read_tail(name, marker.metadata_bytes)
    if crc32(line) != marker.metadata_crc:
        raise CorruptCheckpointError(f"{source.name}: the metadata line of {name} was altered", file=name)
    return decode_metadata(parse_metadata_line(line))


async def open_manifest(location: Location) -> tuple[RangeSource, Manifest]:
    """``read_manifest`` of what is at ``location``, a directory or a single file, and the source of its files, from
    which the manifest was read. The caller closes the source; where this raises, nothing is left open.

    Where nothing is listed, a name that ends as those of files do is taken for a file."""
    while True:
        source, root = await open_root(location)
        if isinstance(root, Manifest):
            return source, root
        with suppress(_Moved):
            async with _closed_on_error(source):
                return source, await _whole(source, location.url, root)


async def open_root(location: Location) -> tuple[RangeSource, Manifest | Root]:
    """As ``open_manifest``; but of a checkpoint that several ranks wrote only the root, which is not yet validated."""
    while True:
        with suppress(_Moved):
            return await _open_root(location)


async def _open_root(location: Location) -> tuple[RangeSource, Manifest | Root]:
    source, store = location.source(), location.store
    async with _closed_on_error(source):
        listed = await _listed(store, source)
        if listed is not None or not (store.capabilities.listing or location.name.endswith(FILE_SUFFIXES)):
            return source, await read_root(source, location, listed)
    await source.aclose()
    source = store.source(".")
    async with _closed_on_error(source):
        return source, await _read_single(source, location)


class _Moved(Exception):  # caught in this module
    """Another checkpoint has taken the place of the one that was being opened, and its files may be deleted."""


@asynccontextmanager
async def _closed_on_error(source: RangeSource) -> AsyncIterator[None]:
    """Close ``source`` if the body raises. Raises ``_Moved`` instead of what may be due to an exchange of
    directories."""
    try:
        yield
    except (CorruptCheckpointError, CheckpointNotFoundError) as error:
        try:
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
    """The files of a directory and their sizes; None if there is no such directory, or nothing is listed here."""
    if not store.capabilities.listing:
        return None
    try:
        return await source.sizes()
    except FileNotFoundError:
        return None


async def _read_single(source: RangeSource, location: Location) -> Manifest:
    """The file that ``location`` names, as a checkpoint. ``source`` is the directory that it is in."""
    store, name, url = location.store, location.name, location.url
    try:
        manifest = await read_file_manifest(source, name, await source.size(name))
        await io_threads().run_sliced(validate, manifest)
    except FileNotFoundError as error:
        what = await what_is_there(store, name, url, {}) if store.capabilities.listing else ""
        raise CheckpointNotFoundError(
            f"no committed checkpoint at {url}: there is no {METADATA_NAME}, and no file of that name. "
            f"{what or _INTERRUPTED}"
        ) from error
    except SidestreamError as error:
        raise about(error, url) from error
    return manifest


async def check_not_replaced(source: RangeSource, location: Location, manifest: Manifest) -> None:
    """Raise ``CorruptCheckpointError`` if the checkpoint that is now at ``location`` is not the one that ``manifest``
    belongs to.

    Only where its files may have the names of those of the other one: object storage has no rename, so names there
    contain the id of the save, as names of parts do everywhere."""
    if not location.store.capabilities.rename or not manifest.own or manifest.parts:
        return
    marker = await read_marker(source)
    if marker is None or marker.save_id != manifest.save_id:
        raise replaced(location.url)


def replaced(url: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{url}: another checkpoint has replaced this one since it was opened: open it again")


async def was_replaced(location: Location, manifest: Manifest) -> bool:
    """Return whether another checkpoint of sidestream has taken the place of the one that ``manifest`` belongs to."""
    if not manifest.own:
        return False
    async with aclosing(location.source()) as source:
        try:
            marker = await read_marker(source)
        except (FileNotFoundError, SidestreamError):
            return await source.moved()  # if not, the caller raises its own error
    return marker is not None and marker.save_id != manifest.save_id


async def read_manifest(source: RangeSource, location: Location) -> Manifest:
    """Everything about the committed checkpoint in the directory ``source``, which is at ``location``, validated
    against the sizes of its files.

    Raises ``CheckpointNotFoundError`` if there is none, ``CorruptCheckpointError`` or ``UnsupportedCheckpointError``.
    """
    root = await read_root(source, location)
    if isinstance(root, Manifest):
        return root
    return await _whole(source, location.url, root)


async def _whole(source: RangeSource, url: str, root: Root) -> Manifest:
    with _telling(url):
        parts = await read_parts(source, root, range(len(root.parts)))
        manifest = await io_threads().run_sliced(join, root, parts)
        await io_threads().run_sliced(validate, manifest)
    return manifest


async def read_root(
    source: RangeSource, location: Location, listed: Mapping[str, int] | None = None
) -> Manifest | Root:
    """As ``read_manifest``; but of a checkpoint that several ranks wrote only the root, which is not yet validated.
    ``listed`` are the sizes of its files, if they are known."""
    store, url = location.store, location.url
    if not store.capabilities.listing:
        return await _read_unlisted(source, url)
    sizes: Mapping[str, int] = {}
    try:
        sizes = await source.sizes() if listed is None else listed
        unmarked = METADATA_NAME not in sizes and await io_threads().run(is_foreign, sizes)
        marker = None if unmarked else await committed_marker(source, store)
    except FileNotFoundError as error:
        what = await what_is_there(store, location.name, url, sizes)
        raise CheckpointNotFoundError(
            f"no committed checkpoint at {url}: {_lacking(error)}. {what or _INTERRUPTED}"
        ) from error
    except CorruptCheckpointError as error:
        raise about(error, url) from error
    with _telling(url):
        if marker is None:
            ours = await io_threads().run(own_manifest_among, sizes)
            if ours is not None:
                what = f"it names no manifest, but {ours} is there"
                raise CorruptCheckpointError(f"{METADATA_NAME} was altered: {what}", file=METADATA_NAME)
            manifest: Manifest | Root = await _read_unmarked(source, sizes)
        else:
            manifest = await _own_manifest_listed(source, marker, sizes)
        if isinstance(manifest, Manifest):
            await io_threads().run_sliced(validate, manifest)
    return manifest


def _lacking(error: FileNotFoundError) -> str:
    if "incomplete" in str(error.strerror):
        return f"its {METADATA_NAME} is incomplete: a save is committing it at this moment, or died while it did"
    return f"there is no {METADATA_NAME}"


_INTERRUPTED = "An interrupted save leaves no such file"


async def _read_unmarked(source: RangeSource, sizes: Mapping[str, int]) -> Manifest:
    """What ranks saved apart, or what another writer made. Raises ``IncompleteCheckpointError``."""
    if METADATA_NAME not in sizes:
        markers = await read_part_markers(source, sizes)
        if any(markers.values()):
            return await read_apart(source, sizes, markers)
    return await read_foreign_manifest(source, sizes)


async def read_parts(source: RangeSource, root: Root, ranks: Iterable[int]) -> dict[int, RankPart]:
    """The parts of these ranks. Raises ``CorruptCheckpointError``, ``FileNotFoundError``."""
    parts: dict[int, RankPart] = {}
    for rank in ranks:
        nbytes, crc = root.parts[rank]
        if not nbytes:
            parts[rank] = RankPart({}, {})
            continue
        name = part_name(manifest_name(root.manifest.save_id), rank)
        raw = await read_file(source, name, nbytes)
        parts[rank] = await io_threads().run(_parse_part, name, raw, crc)
    return parts


def _parse_part(name: str, raw: bytearray, crc: int) -> RankPart:
    if crc32(raw) != crc:
        raise CorruptCheckpointError(f"{name} was altered: its checksum is not the one in the manifest", file=name)
    return run_sliced(parse_part(raw))


@contextmanager
def _telling(url: str) -> Iterator[None]:
    """What is raised says which checkpoint it is about."""
    try:
        yield
    except FileNotFoundError as error:
        raise CorruptCheckpointError(f"{url}: {error.filename} is missing") from error
    except SidestreamError as error:
        raise about(error, url) from error


async def _read_unlisted(source: RangeSource, url: str) -> Manifest | Root:
    """Where nothing is listed, the marker says how large the manifest is, and the manifest which files there are."""
    try:
        sizes = {METADATA_NAME: await source.size(METADATA_NAME)}
        marker = await read_marker(source)
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"no committed checkpoint at {url}: there is no {METADATA_NAME}") from error
    except CorruptCheckpointError as error:
        raise about(error, url) from error
    if marker is None:
        raise UnsupportedCheckpointError(
            f"{url} was written by another writer, and a server without listings does not say which files it has: copy "
            "it to a directory first"
        )
    with _telling(url):
        name = manifest_name(marker.save_id)
        sizes[name] = await source.size(name)
        raw = await read_file(source, name, marker.manifest_bytes)
        named = await io_threads().run(_parse, name, raw, marker)
        for file in _head(named).files:
            sizes[file] = await source.size(file)
        manifest = await _own_manifest(source, marker, sizes)
        if isinstance(manifest, Manifest):
            await io_threads().run_sliced(validate, manifest)
    return manifest


async def _own_manifest_listed(source: RangeSource, marker: Marker, sizes: Mapping[str, int]) -> Manifest | Root:
    """List the files once more if some are missing: they may belong to a save that has written the marker between the
    listing and the read of the marker, and were complete before it did."""
    try:
        return await _own_manifest(source, marker, sizes)
    except CorruptCheckpointError:
        listed = await source.sizes()
        if listed == sizes:
            raise
    return await _own_manifest(source, marker, listed)


async def _own_manifest(source: RangeSource, marker: Marker, sizes: Mapping[str, int]) -> Manifest | Root:
    name = manifest_name(marker.save_id)
    if sizes.get(name) != marker.manifest_bytes:
        raise CorruptCheckpointError(
            f"{name} has {sizes.get(name, 0)} bytes, the marker says {marker.manifest_bytes}", file=name
        )
    raw = await read_file(source, name, marker.manifest_bytes)
    manifest = await io_threads().run(_parse, name, raw, marker)
    head = _head(manifest)
    if (head.save_id, head.step, head.generation) != (marker.save_id, marker.step, marker.generation):
        raise CorruptCheckpointError(f"{name} belongs to another save than the marker", file=name)
    await io_threads().run(check_sizes, head.files, sizes)
    return manifest


def _head(manifest: Manifest | Root) -> Manifest:
    return manifest if isinstance(manifest, Manifest) else manifest.manifest


def _parse(name: str, raw: bytearray, marker: Marker) -> Manifest | Root:
    if crc32(raw) != marker.manifest_crc:
        raise CorruptCheckpointError(f"{name} was altered: its checksum is not the one in the marker", file=name)
    return run_sliced(parse_manifest(raw))

"""The validation of a ``Manifest`` of any writer, before memory is allocated for it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import lt

from .._runtime.pauses import chunked, pause_point
from ..errors import CorruptCheckpointError, IncompleteTensorError, UnsupportedCheckpointError
from .checksum import DIGEST_BYTES, block_count
from .cover import Box, TooIntricateError, find_overlap, volume
from .records import (
    MAX_FQN_CHARS,
    MAX_PARTS,
    MAX_PATH_DEPTH,
    MAX_SIZE,
    SAVED_DTYPES,
    SPARSE_PARTS,
    Chunk,
    CompositeEntry,
    DictKey,
    Entry,
    Key,
    Manifest,
    OpaqueEntry,
    Row,
    TensorEntry,
    ValueEntry,
    name_of,
    path_of,
    shape_problem,
    stored,
)
from .shared import Root

MAX_ENTRIES = 10_000_000
MAX_CHUNKS = 50_000_000
MAX_FILES = 1_000_000

MOST_EXPANSION = 1 << 15
"""The most bytes to which one byte of zstd can expand: a block of 128 KiB takes at least four bytes."""


_MAX_NAME_BYTES = 255
_HOLES_LISTED = 100
_MANY = 256

_Range = tuple[int, int, str, object]


def validate(manifest: Manifest, *, partly: bool = False) -> None:
    """Check a manifest. ``manifest.files`` has to hold the real sizes, and all fields have to have their declared
    types.

    After it has returned, these facts hold:

    - The name of each data file is one plain component. - Each item lies within its file. It does not overlap with
    other items, or has the same range (tied tensors). - Each payload fits into its item. - The chunks of each tensor
    lie within its shape, do not overlap, and cover it. - No tensor claims more bytes than its files have.

    ``partly``: only some parts of the manifest were read, so chunks and the files of values may be missing.
    ``check_patterns`` then finds holes. For an ``OpaqueEntry`` only the places of its items are checked.

    Raises ``CorruptCheckpointError`` with ``file`` or ``fqn`` set, ``IncompleteTensorError`` with all tensors if only
    chunks are missing, and ``UnsupportedCheckpointError`` for an unknown dtype or for chunks that take too long to
    check.
    """
    # First, because everything below costs time for each entry.
    _check_counts(manifest)
    for name, size in manifest.files.items():
        _check_file(name, size)
    ranges: dict[str, list[_Range]] = {}
    holes: list[str] = []
    # In two groups, because most entries of a large checkpoint are ordinary tensors, which were checked while they were
    # parsed. What is left for them, overlaps, is found by sorting numbers. Only if that finds some, as tied tensors
    # make them, are the files concerned looked at item by item.
    rows, others = _sorted_out(manifest.entries)
    for fqn, entry in others.items():
        pause_point()
        _check_names(fqn, entry)
        for file, start, length, content in _items(entry, manifest.own):
            if partly and not file:
                continue
            check_item(manifest.files, fqn, file, start, length)
            # Two entries may share an item if it is the same tensor, or in other formats the same storage. Values of
            # other writers get their own name as the key, so that they share an item with themselves only.
            shared = content if manifest.own or content is not None else fqn
            ranges.setdefault(file, []).append((start, start + length, fqn, shared))
        if isinstance(entry, TensorEntry):
            missing = _check_tensor(manifest.files, fqn, entry, manifest.digest)
            if missing and not partly:
                holes.append(f"{fqn}: {missing} of {math.prod(entry.shape)} elements are in no chunk")
        elif isinstance(entry, CompositeEntry):
            _check_composite(fqn, entry, manifest.stored)
    _check_sidecars(manifest, {*rows, *ranges})
    # Tied tensors have equal ranges and look like overlaps. Only the files for which that is so are compared item by
    # item.
    tied: set[str] = set()
    for file, found in rows.items():
        pause_point()
        if not _are_disjoint(found, ranges.get(file, [])):
            tied.add(file)
    ranges = {file: items for file, items in ranges.items() if file not in rows}
    for fqn, entry in manifest.entries.items() if tied else ():  # in order, for the files with overlapping items
        pause_point()
        for file, start, length, content in _items(entry, manifest.own):
            if file in tied:
                ranges.setdefault(file, []).append((start, start + length, fqn, content))
    for file, items in ranges.items():
        _check_disjoint(file, items)
    if holes:
        listed = "; ".join(holes[:_HOLES_LISTED])
        raise IncompleteTensorError(f"{len(holes)} tensors of the checkpoint have holes: {listed}", holes)


def check_patterns(root: Root, rows: Iterable[int]) -> None:
    """Check that the boxes of each of these rows cover its shape and do not overlap. Raises what ``validate``
    raises."""
    known: set[tuple[int, str]] = set()
    for number in rows:
        pause_point()
        row = root.shared.rows[number]
        # Most tensors of a model have one of a few shapes and patterns, so each pair is checked once.
        layout = (row.pattern, name_of(row.shape))
        if layout in known:
            continue
        known.add(layout)
        boxes = [(one.offsets, one.sizes) for one in root.shared.patterns[row.pattern]]
        if missing := _uncovered(row.fqn, boxes, row.shape):
            hole = f"{row.fqn}: {missing} of {math.prod(row.shape)} elements are in no chunk"
            raise IncompleteTensorError(f"a tensor of the checkpoint has holes: {hole}", [hole])


_FileRows = tuple[list[int], list[int]]
"""The starts and the ends of the items of all rows in one file."""


def _sorted_out(entries: Mapping[str, Entry]) -> tuple[dict[str, _FileRows], dict[str, Entry]]:
    """Return the rows by file, and all other entries by FQN. The rows were checked when they were parsed, except for
    overlaps with other items."""
    rows: dict[str, _FileRows] = defaultdict(lambda: ([], []))
    others: dict[str, Entry] = {}
    for some in chunked(stored(entries).items(), _MANY):
        for fqn, entry in some:
            if isinstance(entry, tuple):
                _, _, _, file, start, nbytes, *_ = entry
                starts, ends = rows[file]
                starts.append(start)
                ends.append(start + nbytes)
            else:
                others[fqn] = entry
        pause_point()
    return rows, others


def _are_disjoint(rows: _FileRows, items: list[_Range]) -> bool:
    """Return whether no two of these items share bytes. That is so if the (n+1)-th smallest
    start is never less than the n-th smallest end."""
    starts = sorted([*rows[0], *(item[0] for item in items)])
    ends = sorted([*rows[1], *(item[1] for item in items)])
    return not any(map(lt, starts[1:], ends))


def _check_counts(manifest: Manifest) -> None:
    chunks = 0
    for entries in chunked(manifest.stored.values(), _MANY):
        chunks += sum(len(entry.chunks) for entry in entries if isinstance(entry, TensorEntry | OpaqueEntry))
        chunks += sum(isinstance(entry, tuple) for entry in entries)
        pause_point()
    counts = (len(manifest.entries), MAX_ENTRIES, "entries"), (chunks, MAX_CHUNKS, "chunks")
    for count, most, what in (*counts, (len(manifest.files), MAX_FILES, "files")):
        if count > most:
            raise CorruptCheckpointError(f"the checkpoint claims {count} {what}, more than the {most} that are read")


def _check_file(name: str, size: int) -> None:
    # A file name is joined to the directory of the checkpoint. A separator, a leading dot or a drive would lead out of
    # it, also on systems that this version does not run on: a checkpoint may be copied there.
    drive = len(name) > 1 and name[1] == ":"
    plain = name and name[0] != "." and not drive and "/" not in name and "\\" not in name and name.isprintable()
    if not plain or len(name.encode()) > _MAX_NAME_BYTES:
        raise CorruptCheckpointError(f"{name[:_MAX_NAME_BYTES]!r} is not a plain file name", file=name)
    if not 0 <= size <= MAX_SIZE:
        raise CorruptCheckpointError(f"file {name!r} has an impossible size ({size})", file=name)


def _check_sidecars(manifest: Manifest, taken: set[str]) -> None:
    """Raise ``CorruptCheckpointError`` unless each sidecar file is a whole file without other contents. ``taken`` are
    the files of tensors and values."""
    taken = set(taken)
    for name, entry in manifest.sidecars.items():
        (chunk,) = entry.chunks
        _check_file(name, chunk.item_bytes)
        check_item(manifest.files, name, chunk.file, 0, chunk.item_bytes)
        _check_tensor(manifest.files, name, entry, manifest.digest)
        if chunk.file in taken or manifest.files[chunk.file] != chunk.item_bytes:
            raise CorruptCheckpointError(
                f"the sidecar file {name!r} is not the whole of {chunk.file!r}", file=chunk.file
            )
        taken.add(chunk.file)


def _check_names(fqn: str, entry: Entry) -> None:
    if len(fqn) > MAX_FQN_CHARS:
        raise CorruptCheckpointError(
            f"an FQN has {len(fqn)} characters, more than the {MAX_FQN_CHARS} that are read", fqn=fqn
        )
    check_path(fqn, entry.path)


def check_composites(manifest: Manifest) -> None:
    """Check the composite tensors of a manifest that is not validated yet. Raises ``CorruptCheckpointError`` and
    ``UnsupportedCheckpointError``."""
    for fqn, entry in manifest.entries.items():
        pause_point()
        if isinstance(entry, CompositeEntry):
            _check_names(fqn, entry)
            _check_composite(fqn, entry, manifest.entries)


def _check_composite(fqn: str, entry: CompositeEntry, entries: Mapping[str, Entry | Row]) -> None:
    """Raise ``CorruptCheckpointError`` unless each part of a composite tensor has an entry of its own, at its path."""
    check_shape(fqn, entry.dtype, entry.shape)
    names = SPARSE_PARTS.get(entry.type, entry.parts)
    if (
        not 0 < len(entry.type) <= MAX_FQN_CHARS
        or entry.parts != names
        or (entry.type in SPARSE_PARTS) != (entry.strides is None)
    ):
        raise CorruptCheckpointError(f"{fqn!r} is a composite tensor that does not fit its type", fqn=fqn)
    strides = entry.strides or ()
    if entry.strides is not None and len(strides) != len(entry.shape):
        raise CorruptCheckpointError(f"{fqn!r} has {len(strides)} strides for {len(entry.shape)} dimensions", fqn=fqn)
    if any(not 0 <= stride <= MAX_SIZE for stride in strides):
        raise CorruptCheckpointError(f"{fqn!r} has impossible strides", fqn=fqn)
    if not 0 < len(set(entry.parts)) == len(entry.parts) <= MAX_PARTS or "" in entry.parts:
        raise CorruptCheckpointError(
            f"{fqn!r} has empty or repeated part names, or not 1 to {MAX_PARTS} parts", fqn=fqn
        )
    for part in entry.parts:
        one = entries.get(f"{fqn}.{part}")
        if not isinstance(one, tuple | TensorEntry | CompositeEntry) or path_of(one) != (*entry.path, part):
            raise CorruptCheckpointError(f"{fqn!r} consists of parts, and its part {part!r} is missing", fqn=fqn)


def check_path(fqn: str, path: tuple[Key, ...]) -> None:
    """Raise ``CorruptCheckpointError`` if a path is too long, or a step of it is not a key."""
    if not 0 < len(path) <= MAX_PATH_DEPTH:
        raise CorruptCheckpointError(f"{fqn!r} has a path of {len(path)} steps, not 1 to {MAX_PATH_DEPTH}", fqn=fqn)
    for step in path:
        index = type(step) is int and 0 <= step <= MAX_SIZE
        if not index and not isinstance(step, str | DictKey):
            raise CorruptCheckpointError(f"{fqn!r} has a path with a step that is not a key or an index", fqn=fqn)
        if isinstance(step, str) and len(step) > MAX_FQN_CHARS:
            raise CorruptCheckpointError(f"{fqn!r} has a path with a key of {len(step)} characters", fqn=fqn)


def _items(entry: Entry, own: bool) -> Iterator[tuple[str, int, int, object]]:
    """Yield file, offset and length of each item, and a key. Two entries may share an item only if the keys are equal
    and not None: for the same tensor in checkpoints of sidestream, and for views of one storage."""
    if isinstance(entry, TensorEntry):
        for chunk in entry.chunks:
            content = (entry.dtype, entry.shape, chunk) if own else None if chunk.foreign is None else "a storage"
            yield chunk.file, chunk.item_offset, chunk.item_bytes, content
    elif isinstance(entry, OpaqueEntry):
        for chunk in entry.chunks:
            yield chunk.file, chunk.item_offset, chunk.item_bytes, None
    elif isinstance(entry, ValueEntry):
        yield entry.file, entry.item_offset, entry.item_bytes, None


def check_item(files: Mapping[str, int], fqn: str, file: str, start: int, length: int) -> None:
    """Raise ``CorruptCheckpointError`` unless the file exists, has a plain name, and has these bytes."""
    if file not in files:
        _check_file(file, 0)
        raise CorruptCheckpointError(f"{fqn!r} lies in {file!r}, which is missing", file=file, fqn=fqn)
    if start < 0 or length < 0 or start + length > files[file]:
        where = f"bytes {start} to {start + length} of {file!r}"
        raise CorruptCheckpointError(f"{fqn!r} lies at {where}, which has {files[file]}", file=file, fqn=fqn)


def _check_disjoint(file: str, items: list[_Range]) -> None:
    """Raise ``CorruptCheckpointError`` if two items share bytes, unless they have the same range and key."""
    items.sort(key=lambda item: item[:2])
    reached: _Range = (0, 0, "", None)
    for item in items:
        pause_point()
        start, end, fqn, content = item
        # Items are sorted by their ranges, so tied ones follow one another, and each is compared with the one that
        # reaches furthest.
        if start == end or ((start, end) == reached[:2] and content is not None and content == reached[3]):
            continue
        if start < reached[1]:
            raise CorruptCheckpointError(
                f"{fqn!r} and {reached[2]!r} overlap in {file!r}", file=file, fqn=fqn, offset=start
            )
        reached = item


def _check_tensor(files: dict[str, int], fqn: str, entry: TensorEntry, digest: str | None) -> int:
    """Check a tensor and its chunks. Returns the number of elements that are in no chunk."""
    check_shape(fqn, entry.dtype, entry.shape)
    for chunk in entry.chunks:
        _check_chunk(fqn, entry, chunk, digest)
    boxes = [(chunk.offsets, chunk.sizes) for chunk in entry.chunks]
    available = sum(files[file] for file in {chunk.file for chunk in entry.chunks})
    expansion = MOST_EXPANSION if any(chunk.transform for chunk in entry.chunks) else 1
    if volume(boxes) * entry.itemsize > available * expansion:
        raise CorruptCheckpointError(f"{fqn!r} claims more bytes than its files have ({available})", fqn=fqn)
    return _uncovered(fqn, boxes, entry.shape)


def _uncovered(fqn: str, boxes: Sequence[Box], shape: tuple[int, ...]) -> int:
    """Return the number of elements that are in no box. Raises ``CorruptCheckpointError`` if two boxes overlap."""
    try:
        overlap = find_overlap(boxes)
    except TooIntricateError:
        raise UnsupportedCheckpointError(
            f"{fqn!r} is cut into chunks in a way that is too intricate to check"
        ) from None
    if overlap:
        first, second = (list(boxes[index][0]) for index in overlap)
        raise CorruptCheckpointError(f"the chunks of {fqn!r} at {first} and {second} overlap", fqn=fqn)
    return math.prod(shape) - volume(boxes)


def check_shape(fqn: str, dtype: str, shape: tuple[int, ...]) -> None:
    """Raise ``UnsupportedCheckpointError`` for an unknown dtype, and ``CorruptCheckpointError`` for a shape that a
    tensor cannot have."""
    if dtype not in SAVED_DTYPES:
        raise UnsupportedCheckpointError(f"{fqn!r} has dtype {dtype[:64]!r}, which this version does not read")
    if shape_problem(dtype, shape):
        raise CorruptCheckpointError(f"{fqn!r} has an impossible shape", fqn=fqn)


def _check_chunk(fqn: str, entry: TensorEntry, chunk: Chunk, digest: str | None) -> None:
    def corrupt(what: str) -> CorruptCheckpointError:
        where = f"a chunk of {fqn!r} in {chunk.file!r}"
        return CorruptCheckpointError(f"{where} {what}", file=chunk.file, fqn=fqn, offset=chunk.item_offset)

    if not len(chunk.offsets) == len(chunk.sizes) == len(entry.shape):
        raise corrupt(f"does not have the {len(entry.shape)} dimensions of the tensor")
    extents = zip(chunk.offsets, chunk.sizes, entry.shape, strict=True)
    if not all(offset >= 0 and size >= 0 and offset + size <= dim for offset, size, dim in extents):
        raise corrupt(f"reaches out of the shape {list(entry.shape)}")
    payload = math.prod(chunk.sizes) * entry.itemsize
    start = chunk.item_offset if chunk.payload_offset is None else chunk.payload_offset
    expansion = MOST_EXPANSION if chunk.transform else 1
    if start < chunk.item_offset or start + payload > chunk.item_offset + chunk.item_bytes * expansion:
        raise corrupt(f"has {payload} bytes, which do not fit into its item of {chunk.item_bytes}")
    if chunk.crcs is not None and len(chunk.crcs) != 4 * block_count(payload):
        raise corrupt(f"has {len(chunk.crcs)} bytes of checksums for {payload} bytes of payload")
    if chunk.digests is None and digest is not None:
        raise corrupt("has no digests, although the manifest announces them")
    if chunk.digests is not None and len(chunk.digests) != DIGEST_BYTES * block_count(payload):
        raise corrupt(f"has {len(chunk.digests)} bytes of digests for {payload} bytes of payload")

"""The recognition of files that are not checkpoints, by first bytes or name, for an error that says what to do."""

from __future__ import annotations

from .._format.safetensors import INDEX_NAME, SUFFIX
from .torch_zip.zip import is_older, is_zip

HEAD_BYTES = 512
"""The number of bytes at the beginning of a file that determine its kind."""

_ZIP = (
    "it is a zip file; if torch.save wrote it, rename it so that its name ends in .pt (stock DCP writes such a file, "
    "which cannot be read, from a state dict that holds more than tensors)"
)
_MAGICS = (
    (b"\x1f\x8b", "it is compressed with gzip: decompress it first"),
    (b"\x28\xb5\x2f\xfd", "it is compressed with zstd: decompress it first"),
    (b"\xfd7zXZ\x00", "it is compressed with xz: decompress it first"),
    (b"BZh", "it is compressed with bzip2: decompress it first"),
    (b"\x89HDF\r\n\x1a\n", "it is an HDF5 file: read it with h5py, and save its arrays as tensors"),
    (b"\x93NUMPY", "it is a NumPy array: save torch.from_numpy(numpy.load(...))"),
    (b"GGUF", "it is a GGUF file: convert it to safetensors with the tools of its writer"),
    (b"version https://git-lfs", "it is a Git LFS pointer and not the file itself: run git lfs pull"),
    (b"<!DOCTYPE", "it is an HTML page: the server may have sent an error page in place of the file"),
    (b"<html", "it is an HTML page: the server may have sent an error page in place of the file"),
)


def other_kind(head: bytes, name: str) -> str | None:
    """Return text that says what kind of file ``name`` is, and what to do with it. ``head`` are its first bytes.
    Returns None if the kind is unknown, or if the first bytes match the name."""
    if is_older(head):
        older = "it is in the format of torch.save from before torch 1.6: rename it so that its name ends in .pt"
        return older if name.endswith(SUFFIX) else None
    for magic, what in _MAGICS:
        if head.startswith(magic):
            return what
    if head[257:262] == b"ustar":
        return "it is a tar archive: extract it first"
    if is_zip(head):
        return _ZIP if name.endswith(SUFFIX) else None
    if not name.endswith(SUFFIX) and _begins_as_safetensors(head):
        return f"it is a safetensors file: rename it so that its name ends in {SUFFIX}"
    if head[:1] == b"\x80" and head[1:2] in (b"\2", b"\3", b"\4", b"\5"):
        return "it is a plain pickle, which is not read: if you trust it, unpickle it and torch.save its state dict"
    if _is_text(head):
        return "it is a text file, not a checkpoint"
    return None


def part_of_checkpoint(name: str) -> bool:
    """Return whether ``name`` is the name of one of several files of a checkpoint."""
    base = name.rpartition("/")[2]
    return base in (".metadata", INDEX_NAME) or base.endswith(".distcp") or base.startswith("manifest-")


def _begins_as_safetensors(head: bytes) -> bool:
    return head[8:10] in (b'{"', b"{}") and 2 <= int.from_bytes(head[:8], "little") < 100 << 20


def _is_text(head: bytes) -> bool:
    try:
        text = head[: len(head) - 3].decode() if len(head) == HEAD_BYTES else head.decode()
    except UnicodeDecodeError:
        return False
    return bool(text) and all(one.isprintable() or one.isspace() for one in text)

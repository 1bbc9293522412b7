"""The keywords of DCP's own storage classes: the meaning of each in sidestream, or its replacement."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from .._foreign.transforms import check_transforms
from ..errors import InvalidOptionError, UnsupportedCheckpointError
from ..options import Durability

__all__ = [
    "StockReaderOptions",
    "StockWriterOptions",
    "check_extensions",
    "check_stock_reader",
    "check_stock_writer",
    "durability_of",
    "one_url",
]


class StockWriterOptions(TypedDict, total=False):
    """Keywords of ``FileSystemWriter``, ``FsspecWriter`` and ``HuggingFaceStorageWriter``."""

    path: str | os.PathLike[str]
    single_file_per_rank: bool
    sync_files: bool
    thread_count: int
    per_thread_copy_ahead: int
    cache_staged_state_dict: bool
    _extensions: Sequence[Any] | None
    serialization_format: Any
    fqn_to_index_mapping: Mapping[str, int] | None
    save_distributed: bool
    enable_consolidation: bool
    thread_count_consolidation: int


class StockReaderOptions(TypedDict, total=False):
    """Keywords of ``FileSystemReader``, ``FsspecReader`` and the readers of safetensors."""

    path: str | os.PathLike[str]
    thread_count: int
    _extension_registry: Any
    target_dtype: Any
    block_size: int


@dataclass(frozen=True, slots=True)
class _Keywords:
    """``ignored``: keywords that have no effect, each with the reason. ``refused``: keywords that request something
    else, each with the alternative. ``translated``: keywords that have a meaning here."""

    owner: str
    translated: frozenset[str]
    ignored: Mapping[str, str]
    refused: Mapping[str, str]

    def check(self, given: Mapping[str, Any]) -> None:
        """Raise ``InvalidOptionError`` with the name of a keyword that is refused; warn once about all keywords that
        are ignored."""
        for name in given:
            if name in self.refused:
                raise InvalidOptionError(f"{self.owner} does not support {name}=: {self.refused[name]}")
            if name not in self.translated and name not in self.ignored:
                raise InvalidOptionError(
                    f"{self.owner} has no option {name}=; pass an option of the file system in "
                    f"storage_options={{{name!r}: ...}}"
                )
        ignored = [f"{name}= ({why})" for name, why in self.ignored.items() if name in given]
        if ignored:
            warnings.warn(f"{self.owner} ignores {', '.join(ignored)}", stacklevel=4)


_SAFETENSORS = 'sidestream.convert(url, target, format="safetensors") writes safetensors from a checkpoint'

_WRITER = _Keywords(
    "StorageWriter",
    frozenset({"path", "sync_files", "_extensions", "serialization_format"}),
    {
        "single_file_per_rank": "the size of the state decides how many files a rank writes",
        "thread_count": "four threads write, independent of this value",
        "per_thread_copy_ahead": "tensors are staged ahead within a budget of 256 MiB",
        "cache_staged_state_dict": "sidestream.AsyncStager, passed as async_stager=, reuses its memory",
    },
    dict.fromkeys(
        ("fqn_to_index_mapping", "save_distributed", "enable_consolidation", "thread_count_consolidation"), _SAFETENSORS
    ),
)

_DEQUANTIZE = "sidestream reads quantized tensors and their scales unchanged; multiply them after the load"

_READER = _Keywords(
    "StorageReader",
    frozenset({"path", "_extension_registry"}),
    {"thread_count": "ranges are read in parallel, independent of this value"},
    {"target_dtype": _DEQUANTIZE, "block_size": _DEQUANTIZE},
)


def check_stock_writer(given: Mapping[str, Any]) -> None:
    """Raise ``InvalidOptionError`` for a keyword that is not supported."""
    _WRITER.check(given)
    serialization = getattr(given.get("serialization_format"), "name", "TORCH_SAVE")
    if serialization != "TORCH_SAVE":
        raise InvalidOptionError(f"StorageWriter does not support serialization_format={serialization}: {_SAFETENSORS}")


def check_stock_reader(given: Mapping[str, Any]) -> None:
    """Raise ``InvalidOptionError`` for a keyword that is not supported."""
    _READER.check(given)
    known: Mapping[str, object] = getattr(given.get("_extension_registry"), "extensions", {})
    unread = sorted(name for name in known if not _is_read([f"{name}/1"]))
    if unread:
        warnings.warn(
            f"StorageReader can undo stream.zstd, but not {', '.join(unread)} of the registry",
            stacklevel=3,
        )


def one_url(owner: str, url: str | os.PathLike[str] | None, given: Mapping[str, Any]) -> str | os.PathLike[str]:
    """Return ``url=`` or DCP's ``path=``. Raises ``InvalidOptionError`` unless exactly one of them is passed."""
    path: str | os.PathLike[str] | None = given.get("path")
    if (url is None) == (path is None):
        problem = "url= and path= are the same option: pass only one" if path else "pass url="
        raise InvalidOptionError(f"{owner}: {problem}")
    return path if url is None else url  # type: ignore[return-value]


def durability_of(durability: Durability | None, given: Mapping[str, Any]) -> Durability:
    """Return the durability that ``durability`` or DCP's ``sync_files`` requests. Raises ``InvalidOptionError`` if they
    contradict each other."""
    if "sync_files" not in given:
        return durability or "fsync"
    meant: Durability = "fsync" if given["sync_files"] else "flush"
    if durability not in (None, meant):
        raise InvalidOptionError(
            f"sync_files={given['sync_files']!r} contradicts durability={durability!r}: pass only one"
        )
    return meant


def check_extensions(extensions: Sequence[Any]) -> None:
    """Raise ``InvalidOptionError`` for an extension that sidestream's readers cannot undo."""
    descriptors = [str(one.get_descriptor()) for one in extensions]
    if descriptors and not _is_read(descriptors):
        raise InvalidOptionError(
            f"extensions={descriptors}: sidestream's readers can undo only a single stream.zstd/1; write with "
            "FileSystemWriter of torch.distributed.checkpoint instead"
        )


def _is_read(descriptors: Sequence[str]) -> bool:
    try:
        check_transforms(list(descriptors), "extensions")
    except UnsupportedCheckpointError:
        return False
    return True

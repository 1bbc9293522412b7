"""Sidestream under DCP's names and with DCP's behaviour: targets are overwritten, and keywords may be positional."""

from __future__ import annotations

import importlib
import os
import shutil
import warnings
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

import sidestream
from sidestream.dcp import StorageReader, StorageWriter

__all__ = ["put_in_place"]

_ARGUMENTS = ("path", "single_file_per_rank", "sync_files", "thread_count", "per_thread_copy_ahead")


class FileSystemWriter(StorageWriter):
    """``StorageWriter`` with the defaults of ``FileSystemWriter``."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options |= dict(zip(_ARGUMENTS, args, strict=False))
        with warnings.catch_warnings():  # of keywords without a meaning; what the tests test are the others
            warnings.simplefilter("ignore", UserWarning)
            super().__init__(**({"overwrite": True} | options))
        self.path = options["path"]


class FileSystemReader(StorageReader):
    def __init__(self, path: Any, _extension_registry: Any = None, **options: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            super().__init__(path=path, _extension_registry=_extension_registry, **options)
        self.path = path


class DefaultStager(sidestream.AsyncStager):
    def __init__(self, options: Any = None) -> None:
        super().__init__()


def put_in_place(what: str) -> None:
    """``what``: ``storage`` or ``verbs``."""
    if what not in ("storage", "verbs"):
        raise ValueError(f"SIDESTREAM_TORCH_SUITE={what!r} has to be 'storage' or 'verbs'")
    for deriving in ("_fsspec_filesystem", "hf_storage"):  # from DCP's own
        importlib.import_module(f"torch.distributed.checkpoint.{deriving}")
    storage = {"FileSystemWriter": FileSystemWriter, "FileSystemReader": FileSystemReader}
    _replace(("", "filesystem", "_storage_utils"), storage)
    stagers = {"BlockingAsyncStager": sidestream.BlockingAsyncStager, "DefaultStager": DefaultStager}
    _replace(("", "staging", "state_dict_saver"), stagers)
    if what == "verbs":
        saver = importlib.import_module("torch.distributed.checkpoint.state_dict_saver")
        loader = importlib.import_module("torch.distributed.checkpoint.state_dict_loader")
        _Verbs.stock_save, _Verbs.stock_load = saver.save, loader.load
        _replace(("", "state_dict_saver"), {"save": _Verbs.save, "save_state_dict": _Verbs.save_state_dict})
        _replace(("", "state_dict_loader"), {"load": _Verbs.load, "load_state_dict": _Verbs.load_state_dict})


def _replace(modules: tuple[str, ...], names: dict[str, Any]) -> None:
    for module in modules:
        found = importlib.import_module(f"torch.distributed.checkpoint{'.' if module else ''}{module}")
        for name, ours in names.items():
            if hasattr(found, name):
                setattr(found, name, ours)


class _Verbs:
    """DCP's calls, forwarded to ``sidestream.blocking`` if they name sidestream's storage, and to DCP otherwise."""

    stock_save: Any
    stock_load: Any

    @staticmethod
    def save(
        state_dict: Any,
        storage_writer: Any = None,  # by position too, as in the calls of torch 2.2
        *,
        checkpoint_id: Any = None,
        planner: Any = None,
        process_group: Any = None,
        no_dist: bool = False,
        **options: Any,
    ) -> Any:
        url = _url_of(checkpoint_id, storage_writer, FileSystemWriter)
        if url is None or planner is not None or options or getattr(storage_writer, "_extensions", ()):
            return _Verbs.stock_save(
                state_dict,
                checkpoint_id=checkpoint_id,
                storage_writer=storage_writer,
                planner=planner,
                process_group=process_group,
                no_dist=no_dist,
                **options,
            )
        group = _group(process_group, no_dist)
        if group == "alone" or dist.get_rank(process_group) == 0:
            shutil.rmtree(url, ignore_errors=True)  # sidestream.save takes new directories only
        with _as_dcp_raises():
            sidestream.blocking.save(state_dict, url, process_group=group)
        return StorageReader(url).read_metadata()

    @staticmethod
    def load(
        state_dict: Any,
        storage_reader: Any = None,
        *,
        checkpoint_id: Any = None,
        planner: Any = None,
        process_group: Any = None,
        no_dist: bool = False,
    ) -> None:
        url = _url_of(checkpoint_id, storage_reader, FileSystemReader)
        if url is None or planner is not None:
            _Verbs.stock_load(
                state_dict,
                checkpoint_id=checkpoint_id,
                storage_reader=storage_reader,
                planner=planner,
                process_group=process_group,
                no_dist=no_dist,
            )
            return
        group = _group(process_group, no_dist)
        with _as_dcp_raises():
            sidestream.blocking.load(state_dict, url, allow_cast=True, allow_unexpected=True, process_group=group)

    @staticmethod
    def save_state_dict(
        state_dict: Any,
        storage_writer: Any,
        process_group: Any = None,
        coordinator_rank: int = 0,
        no_dist: bool = False,
        planner: Any = None,
    ) -> Any:
        return _Verbs.save(
            state_dict, storage_writer=storage_writer, planner=planner, process_group=process_group, no_dist=no_dist
        )

    @staticmethod
    def load_state_dict(
        state_dict: Any,
        storage_reader: Any,
        process_group: Any = None,
        coordinator_rank: int = 0,
        no_dist: bool = False,
        planner: Any = None,
    ) -> None:
        _Verbs.load(
            state_dict, storage_reader=storage_reader, planner=planner, process_group=process_group, no_dist=no_dist
        )


def _url_of(checkpoint_id: Any, storage: Any, kind: type[StorageWriter] | type[StorageReader]) -> str | None:
    """Returns None if the storage is not sidestream's."""
    if storage is not None:
        return (os.fspath(checkpoint_id) if checkpoint_id else storage.checkpoint_id) if type(storage) is kind else None
    taken = checkpoint_id is not None and kind.validate_checkpoint_id(checkpoint_id)
    return os.fspath(checkpoint_id) if taken else None


def _group(process_group: Any, no_dist: bool) -> Any:
    return "alone" if no_dist or not dist.is_initialized() else process_group


@contextmanager
def _as_dcp_raises() -> Any:
    from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

    try:
        yield
    except Exception as error:
        raise CheckpointException(str(error), {0: _wrap_exception(error)}) from error

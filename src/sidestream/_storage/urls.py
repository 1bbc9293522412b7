"""Stores, and names in them, for the paths, URLs and file systems that users pass."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fsspec.core import strip_protocol, url_to_fs
from fsspec.registry import known_implementations, registry
from fsspec.utils import get_protocol

from .._runtime.caller import run_by_caller
from ..errors import InvalidOptionError, MissingExtraError, from_os_error, redacted
from ..options import BlobStore, Storage, StorePolicy, is_fsspec, storage_of
from .clients.credentials import CLOUDS, Client, Unmapped, client_for
from .clients.engine import Engine, LateEngine, StoreEngine
from .clients.fsspec import FsspecEngine
from .clients.lazy import EngineCache, frozen
from .local.store import LocalStore, MarkedStore
from .object_store.store import ObjectStore
from .store import RangeSource, Store
from .transaction import StoreAddress
from .wrappers.file_cache import FileCache

_ONE_ATTEMPT = {"retries": {"mode": "standard", "total_max_attempts": 1}}
_OF_THE_INSTANCE = frozenset({"asynchronous", "loop", "skip_instance_cache"})
_LOCAL = frozenset({"file", "local"})
_SEPARATOR = re.compile("::|://")
_ONE_SLASH = re.compile("([A-Za-z][A-Za-z0-9+.-]*):/(?!/)")
_PACKAGES = {"s3": "s3fs", "gcs": "gcsfs", "azure": "adlfs"}

_engines = EngineCache(16)


@dataclass(frozen=True, slots=True)
class Location:
    """The checkpoint directory ``name`` in ``store``. ``url`` is its name in messages."""

    store: Store
    name: str
    url: str

    def source(self) -> RangeSource:
        """Return the source from which the files of the directory are read. The caller closes it."""
        return self.store.source(self.name)


DEFAULT_STORAGE = Storage()
"""The default storage options: the URL alone determines the store."""


def locate_directory(url: str | os.PathLike[str], storage: Storage = DEFAULT_STORAGE) -> Location:
    """Return the location of the checkpoint at ``url``. Raises ``InvalidOptionError`` if ``url`` names the root of a
    file system or a whole bucket, and ``MissingExtraError`` if the client of its protocol is not installed."""
    text, protocol = _parsed(url, storage)
    if _is_local(protocol, storage):
        path = _local_path(text)
        if not path.name:
            raise InvalidOptionError(
                f"{path} is the root of the file system; a checkpoint needs a directory of its own"
            )
        return Location(_local_store(path.parent, storage), path.name, str(path))
    parent, _, name = text.rstrip("/").rpartition("/")
    if not name or parent.endswith(":/"):
        if protocol != "memory" or not name:
            raise InvalidOptionError(f"{redacted(text)} is a bucket; a checkpoint needs a prefix of its own in it")
        parent += "/"
    store = _object_store(parent, protocol, storage)
    return Location(store, name, f"{store.url}/{name}")


async def locate_by_caller(
    url: str | os.PathLike[str], options: Mapping[str, Any] | None, storage: Storage | None, prefix: str = ""
) -> Location:
    """Let the caller of this operation do ``locate_directory`` with what it was given as ``storage_options=`` or
    ``storage=``: making a file system may call its code. ``prefix`` precedes these names."""
    return await run_by_caller(locate_directory, url, storage_of(options, storage, prefix))


def locate_run(url: str | os.PathLike[str], storage: Storage = DEFAULT_STORAGE) -> tuple[Store, str]:
    """Return the store whose directories are the steps of a run, and the URL of the run for messages."""
    text, protocol = _parsed(url, storage)
    if _is_local(protocol, storage):
        path = _local_path(text)
        return _local_store(path, storage), str(path)
    store = _object_store(text.rstrip("/"), protocol, storage)
    return store, store.url


def _parsed(url: str | os.PathLike[str], storage: Storage) -> tuple[str, str]:
    try:
        text = os.fspath(url)
    except TypeError:
        if isinstance(url, Mapping):
            message = f"a {type(url).__name__} is not a path or URL: the state comes first, and then the URL"
            raise InvalidOptionError(message) from None
        text = ""
    if type(text) is not str or not text or "\0" in text:
        raise InvalidOptionError(f"{redacted(repr(url))} is not a path or URL")
    protocol = get_protocol(text)
    # A local path may hold bytes that are not UTF-8, as os.fsdecode returns them.
    try:
        text.encode(errors="strict" if storage.filesystem is None and protocol not in _LOCAL else "surrogateescape")
    except UnicodeEncodeError as error:
        raise InvalidOptionError(f"{redacted(ascii(text))} is not a path or URL: {error.reason}") from None
    if storage.filesystem is None:
        _check_address(text, protocol)
    return text, protocol


def _check_address(text: str, protocol: str) -> None:
    """Raise ``InvalidOptionError`` for a protocol that no package provides, for a URL of nothing, and for ``~``.

    ``~`` is refused and not expanded, because ``torch.save`` and DCP make a directory of that name. If it were
    expanded here, one string would name two places in one program, and a third place for another user."""
    if not _is_known(protocol):
        lower = f"write {protocol.lower()}://" if _is_known(protocol.lower()) else "use a path, s3://, gs://, az://"
        raise InvalidOptionError(
            f"{redacted(text)} has the unknown protocol {protocol}://; {lower}, or another protocol that fsspec knows"
        )
    if (match := _ONE_SLASH.match(text)) and _is_known(match[1].lower()):
        begin = match[1].lower() + (":///" if match[1].lower() in _LOCAL else "://")
        raise InvalidOptionError(
            f"{redacted(text)} has one slash after {match[1]}:, where a URL has two, and pathlib.Path leaves one: pass "
            f"the text {redacted(begin + text[match.end() :])!r}, or './{redacted(text)}' for a directory of that name"
        )
    if text.startswith("data:") and "," in text.partition("/")[0]:
        raise InvalidOptionError(f"a data: URL has no room for a checkpoint; a directory of that name is ./{text:.80}")
    if text.endswith("://") or (protocol not in _LOCAL and not _SEPARATOR.split(text)[-1].strip("/")):
        raise InvalidOptionError(f"{redacted(text)} has no bucket, host or path after {protocol}://")
    if protocol in CLOUDS and not _bucket_and_prefix(text)[0]:
        raise InvalidOptionError(f"{redacted(text)} has no bucket after {protocol}://")
    if text == "~" or text.startswith("~/"):
        raise InvalidOptionError(
            f"{text!r} begins with ~, which is expanded by a shell but not here: use os.path.expanduser({text!r}), or "
            f"{'./' + text!r} for a directory of that name"
        )


def _is_known(protocol: str) -> bool:
    return protocol in known_implementations or protocol in registry


def _is_local(protocol: str, storage: Storage) -> bool:
    if storage.filesystem is not None:
        return False
    if protocol in _LOCAL and storage.options:
        raise InvalidOptionError("storage_options= is for object storage, and this is a local directory")
    return protocol in _LOCAL


def _local_store(root: Path, storage: Storage) -> LocalStore:
    return MarkedStore(root) if storage.commit == "marker" else LocalStore(root)


def _local_path(text: str) -> Path:
    return Path(strip_protocol(text) if "://" in text else text).absolute()


def _object_store(base: str, protocol: str, storage: Storage) -> ObjectStore:
    policy = storage.policy or StorePolicy()
    if storage.filesystem is not None and not is_fsspec(storage.filesystem):
        return _own_store(storage.filesystem, base, policy)
    # There are three ways to an engine. A file system of the user, as it is. The clouds: made at the first request, in
    # a thread, because credentials are read from files and services, and importing a client takes long. Any other URL:
    # fsspec makes its file system now.
    engine: Engine | LateEngine
    if storage.filesystem is not None:
        root = storage.filesystem._strip_protocol(base)
        engine = FsspecEngine(storage.filesystem, policy)
        address = _made_again(storage.filesystem, root, policy)
    else:
        options = dict(storage.options or {})
        client = _client(base, protocol, options, policy)
        if protocol in CLOUDS:
            engine = _late(base, protocol, options, policy, client)
            bucket, prefix = _bucket_and_prefix(base)
            root = f"{bucket.partition('@')[0]}/{prefix}".rstrip("/")
        else:
            engine, root = _through_fsspec(base, protocol, options, policy)
        # No other process can open memory://.
        address = None if protocol == "memory" else StoreAddress(base, storage)
    cache = None if policy.cache_dir is None else FileCache(os.fspath(policy.cache_dir))
    return ObjectStore(engine, root, redacted(base), policy, cache, address)


def _own_store(store: BlobStore, base: str, policy: StorePolicy) -> ObjectStore:
    if policy.cache_dir is not None:
        raise InvalidOptionError(f"cache_dir= needs an fsspec file system, not filesystem={type(store).__name__}")
    root = base.rpartition("://")[2].strip("/")
    return ObjectStore(StoreEngine(store, policy), root, redacted(base), policy)


def _late(base: str, protocol: str, options: dict[str, Any], policy: StorePolicy, client: Client | None) -> LateEngine:
    """Return the engine of a cloud, whose client is made at the first request. Errors in the options that are visible
    here are raised here; those that only the client finds are raised by the first request."""
    kind = CLOUDS[protocol]
    if client is None and find_spec(_PACKAGES[kind]) is None:
        raise _no_client(protocol, policy)

    def make() -> Engine:
        if client is None:
            return _through_fsspec(base, protocol, options, policy)[0]
        from .clients.obstore import ObstoreEngine  # needs an extra

        return ObstoreEngine(client.complete(), policy)

    def kept() -> Engine:
        try:
            # Clients are kept, because a new one would open new connections. Options that cannot be compared, such as a
            # session object, get a client of their own.
            key = protocol, _bucket_and_prefix(base)[0], frozen(options), policy
        except TypeError:
            return make()
        return _engines.get(key, make)

    if client is None:
        return LateEngine(f"fsspec:{kind}", make)  # not kept here: fsspec caches its instances
    return LateEngine(f"obstore:{kind}", kept, versions=True)


def _no_client(protocol: str, policy: StorePolicy) -> MissingExtraError:
    if policy.engine == "auto" and find_spec("obstore") is None:
        return MissingExtraError(f'{protocol}:// needs a client: pip install "sidestream[cloud]"', extra="cloud")
    return MissingExtraError(
        f"{protocol}:// needs the client of fsspec with these options: pip install {_PACKAGES[CLOUDS[protocol]]}"
    )


def _client(base: str, protocol: str, options: Mapping[str, Any], policy: StorePolicy) -> Client | None:
    """Return the options of the obstore client; None if fsspec is used."""
    wanted = policy.engine == "obstore"
    if policy.engine == "fsspec" or policy.cache_dir is not None or protocol not in CLOUDS:
        if wanted:
            raise InvalidOptionError(
                f'engine="obstore" has s3://, gs:// and az:// without a cache, not {redacted(base)}'
            )
        return None
    if find_spec("obstore") is None:
        if wanted:
            raise MissingExtraError('engine="obstore" needs obstore: pip install "sidestream[cloud]"', extra="cloud")
        return None
    try:
        return client_for(protocol, _bucket_and_prefix(base)[0], options)
    except Unmapped as error:
        if wanted:
            raise InvalidOptionError(
                f'storage_options has {", ".join(error.names)}, which engine="obstore" has no words for; leave it to '
                'engine="auto" to take fsspec'
            ) from None
        return None


def _through_fsspec(base: str, protocol: str, options: dict[str, Any], policy: StorePolicy) -> tuple[FsspecEngine, str]:
    if protocol in CLOUDS:
        options.setdefault("use_listings_cache", False)
    if protocol in ("s3", "s3a"):
        options["config_kwargs"] = {**_ONE_ATTEMPT, **(options.get("config_kwargs") or {})}
    try:
        filesystem, root = url_to_fs(base, **options)
        if protocol in ("s3", "s3a"):
            filesystem.retries = 1  # Requests retries: with events, the deadline and a common pause
    except ImportError as error:
        raise MissingExtraError(f"{protocol}:// needs a package: {error}") from error  # fsspec says which
    except OSError as error:  # some file systems connect when they are made
        raise from_os_error(error, f"connecting to {protocol}://", redacted(base)) from error
    except (ValueError, TypeError, AttributeError) as error:  # of options that are wrong or missing
        raise InvalidOptionError(f"{redacted(base)}: {redacted(str(error))}") from None
    return FsspecEngine(filesystem, policy), root


def _made_again(filesystem: Any, root: str, policy: StorePolicy) -> StoreAddress | None:
    """Return the address with which another process can make an equal file system; None if there is none. It needs the
    protocol of a cloud, and only options that were given by name."""
    protocols = filesystem.protocol if isinstance(filesystem.protocol, tuple) else (filesystem.protocol,)
    if protocols[0] not in CLOUDS or getattr(filesystem, "storage_args", None) != ():
        return None
    options = {name: one for name, one in filesystem.storage_options.items() if name not in _OF_THE_INSTANCE}
    return StoreAddress(f"{protocols[0]}://{root}", Storage(options, policy=replace(policy, engine="fsspec")))


def _bucket_and_prefix(base: str) -> tuple[str, str]:
    bucket, _, prefix = base.partition("://")[2].partition("/")
    return bucket, prefix

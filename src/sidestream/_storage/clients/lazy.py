"""A cache of clients. A client that is used again keeps its connections open."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from .engine import Engine

_FILES = {  # default paths of files with credentials, by the environment variable that overrides each
    "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials",
    "AWS_CONFIG_FILE": "~/.aws/config",
    "GOOGLE_APPLICATION_CREDENTIALS": "~/.config/gcloud/application_default_credentials.json",
}
_VARIABLES = ("AWS_", "GOOGLE_", "AZURE_", "BOTO", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT")


class EngineCache:
    """The engines that were used last. Their keys contain what they were made from: options, environment variables, and
    files with credentials."""

    def __init__(self, most: int) -> None:
        self._kept = lru_cache(most)(_made)

    def __reduce__(self) -> Any:
        raise TypeError("clients hold credentials: they are not pickled")

    def get(self, key: Hashable, make: Callable[[], Engine]) -> Engine:
        """Return the engine with this key, or the one that ``make`` returns. Called in a thread. Calls of ``make`` do
        not wait for each other. If two threads make the same engine at once, the first one is kept. Engines that were
        made before a fork are not used in the child: keys contain the process id."""
        return self._kept(_Wanted((key, os.getpid(), *_thread_state()), make))


@dataclass(frozen=True, slots=True)
class _Wanted:
    key: Hashable
    make: Callable[[], Engine] = field(compare=False)


def _made(wanted: _Wanted) -> Engine:
    return wanted.make()


def frozen(value: Any) -> Hashable:
    """Return ``value`` in a hashable form. Raises ``TypeError`` for types that cannot be compared by their content."""
    if isinstance(value, Mapping):
        return tuple(sorted((str(name), frozen(one)) for name, one in value.items()))
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *map(frozen, value))
    if value is None or type(value) in (str, int, float, bool, bytes):
        return (type(value).__name__, repr(value))
    raise TypeError(f"a {type(value).__name__} cannot be compared by its content")


def _thread_state() -> tuple[Hashable, ...]:
    names = sorted(name for name in list(os.environ) if name.upper().startswith(_VARIABLES))
    variables = tuple((name, os.environ.get(name)) for name in names)  # get: another thread may remove one
    files = (os.environ.get(variable) or os.path.expanduser(default) for variable, default in _FILES.items())
    return variables, *map(_stamp, files)


def _stamp(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_mtime_ns, status.st_size

"""PyTorch's own tests of DCP against our storage, stagers and verbs: ``nox -s dcp_suite``.

With this directory on its path, every process (torch's tests start one for each rank) puts ours in the place of DCP's
when ``torch.distributed.checkpoint`` has been imported. ``SIDESTREAM_TORCH_SUITE`` says what: ``storage`` (writers,
readers and stagers, below DCP's own calls) or ``verbs`` (the calls as well).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType

_NAME = "torch.distributed.checkpoint"
_WHAT = os.environ.get("SIDESTREAM_TORCH_SUITE", "")


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        import _substitutes

        _substitutes.put_in_place(_WHAT)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _NAME:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


if _WHAT:
    sys.meta_path.insert(0, _Finder())

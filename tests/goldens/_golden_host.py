"""A process that has imported everything, and whose forks run cases."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
import traceback
import warnings
from collections.abc import Callable

import torch

import sidestream


def import_all(*others: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))  # or the first threads of a fork race to do it
    ours = [module.name for module in pkgutil.walk_packages(sidestream.__path__, "sidestream.")]
    for name in [*(name for name in ours if not name.startswith("sidestream.integrations.")), *others]:
        importlib.import_module(name)


def fork(work: Callable[[], None]) -> int:
    """Start ``work`` in a fork, and return its process id. A fork whose work raises ends with 1."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)

"""What the objects of a target take of a checkpoint.

An object is given its state as it was saved, as its ``load_state_dict`` would get it after ``torch.save``. Only a
``torch.nn.Module`` is compared with the checkpoint name by name, because torch itself takes from it nothing but the
names and shapes that the module has. Parts of a module whose loading is code of their own are given what was saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from .._format.records import Entry
from .._runtime.pauses import paced, pause_point
from .flatten import Leaf, StatefulRoot, plain_path

_EXTRA_STATE = "_extra_state"
_WRAPPED = frozenset({"_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Names of modules that the wrappers of torch leave out of the names in a state dict."""


@dataclass(frozen=True, slots=True)
class LoadedAsSaved:
    """What an object takes as it was saved, whatever is in its own state dict.

    ``whole``: all of it. Tensors that fit are read in place. Otherwise the object is a module, and takes all that has
    one of ``names``, or is below it, in new memory: its code may rename and rearrange it. ``extra_states`` are those of
    these names that have to be there.
    """

    whole: bool
    names: frozenset[str] = frozenset()
    extra_states: frozenset[str] = frozenset()

    def covers(self, fqn: str) -> bool:
        """Return whether ``fqn`` is given to code of a part of a module."""
        return bool(self.names) and not self.names.isdisjoint(containers_of(fqn))


def containers_of(fqn: str) -> Iterator[str]:
    """Yield ``fqn`` and the names that it begins with."""
    end = len(fqn)
    while end > 0:
        yield fqn[:end]
        end = fqn.rfind(".", 0, end)


def loaded_as_saved(root: Leaf) -> LoadedAsSaved:
    """Return what the object at ``root`` takes. Looks at the modules in it, and calls none of their methods."""
    found: StatefulRoot = root.value
    instance = found.instance
    # Two kinds of objects. ``load_state_dict`` of an optimizer, or of a class of the caller, may do anything with what
    # it gets, so it gets its state as it was saved; ``torch.save`` and ``torch.load`` would hand it over in the same
    # way. Torch's own code for modules takes names and shapes as they are, so these can be compared before anything is
    # changed.
    if not isinstance(instance, torch.nn.Module) or not _is_of_torch(instance, "load_state_dict"):
        return LoadedAsSaved(whole=True)
    names: set[str] = set()
    extra_states: set[str] = set()
    stack: list[tuple[str, Any]] = [(root.fqn, instance)]
    while stack:
        pause_point()
        fqn, module = stack.pop()
        # Its children are not examined: the code of this module gets everything below its name, and decides what they
        # get.
        if _loads_itself(module):
            names.add(fqn)
            continue
        if not _is_of_torch(module, "set_extra_state"):
            extra_states.add(f"{fqn}.{_EXTRA_STATE}")
        stack += [
            (fqn if name in _WRAPPED else f"{fqn}.{name}", child)
            for name, child in list(module._modules.items())
            if child is not None
        ]
    return LoadedAsSaved(False, frozenset(names | extra_states), frozenset(extra_states))


def _is_of_torch(module: Any, method: str) -> bool:
    # Programs replace such methods on a class, and on one instance as well.
    return method not in vars(module) and getattr(type(module), method, None) is getattr(torch.nn.Module, method)


def _loads_itself(module: Any) -> bool:
    """Return whether a module has code of its own that gets what was saved of it. The norms of torch only add what old
    versions lack, and the hooks of ``torch.distributed`` keep names and shapes."""
    method = module._load_from_state_dict
    # By the module that defines the method, and not by identity: the norms of torch override it, and ``BatchNorm`` only
    # adds the counter that old versions did not save.
    if not getattr(method, "__module__", "").startswith("torch.nn.modules."):
        return True
    hooks = (*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values())
    return not all(_module_of(hook).startswith("torch.distributed.") for hook in hooks)


def _module_of(hook: Any) -> str:
    hook = getattr(hook, "hook", hook)  # torch wraps those of ``with_module``
    while isinstance(hook, partial):
        hook = hook.func
    return getattr(hook, "__module__", None) or ""


def unsaved_leaves(leaves: Iterable[Leaf], depth: int, saved: Iterable[Entry]) -> list[Leaf]:
    """Return those of ``leaves`` that an object may keep: below a key of its state dict of which nothing was saved. The
    value of any other key is what was saved. ``depth`` is that of the object, and ``saved`` is all that it gets."""
    keys = {key for entry in paced(saved) for key in plain_path(entry.path[depth : depth + 1])}
    return [leaf for leaf in paced(leaves) if keys.isdisjoint(plain_path(leaf.path[depth : depth + 1]))]

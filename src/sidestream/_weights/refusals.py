"""What of a module cannot be swapped: it would keep the weights of another version, and answers would mix the two.

A module may hold its weights anywhere: in a hook, in the closure of a patched ``forward``, in a packed copy. So there
are two checks. ``problems_of`` looks at the tensors of the module itself, ``hidden_state`` at everything that can be
reached from a copy of it. Each returns one line for each problem, with its name and a way out.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from .._runtime.threads import pause_point

_TENSORS = (torch.Tensor, torch.nn.Parameter)
_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size, type)
_OF_EVERY_MODULE = frozenset({"_parameters", "_buffers", "_modules", "training"})


def problems_of(module: torch.nn.Module) -> list[str]:
    """Return what in the tensors of ``module``, and in its kind, cannot be swapped."""
    found = []
    for name, one in module.named_modules():
        pause_point()
        if isinstance(one, torch.jit.ScriptModule):
            found.append(
                f"{_named(name)} is a ScriptModule, whose weights may be frozen or packed: use the module itself"
            )
        elif hasattr(one, "_orig_mod"):
            found.append(f"{_named(name)} is the result of torch.compile: pass the module, and {_COMPILE}")
        elif vars(one).get("_compiled_call_impl") is not None:
            found.append(f"{_named(name)} is compiled, and its copies would not be: {_COMPILE}")
    tensors = [*module.named_parameters(), *module.named_buffers()]
    found += [f"{name} {problem}" for name, tensor in tensors if (problem := problem_of(tensor))]
    own = {id(tensor) for _, tensor in tensors}
    inside = module.state_dict(keep_vars=True)
    known = {id(value) for value in inside.values()}
    lacking = [name for name, one in module.named_parameters() if id(one) not in known]
    found += [f"{name} is a parameter that state_dict() leaves out: it would never change" for name in lacking]
    memory = {_memory_of(value) for value in inside.values() if id(value) in own} - {0}
    views = [name for name, one in module.named_buffers() if id(one) not in known and _memory_of(one) in memory]
    found += [f"{name} is a view of weights that state_dict() leaves out: it would never change" for name in views]
    for name, value in inside.items():
        if id(value) not in own:
            kind = "a tensor" if isinstance(value, torch.Tensor) else type(value).__name__
            found.append(f"{name} is {kind} that state_dict() makes (extra state, packed weights): it has no place")
    return found


_COMPILE = "compile the copies with Live(module, prepare=lambda copy: copy.compile())"


def _named(name: str) -> str:
    return name or "the module"


def problem_of(tensor: torch.Tensor) -> str | None:
    """Return why ``tensor`` cannot be swapped."""
    if torch.nn.parameter.is_lazy(tensor):
        return "has no shape yet: call the module once before"
    if type(tensor) not in _TENSORS:
        return f"is a {type(tensor).__name__}, and only plain tensors can be swapped"
    if tensor.layout != torch.strided or tensor.is_quantized:
        return f"is a {'quantized tensor' if tensor.is_quantized else tensor.layout} that cannot be swapped"
    return None


def _memory_of(tensor: torch.Tensor) -> int:
    """Return the address of the storage of ``tensor``; 0 if it has none."""
    return tensor.untyped_storage().data_ptr() if problem_of(tensor) is None else 0


def hidden_state(original: torch.nn.Module, copied: torch.nn.Module) -> list[str]:
    """Return what can be reached from ``copied`` and would not follow a swap of its parameters and buffers: other
    tensors, packed weights, and what belongs to ``original``."""
    return list(_Search(original, copied).run())


class _Search:
    """A walk over all that a copy of a module refers to, but for its parameters and buffers."""

    def __init__(self, original: torch.nn.Module, copied: torch.nn.Module) -> None:
        self._copied = copied
        self._own = {id(one) for one in (*copied.parameters(), *copied.buffers(), *copied.modules())}
        originals = (*original.named_parameters(), *original.named_buffers(), *original.named_modules())
        self._originals = {id(one): name for name, one in originals}
        self._seen: dict[int, Any] = {}  # with the objects, so that no id is used again

    def run(self) -> Iterator[str]:
        copied = self._copied
        for name, one in (*copied.named_modules(), *copied.named_parameters(), *copied.named_buffers()):
            if id(one) in self._originals:
                yield f"{_named(name)} is not copied by copy.deepcopy(): all copies would share its weights"
        for name, module in copied.named_modules():
            for key, value in vars(module).items():
                if key not in _OF_EVERY_MODULE:
                    yield from self._walk(value, f"{name}.{key}" if name else key)

    def _walk(self, value: Any, path: str) -> Iterator[str]:
        left = [(value, path)]
        while left:
            value, path = left.pop()
            pause_point()
            if isinstance(value, _PLAIN) or id(value) in self._own or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            problem = self._problem(value)
            if problem is not None:
                yield f"{path} {problem}"
            else:
                left.extend(_parts(value, path))

    def _problem(self, value: Any) -> str | None:
        if id(value) in self._originals:
            name = self._originals[id(value)] or "the module itself"
            return f"holds {name} and not its copy (a hook, a patched forward, a closure or a default): remove it"
        if isinstance(value, torch.Tensor):
            return "is a tensor that is neither a parameter nor a buffer: make it one with register_buffer()"
        if isinstance(value, torch.ScriptObject):
            return "has packed weights: use a module that is not quantized"
        return None


def _parts(value: Any, path: str) -> Iterator[tuple[Any, str]]:
    """Yield what ``value`` refers to, and where."""
    if isinstance(value, Mapping):
        yield from ((one, f"{path}[{key!r}]") for key, one in list(value.items()))
    elif isinstance(value, (list, tuple, set, frozenset)) or type(value).__name__ == "deque":
        yield from ((one, f"{path}[{number}]") for number, one in enumerate(value))
    elif isinstance(value, types.FunctionType):
        names = value.__code__.co_freevars
        yield from ((one, f"{path} (closure: {name})") for name, one in zip(names, _cells(value), strict=True))
        yield from _attributes((("default", value.__defaults__), ("default", value.__kwdefaults__)), path)
        yield from _attributes(vars(value).items(), path)
    elif isinstance(value, types.MethodType):
        yield from _attributes((("__func__", value.__func__), ("__self__", value.__self__)), path)
    elif isinstance(value, partial):
        yield from _attributes((("func", value.func), ("args", value.args), ("keywords", value.keywords)), path)
    elif isinstance(value, weakref.ref):
        yield value(), f"{path} (weak)"
    elif not isinstance(value, types.ModuleType):
        yield from _attributes(getattr(value, "__dict__", {}).items(), path)
        slots = (slot for kind in type(value).__mro__ for slot in _slots(kind))
        yield from _attributes(((slot, getattr(value, slot, None)) for slot in slots), path)


def _slots(kind: type) -> Iterable[str]:
    slots = vars(kind).get("__slots__", ())
    return [slots] if isinstance(slots, str) else list(slots)


def _cells(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not yet assigned
            yield None


def _attributes(found: Iterable[tuple[str, Any]], path: str) -> Iterator[tuple[Any, str]]:
    return ((value, f"{path}.{key}") for key, value in list(found))

"""A decoder of pickles that returns plain containers and records, and neither imports nor calls anything.

It supports the opcodes that protocols 2 to 5 use for values, which ``torch.save`` and stock DCP write, and strings of
Python 2. It raises an error for text opcodes of protocol 0, extension codes, out-of-band buffers, DUP and POP_MARK.

No decoded object is hashed, compared or printed recursively. A dict becomes a list of pairs (``Pairs``) and a set a
call of ``builtins.set`` with a list, so deeply nested keys take no extra time. Parts may be shared, as in any pickle,
so a caller that expands the result has to limit its size.
"""

from __future__ import annotations

import struct
from collections.abc import Container, Iterator, Sequence

from ..._runtime.pauses import pause_point
from ...errors import CorruptCheckpointError
from .machine import Global, Limits, Machine, Pairs, Persistent, PickledCall
from .opcodes import HANDLERS

__all__ = ["Global", "Limits", "Pairs", "Persistent", "PickledCall", "decode", "decode_next", "persistent_in"]

_DEFAULT_LIMITS = Limits()
_STOP = ord(".")
_STEP = 256  # opcodes, each of which takes a fraction of a microsecond


def decode(data: bytes | bytearray, allowed: Container[str], limits: Limits = _DEFAULT_LIMITS) -> object:
    """Decode ``data`` to None, bool, int, float, str, bytes, bytearray, list, tuple and the records of ``machine``.

    Unless ``limits.depth`` is None, no container in the result contains itself, and containers are nested at most that
    deep, so that a reader may recurse. Parts may be shared. Python 2 module names are converted to those of Python 3.

    Raises ``UnsafeObjectError`` with the name for a global that is not in ``allowed``, and ``CorruptCheckpointError``
    for everything else: a truncated or malformed pickle, one beyond the limits, an opcode of another protocol, trailing
    bytes.
    """
    result, end = decode_next(data, 0, allowed, limits)
    if end != len(data):
        raise CorruptCheckpointError(f"malformed pickle near byte {end}: other bytes follow its end", offset=end)
    return result


def decode_next(
    data: bytes | bytearray, start: int, allowed: Container[str], limits: Limits = _DEFAULT_LIMITS
) -> tuple[object, int]:
    """Decode the pickle that begins at byte ``start``, as ``decode`` does. Other data may follow. Returns the result
    and the end of the pickle."""
    if len(data) > limits.total_bytes:
        raise CorruptCheckpointError(f"pickle of {len(data)} bytes, more than the {limits.total_bytes} allowed")
    machine = Machine(data, allowed, limits)
    machine.position = start
    try:
        result = _run(machine, limits.opcodes)
    except (IndexError, KeyError, UnicodeDecodeError, struct.error) as error:
        raise CorruptCheckpointError(
            f"malformed pickle near byte {machine.position}: {type(error).__name__}", offset=machine.position
        ) from None
    if limits.depth is not None:
        _check_nesting(result, limits.depth)
    return result, machine.position


def _run(machine: Machine, opcodes: int) -> object:
    data = machine.data
    handlers = HANDLERS
    for done in range(0, opcodes, _STEP):
        pause_point()
        for _ in range(min(_STEP, opcodes - done)):
            opcode = data[machine.position]
            machine.position += 1
            if opcode == _STOP:
                if machine.marks or len(machine.stack) != 1:
                    raise machine.malformed("the stack has other values at its end")
                return machine.stack[0]
            handlers[opcode](machine)
    raise machine.malformed(f"more than {opcodes} opcodes")


# --- the check for recursive readers -------------------------------------------------------------------------------

_NESTING = (list, tuple, Pairs, PickledCall, Persistent)
_NESTING_TYPES = frozenset(_NESTING)


def _check_nesting(root: object, limit: int) -> None:
    """Raise ``CorruptCheckpointError`` if a container contains itself or is nested deeper than ``limit``. Every part is
    visited once at most, and nothing below the limit."""
    if type(root) not in _NESTING_TYPES:
        return
    heights: dict[int, int] = {}  # by id; 0 while the parts are being visited
    too_deep = CorruptCheckpointError(f"malformed pickle: nested more than {limit} deep")
    outer = 0  # the parts whose height is 0
    todo = [root]
    while todo:
        pause_point()
        part = todo[-1]
        key = id(part)
        height = heights.get(key)
        if height:
            todo.pop()
            continue
        nested = [inner for inner in _parts(part) if type(inner) in _NESTING_TYPES]
        if height is None and nested:
            heights[key] = 0
            outer += 1
            if outer >= limit:
                raise too_deep
            fresh = [inner for inner in nested if not heights.get(id(inner))]
            if any(id(inner) in heights for inner in fresh):
                raise CorruptCheckpointError("malformed pickle: a container contains itself")
            todo.extend(fresh)
            continue
        height = 1 + max((heights[id(inner)] for inner in nested), default=0)
        if height > limit:
            raise too_deep
        outer -= key in heights
        heights[key] = height
        todo.pop()


def persistent_in(root: object) -> Iterator[Persistent]:
    """Yield each reference in a result of ``decode`` once."""
    seen: set[int] = set()
    todo = [root]
    while todo:
        part = todo.pop()
        if type(part) not in _NESTING_TYPES or id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, Persistent):
            yield part
        else:
            todo.extend(_parts(part))


def _parts(part: object) -> Sequence[object]:
    if isinstance(part, list | tuple):
        return part
    if isinstance(part, Pairs):
        return part.flat
    if isinstance(part, PickledCall):
        return (*part.args, part.state, part.items, part.elements)
    assert isinstance(part, Persistent)
    return (part.id,)

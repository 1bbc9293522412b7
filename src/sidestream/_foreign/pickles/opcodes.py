"""The handlers of the opcodes for reading a pickle as data. ``unpickle`` has the guarantees."""

from __future__ import annotations

import struct
from codecs import getincrementaldecoder
from collections.abc import Callable

from ...errors import UnsafeObjectError
from .machine import Global, Machine, Pairs, Persistent, PickledCall

_Handler = Callable[[Machine], None]
_U32 = struct.Struct("<I")
_SLICE = 1 << 20  # bytes that are decoded at a time, because the GIL is held meanwhile


def _refuse(machine: Machine) -> None:
    raise machine.malformed(f"the opcode {machine.data[machine.position - 1]:#04x} is not supported")


HANDLERS: list[_Handler] = [_refuse] * 256


def _opcode(*codes: int) -> Callable[[_Handler], _Handler]:
    def register(handler: _Handler) -> _Handler:
        for code in codes:
            HANDLERS[code] = handler
        return handler

    return register


# --- framing and scalars -------------------------------------------------------------------------------------------


@_opcode(0x80)  # PROTO
def _protocol(machine: Machine) -> None:
    if not 2 <= machine.number(1) <= 5:
        raise machine.malformed("not of protocol 2 to 5")


@_opcode(0x95)  # FRAME
def _frame(machine: Machine) -> None:
    machine.take(8)


def _constant(value: object) -> _Handler:
    def push(machine: Machine) -> None:
        machine.stack.append(value)

    return push


_opcode(ord("N"))(_constant(None))
_opcode(0x88)(_constant(True))
_opcode(0x89)(_constant(False))
_opcode(ord(")"))(_constant(()))


@_opcode(ord("0"))  # POP: the writer of sidestream memoizes names at the beginning and pops them
def _drop(machine: Machine) -> None:
    machine.stack.pop()


@_opcode(ord("K"))  # BININT1
def _int1(machine: Machine) -> None:
    machine.stack.append(machine.data[machine.position])
    machine.position += 1


@_opcode(ord("M"))  # BININT2
def _int2(machine: Machine) -> None:
    machine.stack.append(machine.number(2))


@_opcode(ord("J"))  # BININT
def _int4(machine: Machine) -> None:
    machine.stack.append(int.from_bytes(machine.take(4), "little", signed=True))


@_opcode(0x8A, 0x8B)  # LONG1, LONG4
def _long(machine: Machine) -> None:
    count = machine.number(1 if machine.data[machine.position - 1] == 0x8A else 4)
    if count > machine.limits.integer_bytes:
        raise machine.malformed(f"an integer of {count} bytes")
    machine.stack.append(int.from_bytes(machine.take(count), "little", signed=True))


@_opcode(ord("G"))  # BINFLOAT
def _float(machine: Machine) -> None:
    machine.stack.append(struct.unpack(">d", machine.take(8))[0])


def _sized(length_bytes: int, make: Callable[[bytes | bytearray], object]) -> _Handler:
    def push(machine: Machine) -> None:
        machine.stack.append(make(machine.take(machine.number(length_bytes))))

    return push


def _text(encoded: bytes | bytearray) -> str:
    if len(encoded) <= _SLICE:
        return encoded.decode("utf-8", "surrogatepass")
    decoder = getincrementaldecoder("utf-8")("surrogatepass")
    slices = [decoder.decode(encoded[at : at + _SLICE]) for at in range(0, len(encoded), _SLICE)]
    return "".join([*slices, decoder.decode(b"", final=True)])


@_opcode(0x8C)  # SHORT_BINUNICODE
def _short_text(machine: Machine) -> None:
    start = machine.position + 1
    end = start + machine.data[start - 1]
    if end > len(machine.data):
        raise machine.malformed("truncated")
    machine.stack.append(machine.data[start:end].decode("utf-8", "surrogatepass"))
    machine.position = end


_opcode(ord("X"))(_sized(4, _text))  # BINUNICODE
_opcode(ord("U"))(_sized(1, _text))  # SHORT_BINSTRING, a string of Python 2
_opcode(ord("T"))(_sized(4, _text))  # BINSTRING, likewise
_opcode(0x8D)(_sized(8, _text))  # BINUNICODE8
_opcode(ord("C"))(_sized(1, bytes))  # SHORT_BINBYTES
_opcode(ord("B"))(_sized(4, bytes))  # BINBYTES
_opcode(0x8E)(_sized(8, bytes))  # BINBYTES8
_opcode(0x96)(_sized(8, bytearray))  # BYTEARRAY8


# --- the memo ------------------------------------------------------------------------------------------------------


@_opcode(0x94)  # MEMOIZE
def _memoize(machine: Machine) -> None:
    machine.memo.append(machine.stack[-1])


@_opcode(ord("q"), ord("r"))  # BINPUT, LONG_BINPUT
def _put(machine: Machine) -> None:
    long = machine.data[machine.position - 1] == ord("r")
    machine.memoize(machine.number(4 if long else 1))


@_opcode(ord("h"))  # BINGET
def _get1(machine: Machine) -> None:
    machine.stack.append(machine.memo[machine.data[machine.position]])
    machine.position += 1


@_opcode(ord("j"))  # LONG_BINGET
def _get4(machine: Machine) -> None:
    (index,) = _U32.unpack_from(machine.data, machine.position)
    machine.stack.append(machine.memo[index])
    machine.position += 4


# --- containers ----------------------------------------------------------------------------------------------------


@_opcode(ord("("))  # MARK
def _mark(machine: Machine) -> None:
    machine.marks.append(machine.stack)
    machine.stack = []


@_opcode(0x85, 0x86, 0x87)  # TUPLE1, TUPLE2, TUPLE3
def _short_tuple(machine: Machine) -> None:
    count = machine.data[machine.position - 1] - 0x84
    items = tuple(machine.stack[-count:])
    if len(items) < count:
        raise machine.malformed("a tuple of more values than are on the stack")
    machine.stack[-count:] = [items]


@_opcode(ord("t"))  # TUPLE
def _tuple(machine: Machine) -> None:
    items = machine.pop_mark()
    machine.stack.append(tuple(items))


@_opcode(ord("]"))  # EMPTY_LIST
def _empty_list(machine: Machine) -> None:
    machine.stack.append([])


@_opcode(ord("a"))  # APPEND
def _append(machine: Machine) -> None:
    _extend(machine, [machine.stack.pop()])


@_opcode(ord("e"))  # APPENDS
def _appends(machine: Machine) -> None:
    _extend(machine, machine.pop_mark())


def _extend(machine: Machine, items: list[object]) -> None:
    target = machine.stack[-1]
    if type(target) is PickledCall:
        if target.elements is None:
            target.elements = []
        target = target.elements
    if type(target) is not list:
        raise machine.malformed("APPEND to an object that is not a list")
    target.extend(items)


@_opcode(ord("}"))  # EMPTY_DICT
def _empty_dict(machine: Machine) -> None:
    machine.stack.append(Pairs())


@_opcode(ord("s"))  # SETITEM
def _set_item(machine: Machine) -> None:
    value = machine.stack.pop()
    _update(machine, [machine.stack.pop(), value])


@_opcode(ord("u"))  # SETITEMS
def _set_items(machine: Machine) -> None:
    _update(machine, machine.pop_mark())


def _update(machine: Machine, flat: list[object]) -> None:
    target = machine.stack[-1]
    if type(target) is PickledCall:
        if target.items is None:
            target.items = Pairs()
        target = target.items
    if type(target) is not Pairs or len(flat) % 2:
        raise machine.malformed("SETITEM on an object that is not a dict")
    if target.flat:
        target.flat += flat
    else:
        target.flat = flat


@_opcode(0x8F)  # EMPTY_SET
def _empty_set(machine: Machine) -> None:
    machine.stack.append(PickledCall("builtins.set", ([],)))


@_opcode(0x90)  # ADDITEMS
def _add_items(machine: Machine) -> None:
    items = machine.pop_mark()
    match machine.stack[-1]:
        case PickledCall("builtins.set", (list(elements),)):
            elements.extend(items)
        case _:
            raise machine.malformed("ADDITEMS to an object that is not a set")


@_opcode(0x91)  # FROZENSET
def _frozenset(machine: Machine) -> None:
    elements = machine.pop_mark()
    machine.stack.append(PickledCall("builtins.frozenset", (elements,)))


# --- globals and calls ---------------------------------------------------------------------------------------------

_NAME_BYTES = 512
_RENAMED_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}
_RENAMED = {"builtins.xrange": "builtins.range"}


@_opcode(ord("c"))  # GLOBAL
def _global(machine: Machine) -> None:
    lines = []
    for _ in range(2):
        end = machine.data.find(b"\n", machine.position, machine.position + _NAME_BYTES)
        if end < 0:
            raise machine.malformed("a name does not end")
        lines.append(machine.take(end - machine.position).decode("utf-8"))
        machine.position += 1
    _push_global(machine, *lines)


@_opcode(0x93)  # STACK_GLOBAL
def _stack_global(machine: Machine) -> None:
    name = machine.stack.pop()
    module = machine.stack.pop()
    if not isinstance(name, str) or not isinstance(module, str) or len(name) + len(module) > _NAME_BYTES:
        raise machine.malformed("a name is not a string, or too long")
    _push_global(machine, module, name)


def _push_global(machine: Machine, module: str, name: str) -> None:
    full = f"{_RENAMED_MODULES.get(module, module)}.{name}"
    full = _RENAMED.get(full, full)
    if full not in machine.allowed:
        raise UnsafeObjectError(
            f"the pickle asks for {ascii(full)[1:-1]} (byte {machine.position}), which is not among the types read as"
            " data; nothing of it was imported or run"
        )
    machine.stack.append(Global(full))


@_opcode(ord("R"), 0x81)  # REDUCE, NEWOBJ
def _call(machine: Machine) -> None:
    args = machine.stack.pop()
    function = machine.stack[-1]
    if not isinstance(function, Global) or not isinstance(args, tuple):
        raise machine.malformed("a call of an object that is not a global")
    if function.name == "builtins.getattr":
        machine.stack[-1] = _member(machine, args)
    else:
        machine.stack[-1] = PickledCall(function.name, args, new=machine.data[machine.position - 1] == 0x81)


def _member(machine: Machine, args: tuple[object, ...]) -> Global | PickledCall:
    """Return the name of a class inside a class, for which protocol 2 calls ``getattr``. If the full name is not
    allowed, return the call."""
    match args:
        case (Global(outer), str(name)) if f"{outer}.{name}" in machine.allowed:
            return Global(f"{outer}.{name}")
    return PickledCall("builtins.getattr", args)


@_opcode(ord("b"))  # BUILD
def _build(machine: Machine) -> None:
    state = machine.stack.pop()
    target = machine.stack[-1]
    if not isinstance(target, PickledCall) or target.state is not None:
        raise machine.malformed("BUILD on an object that cannot have a state")
    target.state = state


@_opcode(ord("Q"))  # BINPERSID
def _persistent(machine: Machine) -> None:
    machine.stack[-1] = Persistent(machine.stack[-1])

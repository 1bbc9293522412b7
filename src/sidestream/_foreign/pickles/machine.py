"""The records and the stack machine for reading a pickle as data. See ``unpickle``."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, field

from ...errors import CorruptCheckpointError


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a pickle.

    ``depth`` counts nested containers and records, including the innermost one. With None, nesting and cycles are not
    checked, because the check takes as long as the decoder. None is for readers that follow a fixed structure and do
    not recurse.
    """

    total_bytes: int = 1 << 30
    opcodes: int = 1 << 28
    depth: int | None = 100
    integer_bytes: int = 1024


@dataclass(frozen=True, slots=True)
class Global:
    """An allowed name, ``module.qualname``. It represents the object and gives no access to it."""

    name: str


@dataclass(slots=True, eq=False)
class Pairs:
    """A dict as it is in the pickle: ``flat`` has keys and values in turn. Keys are of any kind and may repeat."""

    flat: list[object] = field(default_factory=list)

    def __iter__(self) -> Iterator[tuple[object, object]]:
        flat = iter(self.flat)
        return zip(flat, flat, strict=True)

    def __len__(self) -> int:
        return len(self.flat) // 2


@dataclass(slots=True, eq=False)
class PickledCall:
    """A call that an unpickler would have made (REDUCE, NEWOBJ), with what it would have stored into the result.

    ``state`` is the operand of BUILD. ``items`` are the items of SETITEMS, as for an ``OrderedDict``, and ``elements``
    the elements of APPENDS; both are None without such an opcode. With ``new``, only ``__new__`` would have been called
    (NEWOBJ).
    """

    function: str
    args: tuple[object, ...]
    state: object = None
    items: Pairs | None = None
    elements: list[object] | None = None
    new: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Persistent:
    """A reference to an object outside of the pickle, such as a storage of ``torch.save``."""

    id: object


class Machine:
    """The stack, marks and memo of an unpickler. A short stack or an unknown memo index raises a ``LookupError``."""

    __slots__ = ("allowed", "data", "limits", "marks", "memo", "position", "stack")

    def __init__(self, data: bytes | bytearray, allowed: Container[str], limits: Limits) -> None:
        self.data = data
        self.allowed = allowed
        self.limits = limits
        self.position = 0
        self.stack: list[object] = []
        self.marks: list[list[object]] = []  # the stacks below each open mark
        self.memo: list[object] = []

    def memoize(self, index: int) -> None:
        """Store the top of the stack in the memo. Picklers number their memo from 0 on, the pickler of Python 2 from 1
        on. Other numbers raise an error: they would require a dict, and a file could choose keys that make it slow."""
        if index == 1 and not self.memo:
            self.memo.append(None)
        if index == len(self.memo):
            self.memo.append(self.stack[-1])
        elif index < len(self.memo):
            self.memo[index] = self.stack[-1]
        else:
            raise self.malformed(f"memo index {index}, but the next one is {len(self.memo)}")

    def take(self, count: int) -> bytes | bytearray:
        start = self.position
        end = start + count
        if end > len(self.data):
            raise self.malformed("truncated")
        self.position = end
        return self.data[start:end]

    def number(self, count: int) -> int:
        return int.from_bytes(self.take(count), "little")

    def pop_mark(self) -> list[object]:
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def malformed(self, what: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"malformed pickle near byte {self.position}: {what}", offset=self.position)

"""The stack machine that reads a pickle as data, and the records that stand for objects in it. See ``unpickle``."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, field

from ...errors import CorruptCheckpointError

__all__ = ["Global", "Limits", "Machine", "Pairs", "Persistent", "PickledCall"]


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a pickle may ask for.

    ``depth`` counts the containers and records around the innermost one, itself included. None leaves nesting and
    circles unchecked, which takes as long as decoding does: for readers that follow a fixed shape and never recurse.
    """

    total_bytes: int = 1 << 30
    opcodes: int = 1 << 28
    depth: int | None = 100
    integer_bytes: int = 1024


@dataclass(frozen=True, slots=True)
class Global:
    """A name that was allowed: ``module.qualname``. It stands for the object and gives no access to it."""

    name: str


@dataclass(slots=True, eq=False)
class Pairs:
    """A dict as written: ``flat`` alternates keys and values. Keys are of any kind and may repeat."""

    flat: list[object] = field(default_factory=list)

    def __iter__(self) -> Iterator[tuple[object, object]]:
        flat = iter(self.flat)
        return zip(flat, flat, strict=True)

    def __len__(self) -> int:
        return len(self.flat) // 2


@dataclass(slots=True, eq=False)
class PickledCall:
    """A call that unpickling would have made (REDUCE, NEWOBJ), with what it would have stored into the result.

    ``state`` is the operand of BUILD; ``items`` what SETITEMS would have set, as for an ``OrderedDict``, if anything,
    and ``elements`` what APPENDS would have added. ``new`` says that only ``__new__`` would have run (NEWOBJ).
    """

    function: str
    args: tuple[object, ...]
    state: object = None
    items: Pairs | None = None
    elements: list[object] | None = None
    new: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Persistent:
    """A reference to something outside of the pickle, such as a storage of ``torch.save``."""

    id: object


class Machine:
    """The unpickler's stack, marks and memo. A short stack or an unknown memo index surfaces as a ``LookupError``."""

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
        on. Other numbers are refused, because a dict with keys chosen by the file could be made slow."""
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

from __future__ import annotations

import contextlib
import os
import pickle
import random
import struct
from collections import OrderedDict
from contextlib import suppress
from typing import Any

import pytest
from hangs import processor_budget
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestream._foreign.pickles.unpickle import Global, Limits, Pairs, Persistent, PickledCall, decode
from sidestream._format.records import MAX_INTEGER_BYTES
from sidestream.errors import CorruptCheckpointError, SidestreamError, UnsafeObjectError

ALLOWED = frozenset(f"builtins.{name}" for name in ("set", "frozenset", "complex", "bytes", "bytearray")) | {
    "_codecs.encode",
    "collections.OrderedDict",
}


def rebuilt(part: object) -> Any:
    """What the pickle stood for, for the few types of ``ALLOWED``."""
    if isinstance(part, list | tuple):
        return type(part)(rebuilt(item) for item in part)
    if isinstance(part, Pairs):
        return {rebuilt(key): rebuilt(value) for key, value in part}
    if isinstance(part, PickledCall):
        kinds = {"set": set, "frozenset": frozenset, "complex": complex, "bytes": bytes, "bytearray": bytearray}
        args = [rebuilt(arg) for arg in part.args]
        if part.function == "_codecs.encode":
            return args[0].encode(args[1])
        if part.function == "collections.OrderedDict":
            return OrderedDict(rebuilt(part.items) if part.items else {})
        return kinds[part.function.removeprefix("builtins.")](*args)
    return part


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(1 << 600), 1 << 600)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
)
hashables = st.recursive(
    scalars, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=5
)
values = st.recursive(
    scalars | st.binary().map(bytearray),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(hashables, inner)
        | st.dictionaries(st.text(), inner).map(OrderedDict)
        | st.sets(hashables)
    ),
    max_leaves=20,
)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@settings(max_examples=100)
@given(value=values)
def test_agrees_with_pickle(protocol: int, value: object) -> None:
    data = pickle.dumps(value, protocol)
    result = rebuilt(decode(data, ALLOWED))
    assert result == value
    assert type(result) is type(value)


def test_long_containers_and_shared_parts() -> None:
    shared = {"k": "v" * 300}
    value = [list(range(5000)), {str(i): (i, shared) for i in range(3000)}, "\ud800", b"x" * 300]
    for protocol in (2, 4, 5):
        assert rebuilt(decode(pickle.dumps(value, protocol), ALLOWED)) == value


def test_records() -> None:
    assert decode(b"\x80\x02cbuiltins\nset\n.", ALLOWED) == Global("builtins.set")
    assert decode(b"\x80\x02c__builtin__\nset\n.", ALLOWED) == Global("builtins.set")
    persistent = decode(b"\x80\x02K\x01Q.", ALLOWED)
    assert isinstance(persistent, Persistent)
    assert persistent.id == 1
    call = decode(b"\x80\x02cbuiltins\nset\n)R}b.", ALLOWED)
    assert isinstance(call, PickledCall)
    assert (call.function, call.args, call.items) == ("builtins.set", (), None)
    assert isinstance(call.state, Pairs)


class Exec:
    def __init__(self, function: object, *args: object) -> None:
        self.reduced = (function, args)

    def __reduce__(self) -> Any:
        return self.reduced


@pytest.mark.parametrize("protocol", [2, 4])
def test_code_is_refused_by_name_and_not_run(protocol: int, tmp_path: Any) -> None:
    marker = tmp_path / "ran"
    for function, args, name in (
        (os.system, (f"touch {marker}",), f"{os.system.__module__}.system"),
        (eval, (f"open({str(marker)!r}, 'w')",), "builtins.eval"),
        (exec, (f"open({str(marker)!r}, 'w')",), "builtins.exec"),
        (open, (str(marker), "w"), "io.open"),
        (getattr, (os, "system"), "builtins.getattr"),
    ):
        try:
            data = pickle.dumps({"a": [Exec(function, *args)]}, protocol)
        except TypeError:  # a module as an argument cannot be pickled; the name comes first all the same
            data = b"\x80\x02cbuiltins\ngetattr\ncos\nsystem\n\x85R."
        with pytest.raises(UnsafeObjectError) as refused:
            decode(data, ALLOWED)
        assert name in str(refused.value)
    assert not marker.exists()


def test_dotted_name_does_not_reach_through_an_allowed_module() -> None:
    data = b"\x80\x04\x8c\x08builtins\x8c\x0aset.__init\x93."
    with pytest.raises(UnsafeObjectError, match=r"builtins\.set\.__init"):
        decode(data, ALLOWED)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b".",
        b"\x80\x02",
        b"\x80\x02.",
        b"\x80\x01N.",
        b"\x80\x06N.",
        b"NN.",
        b"(N.",
        b"(.",
        b"N.N",
        b"N. ",
        b"t.",
        b"\x85.",
        b"N\x87.",
        b"(\x85.",
        b"Na.",
        b")Na.",
        b"}Ns.",
        b"](NNu.",
        b"}(NNNu.",
        b"}Nb.",
        b"N)R.",
        b"cbuiltins\nset\n]R.",
        b"cbuiltins\nset\n}b.",
        b"cbuiltins\nset\n)R}b}b.",
        b"cbuiltins\nset",
        b"cbuiltins\n" + b"x" * 600 + b"\n.",
        b"c\xff\nset\n.",
        b"K\x01K\x02\x93.",
        b"h\x00.",
        b"j\x00\x00\x00\x00.",
        b"q\x00.",
        b"\x94.",
        b"\x8c\x05ab.",
        b"X\xff\xff\xff\xffab.",
        b"\x8d" + b"\xff" * 8 + b"ab.",
        b"\x8e" + b"\xff" * 8 + b"ab.",
        b"\x96" + b"\xff" * 8 + b"ab.",
        b"B\xff\xff\xff\xff.",
        b"\x8b\xff\xff\xff\xff.",
        b"\x8b\xff\xff\xff\x7f.",
        b"\x8c\x01\xff.",
        b"G\x00.",
        b"(N\x90.",
        b"](N\x90.",
        b"S'a'\n.",
        b"I1\n.",
        b"g0\n.",
        b"(ios\nsystem\n.",
        b"\x82\x01.",
        b"\x97.",
        b"N0.",
        b"N2.",
    ],
)
def test_malformed(data: bytes) -> None:
    with pytest.raises(CorruptCheckpointError):
        decode(data, ALLOWED)


def test_limits() -> None:
    data = pickle.dumps([1, 2, 3], 2)
    for limits in (Limits(total_bytes=len(data) - 1), Limits(opcodes=5), Limits(depth=0)):
        with pytest.raises(CorruptCheckpointError):
            decode(data, ALLOWED, limits)
    decode(data, ALLOWED, Limits(total_bytes=len(data), opcodes=20, depth=1))
    for bits in (71, 1 << 13):
        with pytest.raises(CorruptCheckpointError):
            decode(pickle.dumps(1 << bits, 2), ALLOWED, Limits(integer_bytes=9) if bits == 71 else Limits())
    assert decode(pickle.dumps((1 << 63) + 1, 2), ALLOWED, Limits(integer_bytes=9)) == (1 << 63) + 1


def test_memo_bombs_cost_nothing() -> None:
    bomb = b")q\x00" + b"h\x00\x86q\x00" * 90  # a tuple of 2**90 leaves; hashing it would never end
    with processor_budget(1):
        assert isinstance(decode(b"\x80\x02" + bomb + b".", ALLOWED), tuple)
        assert isinstance(decode(b"\x80\x02}" + bomb + b"Ns.", ALLOWED), Pairs)
        assert isinstance(decode(b"\x80\x04\x8f(" + bomb + b"\x90.", ALLOWED), PickledCall)
        with pytest.raises(CorruptCheckpointError, match="memo index 4294967295, but the next one is 0"):
            decode(b"\x80\x02Nr\xff\xff\xff\xff.", ALLOWED)


def test_deep_and_circular_values_are_refused() -> None:
    for data in (
        b")" + b"\x85" * 100_000 + b".",
        b"]" * 100_000 + b"a" * 99_999 + b".",
        b")" + b"\x85" * 100 + b".",
        b"]q\x00h\x00a.",
        b"]q\x00h\x00\x85a.",
        b"}q\x00Nh\x00s.",
        b"cbuiltins\nset\n)Rq\x00h\x00b.",
        b")" + b"Q" * 200 + b".",
    ):
        with pytest.raises(CorruptCheckpointError, match=r"deep|itself"):
            decode(data, ALLOWED)
        decode(data, ALLOWED, Limits(depth=None))


@pytest.mark.parametrize("data", [b")" + b"\x85" * 100_000, b"]" * 100_000 + b"a" * 99_999], ids=["tuples", "lists"])
def test_nothing_below_the_limit_of_nesting_is_visited(data: bytes) -> None:
    def steps(limits: Limits) -> int:
        taken = 0
        with suppress(CorruptCheckpointError):
            for _ in decode(data + b".", ALLOWED, limits):
                taken += 1
        return taken

    assert steps(Limits()) <= steps(Limits(depth=None)) + 200


def _sample() -> bytes:
    value = {
        "a": [1, 2.5, None, True, 1 << 70],
        "b": ({1, 2}, frozenset([3]), b"xy", bytearray(b"z"), 1j, OrderedDict(q=1)),
    }
    return pickle.dumps(value, 2)


def test_truncation_at_every_byte() -> None:
    for protocol in (2, 4, 5):
        data = pickle.dumps(rebuilt(decode(_sample(), ALLOWED)), protocol)
        for end in range(len(data)):
            with pytest.raises(CorruptCheckpointError):
                decode(data[:end], ALLOWED)


def test_mutations_end_in_a_value_or_a_typed_error() -> None:
    generator = random.Random(7)
    data = _sample()
    for _ in range(5000):
        mutated = bytearray(data)
        for _ in range(generator.randint(1, 4)):
            mutated[generator.randrange(len(mutated))] = generator.randrange(256)
        with contextlib.suppress(SidestreamError):
            decode(bytes(mutated), ALLOWED)


@settings(max_examples=300)
@given(st.lists(st.sampled_from([b")", b"(", b"t", b"\x85", b"\x86", b"]", b"a", b"e", b"}", b"s", b"u", b"N", b"K\x01",
                                 b"q\x00", b"h\x00", b"\x94", b"cbuiltins\nset\n", b"R", b"b", b"Q", b"\x8f", b"\x90",
                                 b"\x91", struct.pack("<cI", b"X", 2) + b"ab"])))  # fmt: skip
def test_random_opcodes_end_in_a_value_or_a_typed_error(opcodes: list[bytes]) -> None:
    with contextlib.suppress(SidestreamError):
        decode(b"\x80\x04" + b"".join(opcodes) + b".", ALLOWED)


def test_the_longest_integer_that_is_saved_is_read() -> None:
    assert Limits().integer_bytes == MAX_INTEGER_BYTES


@pytest.mark.parametrize("shift", range(5))
def test_a_long_text_is_decoded_as_at_once(shift: int) -> None:
    text = "a" * ((1 << 20) - shift) + "\ud800\U0001d11e" + "\u00e9\u20ac" * (1 << 18) + "\udc00"
    data = pickle.dumps(text, 2)
    assert decode(data, ALLOWED) == text
    for right, wrong in ((b"\xf0\x9d\x84\x9e", b"\xf0\x9d\x84a"), (b"\xed\xb0\x80", b"aa\xed")):
        assert data.count(right) == 1
        with pytest.raises(CorruptCheckpointError, match="UnicodeDecodeError"):
            decode(data.replace(right, wrong), ALLOWED)

from __future__ import annotations

import base64
import contextlib
import io
import math
import os
import pickle
import random
import struct
import sys
import tracemalloc
import warnings
import zipfile
import zlib
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hangs import processor_budget

from sidestream._foreign.dcp_metadata import read_dcp_metadata
from sidestream._foreign.torch_zip.file import TensorPayload, open_tensor_item, open_value_item
from sidestream._format.records import DTYPES, Node, TensorEntry, ValueEntry, row_major_strides
from sidestream.errors import CorruptCheckpointError, SidestreamError, UnsafeObjectError, UnsupportedCheckpointError


class Source(io.BytesIO):
    """An item that says how much of it was read, and refuses reads beyond its size."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.size = len(data)
        self.touched = 0

    def read(self, size: int | None = -1) -> bytes:
        assert size is not None
        assert 0 <= size <= self.size
        self.touched += size
        return super().read(size)


def saved(value: object, protocol: int = 2) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_protocol=protocol)
    return buffer.getvalue()


def tensor_of(data: bytes) -> TensorPayload:
    return open_tensor_item(Source(data), len(data))


def value_of(data: bytes) -> Node:
    return open_value_item(Source(data), len(data))


def zipped(records: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, content in records.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def crafted(pickled: bytes, **payloads: bytes) -> bytes:
    return zipped({"archive/data.pkl": pickled} | {f"archive/data/{key[1:]}": data for key, data in payloads.items()})


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


def rebuilt(data: bytes, payload: TensorPayload) -> torch.Tensor:
    stored = payload.foreign
    content = data[payload.payload_offset : payload.payload_offset + stored.payload_bytes]
    assert zlib.crc32(content) == stored.crc
    storage = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    dtype = getattr(torch, payload.dtype)
    flat = torch.empty(0, dtype=dtype).set_(storage.untyped_storage())
    return flat.as_strided(payload.shape, stored.strides or row_major_strides(payload.shape), stored.first_element)


@pytest.mark.parametrize("opened", [tensor_of, value_of])
def test_the_format_before_zips_is_refused_by_name(opened: Any) -> None:
    buffer = io.BytesIO()
    torch.save(torch.ones(3), buffer, _use_new_zipfile_serialization=False)
    with pytest.raises(UnsupportedCheckpointError, match="before zips"):
        opened(buffer.getvalue())


# --- tensors -------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype: str) -> None:
    tensor = torch.arange(64, dtype=torch.uint8).view(getattr(torch, dtype)).reshape(2, -1)
    data = saved(tensor)
    payload = tensor_of(data)
    assert (payload.dtype, payload.shape, payload.foreign.strides) == (dtype, tuple(tensor.shape), None)
    assert raw_bytes(rebuilt(data, payload).view(torch.uint8)) == raw_bytes(tensor.view(torch.uint8))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.ones(0),
        torch.ones(0, 3),
        torch.ones(3, 0).t(),
        torch.arange(6.0).reshape(2, 3).t(),
        torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1),
        torch.arange(10.0)[3:7],
        torch.arange(12.0).reshape(3, 4)[:, 1:3],
        torch.ones(3).expand(4, 3),
        torch.nn.Parameter(torch.arange(4.0)),
        torch.nn.Parameter(torch.ones(2, 3)).t().detach(),
        torch.ones(1000, 1000),
    ],
)
def test_views(tensor: torch.Tensor) -> None:
    data = saved(tensor)
    source = Source(data)
    payload = open_tensor_item(source, len(data))
    assert torch.equal(rebuilt(data, payload), tensor)
    assert source.touched < 4000  # the directory and the pickle, not the payload


def test_lazy_conjugation_is_refused() -> None:
    with pytest.raises(UnsupportedCheckpointError, match="conj"):
        tensor_of(saved(torch.ones(2, dtype=torch.complex64).conj()))


def test_a_checkpoint_of_stock_dcp(tmp_path: Path) -> None:
    state = {
        "w": torch.randn(5, 7),
        "t": torch.randn(5, 7).t(),
        "slice": torch.randn(100)[10:20],
        "p": torch.nn.Parameter(torch.randn(3)),
        "v": (1, "x", {"y": {2.5, None}}),
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(single process|TypedStorage|no_dist).*")
        dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    entries = read_dcp_metadata((tmp_path / ".metadata").read_bytes()).entries
    for fqn, entry in entries.items():
        if isinstance(entry, TensorEntry):
            (chunk,) = entry.chunks
            item = (tmp_path / chunk.file).read_bytes()[chunk.item_offset : chunk.item_offset + chunk.item_bytes]
            expected = state[fqn]
            assert isinstance(expected, torch.Tensor)
            assert torch.equal(rebuilt(item, tensor_of(item)), expected)
        else:
            assert isinstance(entry, ValueEntry)
            content = (tmp_path / entry.file).read_bytes()[entry.item_offset : entry.item_offset + entry.item_bytes]
            node = value_of(content)
            assert isinstance(node, dict)
            assert node["tuple"][:2] == [1, "x"]  # type: ignore[index]


def rebuild_v2(offset: int, shape: tuple[int, ...], strides: tuple[int, ...], numel: int, key: str = "0") -> bytes:
    """The pickle of a float32 tensor that says whatever it is told to."""

    def whole(value: Any) -> bytes:
        if isinstance(value, tuple):
            return b"(" + b"".join(map(whole, value)) + b"t"
        if isinstance(value, str):
            return b"X" + struct.pack("<I", len(value)) + value.encode()
        return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)

    storage = b"(" + whole("storage") + b"ctorch\nFloatStorage\n" + whole(key) + whole("cpu") + whole(numel) + b"tQ"
    hooks = b"ccollections\nOrderedDict\n)R"
    call = b"(" + storage + whole(offset) + whole(shape) + whole(strides) + b"\x89" + hooks + b"t"
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n" + call + b"R."


def test_a_tensor_stays_within_its_storage() -> None:
    payload = bytes(24)
    good = tensor_of(crafted(rebuild_v2(0, (2, 3), (3, 1), 6), _0=payload))
    assert good.foreign.payload_bytes == 24
    for arguments in (
        (1, (2, 3), (3, 1), 6),
        (-1, (2, 3), (3, 1), 6),
        (0, (2, 3), (4, 1), 6),
        (0, (2, 3), (-3, 1), 6),
        (0, (2, -3), (3, 1), 6),
        (0, (2, 3), (3,), 6),
        (0, (1 << 62, 3), (1, 1), 6),
        (0, (2, 3), (3, 1), 5),
        (0, (2, 3), (3, 1), 7),
        (0, (2, 3), (3, 1), -6),
        (0, (1 << 30,), (1,), 1 << 30),
        (0, (1,) * 65, (1,) * 65, 6),
        (0, (2, 3), (3, 1), 6, "1"),
        (0, (2, 3), (3, 1), 6, "../data.pkl"),
    ):
        item = crafted(rebuild_v2(*arguments), _0=payload)
        with pytest.raises(CorruptCheckpointError):
            tensor_of(item)
        with pytest.raises(CorruptCheckpointError):
            value_of(item)


@pytest.mark.parametrize(
    "value", [None, 1, [torch.ones(2)], {"a": torch.ones(2)}, torch.Size([1]), b"x", torch.float32]
)
def test_no_tensor(value: object) -> None:
    with pytest.raises((CorruptCheckpointError, UnsafeObjectError)):
        tensor_of(saved(value))


def test_foreign_tensor_types_are_refused_by_name() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    for tensor in (quantized, torch.eye(2).to_sparse(), torch.ones(2, device="meta")):
        with pytest.raises(UnsafeObjectError, match=r"torch\._utils\._rebuild_"):
            value_of(saved(tensor))
    with pytest.raises(UnsafeObjectError, match=r"torch\._utils\._rebuild_"):
        tensor_of(saved(torch.ones(2, device="meta")))
    for tensor, kind in ((quantized, "a quantized tensor"), (torch.eye(2).to_sparse(), "a sparse tensor")):
        with pytest.raises(UnsupportedCheckpointError, match=kind):
            tensor_of(saved(tensor))


# --- values --------------------------------------------------------------------------------------------------------

VALUES: list[tuple[object, Node]] = [
    (None, None),
    (True, True),
    (False, False),
    (0, 0),
    (-5, -5),
    ((1 << 63) - 1, (1 << 63) - 1),
    (1 << 63, {"int": "0x8000000000000000"}),
    (-(1 << 63), {"int": "-0x8000000000000000"}),
    (1 << 900, {"int": hex(1 << 900)}),
    (1.5, 1.5),
    (math.inf, {"float": "inf"}),
    (-math.inf, {"float": "-inf"}),
    (math.nan, {"float": "nan"}),
    ("", ""),
    ("a\u20ac\n\ud800", "a\u20ac\n\ud800"),
    ([1, [2]], {"list": [1, {"list": [2]}]}),
    ((), {"tuple": []}),
    ((1, (2, 3, 4, 5)), {"tuple": [1, {"tuple": [2, 3, 4, 5]}]}),
    ({"a": 1, 2: None, (1, "x"): {}}, {"dict": [["a", 1], [2, None], [{"tuple": [1, "x"]}, {"dict": []}]]}),
    (OrderedDict(b=1, a=2), {"ordered_dict": [["b", 1], ["a", 2]]}),
    (OrderedDict(), {"ordered_dict": []}),
    ({7}, {"set": [7]}),
    (set(), {"set": []}),
    (frozenset([(1,)]), {"frozenset": [{"tuple": [1]}]}),
    (b"\x00\xff", {"bytes": b64(b"\x00\xff")}),
    (b"", {"bytes": ""}),
    (bytearray(b"\x80z"), {"bytearray": b64(b"\x80z")}),
    (bytearray(), {"bytearray": ""}),
    (1 - 2j, {"complex": [1.0, -2.0]}),
    (complex(math.nan, math.inf), {"complex": [{"float": "nan"}, {"float": "inf"}]}),
    (torch.Size([2, 3]), {"size": [2, 3]}),
    (torch.Size([]), {"size": []}),
    (torch.bfloat16, {"dtype": "bfloat16"}),
    (torch.float, {"dtype": "float32"}),
    (torch.device("cuda:1"), {"device": "cuda:1"}),
    (torch.device("cpu"), {"device": "cpu"}),
    (np.float64(1.5), {"numpy": {"dtype": "<f8", "data": b64(struct.pack("<d", 1.5))}}),
    (np.bool_(True), {"numpy": {"dtype": "|b1", "data": b64(b"\x01")}}),
    (np.arange(3, dtype="u4"), {"ndarray": {"dtype": "<u4", "shape": [3], "data": b64(struct.pack("<3I", 0, 1, 2))}}),
    (np.arange(2, dtype=">i2"), {"ndarray": {"dtype": ">i2", "shape": [2], "data": b64(b"\0\0\0\1")}}),
    (np.array(3, dtype="i1"), {"ndarray": {"dtype": "|i1", "shape": [], "data": b64(b"\3")}}),
    (np.zeros((0, 2), "c8"), {"ndarray": {"dtype": "<c8", "shape": [0, 2], "data": ""}}),
    (
        np.asfortranarray(np.arange(6, dtype="u1").reshape(2, 3)),
        {"ndarray": {"dtype": "|u1", "shape": [2, 3], "data": b64(bytes(range(6)))}},
    ),
    (
        torch.arange(6, dtype=torch.uint8).reshape(2, 3).t(),
        {"tensor": {"dtype": "uint8", "shape": [3, 2], "data": b64(bytes([0, 3, 1, 4, 2, 5]))}},
    ),
    (
        [torch.arange(9, dtype=torch.uint8)[3:6], torch.nn.Parameter(torch.tensor(1.0))],
        {
            "list": [
                {"tensor": {"dtype": "uint8", "shape": [3], "data": b64(bytes([3, 4, 5]))}},
                {"tensor": {"dtype": "float32", "shape": [], "data": b64(struct.pack("<f", 1))}},
            ]
        },
    ),
    (torch.ones(0, 2), {"tensor": {"dtype": "float32", "shape": [0, 2], "data": ""}}),
    (
        torch.tensor(2, dtype=torch.uint8).expand(2, 2),
        {"tensor": {"dtype": "uint8", "shape": [2, 2], "data": b64(b"\2" * 4)}},
    ),
    (torch.tensor([1], dtype=torch.uint16), {"tensor": {"dtype": "uint16", "shape": [1], "data": b64(b"\1\0")}}),
]


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize(("value", "node"), VALUES, ids=lambda part: type(part).__name__)
def test_values(value: object, node: Node, protocol: int) -> None:
    assert value_of(saved(value, protocol)) == node


def test_random_states_and_module_state() -> None:
    for protocol in (2, 4):
        state = value_of(saved((random.getstate(), np.random.get_state(), torch.get_rng_state()), protocol))
        assert isinstance(state, dict)
    node = value_of(saved((torch.nn.Linear(2, 2).state_dict(),)))
    assert isinstance(node, dict)
    (inner,) = node["tuple"]  # type: ignore[union-attr, misc]
    assert [key for key, _ in inner["ordered_dict"]] == ["weight", "bias"]  # type: ignore[index, call-overload, union-attr]


class Plain:
    pass


class Exec:
    def __init__(self, function: object, *args: object) -> None:
        self.reduced = (function, args)

    def __reduce__(self) -> Any:
        return self.reduced


def test_what_is_not_data_is_refused_by_name() -> None:
    attributed = OrderedDict(a=1)
    attributed.note = 1  # type: ignore[attr-defined]
    for value, name in (
        (Plain(), "Plain"),
        (Path("x"), "pathlib"),
        (Counter("ab"), "Counter"),
        (range(3), "range"),
        (np.array(["a"]), "U1"),
        (np.array([None]), "O8"),
        (np.datetime64("2020-01-01"), "M8"),
        (np.dtype("f4"), "numpy.dtype"),
        (np.zeros(2, dtype=[("a", "f4")]), "V4"),
        (torch.nn.Linear(1, 1), "Linear"),
        (torch.float32.to_complex, "getattr"),
        (attributed, "OrderedDict"),
    ):
        with pytest.raises(UnsafeObjectError, match=name):
            value_of(saved(value))


def test_code_is_refused_by_name_and_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    for function, argument, name in (
        (os.system, f"touch {marker}", "system"),
        (eval, f"open({str(marker)!r}, 'w')", r"builtins\.eval"),
        (exec, f"open({str(marker)!r}, 'w')", r"builtins\.exec"),
    ):
        for opened in (tensor_of, value_of):
            with pytest.raises(UnsafeObjectError, match=name):
                opened(saved({"x": Exec(function, argument)}))
    assert not marker.exists()


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\x02c_codecs\nencode\nX\x02\x00\x00\x00abX\x05\x00\x00\x00utf-8\x86R.",
        b"\x80\x02c_codecs\nencode\nX\x03\x00\x00\x00\xe2\x82\xacX\x06\x00\x00\x00latin1\x86R.",
        b"\x80\x02c__builtin__\nset\nK\x01\x85R.",
        b"\x80\x02c__builtin__\nset\n]]a\x85R.",
        b"\x80\x02c__builtin__\nbytes\nK\xff\x85R.",
        b"\x80\x02c__builtin__\nbytearray\nK\xff\x85R.",
        b"\x80\x02c__builtin__\ncomplex\nX\x01\x00\x00\x001\x85R.",
        b"\x80\x02ctorch\nSize\n]\x85R.",
        b"\x80\x02ctorch\ndevice\nX\x03\x00\x00\x00c u\x85R.",
        b"\x80\x02ctorch\ndevice\nX\x03\x00\x00\x00cpuJ\xff\xff\xff\xff\x86R.",
        b"\x80\x02ctorch\nSize\n)R}b.",
        b"\x80\x02}]Ns.",
        b"\x80\x02K\x01Q.",
        b"\x80\x02cnumpy.core.multiarray\nscalar\n)R.",
        b"\x80\x02cnumpy.core.multiarray\nscalar\nNN\x86R.",
    ],
)
def test_calls_that_make_no_sense(pickled: bytes) -> None:
    with pytest.raises(CorruptCheckpointError):
        value_of(crafted(pickled))


def test_bombs_end_soon_and_small() -> None:
    doubling = b"h\x00\x86q\x00" * 60
    shared_text = b"X" + struct.pack("<I", 1 << 16) + b"x" * (1 << 16) + b"q\x00"
    big = b"\x8a\xff" + b"\x7f" * 255 + b"q\x00"
    dim = b"\x8b\x00\x04\x00\x00" + b"\x7f" * 1024
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R"
    order = b"(K\x03X\x01\x00\x00\x00<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00t"
    kind = b"cnumpy\ndtype\nX\x02\x00\x00\x00f4\x89\x88\x87R" + order + b"b"
    bombs = [
        crafted(b"\x80\x02)q\x00" + doubling + b"."),
        crafted(b"\x80\x02})q\x00" + doubling + b"Ns."),
        crafted(b"\x80\x02](" + shared_text + b"h\x00" * 20_000 + b"e."),
        crafted(b"\x80\x02](" + big + b"h\x00" * 50_000 + b"e."),
        crafted(b"\x80\x02](" + array + b"(K\x01(" + dim + b"q\x00" + b"h\x00" * 63 + b"t" + kind + b"\x89C\x00tbe."),
        crafted(b"\x80\x02" + b"]" * 20_000 + b"a" * 19_999 + b"."),
        crafted(b"\x80\x02]q\x00h\x00a."),
        crafted(rebuild_v2(0, (1 << 40,), (0,), 1), _0=bytes(4)),
        crafted(rebuild_v2(0, (1 << 20, 1 << 20), (0, 0), 1), _0=bytes(4)),
    ]
    for bomb in bombs:
        with processor_budget(3), pytest.raises(CorruptCheckpointError):
            value_of(bomb)
        assert peak_of(value_of, bomb) < 200 << 20


def peak_of(opened: Any, item: bytes) -> int:
    """The bytes of memory that opening took at its peak, whatever came of it."""
    tracemalloc.start()
    try:
        opened(item)
    except SidestreamError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


# --- the zip -------------------------------------------------------------------------------------------------------


def test_zips_that_torch_does_not_write() -> None:
    pickled = pickle.dumps(1, 2)
    for item in (
        b"",
        b"PK",
        b"x" * 1000,
        pickled,
        zipped({"archive/data.pkl": pickled}, zipfile.ZIP_DEFLATED),
        zipped({"data.pkl": pickled}),
        zipped({"a/data.pkl": pickled, "b/data.pkl": pickled}),
        zipped({"a/other": pickled}),
        zipped({"a/data.pkl": pickled, "a/byteorder": b"middle"}),
        zipped({}),
    ):
        with pytest.raises(CorruptCheckpointError):
            value_of(item)
    with pytest.raises(UnsupportedCheckpointError, match="endian"):
        value_of(zipped({"a/data.pkl": pickled, "a/byteorder": b"big"}))
    assert value_of(zipped({"a/data.pkl": pickled, "a/byteorder": b"little"})) == 1
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for value in (1, 2):
            archive.writestr("a/data.pkl", pickle.dumps(value, 2))
    with pytest.raises(CorruptCheckpointError, match="two records"):
        value_of(buffer.getvalue())
    encrypted = bytearray(zipped({"a/data.pkl": pickled}))
    encrypted[encrypted.index(b"PK\x01\x02") + 8] |= 1
    with pytest.raises(CorruptCheckpointError, match="encrypted"):
        value_of(bytes(encrypted))


def test_an_altered_pickle_is_found_by_its_checksum() -> None:
    item = bytearray(saved("some text"))
    item[item.index(b"some text")] ^= 1
    with pytest.raises(CorruptCheckpointError, match="CRC"):
        value_of(bytes(item))


def test_claims_of_gigabytes_are_not_believed() -> None:
    item = saved(torch.ones(4))
    directory = item.index(b"PK\x01\x02")
    for field in (20, 24, 42):  # compressed size, size, offset of the header
        position = directory
        while position >= 0:
            claimed = bytearray(item)
            claimed[position + field : position + field + 4] = b"\xfe\xff\xff\xff"
            for opened in (tensor_of, value_of):
                assert peak_of(opened, bytes(claimed)) < 1 << 20
                if field != 42:  # where a record lies matters only when it is opened
                    with pytest.raises(CorruptCheckpointError):
                        opened(bytes(claimed))
            position = item.find(b"PK\x01\x02", position + 4)


def test_a_huge_directory_is_not_read() -> None:
    item = zipped({"a/data.pkl": pickle.dumps(1, 2)} | {f"a/{index:0100}": b"" for index in range(40_000)})
    with pytest.raises(CorruptCheckpointError, match="directory"):
        value_of(item)


def small_items() -> list[tuple[Any, bytes]]:
    value = {"a": [1, b"x", {2}], "n": np.arange(2), "t": torch.ones(2), "s": torch.Size([1]), "o": OrderedDict(a=1j)}
    return [(tensor_of, saved(torch.arange(6.0).reshape(2, 3).t())), (value_of, saved(value))]


def test_truncation_at_every_byte() -> None:
    for opened, item in small_items():
        for end in range(len(item)):
            with pytest.raises(SidestreamError):
                opened(item[:end])
            with pytest.raises(SidestreamError):  # the file ends before the item does
                if opened is tensor_of:
                    open_tensor_item(io.BytesIO(item[:end]), len(item))
                else:
                    open_value_item(io.BytesIO(item[:end]), len(item))


def test_mutations_end_in_a_value_or_a_typed_error() -> None:
    generator = random.Random(5)
    for opened, item in small_items():
        for _ in range(1200):
            mutated = bytearray(item)
            for _ in range(generator.randint(1, 3)):
                mutated[generator.randrange(len(mutated))] = generator.randrange(256)
            with contextlib.suppress(SidestreamError):
                opened(bytes(mutated))


def test_mutated_pickles_end_in_a_value_or_a_typed_error() -> None:
    generator = random.Random(6)
    for opened, item in small_items():
        with zipfile.ZipFile(io.BytesIO(item)) as archive:
            records = {info.filename: archive.read(info) for info in archive.infolist()}
        pickled = records["archive/data.pkl"]
        for _ in range(1000):
            mutated = bytearray(pickled)
            for _ in range(generator.randint(1, 3)):
                mutated[generator.randrange(len(mutated))] = generator.randrange(256)
            with contextlib.suppress(SidestreamError):
                opened(zipped(records | {"archive/data.pkl": bytes(mutated)}))


def test_long_bytes_of_others_are_read_in_slices() -> None:
    content = random.Random(1).randbytes(6 << 20)
    calls: Counter[str] = Counter()

    def count(_: object, event: str, called: Any) -> None:
        if event == "c_call":
            calls[called.__name__] += 1

    raw = saved(content)
    sys.setprofile(count)
    try:
        node = value_of(raw)
    finally:
        sys.setprofile(None)
    assert node == {"bytes": b64(content)}
    assert min(calls["b2a_base64"], calls["encode"], calls["utf_8_decode"]) >= 6

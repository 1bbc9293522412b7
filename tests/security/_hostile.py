"""Hostile checkpoints, made by code: none of them lies in the repository, and no test unpickles one."""

from __future__ import annotations

import base64
import functools
import importlib
import io
import json
import os
import pickle
import runpy
import shutil
import socket
import struct
import subprocess
import types
import webbrowser
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from sidestream._format.marker import Marker, find_marker, marker_attribute
from sidestream._format.records import manifest_name

STATE: dict[str, Any] = {"w": torch.arange(4.0), "v": (1, "two")}
Make = Callable[[Path], None]


class Evil:
    """Pickles as the call that it is made of."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.reduced = (function, args)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


def calls(victim: str) -> dict[str, Any]:
    """What runs code when it is unpickled; each would leave ``victim`` behind, or be seen by the audit hook."""
    return {
        "os.system": Evil(os.system, f"touch {victim}"),
        "eval": Evil(eval, f"open({victim!r}, 'w')"),
        "exec": Evil(exec, f"open({victim!r}, 'w')"),
        "open": Evil(open, victim, "w"),
        "import": Evil(__import__, "this"),
        "import_module": Evil(importlib.import_module, "this"),
        "popen": Evil(subprocess.Popen, ("touch", victim)),
        "partial": Evil(functools.partial, os.system, f"touch {victim}"),
        "partial called": Evil(functools.partial(os.system), f"touch {victim}"),
        "getattr": Evil(getattr, Evil(__import__, "os"), "system"),
        "runpy": Evil(runpy.run_path, victim),
        "pickle in a pickle": Evil(pickle.loads, pickle.dumps(Evil(os.system, f"touch {victim}"))),
        "torch.load": Evil(torch.load, victim),
        "socket": Evil(socket.create_connection, ("127.0.0.1", 9)),
        "rmtree": Evil(shutil.rmtree, os.path.dirname(victim)),
        "browser": Evil(webbrowser.open, "http://127.0.0.1:9"),
        "type": Evil(type, "T", (), {}),
        "namespace": Evil(types.SimpleNamespace),
    }


# --- stock checkpoints -----------------------------------------------------------------------------------------------


def stock(path: Path, state: dict[str, Any] | None = None) -> None:
    dcp.save(state or STATE, checkpoint_id=path, no_dist=True)


def item(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def with_records(raw: bytes, change: Callable[[str, bytes], bytes | None], method: int = zipfile.ZIP_STORED) -> bytes:
    """The zip again, with changed records."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as old, zipfile.ZipFile(buffer, "w", method) as new:
        for info in old.infolist():
            content = change(info.filename, old.read(info))
            if content is not None:
                new.writestr(info.filename, content)
    return buffer.getvalue()


def described(path: Path, tensor: bytes, value: bytes, file: str = "__0_0.distcp", **changes: Any) -> None:
    """A checkpoint of stock DCP around two items; ``changes`` are told of the tensor and not of the file."""
    path.mkdir()
    (path / "__0_0.distcp").write_bytes(tensor + value + bytes(changes.get("more", 0)))
    size = torch.Size(changes.get("size", (4,)))
    chunks = [
        ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)) for at, sizes in changes.get("chunks", [((0,), size)])
    ]
    tensor_bytes = changes.get("length", len(tensor))
    storage = {
        MetadataIndex("w", chunk.offsets, number): _StorageInfo(file, changes.get("offset", 0), tensor_bytes)
        for number, chunk in enumerate(chunks)
    }
    info = _StorageInfo("__0_0.distcp", len(tensor), len(value), transform_descriptors=changes.get("transforms"))
    metadata = Metadata(
        {"w": TensorStorageMetadata(TensorProperties(torch.float32), size, chunks), "v": BytesStorageMetadata()},
        {"w": ("w",), "v": changes.get("value_path", ("v",))},
        {**storage, MetadataIndex("v"): info},
    )
    for number in range(changes.get("more", 0)):
        empty = TensorStorageMetadata(
            TensorProperties(torch.float32), torch.Size([0]), [ChunkStorageMetadata(torch.Size([0]), torch.Size([0]))]
        )
        metadata.state_dict_metadata[f"t.{number}"] = empty
        metadata.planner_data[f"t.{number}"] = ("t", str(number))
        begin = len(tensor) + len(value) + number
        metadata.storage_data[MetadataIndex(f"t.{number}", torch.Size([0]), 0)] = _StorageInfo(file, begin, 1)
    for name, extra in changes.get("attributes", {}).items():
        setattr(metadata, name, extra)
    (path / changes.get("metadata", ".metadata")).write_bytes(pickle.dumps(metadata, protocol=4))


def stock_cases(victim: str) -> Iterator[tuple[str, Make]]:
    weight, value = item(STATE["w"]), item(STATE["v"])
    for name, evil in calls(victim).items():
        yield f"value {name}", lambda path, evil=evil: described(path, weight, item(evil))  # type: ignore[misc]
        yield f"deep value {name}", lambda path, evil=evil: described(path, weight, item({"a": [1, (evil,)]}))  # type: ignore[misc]
        attributes = {"storage_meta": evil, "planner_data": {"w": evil}}
        yield (
            f"metadata {name}",
            lambda path, attributes=attributes: described(path, weight, value, attributes=attributes),  # type: ignore[misc]
        )
        yield (
            f"rank metadata {name}",
            lambda path, a=attributes: described(path, weight, value, attributes=a, metadata="__0.metadata"),  # type: ignore[misc]
        )
        pickled = pickle.dumps(evil, protocol=2)
        tensor = with_records(weight, lambda name, raw, p=pickled: p if name.endswith("data.pkl") else raw)  # type: ignore[misc]
        yield f"tensor {name}", lambda path, tensor=tensor: described(path, tensor, value)  # type: ignore[misc]
    for number, file in enumerate(OUTSIDE):
        yield f"path {number}", lambda path, file=file: described(path, weight, value, file)  # type: ignore[misc]
    claims: dict[str, dict[str, Any]] = {
        "huge": {"size": (1 << 40,)}, "huge length": {"length": 1 << 40}, "negative": {"offset": -8, "length": 8},
        "beyond": {"offset": 1 << 62}, "hole": {"size": (8,)}, "outside": {"chunks": [((2,), (4,))]},
        "overlap": {"chunks": [((0,), (4,)), ((1,), (3,))]}, "rank": {"chunks": [((0, 0), (2, 2))]},
        "long path": {"value_path": ("v",) * 1000}, "hole in a list": {"value_path": ("v", 1 << 60)},
        "transform": {"transforms": ["stream.exec/1"]},
    }  # fmt: skip
    for name, changes in claims.items():
        yield f"claim {name}", lambda path, changes=changes: described(path, weight, value, **changes)  # type: ignore[misc]
    deflated = with_records(item(bytes(64 << 20)), lambda _, raw: raw, zipfile.ZIP_DEFLATED)
    yield "zip bomb", lambda path: described(path, weight, deflated)
    nested = b")" + b"q\x00h\x00\x86" * 40  # small as a pickle, and 2 ** 40 parts for whoever hashes it
    for name, pickled in {
        "hash bomb": b"\x80\x02}" + nested + b"K\x01s.",
        "hash bomb of a set": b"\x80\x02c__builtin__\nset\n]" + nested + b"a\x85R.",
        "memo bomb": b"\x80\x02r\xff\xff\xff\xffN.",
    }.items():
        bomb = with_records(value, lambda name, raw, p=pickled: p if name.endswith("data.pkl") else raw)  # type: ignore[misc]
        yield name, lambda path, bomb=bomb: described(path, weight, bomb)  # type: ignore[misc]
    yield "trailing bytes", lambda path: (described(path, weight, value), append(path / ".metadata", b"."))[0]
    yield "metadata is a bomb", lambda path: (stock(path), sparse(path / ".metadata", 1 << 40))[0]
    yield "zstd bomb", zstd_bomb


# --- keys that share a hash -----------------------------------------------------------------------------------------

_MODULUS = (1 << 61) - 1  # of CPython's hash of numbers
MANY = 1_200  # four hashes at most among them, and 256 keys of one hash are still taken


def colliding() -> dict[str, list[Any]]:
    """Thousands of keys with the same hash, of each kind that a file can hold. They are never put into a dict here."""
    bits = [[number >> bit & 1 for bit in range(15)] for number in range(MANY)]
    return {
        "integers": [number * _MODULUS for number in range(MANY)],
        "negative integers": [-number * _MODULUS for number in range(1, MANY)],
        "tuples": [tuple(-1 - bit for bit in one) for one in bits],
        "tuples of large integers": [(number * _MODULUS, "a") for number in range(MANY)],
        "nested tuples": [((-1 - one[0], (tuple(-1 - bit for bit in one),)),) for one in bits],
        "frozensets": [frozenset(at + bit * _MODULUS for at, bit in enumerate(one)) for one in bits],
        "complex numbers": [complex(-1000003.0 * number, number) for number in range(2, MANY)],
        "sizes": [torch.Size(bit * _MODULUS for bit in one) for one in bits],
        "numpy numbers": [np.complex128(complex(-1000003.0 * number, number)) for number in range(2, MANY)],
    }


def opcodes(value: Any) -> bytes:
    """What pushes a value, without the beginning and the end of its pickle."""
    return pickle.dumps(value, 2)[2:-1]


def colliding_cases(sound: Path) -> Iterator[tuple[str, Make]]:
    weight = item(STATE["w"])
    for name, keys in colliding().items():
        pushed = [opcodes(key) for key in keys]
        for kind, pickled in {
            "dict": b"}(" + b"".join(key + b"N" for key in pushed) + b"u",
            "set": b"c__builtin__\nset\n](" + b"".join(pushed) + b"e\x85R",
            "frozenset in a tuple": b"c__builtin__\nfrozenset\n](" + b"".join(pushed) + b"e\x85R\x85",
            "ordered dict": b"ccollections\nOrderedDict\n)R(" + b"".join(key + b"N" for key in pushed) + b"u",
        }.items():
            bomb = with_records(item(1), lambda file, raw, p=pickled: _pickled(file, raw, p))  # type: ignore[misc]
            yield f"colliding {name} of a {kind}", lambda path, bomb=bomb: described(path, weight, bomb)  # type: ignore[misc]
    integers = [number * _MODULUS for number in range(MANY)]
    nodes: dict[str, Any] = {
        "dict": {"dict": [[{"int": hex(one)}, None] for one in integers]},
        "set": {"set": [{"int": hex(one)} for one in integers]},
        "tuples": {"set": [{"tuple": [-1 - (one >> bit & 1) for bit in range(15)]} for one in range(MANY)]},
    }
    for name, node in nodes.items():
        yield (
            f"colliding node {name}",
            forged(sound, lambda head, lines, node=node: lines["v"][1].__setitem__(3, node)),  # type: ignore[misc]
        )

    def keys_of_paths(head: dict[str, Any], lines: dict[str, list[Any]]) -> None:
        value = lines["v"]
        more = {f"p.{one}": [*value[:2], f"p.{one}", ["p", {"key": one}]] for one in integers}
        for line in more.values():
            line[1] = [value[1][0], 0, 0, None]
        lines.update(more)
        head["entries"] = len(lines)

    yield "colliding keys of paths", forged(sound, keys_of_paths)
    offsets = [tuple(-1 - (one >> bit & 1) for bit in range(15)) for one in range(MANY)]
    yield "colliding offsets", lambda path: scattered(path, offsets)
    yield (
        "colliding large offsets",
        lambda path: scattered(path, [tuple(-at * _MODULUS for at in map(abs, one)) for one in offsets]),
    )


def _pickled(file: str, raw: bytes, pushed: bytes) -> bytes:
    return b"\x80\x02" + pushed + b"." if file.endswith("data.pkl") else raw


def scattered(path: Path, offsets: list[tuple[int, ...]]) -> None:
    """Stock DCP's metadata with a place for each of these offsets of one tensor, which are written by hand: a dict of
    them would never be made."""
    described(path, item(STATE["w"]), item(STATE["v"]))
    raw = (path / ".metadata").read_bytes()
    at = raw.rindex(b"u", 0, raw.index(b"storage_meta") if b"storage_meta" in raw else len(raw))
    module = b"torch.distributed.checkpoint."
    state = b"".join(map(opcodes, ("relative_path", "x", "offset", 0, "length", 0)))
    info = b"c" + module + b"filesystem\n_StorageInfo\n)\x81}(" + state + b"ub"
    index = b"c" + module + b"metadata\nMetadataIndex\n)\x81}(" + b"".join(map(opcodes, ("fqn", "w", "offset")))
    rows = [index + opcodes(one) + b"ub" + info for one in offsets]
    (path / ".metadata").write_bytes(raw[:at] + b"".join(rows) + raw[at:])


def zstd_bomb(path: Path) -> None:
    import zstandard

    packed = zstandard.ZstdCompressor().compress(bytes(512 << 20))
    described(path, item(STATE["w"]), packed, transforms=["stream.zstd/1"])


OUTSIDE = [
    "../sound/own/__0_1.distcp", "/etc/passwd", "a/../../x", "..", ".", "", "sub/x", "..\\x", "C:\\x", "\0", ".hidden",
    "x" * 300, "~root", "\u202e", "file:///etc/passwd",
]  # fmt: skip


def append(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content)


def sparse(path: Path, nbytes: int) -> None:
    os.truncate(path, nbytes)
    with path.open("r+b") as file:
        file.seek(nbytes - 1)
        file.write(b".")


# --- the file system ------------------------------------------------------------------------------------------------


def file_system_cases(root: Path) -> Iterator[tuple[str, Make]]:
    def swapped(file: str, swap: Callable[[Path], object]) -> Make:
        def make(path: Path) -> None:
            stock(path)
            (path / file).unlink()
            swap(path / file)

        return make

    elsewhere = root / "sound" / "stock"
    for file in (".metadata", "__0_0.distcp"):
        yield f"link {file}", swapped(file, lambda path, file=file: path.symlink_to(elsewhere / file))  # type: ignore[misc]
        yield f"fifo {file}", swapped(file, os.mkfifo)
        yield f"directory {file}", swapped(file, Path.mkdir)
        yield f"zero device {file}", swapped(file, lambda path: path.symlink_to("/dev/zero"))
        yield f"gone {file}", swapped(file, lambda path: None)
        yield f"empty {file}", swapped(file, Path.touch)


# --- safetensors ----------------------------------------------------------------------------------------------------


def safetensors(path: Path, header: Any, payload: bytes = bytes(16), announce: int | None = None) -> None:
    path.mkdir()
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    prefix = struct.pack("<Q", len(raw) if announce is None else announce)
    (path / "model.safetensors").write_bytes(prefix + raw + payload)


def tensor_of(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def safetensors_cases() -> Iterator[tuple[str, Make]]:
    headers: dict[str, Any] = {
        "deep": b"[" * 100_000,
        "deep dicts": b'{"a":' * 100_000,
        "no dict": b"[]",
        "no json": b"\xff" * 64,
        "twice": b'{"w":' + json.dumps(tensor_of(0, 16, [4])).encode() + b',"w":{}}',
        "huge shape": {"w": tensor_of(0, 1 << 62, [1 << 60])},
        "negative": {"w": tensor_of(-16, 0, [4])},
        "overlap": {"w": tensor_of(0, 16, [4]), "u": tensor_of(8, 16, [2])},
        "dtype": {"w": tensor_of(0, 16, [4], "__import__('os')")},
        "metadata": {"__metadata__": {"DCP_SHARDING_INFO": "[" * 9999}, "w": tensor_of(0, 16, [4])},
        "floats": {"w": {"dtype": "F32", "shape": [4.0], "data_offsets": [0, 16]}},
        "large number": b'{"w":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,16]}}',
    }
    for name, header in headers.items():
        yield f"safetensors {name}", lambda path, header=header: safetensors(path, header)  # type: ignore[misc]
    yield "safetensors announced", lambda path: safetensors(path, {}, announce=1 << 62)
    for number, file in enumerate(["../sound/own/__0_1.distcp", "/etc/passwd", "no", "", 3]):

        def make(path: Path, file: Any = file) -> None:
            safetensors(path, {"w": tensor_of(0, 16, [4])})
            index = {"metadata": {}, "weight_map": {"w": file}}
            (path / "model.safetensors.index.json").write_text(json.dumps(index))

        yield f"safetensors index {number}", make


# --- ours, with checksums that fit ----------------------------------------------------------------------------------


def forged(sound: Path, edit: Callable[[dict[str, Any], dict[str, list[Any]]], object]) -> Make:
    """Our checkpoint with another manifest, which the marker vouches for."""

    def make(path: Path) -> None:
        shutil.copytree(sound, path)
        raw = (path / ".metadata").read_bytes()
        marker = find_marker(raw[-4096:])
        assert marker is not None
        manifest = path / manifest_name(marker.save_id)
        head, *lines = map(json.loads, manifest.read_text().splitlines())
        by_fqn = {line[2]: line for line in lines}
        edit(head, by_fqn)
        changed = b"".join(json.dumps(line).encode() + b"\n" for line in (head, *by_fqn.values()))
        changed = changed.replace(b'"DEEP"', b'{"list":[' * 9000 + b"1" + b"]}" * 9000)
        manifest.write_bytes(changed)
        other = Marker(marker.save_id, len(changed), crc32(changed), marker.step, marker.generation)
        at = raw.rindex(marker_attribute(marker))
        (path / ".metadata").write_bytes(raw[:at] + marker_attribute(other))

    return make


def own_cases(sound: Path) -> Iterator[tuple[str, Make]]:
    nodes: dict[str, Any] = {
        "object": {"object": {"type": "os.system", "new": False, "args": ["true"]}},
        "type": {"type": "os.system"},
        "member": {"member": ["os", "system"]},
        "deep": "DEEP",
        "tensor": {"tensor": {"dtype": "float32", "shape": [1 << 62], "data": ""}},
        "negative tensor": {"tensor": {"dtype": "float32", "shape": [-1, -1], "data": "AAAAAA=="}},
        "dtype of a tensor": {"tensor": {"dtype": "Tensor", "shape": [0], "data": ""}},
        "objects": {"ndarray": {"dtype": "O", "shape": [1], "data": base64.b64encode(bytes(8)).decode()}},
        "fields": {"ndarray": {"dtype": [["a", "O"]], "shape": [1], "data": base64.b64encode(bytes(8)).decode()}},
        "numpy by name": {"numpy": {"dtype": "os.system", "data": ""}},
        "dtype": {"dtype": "load"},
        "device": {"device": "cuda:999999999999999999999"},
        "float": {"float": "1e999"},
        "large complex": {"complex": [10**400, 0]},
        "large dim": {"tensor": {"dtype": "float32", "shape": [0, 1 << 70], "data": ""}},
        "int": {"int": "0x" + "g"},
        "size": {"size": ["a"]},
        "unhashable": {"dict": [[{"list": []}, 1]]},
        "pairs": {"dict": [[1]]},
        "base64": {"bytes": "\u00e9"},
        "kind": {"eval": "1"},
        "two kinds": {"list": [], "tuple": []},
        "bare list": [1, 2],
    }  # fmt: skip

    def with_node(node: Any) -> Callable[[Any, Any], object]:
        return lambda head, lines: lines["v"][1].__setitem__(3, node)

    for name, node in nodes.items():
        yield f"own node {name}", forged(sound, with_node(node))

    def with_chunk(field: int, value: Any) -> Callable[[Any, Any], object]:
        return lambda head, lines: lines["w"][1][2][0].__setitem__(field, value)

    chunk_fields = {
        "file": [2, [*OUTSIDE, 3]], "item_offset": [3, [-1, 1 << 62, "0", None]], "item_bytes": [4, [-1, 1 << 62, 0]],
        "payload_offset": [5, [-1, 0, 1 << 62, None]], "crcs": [6, ["", "AAAA", "AAAAAAAAAAA=", 7]],
        "sizes": [1, [[1 << 40], [-4], [2, 2], "4", [4.0]]], "offsets": [0, [[1], [-1], [], None]],
    }  # fmt: skip
    for name, (field, values) in chunk_fields.items():
        for number, value in enumerate(values):  # type: ignore[arg-type]
            yield f"own {name} {number}", forged(sound, with_chunk(field, value))  # type: ignore[arg-type]
    edits: dict[str, Callable[[dict[str, Any], dict[str, list[Any]]], object]] = {
        "version": lambda head, lines: head.update(sidestream=99),
        "digest": lambda head, lines: head.update(digest="eval"),
        "no digests": lambda head, lines: head.update(digest="blake3"),
        "entries": lambda head, lines: head.update(entries=1 << 40),
        "files": lambda head, lines: head["files"].update({"../x": 3}),
        "negative file": lambda head, lines: head["files"].update({"x": -3}),
        "another step": lambda head, lines: head.update(step=7),
        "kind": lambda head, lines: lines["w"].__setitem__(0, "eval"),
        "path": lambda head, lines: lines["w"].__setitem__(3, [{"key": {"a": 1}}]),
        "long path": lambda head, lines: lines["w"].__setitem__(3, ["a"] * 100),
        "list with a hole": lambda head, lines: lines["w"].__setitem__(3, ["w", 1 << 60]),
        "same path": lambda head, lines: lines["w"].__setitem__(3, ["v"]),
        "dtype": lambda head, lines: lines["w"][1].__setitem__(0, "load"),
        "shape": lambda head, lines: lines["w"][1].__setitem__(1, [1 << 62]),
        "scalar line": lambda head, lines: lines.__setitem__("w", 3),  # type: ignore[call-overload]
    }
    for name, edit in edits.items():
        yield f"own {name}", forged(sound, edit)

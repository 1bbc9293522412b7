"""A process that reads made-up files.

``python _fuzzing.py SAMPLES`` waits for lines ``{"target": NAME, "seed": N, "trials": N}``. For each it forks a child,
which prints what came of it as JSON.

Inputs are valid ones with a lie in their fields, with other bytes, or both. Every one has to end as a value or a typed
error. While it is read no code of it may run: the interpreter's audit hook tells of imports, ``exec``, files, sockets
and processes. Memory is limited for the process; an input that hangs is ended by a timer of processor time, which
stands still while the process is stopped.
"""

from __future__ import annotations

import gc
import io
import json
import os
import random
import resource
import signal
import struct
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch

from sidestream._foreign.dcp_metadata import read_dcp_metadata
from sidestream._foreign.safetensors import header_bytes, parse_header
from sidestream._foreign.torch_zip.file import open_tensor_item, open_value_item, read_torch_file
from sidestream._format import pickles as p
from sidestream._format.dcp import Described
from sidestream._format.frame import frame_tensor, frame_value
from sidestream._format.manifest import parse_manifest, write_manifest
from sidestream._format.marker import Marker, find_marker
from sidestream._format.records import (
    SPARSE_PARTS,
    Chunk,
    CompositeEntry,
    DictKey,
    EmptyEntry,
    Manifest,
    TensorEntry,
    ValueEntry,
)
from sidestream._format.safetensors import PREFIX_BYTES
from sidestream._format.validate import validate
from sidestream.errors import SidestreamError

HANG_S = 60
EXTRA_BYTES = 512 << 20
FORBIDDEN = (
    "import",
    "exec",
    "compile",
    "open",
    "socket",
    "os.",
    "subprocess",
    "ctypes",
    "pickle",
    "marshal",
    "shutil",
)
_SAVE_ID = "0123456789abcdef0123456789abcdef"

NASTY_NUMBERS = (0, 1, -1, 2, 7, 63, 64, 255, 4096, 65536, 1 << 20, 1 << 31, 1 << 32, 1 << 40, 1 << 62, (1 << 63) - 1,
                 1 << 63, 1 << 64, -(1 << 31), -(1 << 63), 10**30, (1 << 61) - 1, 2 * ((1 << 61) - 1),
                 -((1 << 61) - 1), ((1 << 61) - 1) << 40)  # fmt: skip
NASTY_TEXTS = (
    "", ".", "..", "../secret", "/etc/passwd", "a/b", "a\\b", "a\0b", "x" * 300, "\u202egnp", "CON", ".metadata",
    f"manifest-{_SAVE_ID}", "__0_0.distcp", "float32", "os.system", "builtins.eval", "\ud800", "é", "a.b.c",
)  # fmt: skip
SAMPLES: list[bytes] = []
NASTY_THINGS: tuple[Any, ...] = (None, True, False, 0.5, [], {}, "", [[]], [None], {"key": 1}, [1, 2, 3], -1, "x")


# --- valid ones -------------------------------------------------------------------------------------------------------


def records(r: random.Random) -> Manifest:
    """A small checkpoint, valid but for what ``lie`` does to it."""
    entries: dict[str, Any] = {}
    files = {"__0_0.distcp": 1 << 20, "__0_values.distcp": 4096}
    at = 0
    parts: tuple[str, ...] = ()
    if r.random() < 0.3:
        kind = r.choice(["sparse_coo", "sparse_bsc", "some.Class"])
        parts = SPARSE_PARTS.get(kind, ("a", "b"))
        strides = None if kind in SPARSE_PARTS else (4, 1)
        context = r.choice([True, None, {"dict": [["k", {"tuple": [1, {"dtype": "int4"}]}]]}])
        entries["s"] = CompositeEntry(("s",), kind, "float32", (3, 4), strides, parts, context)
    for number in [*parts, *range(r.randrange(1, 5))]:
        shape = tuple(r.randrange(0, 9) for _ in range(r.randrange(0, 4)))
        dtype = r.choice(["float32", "bfloat16", "int64", "uint8", "bool", "int4", "uint1"])
        frame = frame_tensor(dtype, shape)
        nbytes = len(frame.header) + frame.payload_bytes + len(frame.trailer(0))
        blocks = -(-frame.payload_bytes // (1 << 20))
        chunk = Chunk((0,) * len(shape), shape, "__0_0.distcp", at, nbytes, at + len(frame.header), bytes(4 * blocks))
        fqn, path = (f"s.{number}", ("s", number)) if number in parts else (f"m.{number}", ("m", DictKey(number)))
        entries[fqn] = TensorEntry(path, dtype, shape, (chunk,))
        at += nbytes
    entries["v"] = ValueEntry(("v",), "__0_values.distcp", 0, 400, r.choice([None, 1, "text", 1.5, True]))
    if r.random() < 0.3:
        entries["e"] = EmptyEntry(("e",))
    return Manifest(_SAVE_ID, entries, files, r.choice([None, 3]), r.choice([1, 2]))


def lie(manifest: Manifest, r: random.Random) -> Manifest:
    """One field says something else."""
    fqn = r.choice(list(manifest.entries))
    entry: Any = manifest.entries[fqn]
    number, text = r.choice(NASTY_NUMBERS), r.choice(NASTY_TEXTS)
    if isinstance(entry, TensorEntry):
        chunk = entry.chunks[0]
        numbers = tuple(r.choice(NASTY_NUMBERS) for _ in range(r.randrange(0, 4)))
        choice = r.randrange(10)
        if choice < 7:
            fields: list[dict[str, Any]] = [
                {"offsets": numbers}, {"sizes": numbers}, {"file": text}, {"item_offset": number},
                {"item_bytes": number}, {"payload_offset": number}, {"crcs": r.randbytes(r.randrange(9))},
            ]  # fmt: skip
            chunks: tuple[Chunk, ...] = (replace(chunk, **fields[choice]),)
            entry = replace(entry, chunks=chunks)
        elif choice == 7:
            entry = replace(entry, chunks=r.choice([(), entry.chunks * 2]))
        elif choice == 8:
            entry = replace(entry, shape=numbers)
        else:
            entry = replace(entry, dtype=text)
    elif isinstance(entry, ValueEntry):
        fields = [{"file": text}, {"item_offset": number}, {"item_bytes": number}, {"path": (text, number, "x") * 40}]
        entry = replace(entry, **r.choice(fields))
    elif isinstance(entry, CompositeEntry):
        numbers = tuple(r.choice(NASTY_NUMBERS) for _ in range(r.randrange(0, 4)))
        things = r.choice(NASTY_THINGS)
        fields = [{"type": text}, {"dtype": text}, {"shape": numbers}, {"strides": r.choice([None, numbers])},
                  {"parts": (text, "a")}, {"parts": ()}, {"context": things}, {"path": (text,)}]  # fmt: skip
        entry = replace(entry, **r.choice(fields))
    entries = {**manifest.entries, r.choice([fqn, fqn, text]): entry}
    return replace(manifest, entries=entries, files=r.choice([manifest.files, manifest.files, {text: number}]))


def other_bytes(raw: bytes, r: random.Random) -> bytes:
    """Flipped, cut, doubled, moved and spliced."""
    data = bytearray(raw)
    for _ in range(r.choice([1, 1, 1, 2, 4, 16])):
        if not data:
            break
        at = r.randrange(len(data))
        match r.randrange(7):
            case 0:
                data[at] ^= 1 << r.randrange(8)
            case 1:
                data[at] = r.choice(b"\x00\x01\x7f\x80\xff().NR\x81\x93\x94bcsuae}]QB\x8a\x8b\x8e\x95h")
            case 2:
                del data[at : at + r.randrange(1, 9)]
            case 3:
                data[at:at] = r.randbytes(r.randrange(1, 9))
            case 4:
                data[at:at] = data[at : at + r.randrange(1, 200)]
            case 5:
                other = r.randrange(len(data))
                data[at : at + 8] = data[other : other + 8]
            case _:
                data[at : at + 8] = struct.pack("<q", r.choice([n for n in NASTY_NUMBERS if -(1 << 63) <= n < 1 << 63]))
    return bytes(data)


# --- targets: make an input, read it ----------------------------------------------------------------------------------


def manifest_input(r: random.Random) -> bytes:
    manifest = records(r)
    if r.random() < 0.6:
        manifest = lie(manifest, r)
    raw = b"".join(write_manifest(manifest, "2.13"))
    choice = r.random()
    if choice < 0.3:
        return other_bytes(raw, r)
    if choice < 0.6:
        return _other_json(raw, r)
    return raw


def _other_json(raw: bytes, r: random.Random) -> bytes:
    lines = raw.split(b"\n")
    at = r.randrange(len(lines) - 1)
    content = json.loads(lines[at])
    _alter(content, r)
    lines[at] = json.dumps(content).encode()
    if r.random() < 0.05:
        lines[at] = b"[" * r.choice([10, 1000, 100_000])
    return b"\n".join(lines)


def _alter(content: Any, r: random.Random) -> None:
    """Somewhere in it, something of another kind."""
    nasty = deepcopy(r.choice([*NASTY_NUMBERS, *NASTY_TEXTS, *NASTY_THINGS]))
    keys = list(content) if isinstance(content, dict) else list(range(len(content)))
    if not keys:
        return
    key = r.choice(keys)
    if isinstance(content[key], (list, dict)) and content[key] and r.random() < 0.7:
        _alter(content[key], r)
    else:
        content[key] = nasty


def read_manifest(raw: bytes) -> None:
    validate(parse_manifest(raw))


def metadata_input(r: random.Random) -> bytes:
    """What stock DCP writes, or would if it were lied to (``_stock_metadata.py``)."""
    raw = r.choice(SAMPLES)
    return other_bytes(raw, r) if r.random() < 0.7 else raw


def read_metadata(raw: bytes) -> None:
    manifest = read_dcp_metadata(raw)
    validate(replace(manifest, files={"__0_0.distcp": 1 << 20}))


def marker_input(r: random.Random) -> bytes:
    manifest = records(r)
    marker = Marker(_SAVE_ID, 100, 7, manifest.step, manifest.generation)
    raw = Described.of(manifest.entries).metadata(marker)[-600:]
    return other_bytes(raw, r) if r.random() < 0.9 else raw


def tensor_input(r: random.Random) -> bytes:
    shape = tuple(r.randrange(0, 9) for _ in range(r.randrange(0, 4)))
    frame = frame_tensor(r.choice(["float32", "bfloat16", "int64", "bool"]), shape)
    return other_bytes(frame.header + bytes(frame.payload_bytes) + frame.trailer(r.getrandbits(32)), r)


def read_tensor(raw: bytes) -> None:
    open_tensor_item(io.BytesIO(raw), len(raw))


def value_input(r: random.Random) -> bytes:
    value = p.dict_of([(p.text("a"), p.integer(r.choice(NASTY_NUMBERS))), (p.text("b"), p.list_of([p.real(1.5)] * 3))])
    hostile = p.call(p.global_(*r.choice([("os", "system"), ("builtins", "eval"), ("torch", "load")])), p.text("x"))
    known = p.call(p.global_(*r.choice([("collections", "OrderedDict"), ("torch", "Size")])), p.list_of([p.integer(1)]))
    alike = p.dict_of([(p.integer(number * ((1 << 61) - 1)), p.NONE) for number in range(r.choice([2, 300]))])
    twice = b"]" + b"q\x00" + b"h\x00" * r.choice([1, 300]) + b"t"  # parts that are shared
    shared = b"((" + twice + b"q\x01" + b"h\x01" * r.choice([1, 300]) + b"t"
    pickled = b"\x80\x04" + r.choice([value, value, hostile, known, alike, shared]) + b"."
    inside = other_bytes(pickled, r) if r.random() < 0.7 else pickled
    item = frame_value(inside)
    return other_bytes(item, r) if r.random() < 0.3 else item


def read_value(raw: bytes) -> None:
    open_value_item(io.BytesIO(raw), len(raw))


def safetensors_input(r: random.Random) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for number in range(r.randrange(1, 4)):
        shape = [r.randrange(0, 9) for _ in range(r.randrange(0, 3))]
        nbytes = 4
        for dim in shape:
            nbytes *= dim
        header[f"t{number}"] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    for _ in range(r.randrange(3)):
        _alter(header, r)
    raw = json.dumps(header).encode()
    if r.random() < 0.4:
        raw = other_bytes(raw, r)
    prefix = len(raw) if r.random() < 0.9 else r.choice([n for n in NASTY_NUMBERS if 0 <= n < 1 << 63])
    return struct.pack("<Q", prefix) + raw + bytes(at)


def read_safetensors(raw: bytes) -> None:
    nbytes = header_bytes(bytearray(raw[:PREFIX_BYTES]), len(raw) - PREFIX_BYTES, "f.safetensors")
    header = bytearray(raw[PREFIX_BYTES : PREFIX_BYTES + nbytes])
    parse_header(header, PREFIX_BYTES + nbytes, len(raw), "f.safetensors")


def legacy_input(r: random.Random) -> bytes:
    buffer = io.BytesIO()
    state: dict[str, Any] = {f"t{number}": torch.ones(r.randrange(5)) for number in range(r.randrange(1, 4))}
    state["deep"] = {"lr": 0.1, "list": [torch.ones(2), r.randrange(9)], "view": torch.ones(6)[2:]}
    torch.save(state, buffer, _use_new_zipfile_serialization=False)
    return other_bytes(buffer.getvalue(), r)


def read_legacy(raw: bytes) -> None:
    read_torch_file(io.BytesIO(raw), len(raw), "f.pt")


TARGETS: dict[str, tuple[Callable[[random.Random], bytes], Callable[[bytes], object]]] = {
    "manifest": (manifest_input, read_manifest),
    "metadata": (metadata_input, read_metadata),
    "marker": (marker_input, find_marker),
    "tensor": (tensor_input, read_tensor),
    "value": (value_input, read_value),
    "safetensors": (safetensors_input, read_safetensors),
    "legacy": (legacy_input, read_legacy),
}


# --- the watch --------------------------------------------------------------------------------------------------------

_watching = False
_seen: list[str] = []


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _watching and event.startswith(FORBIDDEN):
        _seen.append(f"{event} {str(args)[:100]}")


class HangError(BaseException):
    """The timer has run out."""


def _hangs(*_: object) -> None:
    raise HangError


def run(target: str, seed: int, trials: int) -> dict[str, Any]:
    global _watching
    make, read = TARGETS[target]
    r = random.Random(f"{seed} {target}")
    for _ in range(50):  # what is imported on the way of an error is imported now
        _ends(read, make(r))
    kinds: Counter[str] = Counter()
    violations: list[str] = []
    limit = _address_space() + EXTRA_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    slowest = 0.0
    for number in range(trials):
        state = random.Random(f"{seed} {target} {number}")
        raw = make(state)
        signal.setitimer(signal.ITIMER_PROF, HANG_S)
        _watching = True
        started = time.process_time()
        kind = _ends(read, raw)
        slowest = max(slowest, time.process_time() - started)
        _watching = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        kinds[kind.partition(":")[0]] += 1
        if kind.startswith("untyped"):
            violations.append(f"input {number}: {kind}")
        violations += [f"input {number}: {what}" for what in _seen]
        _seen.clear()
    return {"trials": trials, "violations": violations[:50], "kinds": dict(kinds), "slowest_s": slowest}


def _ends(read: Callable[[bytes], object], raw: bytes) -> str:
    try:
        read(raw)
    except SidestreamError as error:
        return type(error).__name__
    except BaseException as error:
        return f"untyped: {type(error).__name__}: {str(error)[:200]}"
    return "read"


def _address_space() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def serve() -> None:
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                print(json.dumps(run(**json.loads(line))), flush=True)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if status:
            print(json.dumps({"ended": os.waitstatus_to_exitcode(status)}), flush=True)


if __name__ == "__main__":
    sys.addaudithook(_audit)
    signal.signal(signal.SIGPROF, _hangs)
    with open(sys.argv[1]) as samples:
        SAMPLES.extend(bytes.fromhex(line) for line in samples)
    serve()

"""``verify``, ``convert``, ``copy`` and signatures."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _golden_checkpoints import CHECKPOINTS, GOLDENS
from _golden_states import counted, small
from _golden_table import Table
from damages import DAMAGE
from keywords import for_convert

import sidestream


async def errors(table: Table) -> None:
    """What each error can be caught as."""
    for name in sidestream.errors.__all__:
        kind = getattr(sidestream.errors, name)
        if issubclass(kind, Exception):
            table.note(name, [base.__name__ for base in kind.__mro__[1:-3]])  # which are of every exception


async def verify(table: Table) -> None:
    folder = table.folder
    for name, golden in GOLDENS.items():
        await table.tries(f"good: {name}", sidestream.verify(CHECKPOINTS / golden.path))
    for name, damage in DAMAGE.items():
        for golden in ("metadata", "digest"):
            copy = folder / golden / name
            shutil.copytree(CHECKPOINTS / golden, copy)
            damage(copy)
            await table.tries(f"damage: {golden}: {name}", sidestream.verify(copy))
    for name in ("stock/__0_0.distcp", "stock-zstd/__0_0.distcp", "torch-save.pt", "hf/model.safetensors"):
        path = folder / "foreign" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if "/" in name:
            shutil.copytree((CHECKPOINTS / name).parent, path.parent, dirs_exist_ok=True)
        else:
            shutil.copy(CHECKPOINTS / name, path)
        raw = bytearray(path.read_bytes())
        for at in range(100, len(raw), 400):
            raw[at] ^= 1
        path.write_bytes(raw)
        url = path.parent if "/" in name else path
        await table.tries(f"damage: {name}", sidestream.verify(url))
    (folder / "text").write_text("text")
    await table.tries("nothing there", sidestream.verify(folder / "none"))
    await table.tries("a text", sidestream.verify(folder / "text"))
    await table.tries("a run", sidestream.verify(CHECKPOINTS / "run"))
    await table.tries("option: timeout_s", lambda: sidestream.verify(CHECKPOINTS / "digest", timeout_s=0))


async def convert(table: Table) -> None:
    """``convert`` and ``copy``."""
    folder, source = table.folder, CHECKPOINTS / "metadata"
    good: dict[str, tuple[str, dict[str, Any]]] = {
        "dcp": ("dcp", {}),
        "selected": ("selected", {"select": ["model.w", "step"]}),
        "renamed": ("renamed", {"names": lambda name: re.sub(r"^model\.", "m.", name)}),
        "cast": ("cast", {"dtype": torch.bfloat16}),
        "torch.save": ("m.pt", {}),
        "safetensors": ("m.safetensors", {"select": "model.*"}),
        "safetensors, several": ("several", {"select": "model.*", "format": "safetensors", "max_shard_bytes": 32}),
    }

    async def converted(target: str, options: dict[str, Any]) -> Any:
        return await sidestream.convert(source, folder / target, **for_convert(**options))

    for name, (target, options) in good.items():
        await table.tries(f"good: {name}", lambda t=target, o=options: converted(t, o))
    bad: dict[str, tuple[str, dict[str, Any]]] = {
        "values for safetensors": ("a.safetensors", {}),
        "format": ("a", {"format": "pickle"}),
        "nothing is selected": ("a", {"select": "none.*"}),
        "two become one": ("a", {"names": lambda name: re.sub(r"\.[wb]$", ".x", name)}),
        "a bad pattern": ("a", {"names": {"(": "a"}}),
        "dtype": ("a", {"dtype": torch.int8}),
        "shard_bytes": ("a", {"max_shard_bytes": 0}),
        "budget_bytes": ("a", {"budget_bytes": 1}),
        "verify": ("a", {"verify": "no"}),
        "the target is there": ("m.pt", {}),
        "the target is a directory": ("dcp", {}),
    }
    for name, (target, options) in bad.items():
        await table.tries(f"bad: {name}", lambda t=target, o=options: converted(t, o))
    await table.tries("bad: nothing there", sidestream.convert(folder / "none", folder / "a"))
    await sidestream.save({"c": counted(2).to(torch.complex128)}, folder / "complex")
    await table.tries("bad: a dtype for safetensors", sidestream.convert(folder / "complex", folder / "c.safetensors"))
    await table.tries("copy, good", sidestream.copy(source, folder / "copy"))
    await table.tries("copy, a file", sidestream.copy(CHECKPOINTS / "torch-save.pt", folder / "copy.pt"))
    await table.tries("copy, safetensors", sidestream.copy(CHECKPOINTS / "hf", folder / "copied hf"))
    await table.tries("copy, the target is there", sidestream.copy(source, folder / "copy"))
    await table.tries("copy, onto itself", sidestream.copy(folder / "copy", folder / "copy"))
    await table.tries("copy, nothing there", sidestream.copy(folder / "none", folder / "a"))
    for name, damage in DAMAGE.items():
        damaged = folder / "damaged" / name
        shutil.copytree(source, damaged)
        damage(damaged)
        await table.tries(f"damage, copy: {name}", sidestream.copy(damaged, folder / "a"))
        await table.tries(f"damage, convert: {name}", sidestream.convert(damaged, folder / "a"))
    await table.tries("a part is missing", _without_a_part(folder))
    table.note("left behind", sorted(path.name for path in folder.iterdir()))


async def _without_a_part(folder: Path) -> Any:
    shutil.copytree(CHECKPOINTS / "parts", folder / "parts")
    (folder / "parts" / "__2.metadata").unlink()
    return await sidestream.convert(folder / "parts", folder / "a")


async def signing(table: Table) -> None:
    folder = table.folder
    key = _key(folder)
    await sidestream.save(small(), folder / "saved", options=sidestream.SaveOptions(digest="blake3"))
    await sidestream.save(small(), folder / "plain")
    public = CHECKPOINTS / "signed.pub"
    other = folder / "other.pub"
    (folder / "text.key").write_text("no key")
    calls: dict[str, Callable[[], Any]] = {
        "sign": lambda: sidestream.signing.sign(folder / "saved", key),
        "sign again": lambda: sidestream.signing.sign(folder / "saved", key),
        "sign without digests": lambda: sidestream.signing.sign(folder / "plain", key),
        "sign, nothing there": lambda: sidestream.signing.sign(folder / "none", key),
        "sign, no key": lambda: sidestream.signing.sign(CHECKPOINTS / "digest", folder / "none.key"),
        "sign, a text": lambda: sidestream.signing.sign(CHECKPOINTS / "digest", folder / "text.key"),
        "sign, a foreign one": lambda: sidestream.signing.sign(CHECKPOINTS / "stock", key),
        "verify": lambda: sidestream.signing.verify(CHECKPOINTS / "signed", public),
        "verify, another key": lambda: sidestream.signing.verify(CHECKPOINTS / "signed", other),
        "verify, a text": lambda: sidestream.signing.verify(CHECKPOINTS / "signed", folder / "text.key"),
        "verify, not signed": lambda: sidestream.signing.verify(CHECKPOINTS / "digest", public),
        "verify without digests": lambda: sidestream.signing.verify(folder / "plain", public),
    }
    for name, call in calls.items():
        await table.tries(name, call)
    for name in ("shard altered", "manifest altered", "metadata altered", "shard gone"):
        copy = folder / "damaged" / name
        shutil.copytree(CHECKPOINTS / "signed", copy)
        (signature,) = copy.glob("*.sig")
        signature.rename(copy / "kept")
        DAMAGE[name](copy)
        (copy / "kept").rename(signature)
        await table.tries(f"damage: {name}", sidestream.signing.verify(copy, public))


def _key(folder: Path) -> Path:
    """A private key; ``other.pub`` is its public one."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.derive_private_key(0xA3C8104, ec.SECP256R1())
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "mine.key").write_bytes(private)
    public = key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    (folder / "other.pub").write_bytes(public)
    return folder / "mine.key"

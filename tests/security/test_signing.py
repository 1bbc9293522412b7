"""Signatures: by whom, over every byte that anybody reads, and checked with another program too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from zlib import crc32

import pytest
import torch
from _hostile import forged
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from stock import stock_save

import sidestream
from sidestream import errors, signing

STATE = {"w": torch.randn(400_000), "v": (1, "two"), "tied": torch.arange(3)}


def keys(directory: Path, name: str, password: bytes | None = None) -> tuple[Path, Path]:
    """Paths of a new private and public key."""
    key = ec.generate_private_key(ec.SECP256R1())
    private, public = directory / f"{name}.key", directory / f"{name}.pub"
    how = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    pem = serialization.Encoding.PEM
    private.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, how))
    public.write_bytes(key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    return private, public


async def signed(directory: Path, private: Path) -> Path:
    await sidestream.save(STATE, directory / "c", options=sidestream.SaveOptions(digest="blake3"))
    await signing.sign(directory / "c", private)
    return directory / "c"


async def test_signed_and_verified(tmp_path: Path) -> None:
    private, public = keys(tmp_path, "mine")
    checkpoint = await signed(tmp_path, private)
    report = await signing.verify(checkpoint, public)
    assert (report.ok, report.digest) == (True, "verified")
    assert set(report.verified) == {"w", "v", "tied"}
    assert (await sidestream.verify(checkpoint)).ok
    await sidestream.load({"w": torch.zeros(400_000)}, checkpoint)
    (signature,) = checkpoint.glob("*.sig")
    other = subprocess.run(
        [
            *(sys.executable, "-m", "model_signing", "verify", "key", str(checkpoint), "--ignore_unsigned_files"),
            *("--signature", str(signature), "--public_key", str(public)),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert other.returncode == 0, other.stderr


async def test_another_key_and_no_signature(tmp_path: Path) -> None:
    private, public = keys(tmp_path, "mine")
    _, stranger = keys(tmp_path, "theirs")
    checkpoint = await signed(tmp_path, private)
    with pytest.raises(errors.BadSignatureError, match="not made with this key"):
        await signing.verify(checkpoint, stranger)
    (signature,) = checkpoint.glob("*.sig")
    raw = signature.read_bytes()
    for damaged in (raw[:-20], b"{}", b"\xff" * 100, raw.replace(b'"sig"', b'"gis"')):
        signature.write_bytes(damaged)
        with pytest.raises(errors.BadSignatureError):
            await signing.verify(checkpoint, public)
    signature.unlink()
    with pytest.raises(errors.BadSignatureError, match="no signature"):
        await signing.verify(checkpoint, public)


async def test_whatever_is_changed_is_found(tmp_path: Path) -> None:
    """Not only tensors: what stock DCP would unpickle is covered too."""
    private, public = keys(tmp_path, "mine")
    checkpoint = await signed(tmp_path, private)
    places = {
        "__0_0.distcp": [0, 100, -30],  # the value's pickle
        "__0_1.distcp": [b"w payload", b"PK\x01\x02"],
        ".metadata": [10, 200, -50],
    }
    for name, ats in places.items():
        path = checkpoint / name
        raw = path.read_bytes()
        for at in ats:
            if isinstance(at, bytes):
                where = raw.index(STATE["w"].numpy().tobytes()[:64]) if at == b"w payload" else raw.index(at)
            else:
                where = at % len(raw)
            path.write_bytes(raw[:where] + bytes([raw[where] ^ 1]) + raw[where + 1 :])
            with pytest.raises((errors.BadSignatureError, errors.CorruptCheckpointError)):
                await signing.verify(checkpoint, public)
        path.write_bytes(raw)
    assert (await signing.verify(checkpoint, public)).ok

    forged(checkpoint, lambda head, lines: lines["v"][1].__setitem__(3, 7))(tmp_path / "forged")
    assert await (await sidestream.open_checkpoint(tmp_path / "forged")).value("v") == 7  # the marker vouches for it
    with pytest.raises(errors.BadSignatureError):
        await signing.verify(tmp_path / "forged", public)


async def test_a_signature_of_another_save_does_not_fit(tmp_path: Path) -> None:
    private, public = keys(tmp_path, "mine")
    checkpoint = await signed(tmp_path, private)
    (signature,) = checkpoint.glob("*.sig")
    await sidestream.save(STATE, tmp_path / "other", options=sidestream.SaveOptions(digest="blake3"))
    (manifest,) = (tmp_path / "other").glob("manifest-*")
    (manifest.parent / f"{manifest.name}.sig").write_bytes(signature.read_bytes())
    with pytest.raises(errors.BadSignatureError):
        await signing.verify(tmp_path / "other", public)


async def test_what_cannot_be_signed(tmp_path: Path) -> None:
    private, public = keys(tmp_path, "mine")
    await sidestream.save(STATE, tmp_path / "plain")
    stock_save(STATE, tmp_path / "stock")
    for name in ("plain", "stock"):
        with pytest.raises(errors.InvalidOptionError, match='digest="blake3"'):
            await signing.sign(tmp_path / name, private)
    with pytest.raises(errors.CheckpointNotFoundError):
        await signing.sign(tmp_path / "nothing", private)
    checkpoint = await signed(tmp_path, private)
    with pytest.raises(errors.CheckpointExistsError, match="signed already"):
        await signing.sign(checkpoint, private)
    await sidestream.save(STATE, tmp_path / "d", options=sidestream.SaveOptions(digest="blake3"))
    for bad in (public, tmp_path / "nowhere"):
        with pytest.raises(errors.InvalidOptionError, match="not a private key"):
            await signing.sign(tmp_path / "d", bad)
    for bad in (private, tmp_path / "nowhere"):
        with pytest.raises(errors.InvalidOptionError, match="not a public key"):
            await signing.verify(checkpoint, bad)


async def test_a_key_with_a_password(tmp_path: Path) -> None:
    private, public = keys(tmp_path, "mine", b"open sesame")
    await sidestream.save(STATE, tmp_path / "c", options=sidestream.SaveOptions(digest="blake3"))
    for password in (None, "wrong"):
        with pytest.raises(errors.InvalidOptionError) as raised:
            await signing.sign(tmp_path / "c", private, password=password)
        assert "wrong" not in str(raised.value)
    await signing.sign(tmp_path / "c", private, password="open sesame")
    assert (await signing.verify(tmp_path / "c", public)).ok


async def test_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "model_signing", None)
    with pytest.raises(errors.MissingExtraError) as raised:
        await signing.sign(tmp_path, tmp_path / "key")
    assert raised.value.extra == "signing"


async def test_sidecar_files_are_signed(tmp_path: Path) -> None:
    """Also an alteration that keeps the checksum, which only the digest finds; and the signature of a copy is good."""
    private, public = keys(tmp_path, "mine")
    content = bytes(range(256)) * 9000
    await sidestream.save(
        STATE,
        tmp_path / "c",
        files={"config.json": b"{}", "tokenizer": content},
        options=sidestream.SaveOptions(digest="blake3"),
    )
    await signing.sign(tmp_path / "c", private)
    await sidestream.copy(tmp_path / "c", tmp_path / "copied")
    for checkpoint in (tmp_path / "c", tmp_path / "copied"):
        report = await signing.verify(checkpoint, public)
        assert (report.ok, report.digest) == (True, "verified")
        path = checkpoint / "tokenizer"
        altered = bytearray(content)
        for bit, one in enumerate(f"{0x104C11DB7:033b}"):  # the polynomial itself, of which every multiple keeps a CRC
            altered[1000 + bit // 8] ^= int(one) << bit % 8
        assert crc32(altered) == crc32(content)
        assert altered != content
        path.write_bytes(altered)
        with pytest.raises(
            errors.BadSignatureError, match=r"tokenizer.*the digest differs, though the checksum does not"
        ):
            await signing.verify(checkpoint, public)
        with pytest.raises(errors.CorruptCheckpointError, match="tokenizer"):
            await (await sidestream.open_checkpoint(checkpoint)).file("tokenizer")
        path.write_bytes(content)
        (checkpoint / "config.json").write_bytes(b"[]")
        with pytest.raises(errors.BadSignatureError, match=r"config\.json"):
            await signing.verify(checkpoint, public)

"""Signatures, which prove who wrote a checkpoint (the extra ``signing``).

A signature is a file beside the manifest, ``manifest-<save_id>.sig``, that signs the manifest and the marker. The
manifest has a digest of every block of every tensor, and every value in full, so this covers the whole checkpoint. The
format is an OpenSSF model signature (a Sigstore bundle with an in-toto statement), which ``model_signing verify key``
of the package ``model-signing`` also reads. Keys are elliptic-curve keys (P-256, P-384, P-521) in PEM files. No
function here connects to a network, except to the storage at ``url``.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

from ._engine.calls import in_operation
from ._format.marker import METADATA_NAME
from ._format.records import Manifest
from ._load.open.manifest import read_manifest
from ._load.verification import VerifyReport
from ._load.verify import verify_manifest
from ._runtime.tasks import running_loop
from ._runtime.threads import Deadline, io_threads, time_limit
from ._storage import Location, RangeSource, locate_by_caller
from .errors import (
    BadSignatureError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    InvalidOptionError,
    MissingExtraError,
)
from .options import Progress, Storage, check_timeout

__all__ = ["sign", "verify"]

_MOST_SIGNATURE_BYTES = 16 << 20


async def sign(
    url: str | os.PathLike[str],
    key: str | os.PathLike[str],
    *,
    password: str | None = None,
    timeout_s: float = 600.0,
    storage_options: Mapping[str, Any] | None = None,
    storage: Storage | None = None,
) -> str:
    """Sign the checkpoint at ``url``.

    The checkpoint has to be one of sidestream's, saved with ``digest=``: a signature over checksums that are not
    cryptographic would prove nothing. The payload is not read, so verify an older checkpoint before you sign it. When
    this returns, the signature is durable. A cancel or a failure may leave a signature file that does not verify.

    Args:
        url: The checkpoint.
        key: A PEM file with the private key.
        password: The password of the private key, if it has one.
        timeout_s: The deadline of the call, in seconds.
        storage_options: What the fsspec file system of ``url`` takes; short for ``storage=Storage(options=...)``.
        storage: How the storage is reached.

    Returns:
        The name of the new file in the checkpoint.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        CorruptCheckpointError: Its marker or manifest is damaged.
        InvalidOptionError: The checkpoint has no digests, or the key cannot sign.
        CheckpointExistsError: The checkpoint has been signed already.
        MissingExtraError: The extra ``signing`` is not installed.
        DeadlineExceededError: ``timeout_s`` has passed.
        StorageError: The storage failed.
    """
    running_loop("signing.sign")
    check_timeout(timeout_s)
    signing = _package("signing")
    location = await locate_by_caller(url, storage_options, storage)

    async def work() -> str:
        with time_limit(Deadline.after(timeout_s)):
            return await _sign(location, signing, key, password)

    return await in_operation(work, "signing.sign")


async def _sign(location: Location, signing: Any, key: str | os.PathLike[str], password: str | None) -> str:
    async with aclosing(location.source()) as source:
        manifest = await _signable(source, location)
        # Only manifest and ``.metadata`` are signed. The manifest has a digest of every block, so the signature covers
        # all data without reading it.
        files = await _signed_files(source, location.url, manifest)
    secret = None if password is None else password.encode()

    def make(model: Path, signature: Path) -> bytes:
        try:
            config = signing.Config().use_elliptic_key_signer(private_key=key, password=secret)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise InvalidOptionError(f"key={os.fspath(key)!r} is not a private key that can sign: {error}") from error
        config.sign(model, signature)
        return signature.read_bytes()

    raw = await io_threads().run(_with_files, files, b"", make)
    name = f"{manifest.name}.sig"
    try:
        await location.store.put(f"{location.name}/{name}", raw, durability="fsync")
    except CheckpointExistsError as error:
        raise CheckpointExistsError(
            f"{location.url} has been signed already: delete {name} to sign it again"
        ) from error
    return name


async def verify(
    url: str | os.PathLike[str],
    key: str | os.PathLike[str],
    *,
    progress: Progress | None = None,
    timeout_s: float = 600.0,
    storage_options: Mapping[str, Any] | None = None,
    storage: Storage | None = None,
) -> VerifyReport:
    """Verify the signature of the checkpoint at ``url``, and all of its data.

    When this returns, the owner of the key has signed the checkpoint, and every byte that a reader uses is what was
    signed. A cancel leaves nothing behind.

    Args:
        url: The checkpoint.
        key: A PEM file with the public key.
        progress: Called with the bytes read so far and the bytes to read.
        timeout_s: The deadline of the call, in seconds.
        storage_options: What the fsspec file system of ``url`` takes; short for ``storage=Storage(options=...)``.
        storage: How the storage is reached.

    Returns:
        The report of ``sidestream.verify``, without damage.

    Raises:
        BadSignatureError: There is no signature, it was not made with this key over these files, or data is damaged.
        CheckpointNotFoundError: There is no checkpoint.
        CorruptCheckpointError: Its marker or manifest is damaged.
        InvalidOptionError: The checkpoint has no digests, or the key cannot verify.
        MissingExtraError: The extra ``signing`` is not installed.
        DeadlineExceededError: ``timeout_s`` has passed.
        StorageError: The storage failed.
    """
    running_loop("signing.verify")
    check_timeout(timeout_s)
    verifying = _package("verifying")
    location = await locate_by_caller(url, storage_options, storage)

    async def work() -> VerifyReport:
        with time_limit(Deadline.after(timeout_s)):
            return await _verify(location, verifying, key, progress)

    return await in_operation(work, "signing.verify")


async def _verify(
    location: Location, verifying: Any, key: str | os.PathLike[str], progress: Progress | None
) -> VerifyReport:
    def check(model: Path, signature: Path) -> bytes:
        try:
            config = verifying.Config().use_elliptic_key_verifier(public_key=key)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise InvalidOptionError(f"key={os.fspath(key)!r} is not a public key that can verify: {error}") from error
        try:
            config.verify(model, signature)
        except Exception as error:  # for a bad bundle it raises errors of many packages
            why = f"{type(error).__name__}: {error}".strip(": ")
            raise BadSignatureError(
                f"{location.url}: its signature was not made with this key over these files ({why})"
            ) from error
        return b""

    async with aclosing(location.source()) as source:
        manifest = await _signable(source, location)
        files = await _signed_files(source, location.url, manifest)
        bundle = await _signature(source, location.url, manifest)
        # The signature first: until it is good, nothing that the manifest says is worth comparing. Then all data is
        # compared with the digests, without which a signature would cover the manifest only.
        await io_threads().run(_with_files, files, bundle, check)
        report = await verify_manifest(source, location.url, manifest, progress)
        if report.damaged or report.digest != "verified":
            first = report.damaged[0].message if report.damaged else "its digests were not compared"
            raise BadSignatureError(
                f"{location.url}: the signature is good, the files are not what was signed: {first}"
            )
    return report


def _package(part: str) -> Any:
    try:
        from model_signing import signing, verifying
    except ImportError as error:
        raise MissingExtraError(
            f"signing needs {error.name}: pip install 'sidestream[signing]'", extra="signing"
        ) from error
    return {"signing": signing, "verifying": verifying}[part]


async def _signable(source: RangeSource, location: Location) -> Manifest:
    manifest = await read_manifest(source, location)
    if manifest.digest is None:
        what = "was saved without digests" if manifest.own else "was not written by sidestream, and has no digests"
        raise InvalidOptionError(f'{location.url} {what}: save it with digest="blake3" to sign it')
    return manifest


async def _signed_files(source: RangeSource, url: str, manifest: Manifest) -> dict[str, bytes]:
    sizes = await source.sizes()
    files = {}
    root = manifest.name
    parts = (manifest.part_name(rank) for rank in range(manifest.ranks))
    for name in (root, METADATA_NAME, *(part for part in parts if part in sizes)):
        try:
            files[name] = bytes(await source.read_file(name, sizes[name]))
        except (KeyError, FileNotFoundError) as error:
            raise CheckpointNotFoundError(f"{url} was deleted while it was read") from error
    return files


async def _signature(source: RangeSource, url: str, manifest: Manifest) -> bytes:
    name = f"{manifest.name}.sig"
    sizes = await source.sizes()
    if not 0 < sizes.get(name, 0) <= _MOST_SIGNATURE_BYTES:
        raise BadSignatureError(f"{url} carries no signature ({name})")
    return bytes(await source.read_file(name, sizes[name]))


def _with_files(files: dict[str, bytes], bundle: bytes, work: Callable[[Path, Path], bytes]) -> bytes:
    """Call ``work`` in a thread with a private directory that has ``files``, because the package reads local paths."""
    with tempfile.TemporaryDirectory(prefix="sidestream-") as directory:
        model, signature = Path(directory, "checkpoint"), Path(directory, "signature")
        model.mkdir()
        for name, content in files.items():
            (model / name).write_bytes(content)
        if bundle:
            signature.write_bytes(bundle)
        return work(model, signature)

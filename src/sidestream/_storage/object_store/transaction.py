"""An attempt on object storage: objects with unique names below the target, and a create-only put that commits.

Objects cannot be renamed. So the names of the files of a checkpoint contain the id of the save, and the marker, which
readers look for, is written last. A prefix without a marker is not a checkpoint.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ..._runtime.threads import Deadline, Stop, current_deadline, time_limit
from ...errors import (
    CheckpointExistsError,
    CorruptCheckpointError,
    InvalidOptionError,
    SidestreamError,
    StorageError,
    UnsupportedError,
    is_uncertain,
    mark_stuck,
    without_frames,
)
from ...events import GuaranteeLost, emit
from ...options import Listing
from ..bodies import Body
from ..clients.requests import LoopCall, translated
from ..names import ABANDONED_AFTER_S, MARKER, NOTE, READ_FIRST, id_of, is_plain_shard, owner_of
from ..replacing import Use, refusal
from ..transaction import Attempt, CommitFiles, StoreAddress, Transaction, being_removed
from .bucket import Bucket, clear_export, collect_orphans, look_at

_CLEAN_UP_S = 60.0
_SENT_S = 5.0
"""How long a put that was sent has to end after a stop, or after its deadline."""
_warned: set[str] = set()


@dataclass(frozen=True, slots=True)
class _Replaced:
    """The state of the target before a replacement: the ``version`` of the marker.

    When the replacement has committed, it deletes the files of the saves ``ids``, and ``shards``, whose names contain
    no id."""

    version: str
    ids: frozenset[str]
    shards: frozenset[str]


class ObjectTransaction(Transaction):
    """A ``Transaction`` in ``bucket``."""

    _adds_ids = True

    def __init__(self, bucket: Bucket, address: StoreAddress | None, attempt: Attempt) -> None:
        super().__init__(attempt, address)
        self._bucket = bucket
        self._made = False
        self._sizes: dict[str, int] = {}  # of the files that the storage has acknowledged
        self._begun: set[str] = set()  # names of what this attempt wrote, or may have written
        self._last: tuple[str, bytes] | None = None
        self._replaced: _Replaced | None = None

    def _read_tail(self, name: str, nbytes: int) -> bytes:
        return LoopCall(lambda: self._bucket.tail(name, nbytes)).result(f"reading {name}")

    def path_of(self, name: str = "") -> str:
        target = self.attempt.target
        return f"{target}/{name}" if name and self.attempt.kind != "file" else target

    # --- files ---

    def write(self, files: Iterable[tuple[str, Body]], *, stop: Stop | None = None) -> None:
        try:
            self._write(files, stop or Stop())
        except BaseException as error:
            # Without frames, because an error that the caller keeps must not keep staging memory alive.
            raise without_frames(self._explained(error))  # noqa: B904

    def _explained(self, error: BaseException) -> BaseException:
        """Return the ``CheckpointExistsError`` that explains ``error``, or ``error``. A save that replaces the marker
        deletes the files of saves that cannot commit any more."""
        if isinstance(error, StorageError) and error.errno == errno.ENOENT:
            try:
                self.check_not_overtaken()
            except CheckpointExistsError as conflict:
                conflict.__cause__ = error
                return conflict
            except Exception:
                return error
        return error

    def _write(self, files: Iterable[tuple[str, Body]], stop: Stop) -> None:
        attempt, bucket = self.attempt, self._bucket
        stop.check()
        _check_promises(bucket)
        if not self._made and attempt.kind not in ("joined", "joined_files"):
            LoopCall(self._check_vacant).result(f"looking at {bucket.url}/{attempt.target}", stop)
        with self._unless_discarded():
            self._made = True
        for given, body in files:
            name = self.path_of(self.committed_name(given))
            if body.nbytes <= bucket.policy.part_bytes:
                self._send_whole(name, body, stop)
            else:
                self._begun.add(name)
                self._send_parts(name, body, stop)
            self._sizes[name.rpartition("/")[2]] = body.nbytes
            del body

    async def _check_vacant(self) -> None:
        """Raise ``CheckpointExistsError`` if the target exists and may not be replaced. Files of other attempts may
        remain, because their names contain other ids."""
        bucket, target = self._bucket, self.attempt.target
        listing = await bucket.listing(target)
        if self.attempt.replaces_export and await clear_export(bucket, target, listing):
            return
        if self.attempt.kind == "replacement" and MARKER in listing.files:
            await self._check_use(listing)
            self._replaced = await self._look_at_replaced(listing.files)
            return
        if self.attempt.kind == "replacement" and not self.attempt.in_run:
            await collect_orphans(bucket, target, ABANDONED_AFTER_S)
            listing = await bucket.listing(target)
        taken = [name for name in listing.files if not self._carries_id or id_of(name) is None]
        if listing.directories or taken:
            await self._check_use(listing)
            raise CheckpointExistsError(
                f"{bucket.url}/{target} is not empty: files of saves, or directories, are below it; choose another name"
            )
        if self.attempt.kind == "file":
            try:
                await bucket.size(target)
            except FileNotFoundError:
                return
            raise CheckpointExistsError(refusal("file", "create file", f"{bucket.url}/{target}"))

    async def _check_use(self, listing: Listing) -> None:
        """Raise ``CheckpointExistsError`` if this attempt may not take what is at its target."""
        attempt, bucket = self.attempt, self._bucket
        use: Use = "overwrite" if attempt.kind == "replacement" else "export" if attempt.replaces_export else "create"
        if refused := refusal(await look_at(bucket, attempt.target, listing), use, f"{bucket.url}/{attempt.target}"):
            raise CheckpointExistsError(refused)

    async def _look_at_replaced(self, listed: Collection[str]) -> _Replaced:
        bucket, save_id = self._bucket, self.attempt.save_id
        check_replaces(bucket)
        name = f"{self.attempt.target}/{MARKER}"
        if NOTE in listed:
            raise being_removed(f"{bucket.url}/{self.attempt.target}")
        try:
            # After the listing, and the id after the version. A save reads the version before it writes its first file.
            # So each save whose files are in the listing has read this version or an older one, and none of them can
            # commit once this one has: that is why their files may be deleted without a look at a clock or a lease.
            version = await bucket.version(name)
            marked_id = await self._marked_id(name)
        except FileNotFoundError as error:
            raise CheckpointExistsError(f"{bucket.url}/{name} was removed meanwhile") from error
        if not await bucket.compares_versions(self.path_of(self.committed_name("manifest")), version):
            raise UnsupportedError(f"{_no_conditions(bucket)}: it puts what it was asked to put on a condition only")
        ids = {owner for file in listed if (owner := owner_of(file)) is not None}
        if marked_id is not None:
            ids.add(marked_id)
        return _Replaced(version, frozenset(ids - {save_id}), frozenset(filter(is_plain_shard, listed)))

    async def _marked_id(self, name: str) -> str | None:
        """Return the id of the save that wrote this marker; None if it is damaged."""
        try:
            marker = await self._bucket.marker(name)
        except CorruptCheckpointError:
            return None
        if marker is None:
            raise CheckpointExistsError(
                f"{self._bucket.url}/{self.attempt.target} was not written by sidestream, so its files cannot be "
                "distinguished from others on object storage: remove() it first, or save to a new prefix"
            )
        return marker.save_id

    def check_not_overtaken(self) -> None:
        LoopCall(self._check_not_overtaken).result(f"looking at {self.attempt.target}")

    async def _check_not_overtaken(self) -> None:
        replaced, name = self._replaced, f"{self.attempt.target}/{MARKER}"
        if replaced is None:
            return
        try:
            unchanged = await self._bucket.version(name) == replaced.version
        except FileNotFoundError:
            unchanged = False
        if not unchanged:
            raise self._bucket.overtaken(name)

    def _send_whole(self, name: str, body: Body, stop: Stop) -> None:
        bucket = self._bucket
        key = bucket.key(name)
        try:
            # A name with the id of the save belongs to this attempt alone, so it is put without a condition, and
            # repeating the request does no harm. Any other name may be taken by another writer meanwhile. It is
            # created, and compared if it exists.
            content = _in_one_piece(body, stop)
            if self._carries_id:
                LoopCall(lambda: bucket.put(name, content)).result(f"writing {key}", stop)
                return
            creation = LoopCall(lambda: bucket.create(name, content, whole=True))
            self._begun.add(name)  # before the result: after a cancel the object may have been created
            try:
                # A put that was sent is not cancelled at once: it may reach the storage after the objects of this
                # attempt have been deleted.
                if not creation.result(f"writing {key}", stop, _SENT_S):
                    self._begun.discard(name)  # another writer may have created it, so a failed save keeps it
            except CheckpointExistsError:
                self._begun.discard(name)
                raise
        finally:
            for part in body.parts:
                part.release()

    def _send_parts(self, name: str, body: Body, stop: Stop) -> None:
        url = f"{self._bucket.url}/{name}"
        try:
            self._bucket.upload(name, body, stop)
        except SidestreamError:
            raise
        except Exception as error:
            failure = translated(error, "uploading", url)
            if isinstance(failure, FileNotFoundError):
                failure = StorageError(errno.ENOENT, "the bucket, or the upload, is not there", url)
            raise failure from error

    def put(self, name: str, content: bytes, stop: Stop | None = None) -> None:
        bucket = self._bucket
        self._sizes[name] = len(content)
        LoopCall(lambda: bucket.put(self.path_of(name), memoryview(content))).result(
            f"writing {self._shown(name)}", stop
        )

    def _complete(self, files: CommitFiles, stop: Stop) -> None:
        if files:
            *others, last = files
            for name in others:
                self.put(name, _joined(files[name]), stop)
            self._last = last, _joined(files[last])
        LoopCall(self._check_complete).result(f"looking at {self.attempt.target}", stop)

    def _shown(self, name: str) -> str:
        return f"{self.attempt.name}/{name}"

    def wrote(self, sizes: Mapping[str, int]) -> None:
        self._begun.update(map(self.path_of, sizes))
        self._sizes.update(sizes)

    def expect(self, sizes: Mapping[str, int]) -> None:
        self._sizes.update(sizes)

    def clear(self, names: Sequence[str]) -> None:
        bucket, target = self._bucket, self.attempt.target
        files = [self.committed_name(name) for name in names]
        self._begun.update(self.path_of(file) for file in files)
        LoopCall(lambda: bucket.delete(target, files)).result(f"removing files of {self.attempt.name}")

    # --- the end ---

    def _make_visible(self) -> None:
        """Put the marker, create-only or on the condition that the marker that it replaces still has the same
        version."""
        if self._last is not None:  # otherwise the last of the files has made the attempt visible
            name, content = self._last
            name = f"{self.attempt.target}/{name}"
            creation = LoopCall(lambda: self._create(name, content))
            try:
                with time_limit(Deadline.after(current_deadline().remaining_s() + _SENT_S)):
                    creation.result(f"publishing {name}")
            except SidestreamError as error:
                if creation.cancelled:  # at its deadline, or because the program ends: the request may still arrive
                    mark_stuck(error)
                raise
        self._forget()

    def _forget(self) -> None:
        """Free what the transaction keeps in memory, because the result of the save may refer to the transaction."""
        self._made, self._last = False, None
        self._sizes.clear()
        self._begun.clear()

    async def _create(self, name: str, content: bytes) -> None:
        try:
            if self._replaced is None:
                await self._bucket.create(name, content)
            else:
                await self._bucket.replace(name, content, self._replaced.version)
        except Exception as error:
            if is_uncertain(error) and not isinstance(error, CheckpointExistsError):
                mark_stuck(error)  # the request may still arrive
            raise

    async def _check_complete(self) -> None:
        """Raise ``StorageError`` if a file is missing or has another size.

        A file is missing if another process has deleted the attempt because it seemed abandoned. It has another size if
        the client has lost a part of it."""
        bucket, target = self._bucket, self.attempt.target
        listing = await bucket.listing(self._directory)
        if NOTE in listing.files:
            raise being_removed(f"{bucket.url}/{target}")
        for name, nbytes in self._sizes.items():
            info = listing.files.get(name)
            if info is None or info.nbytes != nbytes:
                await self._check_not_overtaken()
                self._check_export_not_overtaken(listing)
                found = "is gone" if info is None else f"has {info.nbytes} bytes"
                raise StorageError(
                    errno.EIO,
                    f"{name} {found}, {nbytes} were written: the attempt was removed, or the storage lost a part",
                    bucket.url,
                )

    def _check_export_not_overtaken(self, listing: Listing) -> None:
        """Raise ``CheckpointExistsError`` if another export has replaced this one, which is visible once the file that
        readers look for is written. The other export deletes that file first: a shard alone was lost by the storage."""
        if not self.attempt.replaces_export:
            return
        first = {name: nbytes for name, nbytes in self._sizes.items() if name in READ_FIRST}
        if all((info := listing.files.get(name)) and info.nbytes == nbytes for name, nbytes in first.items()):
            return
        self._begun.clear()  # files of these names are those of the other export, and are not deleted
        raise CheckpointExistsError(
            f"{self._bucket.url}/{self.attempt.target} was replaced meanwhile: another export was written to it"
        )

    def discard_replaced(self) -> None:
        replaced, self._replaced = self._replaced, None
        if replaced is not None:
            LoopCall(lambda: self._collect(replaced)).result(f"removing what {self.attempt.target} was before")

    async def _collect(self, replaced: _Replaced) -> None:
        bucket, target = self._bucket, self.attempt.target
        listing = await bucket.listing(target)
        # A new listing: between the first one and the commit, losers may have written further files under ids that are
        # known to have lost.
        old = [name for name in listing.files if name in replaced.shards or owner_of(name) in replaced.ids]
        await bucket.delete(target, old)

    @property
    def _directory(self) -> str:
        target = self.attempt.target
        return (target.rpartition("/")[0] or ".") if self.attempt.kind == "file" else target

    def discard(self) -> None:
        with time_limit(Deadline.after(_CLEAN_UP_S)):
            LoopCall(self._discard).result(f"removing {self.attempt.name}")

    async def _discard(self) -> None:
        if not self._may_discard() or not self._made:
            return
        if self._carries_id:
            await self._bucket.delete_of(self.attempt.target, self.attempt.save_id)
        else:
            await self._delete_begun()
        self._forget()

    async def _delete_begun(self) -> None:
        """Delete the files that this attempt wrote under names without its id. If another writer has committed files
        with these names, delete none."""
        bucket, attempt = self._bucket, self.attempt
        shared = attempt.kind in ("files", "joined_files")
        committed = False
        if shared:
            listing = await bucket.listing(attempt.target)
            committed = MARKER in listing.files
            with suppress(CheckpointExistsError):
                self._check_export_not_overtaken(listing)
        await bucket.delete("", () if committed else sorted(self._begun))
        await bucket.forget(attempt.target)


def check_replaces(bucket: Bucket) -> None:
    """Raise ``UnsupportedError`` if the storage cannot replace an object on the condition of its version."""
    if not bucket.capabilities.versions:
        raise UnsupportedError(_no_conditions(bucket))


def _check_promises(bucket: Bucket) -> None:
    name, can = bucket.engine.name, bucket.capabilities
    if not can.listing:
        raise InvalidOptionError(f"{bucket.url} can be read and not written: save to object storage or a directory")
    if not can.create_only and name not in _warned:
        _warned.add(name)
        emit(
            GuaranteeLost(
                bucket.url,
                f"{name} has no conditional put: of two saves to one name at the same time both may report "
                "success, and the marker of the later one stays",
            )
        )


def _no_conditions(bucket: Bucket) -> str:
    return (
        f"{bucket.url}: overwrite=True needs a storage and a client with puts on a condition (If-Match), such as S3, "
        f"Google Cloud Storage and Azure through obstore, and {bucket.engine.name} has none: save to a new prefix, and "
        "remove() the old one afterwards"
    )


def _joined(pieces: Sequence[bytes]) -> bytes:
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _in_one_piece(body: Body, stop: Stop) -> memoryview:
    """Return the content of ``body`` as one buffer. Each part is released when it has been copied, because all parts
    together may exceed the budget of a stager."""
    if len(body.parts) == 1:
        return body.parts[0].take(stop)
    content, filled = bytearray(body.nbytes), 0
    for part in body.parts:
        piece = part.take(stop)
        content[filled : filled + piece.nbytes] = piece
        filled += piece.nbytes
        del piece
        part.release()
    return memoryview(content).toreadonly()

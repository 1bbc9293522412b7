"""``LoadRequest``, the options of a load, and the results of loads and verifications."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from .._format.checksum import DigestCheck, digest_check
from .._format.records import Manifest
from .._layout.values import Allowed, allowed_types
from .._runtime.public import Displayed, Table, public, readable_bytes, shortened
from ..errors import SidestreamError
from ..options import STRICT, LoadOptions, Tolerance

__all__ = ["Damage", "LoadReport", "LoadRequest", "Loaded", "PassedOver", "VerifyReport", "report_of"]


@public
@dataclass(frozen=True, slots=True)
class PassedOver:
    """A damaged step that ``restore`` did not take.

    Attributes:
        step: The number of the step.
        generation: Its generation.
        error: What is wrong with it.
    """

    step: int
    generation: int
    error: SidestreamError


@public
@dataclass(frozen=True, slots=True, repr=False)
class LoadReport(Displayed):
    """The result of a load.

    With ``LoadOptions(names=)`` the names are those of the target, but ``not_requested`` and ``unexpected`` are names
    in the checkpoint.

    Attributes:
        url: The checkpoint that was loaded.
        save_id: The id of the save that wrote it. Empty if another writer did.
        step: Its step, as ``Checkpoint.step``.
        generation: Its generation, from 1.
        nbytes: How many bytes were read.
        loaded: The FQNs that were loaded, in order.
        not_requested: Names in the checkpoint outside of the top-level keys of the target.
        unverified: FQNs of which some bytes had no checksum. Only files of other writers lack them.
        missing: Names of the target that the checkpoint lacks. Their tensors and values were left as they were.
        unexpected: Names in the checkpoint that the target lacks, inside of its top-level keys.
        cast: Tensors that were converted from another dtype.
        digest: With ``verify="always"``, whether the digests in the checkpoint were compared too. None if it has none.
        passed_over: Damaged steps in whose place ``restore`` took this one, newest first.
        leased: True if ``restore`` had a lease on the step while it read it. It has none where this process may not
            write; another process could then have deleted the step meanwhile.
    """

    url: str
    save_id: str
    step: int | None
    generation: int
    nbytes: int
    loaded: tuple[str, ...]
    not_requested: tuple[str, ...]
    unverified: tuple[str, ...]
    missing: tuple[str, ...]
    cast: tuple[str, ...]
    unexpected: tuple[str, ...]
    digest: DigestCheck | None = None
    passed_over: tuple[PassedOver, ...] = ()
    leased: bool = False

    def _summary(self) -> str:
        step = "" if self.step is None else f", step {self.step}"
        accepted = [
            f"{len(names):,} {what}"
            for what, names in (("missing", self.missing), ("unexpected", self.unexpected), ("cast", self.cast))
            if names
        ]
        return ", ".join([f"{self.url}{step}: {len(self.loaded):,} loaded, {readable_bytes(self.nbytes)}", *accepted])

    def _table(self) -> Table:
        kinds = {
            "loaded": self.loaded,
            "missing": self.missing,
            "unexpected": self.unexpected,
            "cast": self.cast,
            "unverified": self.unverified,
            "not requested": self.not_requested,
        }
        rows = [[what, f"{len(names):,}", shortened(names)] for what, names in kinds.items() if names]
        return Table(("what", "count", "names"), rows, len(rows))


@dataclass(frozen=True, slots=True)
class Loaded:
    """The part of a ``LoadReport`` that the target knows."""

    loaded: tuple[str, ...]
    not_requested: tuple[str, ...]
    missing: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


def report_of(
    url: str, manifest: Manifest, digest: str | None, loaded: Loaded, nbytes: int, unverified: Collection[str]
) -> LoadReport:
    """Return the report of a load from ``url``. ``digest`` is the one that was compared, if any was."""
    return LoadReport(
        url=url,
        save_id=manifest.save_id,
        step=manifest.step,
        generation=manifest.generation,
        nbytes=nbytes,
        loaded=loaded.loaded,
        not_requested=loaded.not_requested,
        unverified=tuple(sorted(unverified)),
        missing=loaded.missing,
        cast=loaded.cast,
        unexpected=loaded.unexpected,
        digest=digest_check(digest),
    )


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """The options of a load, apart from its target.

    Raises:
        InvalidOptionError: ``safe_globals`` has something that is not a type.
    """

    options: LoadOptions
    tolerance: Tolerance = STRICT
    allowed: Allowed = field(init=False)
    """The types in ``safe_globals``, by the names under which checkpoints mention them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "allowed", allowed_types(self.options.safe_globals))


@public
@dataclass(frozen=True, slots=True)
class Damage:
    """A place of a checkpoint that is wrong.

    Attributes:
        message: What is wrong.
        file: The file, if it is known.
        fqn: The tensor or value, if it is known.
        offset: The byte in ``file``, if it is known.
    """

    message: str
    file: str | None = None
    fqn: str | None = None
    offset: int | None = None


@public
@dataclass(frozen=True, slots=True, repr=False)
class VerifyReport(Displayed):
    """The result of a verification.

    Attributes:
        url: The checkpoint.
        save_id: The id of the save that wrote it. Empty if another writer did.
        step: Its step, as ``Checkpoint.step``.
        generation: Its generation, from 1.
        nbytes: How many bytes were read.
        verified: The FQNs whose bytes were all compared and found right.
        unverified: The FQNs for which the writer left nothing to compare with (safetensors).
        damaged: The first thing that is wrong with each tensor, value or file.
        digest: Whether the digests in the checkpoint were compared in addition to its checksums. None if it has none.
        unreadable: Tensors of a kind that this version does not read (quantized ones, subclasses). Their bytes match
            the checksums of their writer, and nothing else was compared.
    """

    url: str
    save_id: str
    step: int | None
    generation: int
    nbytes: int
    verified: tuple[str, ...]
    unverified: tuple[str, ...]
    damaged: tuple[Damage, ...]
    digest: DigestCheck | None
    unreadable: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if no damage was found."""
        return not self.damaged

    def _summary(self) -> str:
        verdict = "ok" if self.ok else f"{len(self.damaged):,} damaged"
        unverified = f", {len(self.unverified):,} without checksums" if self.unverified else ""
        return f"{self.url}: {verdict}, {len(self.verified):,} verified{unverified}, {readable_bytes(self.nbytes)} read"

    def _table(self) -> Table:
        rows = ([one.fqn or "", one.file or "", one.message] for one in self.damaged)
        return Table(("name", "file", "damage"), rows, len(self.damaged))

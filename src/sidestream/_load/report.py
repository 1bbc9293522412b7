"""``LoadRequest``, the options of a load, and ``LoadReport``, its result."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from .._format.checksum import installed_digest
from .._format.records import Manifest
from .._layout.values import Allowed, allowed_types
from .._runtime.public import Displayed, Table, public, readable_bytes, shortened
from ..errors import SidestreamError
from ..options import STRICT, DigestCheck, LoadOptions, Tolerance


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


def digest_check(digest: str | None) -> DigestCheck | None:
    if digest is None:
        return None
    return "not installed" if installed_digest(digest) is None else "verified"

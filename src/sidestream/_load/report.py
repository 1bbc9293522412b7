"""What a load is asked for, and what it reports."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from .._format.digest import DigestCheck, digest_check
from .._format.records import Manifest
from .._layout.objects import Allowed
from .._runtime.public import public
from ..errors import InvalidOptionError, SidestreamError
from ..options import Names, Progress, Trust, Verify, check_choice, check_names, check_timeout, check_verify

__all__ = ["LoadOptions", "LoadReport", "Loaded", "PassedOver", "report_of"]


@public
@dataclass(frozen=True, slots=True)
class PassedOver:
    """A damaged step that ``restore`` did not take, and what is wrong with it."""

    step: int
    generation: int
    error: SidestreamError


@public
@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load did.

    ``loaded``: FQNs in order, and ``nbytes`` read for them. ``not_asked_for``: keys of the checkpoint outside the
    target. ``unverified``: of these some bytes had no checksum (only in files of other writers). ``digest``: with
    ``verify="always"``, whether the digests that the checkpoint carries were compared too; None if it has none. What
    ``strict=`` let pass: ``missing`` keys of the target were left as they are, tensors that were ``cast`` from another
    dtype, and ``ignored`` keys of the checkpoint inside the target's own. With ``names=`` the names are those of the
    state dict, but ``not_asked_for`` and ``ignored`` are names in the checkpoint.

    Of a ``restore``: the damaged steps that were ``passed_over`` for this one, newest first, and whether the step was
    ``leased`` while it was read; where this process may not write, it was not, and could have been deleted meanwhile.
    """

    url: str
    save_id: str
    step: int | None
    generation: int
    nbytes: int
    loaded: tuple[str, ...]
    not_asked_for: tuple[str, ...]
    unverified: tuple[str, ...]
    missing: tuple[str, ...]
    cast: tuple[str, ...]
    ignored: tuple[str, ...]
    digest: DigestCheck | None = None
    passed_over: tuple[PassedOver, ...] = ()
    leased: bool = False


@dataclass(frozen=True, slots=True)
class Loaded:
    """The part of a ``LoadReport`` that the target knows."""

    loaded: tuple[str, ...]
    not_asked_for: tuple[str, ...]
    missing: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()


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
        not_asked_for=loaded.not_asked_for,
        unverified=tuple(sorted(unverified)),
        missing=loaded.missing,
        cast=loaded.cast,
        ignored=loaded.ignored,
        digest=digest_check(digest),
    )


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The keywords of ``load``."""

    verify: Verify
    strict: frozenset[str]
    atomic: bool
    progress: Progress | None
    timeout_s: float
    allow: Allowed
    trust: Trust = "data"
    planner: Any = None
    names: Names | None = None

    def __post_init__(self) -> None:
        check_verify(self.verify)
        check_choice("trust", self.trust, Trust)
        check_timeout(self.timeout_s)
        check_names(self.names)
        if self.planner is not None and (self.strict or self.atomic):
            raise InvalidOptionError(
                "what may differ is for the planner to say: leave out strict= and atomic= beside it"
            )
        if self.planner is not None and self.names is not None:
            raise InvalidOptionError("names are for the planner to say: leave out names= beside it")

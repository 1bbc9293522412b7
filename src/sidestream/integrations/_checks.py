"""What a module of this package asks of its framework, when it is imported."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from sidestream import SaveOptions
from sidestream.errors import InvalidOptionError, MissingExtraError, UnsupportedError


def check_options(options: SaveOptions | None, slots: int) -> None:
    """Raise ``InvalidOptionError`` for options that saves with a stager do not take, and for a wrong number of
    slots."""
    if type(slots) is not int or slots < 1:
        raise InvalidOptionError(f"slots={slots!r} has to be a number of saves, at least 1")
    if options is not None and options.streaming:
        raise InvalidOptionError(
            "options=: streaming=True passes the state through memory of its own, and frameworks train on meanwhile: "
            "leave it out. A save then needs host memory for the whole state, and with slots=1 there is one at a time"
        )


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework, and the releases that were tested.

    Attributes:
        package: The distribution, as pip installs it.
        works: The releases that work, as pip takes them: ``">=2.6,<2.7"``.
        extra: The extra of sidestream that installs it.
    """

    package: str
    works: str
    extra: str

    @contextmanager
    def importing(self) -> Iterator[None]:
        """Import what is needed of the framework in the ``with`` block.

        Raises:
            MissingExtraError: A package is not installed.
            UnsupportedError: The framework is installed and has not one of the names.
        """
        try:
            yield
        except ImportError as error:
            top = (error.name or self.package).partition(".")[0]
            if type(error) is ModuleNotFoundError and error.name == top:
                raise MissingExtraError(
                    f'sidestream.integrations.{self.extra} needs {top}: pip install "sidestream[{self.extra}]"',
                    extra=self.extra,
                ) from error
            raise self.unsupported(str(error)) from error

    def check(self, owner: Any, **expected: tuple[str, ...]) -> None:
        """Raise ``UnsupportedError`` unless ``owner``, a class or module, has the functions in ``expected``, with
        exactly these parameters in this order, ``self`` left out."""
        for name, parameters in expected.items():
            function = inspect.getattr_static(owner, name, None)
            if function is None:
                raise self.unsupported(f"{owner.__name__} has no {name}")
            found = tuple(one for one in inspect.signature(getattr(owner, name)).parameters if one != "self")
            if found != parameters:
                raise self.unsupported(
                    f"{owner.__name__}.{name} takes ({', '.join(found)}), and not ({', '.join(parameters)})"
                )

    def check_attributes(self, owner: type, *names: str) -> None:
        """Raise ``UnsupportedError`` unless the constructor of ``owner`` sets the attributes ``names``."""
        instructions = dis.get_instructions(inspect.unwrap(owner.__init__))  # type: ignore[misc]
        found = {one.argval for one in instructions if one.opname == "STORE_ATTR"}
        if missing := [name for name in names if name not in found]:
            raise self.unsupported(f"{owner.__name__}.__init__ sets no {', '.join(missing)}")

    def unsupported(self, reason: str) -> UnsupportedError:
        """Return the error for a release in which something is not as it is needed."""
        try:
            release = metadata.version(self.package)
        except metadata.PackageNotFoundError:
            release = "of an unknown release"
        return UnsupportedError(
            f"{self.package} {release}: {' '.join(reason.split())}. sidestream.integrations.{self.extra} works with "
            f'{self.package}{self.works}: pip install "{self.package}{self.works}"'
        )

"""What modules of sidestream.integrations ask of their framework at import."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sidestream import SaveOptions
from sidestream.errors import InvalidOptionError, MissingExtraError, UnsupportedError
from sidestream.integrations._checks import Framework, check_options

PYTEST = Framework("pytest", ">=9,<10", extra="lightning")


class Saves:
    def save(self, state: object, path: str, *, step: int) -> None: ...

    @staticmethod
    def remove(path: str) -> None: ...


def test_the_package_imports_no_framework() -> None:
    frameworks = (
        "accelerate",
        "lightning",
        "lightning_fabric",
        "pytorch_lightning",
        "ray",
        "torchtitan",
        "transformers",
    )
    code = (
        f"import sys, sidestream; sidestream.integrations; print([one for one in {frameworks} if one in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "[]\n"


def test_a_framework_that_is_not_installed() -> None:
    advice = r'needs lightening: pip install "sidestream\[lightning\]"'
    with pytest.raises(MissingExtraError, match=advice) as missing, PYTEST.importing():
        import lightening.plugins  # noqa: F401
    assert missing.value.extra == "lightning"


@pytest.mark.parametrize("statement", ["from pytest import lightening", "import pytest.lightening"])
def test_a_name_that_has_moved(statement: str) -> None:
    advice = r'works with pytest>=9,<10: pip install "pytest>=9,<10"'
    with pytest.raises(UnsupportedError, match=rf"pytest \d.*lightening.*{advice}"), PYTEST.importing():
        exec(statement)


def test_parameters_that_have_changed() -> None:
    PYTEST.check(Saves, save=("state", "path", "step"), remove=("path",))
    with pytest.raises(UnsupportedError, match=r"Saves.save takes \(state, path, step\), and not \(state, path\)"):
        PYTEST.check(Saves, save=("state", "path"))
    with pytest.raises(UnsupportedError, match="Saves has no load"):
        PYTEST.check(Saves, load=("path",))
    with pytest.raises(NotImplementedError):
        PYTEST.check(pytest, missing=())


class Prepares:
    def __init__(self, model: object) -> None:
        self._models = [model]
        self._other = self._models


def test_attributes_that_have_moved() -> None:
    PYTEST.check_attributes(Prepares, "_models", "_other")
    with pytest.raises(UnsupportedError, match=r"Prepares.__init__ sets no _loaders, model\. .*pytest>=9,<10"):
        PYTEST.check_attributes(Prepares, "_models", "_loaders", "model")


def test_options_that_are_refused() -> None:
    check_options(None, 1)
    check_options(SaveOptions(writer="process"), 2)
    with pytest.raises(InvalidOptionError, match=r"streaming=True.*leave it out.*slots=1"):
        check_options(SaveOptions(streaming=True), 2)
    for slots in (0, True, 1.5):
        with pytest.raises(InvalidOptionError, match=f"slots={slots}"):
            check_options(None, slots)  # type: ignore[arg-type]

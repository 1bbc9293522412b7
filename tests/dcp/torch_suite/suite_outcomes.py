"""A pytest plugin for ``nox -s dcp_suite``. It chooses the tests, marks the known differences and counts what passes.

``--suite-passed FILE`` writes the names of the tests that passed. ``--suite-chosen FILE`` runs only the tests of such a
list. A test that begins with a ``--suite-differs NAME`` has to fail: the list of differences stays exact in this way.
"""

from __future__ import annotations

import inspect
from collections import Counter
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--suite-passed", type=Path)
    parser.addoption("--suite-chosen", type=Path)
    parser.addoption("--suite-differs", action="append", default=[])


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Outcomes(config))


def _lacks_gpus(test: Any) -> bool:
    """The decorator itself starts a process for each rank and skips there, which takes minutes for a file."""
    if "@skip_if_lt_x_gpu(" not in inspect.getsource(inspect.unwrap(test)):
        return False
    import torch

    return torch.accelerator.device_count() == 0


class _Outcomes:
    def __init__(self, config: pytest.Config) -> None:
        self._options = config.option
        self._names: list[str] = []
        self._passed: set[str] = set()
        self._failed: set[str] = set()

    @pytest.hookimpl(trylast=True)  # after -k and --deselect
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if self._options.suite_chosen is not None:
            chosen = set(self._options.suite_chosen.read_text().splitlines())
            config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
            items[:] = [item for item in items if item.nodeid in chosen]
        for item in items:
            if item.nodeid.startswith(tuple(self._options.suite_differs)):
                item.add_marker(pytest.mark.xfail(strict=True, reason="differs on purpose"))
            elif isinstance(item, pytest.Function) and _lacks_gpus(item.function):
                item.add_marker(pytest.mark.skip(reason="needs GPUs"))
        self._names = [item.nodeid for item in items]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)
        elif report.when == "call" and report.passed:
            self._passed.add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        passed = self._passed - self._failed  # a subtest or a teardown can fail after the test has passed
        if self._options.suite_passed is not None:
            self._options.suite_passed.write_text("".join(f"{name}\n" for name in sorted(passed)))
        files = Counter(name.partition("::")[0] for name in passed)
        terminalreporter.section("passed, by file")
        for file, number in Counter(name.partition("::")[0] for name in self._names).items():
            terminalreporter.line(f"{file}: {files[file]} of {number}")

"""On which NUMA node staging memory lies, and how much of it a rank takes."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_device import FakeDriver

from sidestream._runtime.memory_maps import address_of
from sidestream._runtime.threads import Deadline, Stop
from sidestream._staging import AsyncStager, placement
from sidestream._staging.arena import Arena, MappedMemory
from sidestream._staging.placement import bind, pci_address, preferred_node
from sidestream._staging.ring import Slot
from sidestream._staging.stager import share_of_memory

MIB = 1 << 20
DEVICE = torch.device("cuda", 0)
ADDRESS = "0001:3b:00.0"


@pytest.fixture
def machine(tmp_path: Path) -> Callable[..., Path]:
    """Returns a function that makes what ``/sys`` shows of so many nodes, and of a device on one of them."""

    def made(nodes: int, node: str | None = None) -> Path:
        for number in range(nodes):
            (tmp_path / f"devices/system/node/node{number}").mkdir(parents=True)
        if node is not None:
            device = tmp_path / "bus/pci/devices" / ADDRESS
            device.mkdir(parents=True)
            (device / "numa_node").write_text(f"{node}\n")
        return tmp_path

    return made


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """What is bound: address, bytes and node. There is one CUDA device, at ``ADDRESS``."""
    calls: list[tuple[int, int, int]] = []
    monkeypatch.setattr(placement, "bind", lambda *call: calls.append(call))
    properties = SimpleNamespace(pci_domain_id=1, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return calls


@pytest.mark.parametrize(
    ("nodes", "node", "expected"),
    [
        (2, "1", 1),
        (2, "0", 0),
        (12, "10", 10),
        (1, "0", None),
        (0, "0", None),
        (2, "-1", None),
        (2, "2", None),
        (2, "what", None),
        (2, None, None),
    ],
)
def test_the_node_of_a_device(machine: Callable[..., Path], nodes: int, node: str | None, expected: int | None) -> None:
    assert preferred_node(ADDRESS, machine(nodes, node)) == expected


def test_the_address_of_a_device(bound: object, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pci_address(DEVICE) == ADDRESS
    for other in (torch.device("xpu", 0), torch.device("cpu"), "cuda:0", 0):
        assert pci_address(other) is None
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace())
    assert pci_address(DEVICE) is None

    def broken(device: object) -> None:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(torch.cuda, "get_device_properties", broken)
    assert pci_address(DEVICE) is None


def lease(arena: Arena, nbytes: int) -> Any:
    return arena.lease(nbytes, deadline=Deadline.after(60), stop=Stop())


def test_segments_for_a_device_are_bound_and_others_are_not(
    machine: Callable[..., Path], bound: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "_SYSFS", machine(2, "1"))
    arena = Arena(64 * MIB, segment_bytes=MIB)
    leases = [lease(arena, 2 * MIB)]
    assert bound == []
    driver: Any = FakeDriver()
    arena.pin(driver, DEVICE)
    leases.append(lease(arena, 4 * MIB))
    leases[1].register(0)
    assert bound == [(leases[1].address, 4 * MIB, 1)]
    assert driver.registered[leases[1].address] == 4 * MIB
    arena.close()


@pytest.mark.parametrize(("nodes", "expected"), [(2, [1]), (1, [])])
def test_a_slot_is_bound_once(
    machine: Callable[..., Path],
    bound: list[tuple[int, int, int]],
    monkeypatch: pytest.MonkeyPatch,
    nodes: int,
    expected: list[int],
) -> None:
    monkeypatch.setattr(placement, "_SYSFS", machine(nodes, "1"))
    slot, driver = Slot(MIB), FakeDriver()
    for _ in range(2):
        slot.pin(driver, DEVICE)  # type: ignore[arg-type]
    assert [(nbytes, node) for _, nbytes, node in bound] == [(MIB, node) for node in expected]


def policy(address: int) -> str:
    """The policy of the mapping at ``address``, as the kernel names it."""
    lines = [line.split() for line in Path("/proc/self/numa_maps").read_text().splitlines()]
    return [words[1] for words in lines if int(words[0], 16) <= address][-1]


@pytest.mark.parametrize("flags", [mmap.MAP_PRIVATE, mmap.MAP_SHARED])
def test_the_system_call(flags: int) -> None:
    memory = MappedMemory(-1, 4 * MIB, flags=flags | mmap.MAP_ANONYMOUS)
    address = address_of(memory)
    if not Path("/proc/self/numa_maps").exists() or not bind(address, len(memory), 0):
        pytest.skip("the system binds no memory")
    assert policy(address) == "prefer:0"
    memory[:] = b"a" * len(memory)
    assert not bind(address, len(memory), 1023)


def test_no_call_where_its_number_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    monkeypatch.setattr(placement, "_MBIND", {})
    assert not bind(address_of(memory), len(memory), 0)


@pytest.mark.parametrize(
    ("ranks", "divisor"), [("1", 1), ("4", 4), ("0", 1), ("-2", 1), ("", 1), ("eight", 1), (None, 1)]
)
def test_the_ranks_of_a_host_divide_the_default_budget(
    ranks: str | None, divisor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    whole = share_of_memory()
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert share_of_memory() == whole // divisor
    for budget_bytes, expected in ((None, whole // divisor), (MIB, MIB)):
        stager = AsyncStager(budget_bytes=budget_bytes)
        assert stager.statistics().budget_bytes == expected
        stager.close()

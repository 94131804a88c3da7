from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from spottrain.cloud.errors import CloudError, VmNotFoundError
from spottrain.cloud.local.market import MarketEvent, MarketSpec
from spottrain.cloud.provider import AgentBootstrap, VmState

if TYPE_CHECKING:
    from tests.unit.cloud.conftest import Cloud, Machine

MakeCloud = Callable[..., "Cloud"]

BOOTSTRAP = AgentBootstrap(manager_url="https://manager", ca_pem="ca", token="secret")


def running(cloud: Cloud, machine: Machine) -> int:
    """Pid of the cloud's process, which must run."""
    pid = machine.cloud(cloud.folder)
    assert pid is not None
    return pid


def test_an_agent_finds_what_it_must_know_in_a_folder_of_its_own(cloud: Cloud) -> None:
    (vm,) = cloud.launch()
    said = cloud.boot(vm)
    folder = cloud.folder / "vms" / vm.vm_id
    assert said["cwd"] == str(folder)
    assert said["environ"]["SPOTTRAIN_VM"] == f"{cloud.job}/{vm.vm_id}"
    assert said["environ"]["OMP_NUM_THREADS"] == "1"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "agent.json").stat().st_mode & 0o777 == 0o600
    assert json.loads((folder / "agent.json").read_text()) == {
        "vm_id": vm.vm_id,
        "manager_url": "https://manager",
        "ca_pem": "ca",
        "token": "secret",
        "private_address": "127.0.0.1",
        "num_slots": 1,
        "notices": {
            "kind": "local",
            "socket": str(cloud.folder / "cloud.sock"),
            "vm_id": vm.vm_id,
        },
    }


def test_an_agent_is_started_once(cloud: Cloud, machine: Machine) -> None:
    (vm,) = cloud.launch()
    cloud.boot(vm)
    before = machine.marked(cloud.job)
    cloud.client().start_agent(vm.vm_id, BOOTSTRAP)
    assert machine.marked(cloud.job) == before


def test_a_vm_ends_with_its_agent_and_leaves_only_logs(
    cloud: Cloud, machine: Machine
) -> None:
    vm, other = cloud.launch(2)
    agent, *children, escaped = cloud.boot(vm)["pids"]
    folder = cloud.folder / "vms" / vm.vm_id
    (folder / "work").mkdir()
    (folder / "work" / "memory").write_text("weights")
    (folder / "supervisor.log").write_text("log")
    os.kill(escaped, signal.SIGKILL)
    os.kill(agent, signal.SIGKILL)
    for child in children:
        machine.await_exit(child)
    cloud.client().terminate([vm.vm_id])  # returns once the VM has ended
    assert cloud.vm(vm).state == VmState.TERMINATED
    assert cloud.vm(other).state == VmState.RUNNING
    assert sorted(p.name for p in folder.iterdir()) == ["agent.log", "supervisor.log"]


@pytest.mark.parametrize("how", ["terminate", "kill"])
def test_ending_a_vm_leaves_none_of_its_processes(
    cloud: Cloud, machine: Machine, how: str
) -> None:
    vm, other = cloud.launch(2)
    pids, others = cloud.boot(vm)["pids"], cloud.boot(other)["pids"]
    if how == "terminate":
        cloud.client().terminate([vm.vm_id])
    else:
        hit = cloud.client().inject(MarketEvent(at_s=0, kind="kill"))
        if hit == (other.vm_id,):
            vm, other, pids, others = other, vm, others, pids
    assert not any(machine.runs(pid) for pid in pids)
    assert all(machine.runs(pid) for pid in others)
    assert cloud.vm(vm).state == VmState.TERMINATED
    ended_at = cloud.vm(vm).ended_at
    assert ended_at is not None
    assert ended_at >= vm.launched_at
    assert cloud.vm(other).ended_at is None


def test_a_silent_vm_stands_still_and_is_said_to_run(
    cloud: Cloud, machine: Machine
) -> None:
    (vm,) = cloud.launch()
    pids = cloud.boot(vm)["pids"]
    assert cloud.client().inject(MarketEvent(at_s=0, kind="silence")) == (vm.vm_id,)
    assert {machine.state(pid) for pid in pids} == {"T"}
    assert cloud.vm(vm).state == VmState.RUNNING
    assert cloud.client().offers()[0].available == 2
    cloud.client().terminate([vm.vm_id])
    assert not any(machine.runs(pid) for pid in pids)
    assert cloud.client().offers()[0].available == 2


def test_a_vm_that_fell_silent_before_its_agent_started_stays_silent(
    cloud: Cloud, machine: Machine
) -> None:
    (vm,) = cloud.launch()
    cloud.client().inject(MarketEvent(at_s=0, kind="silence"))
    cloud.client().start_agent(vm.vm_id, BOOTSTRAP)
    assert machine.marked(cloud.job) == []


def test_on_demand_vms_stay(cloud: Cloud, machine: Machine) -> None:
    (vm,) = cloud.launch(spot=False)
    pids = cloud.boot(vm)["pids"]
    assert cloud.client().inject(MarketEvent(at_s=0, kind="kill", count=9)) == ()
    assert all(machine.runs(pid) for pid in pids)


def test_capacity_that_was_taken_comes_back_by_itself(cloud: Cloud) -> None:
    cloud.launch(3)
    cloud.client().inject(MarketEvent(at_s=0, kind="kill", return_after_s=0.01))
    noticed = cloud.client().inject(MarketEvent(at_s=0, kind="notice", lead_s=0.2))
    process = threading.Event()
    while cloud.client().offers()[0].available == 0:
        process.wait(0.01)
    assert len(noticed) == 1
    assert len(cloud.launch(1)) == 1


def test_the_script_is_played(make_cloud: MakeCloud, machine: Machine) -> None:
    zones = make_cloud().market.zones
    script = MarketSpec(
        zones=zones,
        events=(
            MarketEvent(at_s=0, kind="price", zone="a", usd_per_hour=0.25),
            MarketEvent(at_s=0, kind="capacity", zone="a", count=5),
        ),
        kills_per_hour=20 * 3600,
    )
    cloud = make_cloud(market=script)
    (vm,) = cloud.launch()
    assert vm.offer.usd_per_hour == 0.25
    cloud.client().start_agent(vm.vm_id, BOOTSTRAP) if cloud.vm(vm).ended_at else None
    assert vm.offer.available == 5

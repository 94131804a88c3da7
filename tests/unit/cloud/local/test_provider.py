from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.local_cloud import bill

from spottrain.cloud.local import provider as local_provider
from spottrain.cloud.local.market import MarketEvent, MarketSpec
from spottrain.cloud.local.provider import LocalProvider
from spottrain.cloud.port.errors import CloudError, VmNotFoundError
from spottrain.cloud.port.provider import AgentBootstrap, Vm, VmState
from spottrain.codec import encode

if TYPE_CHECKING:
    from tests.unit.cloud.conftest import Cloud, Machine

MakeCloud = Callable[..., "Cloud"]

BOOTSTRAP = AgentBootstrap(manager_url="https://manager", ca_pem="ca", token="secret")


def running(cloud: Cloud, machine: Machine) -> int:
    """Pid of the cloud's process, which must run."""
    pid = machine.cloud(cloud.folder)
    assert pid is not None
    return pid


def test_a_vm_has_the_lowest_place_on_this_machine_that_is_free(cloud: Cloud) -> None:
    def place_of(vm: Vm) -> int:
        cloud.boot(vm)
        settings = cloud.folder / "vms" / vm.vm_id / "agent.json"
        return int(json.loads(settings.read_text())["place"])

    first, second = cloud.launch(2)
    assert [place_of(first), place_of(second)] == [0, 1]
    cloud.client().terminate([first.vm_id])
    (third,) = cloud.launch()
    assert place_of(third) == 0


def test_an_agent_gets_its_settings_in_its_own_folder(cloud: Cloud) -> None:
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
        "slot_memory_bytes": vm.offer.gpu_memory_bytes,
        "place": 0,
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


def test_an_agent_of_other_software_is_replaced_on_the_same_vm(
    cloud: Cloud, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (vm,) = cloud.launch()
    before = cloud.boot(vm)["pids"]
    module = "spottrain.version.software_version"
    monkeypatch.setattr(module, lambda: "2")
    cloud.client().start_agent(vm.vm_id, BOOTSTRAP)
    assert not any(machine.runs(pid) for pid in before)
    machine.eventually(lambda: bool(machine.marked(cloud.job)))
    assert cloud.vm(vm).state == VmState.RUNNING


def test_a_vm_ends_with_its_agent_and_leaves_only_logs(cloud: Cloud, machine: Machine) -> None:
    vm, other = cloud.launch(2)
    agent, *children, _ = cloud.boot(vm)["pids"]
    folder = cloud.folder / "vms" / vm.vm_id
    (folder / "work").mkdir()
    (folder / "work" / "memory").write_text("weights")
    (folder / "supervisor.log").write_text("log")
    os.kill(agent, signal.SIGKILL)
    for child in children:
        machine.await_exit(child)
    cloud.client().terminate([vm.vm_id])  # returns once the VM has ended
    assert cloud.vm(vm).state == VmState.TERMINATED
    assert cloud.vm(other).state == VmState.RUNNING
    assert sorted(p.name for p in folder.iterdir()) == ["agent.log", "supervisor.log"]


@pytest.mark.parametrize("how", ["terminate", "kill"])
def test_ending_a_vm_leaves_none_of_its_processes(cloud: Cloud, machine: Machine, how: str) -> None:
    vm, other = cloud.launch(2)
    pids, others = cloud.boot(vm)["pids"], cloud.boot(other)["pids"]
    if how == "terminate":
        cloud.client().terminate([vm.vm_id])
    else:
        hit = cloud.hit("kill")
        if hit == (other.vm_id,):
            vm, other, pids, others = other, vm, others, pids
    assert not any(machine.runs(pid) for pid in pids)
    assert all(machine.runs(pid) for pid in others)
    assert cloud.vm(vm).state == VmState.TERMINATED
    ended_at_s = cloud.vm(vm).ended_at_s
    assert ended_at_s is not None
    assert ended_at_s >= vm.launched_at_s
    assert cloud.vm(other).ended_at_s is None


def test_a_silent_vm_is_stopped_but_listed_as_running(cloud: Cloud, machine: Machine) -> None:
    (vm,) = cloud.launch()
    pids = cloud.boot(vm)["pids"]
    assert cloud.hit("silence") == (vm.vm_id,)
    assert {machine.state(pid) for pid in pids} == {"T"}
    assert cloud.vm(vm).state == VmState.RUNNING
    assert cloud.client().offers()[0].available == 2
    cloud.client().terminate([vm.vm_id])
    assert not any(machine.runs(pid) for pid in pids)
    assert cloud.client().offers()[0].available == 2


def test_a_slow_vm_stops_and_goes_on_all_the_time_and_can_still_be_ended(
    cloud: Cloud, machine: Machine
) -> None:
    vm, other = cloud.launch(2)
    pids, others = cloud.boot(vm)["pids"], cloud.boot(other)["pids"]
    if cloud.hit("slow", factor=4.0) == (other.vm_id,):
        vm, pids, others = other, others, pids
    for _ in range(5):
        machine.eventually(lambda: machine.state(pids[0]) == "T")
        assert "T" not in {machine.state(pid) for pid in others}
        machine.eventually(lambda: machine.state(pids[0]) != "T")
    assert cloud.client().offers()[0].available == 1
    cloud.client().terminate([vm.vm_id])
    assert not any(machine.runs(pid) for pid in pids)


def test_a_slow_vm_that_falls_silent_stays_stopped(cloud: Cloud, machine: Machine) -> None:
    (vm,) = cloud.launch()
    cloud.hit("slow", factor=2.0)
    pids = cloud.boot(vm)["pids"]  # found although it came later
    machine.eventually(lambda: machine.state(pids[0]) == "T")
    cloud.hit("silence")
    for _ in range(100):
        assert {machine.state(pid) for pid in pids} == {"T"}


def test_a_vm_that_fell_silent_before_its_agent_started_stays_silent(
    cloud: Cloud, machine: Machine
) -> None:
    (vm,) = cloud.launch()
    cloud.hit("silence")
    cloud.client().start_agent(vm.vm_id, BOOTSTRAP)
    assert machine.marked(cloud.job) == []


def test_capacity_that_was_taken_comes_back_by_itself(cloud: Cloud, machine: Machine) -> None:
    cloud.launch(3)
    cloud.hit("kill", return_after_s=0.1)
    machine.eventually(lambda: cloud.client().offers()[0].available == 1)
    assert len(cloud.launch(2)) == 1


def test_a_noticed_vm_is_killed_when_its_time_is_up(cloud: Cloud, machine: Machine) -> None:
    (vm,) = cloud.launch()
    pids = cloud.boot(vm)["pids"]
    assert cloud.hit("notice", lead_s=3.0) == (vm.vm_id,)
    assert all(machine.runs(pid) for pid in pids)
    assert cloud.vm(vm).state == VmState.RUNNING
    for pid in pids:
        machine.await_exit(pid)


def test_script_and_hazards_are_played(make_cloud: MakeCloud, machine: Machine) -> None:
    zones = make_cloud().market.zones
    script = (
        MarketEvent(at_s=0.2, kind="price", zone="a", usd_per_hour=0.25),
        MarketEvent(at_s=0, kind="capacity", zone="a", count=5),
    )
    market = MarketSpec(zones=zones, events=script, kills_per_hour=36000)
    cloud = make_cloud(market=market)
    (vm,) = cloud.launch()
    assert vm.offer.available == 5
    machine.eventually(lambda: cloud.client().offers()[0].usd_per_hour == 0.25)
    machine.eventually(lambda: cloud.vm(vm).state == VmState.TERMINATED)


def test_an_agent_waits_for_its_vm_to_boot(make_cloud: MakeCloud) -> None:
    zone = replace(make_cloud().market.zones[0], boot_s=0.3)
    cloud = make_cloud(market=MarketSpec(zones=(zone,)))
    (vm,) = cloud.launch()
    assert vm.state == VmState.STARTING
    cloud.boot(vm)
    assert cloud.vm(vm).state == VmState.RUNNING


def test_a_vm_may_end_while_it_boots(make_cloud: MakeCloud) -> None:
    zone = replace(make_cloud().market.zones[0], boot_s=60)
    cloud = make_cloud(market=MarketSpec(zones=(zone,)))
    (vm,) = cloud.launch()
    with ThreadPoolExecutor(1) as threads:
        start = threads.submit(cloud.client().start_agent, vm.vm_id, BOOTSTRAP)
        cloud.client().terminate([vm.vm_id])
        with pytest.raises(VmNotFoundError, match=vm.vm_id):
            start.result()


def test_clients_that_start_at_once_share_one_cloud_and_one_launch(
    cloud: Cloud,
) -> None:
    barrier = threading.Barrier(4)

    def launch(_: int) -> tuple[str, ...]:
        client = cloud.client()
        barrier.wait()
        launch_request = cloud.request(2, token="same")
        return tuple(vm.vm_id for vm in client.launch(launch_request).vms)

    with ThreadPoolExecutor(4) as threads:
        answers = set(threads.map(launch, range(4)))
    assert len(answers) == 1
    assert len(cloud.client().list_vms(cloud.job)) == 2


def test_vms_outlive_the_client_that_started_them(cloud: Cloud, machine: Machine) -> None:
    os.mkfifo(cloud.pipe)
    client = subprocess.Popen([sys.executable, "-c", CLIENT], stdin=subprocess.PIPE)
    arguments = (str(cloud.folder), cloud.job, encode(cloud.market), str(cloud.pipe))
    client.communicate(json.dumps((*arguments, machine.family)).encode())
    assert client.returncode == -signal.SIGKILL
    (vm,) = cloud.client().list_vms(cloud.job)
    assert vm.state == VmState.RUNNING
    assert len(machine.marked(cloud.job)) >= 3


CLIENT = """
import json, os, pathlib, signal, sys
from spottrain.cloud.local.market import MarketSpec
from spottrain.cloud.local.provider import LocalProvider
from spottrain.cloud.port.provider import AgentBootstrap, LaunchRequest
from spottrain.codec import decode
folder, job, market, pipe, family = json.load(sys.stdin)
argv = (sys.executable, "-S", "-c", family, pipe)
client = LocalProvider(pathlib.Path(folder), job, decode(MarketSpec, market), argv)
offer = client.offers()[0]
wish = LaunchRequest(token="t", job=job, intent="i", offer=offer, count=1, lease_s=9)
(vm,) = client.launch(wish).vms
client.start_agent(vm.vm_id, AgentBootstrap(manager_url="", ca_pem="", token=""))
pathlib.Path(pipe).read_text()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("act", ["list", "terminate", "start_agent"])
def test_a_killed_cloud_takes_its_vms_with_it(cloud: Cloud, machine: Machine, act: str) -> None:
    vm, silent = cloud.launch(2)
    agents = [cloud.boot(v)["pids"][0] for v in (vm, silent)]
    cloud.hit("silence")
    os.kill(running(cloud, machine), signal.SIGKILL)
    for agent in agents:
        machine.await_exit(agent)
    match act:
        case "list":
            states = {v.state for v in cloud.client().list_vms(cloud.job)}
            assert states == {VmState.TERMINATED}
        case "terminate":
            cloud.client().terminate([vm.vm_id])
        case _:
            with pytest.raises(VmNotFoundError):
                cloud.client().start_agent(vm.vm_id, BOOTSTRAP)
    assert machine.marked(cloud.job) == []
    ended_at_s = cloud.vm(vm).ended_at_s
    assert ended_at_s is not None
    assert cloud.vm(vm).ended_at_s == ended_at_s  # found dead once, not anew at each look


def test_vms_and_tokens_survive_a_killed_cloud_process(cloud: Cloud, machine: Machine) -> None:
    launch_request = cloud.request(2)
    before = cloud.client().launch(launch_request)
    cloud.boot(before.vms[0])
    os.kill(running(cloud, machine), signal.SIGKILL)
    after = cloud.client().launch(launch_request)
    assert [vm.vm_id for vm in after.vms] == [vm.vm_id for vm in before.vms]
    assert {vm.state for vm in after.vms} == {VmState.TERMINATED}
    assert machine.marked(cloud.job) == []
    assert cloud.client().offers()[0].available == 3


def test_calls_that_wait_for_processes_may_take_longer_than_others(
    cloud: Cloud, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (vm,) = cloud.launch()
    pid, client = running(cloud, machine), cloud.client()
    answer_s = local_provider._ANSWER_TIMEOUT_S
    monkeypatch.setattr(local_provider, "_ANSWER_TIMEOUT_S", 0.2)
    os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(client.terminate, [vm.vm_id])
        is_over = wait([call], 1.0).done
        # What follows may take as long as on any machine.
        monkeypatch.setattr(local_provider, "_ANSWER_TIMEOUT_S", answer_s)
        os.kill(pid, signal.SIGCONT)
        call.result()
    assert not is_over


def test_the_cloud_ends_with_its_last_vm(make_cloud: MakeCloud, machine: Machine) -> None:
    cloud = make_cloud(idle_s=0.2)
    (vm,) = cloud.launch()
    pid = running(cloud, machine)
    cloud.client().terminate([vm.vm_id])
    machine.await_exit(pid)
    assert not (cloud.folder / "cloud.sock").exists()
    assert cloud.vm(vm).state == VmState.TERMINATED
    assert machine.cloud(cloud.folder) is None  # asking for VMs starts no cloud
    assert cloud.client().offers()[0].available == 3


@pytest.mark.rotated
def test_calls_to_an_ending_cloud_process_reach_the_next_one(
    make_cloud: MakeCloud,
) -> None:
    cloud = make_cloud(idle_s=0.3)
    for round_ in range(4):
        (vm,) = cloud.launch()
        cloud.client().terminate([vm.vm_id])
        time.sleep(0.2 + 0.1 * round_)  # from before its end to after it
    assert len(cloud.client().list_vms(cloud.job)) == 4


def test_ctrl_c_at_the_terminal_does_not_reach_the_cloud(cloud: Cloud, machine: Machine) -> None:
    (vm,) = cloud.launch()
    pid = running(cloud, machine)
    assert os.getsid(pid) == pid != os.getsid(0)
    os.kill(pid, signal.SIGINT)
    assert cloud.vm(vm).state == VmState.RUNNING
    assert machine.cloud(cloud.folder) == pid


def test_a_cloud_that_is_told_to_end_ends_its_vms_first(cloud: Cloud, machine: Machine) -> None:
    (vm,) = cloud.launch()
    pids = cloud.boot(vm)["pids"]
    pid = running(cloud, machine)
    os.kill(pid, signal.SIGTERM)
    machine.await_exit(pid)
    assert not any(machine.runs(p) for p in pids)
    assert cloud.vm(vm).state == VmState.TERMINATED


def test_the_bill_is_each_vms_price_at_launch_for_its_seconds(cloud: Cloud) -> None:
    first, second = cloud.launch()[0], cloud.launch(spot=False)[0]
    cloud.hit("price", usd_per_hour=100.0)
    cloud.client().terminate([first.vm_id, second.vm_id])
    usd = sum(
        price * ((cloud.vm(vm).ended_at_s or 0.0) - vm.launched_at_s) / 3600
        for vm, price in ((first, 1.0), (second, 3.0))
    )
    assert bill(cloud.client(), cloud.job) == pytest.approx(usd)
    assert usd > 0


def test_a_folder_deeper_than_a_socket_address_will_do(cloud: Cloud, tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 100) / ("y" * 100)
    folder.parent.mkdir()
    provider = LocalProvider(folder, "job", cloud.market)
    assert len(provider.offers()) == 2
    provider.shut_down()
    assert not (folder / "cloud.sock").exists()


def test_a_damaged_state_file_is_reported_by_name(cloud: Cloud) -> None:
    cloud.folder.mkdir()
    (cloud.folder / "cloud.json").write_text("{")
    for call in (cloud.client().offers, lambda: cloud.client().list_vms(cloud.job)):
        with pytest.raises(CloudError, match=r"cloud\.(json|log)") as caught:
            call()
        assert "\n" not in str(caught.value)
    (cloud.folder / "cloud.json").unlink()


def test_no_cloud_is_started_to_ask_about_vms(cloud: Cloud, machine: Machine) -> None:
    cloud.client().terminate(["vm-1"])
    assert cloud.client().list_vms(cloud.job) == ()
    assert machine.cloud(cloud.folder) is None


def test_a_cloud_whose_folder_is_gone_is_not_made_anew_and_still_ends_its_vms(
    cloud: Cloud, machine: Machine
) -> None:
    (vm,) = cloud.launch()
    cloud.boot(vm)
    client, job = cloud.client(), cloud.folder.parent
    aside = job.rename(job.with_name("aside"))
    try:
        with pytest.raises(CloudError, match="gone"):
            client.list_vms(cloud.job)
        with pytest.raises(CloudError, match="gone"):
            client.offers()
        assert machine.marked(cloud.job)
        client.terminate([vm.vm_id])
        assert not machine.marked(cloud.job)
        client.shut_down()
        assert not job.exists()
    finally:
        aside.rename(job)

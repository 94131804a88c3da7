"""How long it takes to bring agents up on many hosts, all of them on this machine.

Each host is an sshd with a home of its own. Counted: connecting, taking, sending our
software and the workdir, probing, the tunnel, and starting the agent; all are then ended.
With --rented they are VMs of AWS's fake: the calls to it and their boot count as well.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.builders import a_launch
from tests.contract.ssh_account import empty_workdir
from tests.fakes.aws import KIND, ZONE
from tests.fakes.machines import connections_to
from tests.integration.aws_vms import AwsVms, aws_vms, wish
from tests.integration.ssh_hosts import ssh_hosts, unanswered, vm_processes

from spottrain.cloud.port.provider import Vm
from spottrain.cloud.ssh.hosts.provider import SshProvider
from spottrain.cloud.ssh.rented.provider import RentedVmProvider
from spottrain.cloud.ssh.transport.hosts import Payload

NOBODY = unanswered()


def measure(folder: Path, count: int) -> None:
    """Print how long each part took."""
    with ssh_hosts(folder / "hosts", count) as hosts:
        fleet = [host.host(f"h{n}") for n, host in enumerate(hosts)]
        payload = Payload(workdir=empty_workdir(folder))
        provider = SshProvider(folder / "cloud", "job", fleet, payload)
        began_s = time.perf_counter()
        offer = provider.offers()[0]
        connected_s = time.perf_counter()
        request = a_launch(offer, count, token="t", intent="i", lease_s=60.0)
        vms = provider.launch(request).vms
        taken_s = time.perf_counter()
        with ThreadPoolExecutor(count) as threads:
            starts = threads.map(lambda vm: provider.start_agent(vm.vm_id, NOBODY), vms)
            assert len(list(starts)) == count
        started_s = time.perf_counter()
        print(f"hosts                 {count}")
        print(f"connected after       {connected_s - began_s:.1f} s")
        print(f"taken after           {taken_s - began_s:.1f} s")
        print(f"agents started after  {started_s - began_s:.1f} s")
        provider.terminate([vm.vm_id for vm in vms])
        print(f"given back in         {time.perf_counter() - started_s:.1f} s")
        provider.close()
        assert vm_processes(hosts) == []
        assert not any(host.left() for host in hosts)


def resident_bytes() -> int:
    """Return how much memory this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def replace_relay(cloud: AwsVms, provider: RentedVmProvider, vms: Sequence[Vm]) -> float:
    """Have the VM that carries all calls evicted; return when all others know."""

    def told() -> dict[str, str]:
        files = {
            vm.vm_id: next(cloud.home(vm).glob(".spottrain/*/manager.address"), None) for vm in vms
        }
        return {vm_id: file.read_text() for vm_id, file in files.items() if file}

    provider.list_vms("job")
    before = told()
    address = before[vms[0].vm_id].partition(":")[0]
    sshd_configs = {vm.vm_id: cloud.home(vm).parent / "sshd_config" for vm in vms}
    (relay,) = (
        vm for vm in vms if f"ListenAddress {address}\n" in sshd_configs[vm.vm_id].read_text()
    )
    began_s = time.perf_counter()
    cloud.evict(relay)
    while True:
        provider.list_vms("job")
        now = told()
        if len(now) == len(vms) - 1 and not set(now.values()) & set(before.values()):
            return time.perf_counter() - began_s
        time.sleep(0.2)


def measure_rented(folder: Path, count: int) -> None:
    """Print how long each part took, of VMs rented from AWS's fake."""
    with aws_vms(folder) as cloud:
        cloud.fake.ask("stock", zone=ZONE, instance_type=KIND, count=count)
        provider = cloud.provider()
        provider.serve(NOBODY.manager_url)
        began_s = time.perf_counter()
        vms = provider.launch(wish(provider, count)).vms
        rented_s = time.perf_counter()
        with ThreadPoolExecutor(count) as threads:
            starts = threads.map(lambda vm: provider.start_agent(vm.vm_id, NOBODY), vms)
            assert len(list(starts)) == count
        started_s = time.perf_counter()
        print(f"VMs                   {count}")
        print(f"rented after          {rented_s - began_s:.1f} s")
        print(f"agents started after  {started_s - began_s:.1f} s")
        time.sleep(2)  # connections take a moment to close
        print(f"SSH connections       {len(connections_to(cloud.port))} at rest")
        print(f"threads               {threading.active_count()}")
        print(f"memory                {resident_bytes() / 1e6:.0f} MB")
        took_s = replace_relay(cloud, provider, vms)
        print(f"relay replaced after  {took_s:.1f} s, all agents told")
        started_s = time.perf_counter()
        provider.terminate([vm.vm_id for vm in vms])
        print(f"given back in         {time.perf_counter() - started_s:.1f} s")
        assert cloud.fake.ask("switched_on") == []


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=64)
    parser.add_argument("--rented", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (measure_rented if given.rented else measure)(Path(folder), given.hosts)

"""VMs that go from one job of a pool to another without a boot, through every death."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.integration.jobs import Job, until, weights
from tests.integration.test_pool import Lab, check_money, ended
from tests.integration.undisturbed import undisturbed
from tests.view import View

from spottrain.cloud.local.folder import marker
from spottrain.cloud.port import tags
from spottrain.cloud.port.provider import Vm
from spottrain.cloud.process import tree
from spottrain.varuna_manager.jobs.follow import last_seq
from spottrain.varuna_manager.jobs.journal import Journal

pytestmark = pytest.mark.rotated(parts=[7])

BOOT_S = 3.0
"""Of a VM that is rented."""


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    # So long a VM that is kept for others waits for a manager that has yet to start.
    lab = Lab(tmp_path, lease_s=300.0)
    lab.settings["local"]["zones"][0]["boot_s"] = BOOT_S
    lab.write()
    lab.first.pace(1.0)  # the jobs outlast what happens to them, on a busy machine too
    try:
        yield lab
    finally:
        lab.first.kill_everything()


def vms_of(job: Job) -> dict[str, Vm]:
    return {vm.vm_id: vm for vm in job.cloud.list_vms(job.name)}


def check_moved(giver: Job, taker: Job) -> Vm:
    """A machine of the one went to the other as it was, but nothing of the one's did."""
    theirs = {vm.vm_id.partition(".")[0]: vm for vm in vms_of(giver).values()}
    moved = [vm for vm in vms_of(taker).values() if tags.order_of(vm.intent)]
    vm = moved[-1]
    before = theirs[vm.vm_id.partition(".")[0]]
    assert before.ended_at_s == vm.launched_at_s, "billed once"
    assert before.offer == vm.offer
    files = giver.dir.cloud / "vms" / before.vm_id
    assert {file.suffix for file in files.iterdir()} <= {".log"}
    found = tree.groups([marker(giver.name, before.vm_id)], [])
    assert not found, "no process of the giver is left"
    return vm


def check_lines(job: Job) -> None:
    """The ledger has each VM as the cloud has billed it, to the micro-dollar."""
    for vm in vms_of(job).values():
        assert vm.ended_at_s is not None
        hours = (vm.ended_at_s - vm.launched_at_s) / 3600
        billed = hours * vm.offer.usd_per_hour * 1e6
        line = View(job.state()).ledger.closed[vm.vm_id]
        assert line.cost(0).microusd == pytest.approx(billed, abs=1.0)


def kill_at(what: str, pid: int, happens: Callable[[], bool]) -> None:
    """Kill a process as soon as something is the case."""
    with contextlib.suppress(ProcessLookupError):
        until(what, happens)
        os.kill(pid, signal.SIGKILL)


def check_ends(lab: Lab, jobs: list[Job], wanted: dict[str, str]) -> None:
    for job in jobs:
        until("its end", lambda job=job: ended(lab, job.name))  # type: ignore[misc]
        assert weights(job.checkpoint_root) == wanted
        check_lines(job)
    check_money(lab)


def has_other_manager(job: Job, pid: int) -> bool:
    now = job.dir.manager()
    return now is not None and now.pid != pid


def has_asked(job: Job, after_seq: int) -> bool:
    """Return whether a job has asked for VMs since an event; it may have them by now."""
    with closing(Journal(job.dir.journal, read_only=True)) as journal:
        states = (View(step.after) for _, step in journal.steps(after_seq))
        return any(state.orders or state.intents for state in states)


def test_a_vm_moves_without_a_boot_and_is_billed_once_whoever_dies(
    lab: Lab, tmp_path_factory: pytest.TempPathFactory
) -> None:
    first, urgent = lab.first, lab.urgent
    assert lab.run("create", str(lab.file)).code == 0
    assert lab.launch(first).code == 0
    lab.has(first=2)
    assert lab.launch(urgent, "--priority", "9").code == 0
    lab.has(first=1, urgent=2)
    vm = check_moved(first, urgent)
    started_s = View(urgent.state()).ledger.open[vm.vm_id].ready_us
    assert started_s is not None

    # The giver's manager dies once it keeps a VM.
    pid = urgent.manager_pid()
    assert lab.run("pause", "lab", "urgent").code == 0
    kill_at(
        "a VM is kept",
        pid,
        lambda: any(v.reserved_at_s is not None for v in View(urgent.state()).vms.values()),
    )
    lab.has(first=2)
    check_moved(urgent, first)

    until("another manager", lambda: has_other_manager(urgent, pid))

    # The pool dies once it has ordered, and the taker's manager once it has asked.
    known, last = len(lab.states()), last_seq(urgent.dir)
    assert lab.run("resume", "lab", "urgent").code == 0
    until(  # on a busy machine it may be over before anybody looks
        "an order",
        lambda: any(state.jobs["urgent"].orders for state in lab.states()[known:]),
    )
    lab.kill_daemon()
    assert lab.run("resume", "lab").code == 0
    until("urgent asks", lambda: has_asked(urgent, last))
    with contextlib.suppress(ProcessLookupError):
        os.kill(urgent.manager_pid(), signal.SIGKILL)
    lab.has(first=1, urgent=2)

    first.pace(0.0)
    check_ends(lab, [first, urgent], undisturbed(tmp_path_factory).weights)
    assert lab.run("down", "lab").code == 0

"""A provider in a child process: the same protocols, and what happens when it dies."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.builders import a_launch
from tests.unit.cloud.child_provider import OFFER

from spottrain.cloud.azure.settings import AzureSettings
from spottrain.cloud.gcp.settings import GcpSettings
from spottrain.cloud.port import errors
from spottrain.cloud.port.errors import (
    CloudError,
    MisconfiguredError,
    ThrottledError,
    VmNotFoundError,
)
from spottrain.cloud.port.provider import (
    AgentBootstrap,
    CloudProvider,
    Quota,
    SshTarget,
    StartStep,
    VmState,
)
from spottrain.cloud.process.child import ANSWER_S, SLOW_S, ChildProvider, in_child
from spottrain.errors import UserCodeError
from spottrain.varuna_manager.daemon.effects import CALL_S, LAUNCH_S

ROOT = Path(__file__).resolve().parents[4]
FACTORY = "tests.unit.cloud.child_provider:make"
BOOTSTRAP = AgentBootstrap(manager_url="https://manager", ca_pem="ca", token="secret")
WISH = a_launch(OFFER, 2, intent="intent-0", lease_s=60.5)

Make = Callable[..., Any]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT / "src"), str(ROOT))))
    made: list[ChildProvider] = []

    def child(**settings: Any) -> ChildProvider:
        made.append(in_child(FACTORY, settings))
        return made[-1]

    yield child
    for each in made:
        each.close()
        assert each.pid is None or not _runs(each.pid)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _await_end(pid: int) -> None:
    handle = os.pidfd_open(pid)
    try:
        assert select.select([handle], [], [], 600)[0], f"{pid} is still there"
    finally:
        os.close(handle)


def test_it_has_the_abilities_of_the_provider_inside_and_no_others(make: Make) -> None:
    child = make()
    assert child.name == "odd"
    methods = [method for method in vars(CloudProvider).values() if callable(method)]
    able = {method.__name__ for method in methods if child.can(method)}
    required = {"offers", "launch", "list_vms", "terminate"}
    assert able == {*required, "quotas", "ssh_target", "start_agent"}


def test_what_the_provider_inside_cannot_do_has_the_answer_of_the_port(make: Make) -> None:
    child = make()
    assert child.spot_pools(1) == ()
    assert child.principal() == ""
    assert child.time_s() is None
    child.release("job")
    with pytest.raises(CloudError, match="odd: cannot search for orphans"):
        child.list_all()
    with pytest.raises(VmNotFoundError, match="odd gives no VMs to other jobs"):
        child.move("vm", "giver", "job", "intent", 1.0)


def test_arguments_and_results_survive_the_pipe(make: Make) -> None:
    child = make()
    assert child.offers() == (OFFER,)
    result = child.launch(WISH)
    assert [vm.vm_id for vm in result.vms] == ["token-é"] * 2
    assert result.vms[0].offer == OFFER
    assert result.vms[0].state is VmState.STARTING
    assert child.list_vms("job") == ()
    child.terminate([])
    assert child.quotas() == (Quota(region="r", family="f", spot=True, limit=8.0, unit="vcpu"),)
    assert child.ssh_target("boots") is None
    assert child.ssh_target("vm") == SshTarget(
        host="h", user="u", host_keys=("k a", "k b"), port=2222
    )
    assert child.start_agent("vm", bootstrap=BOOTSTRAP) == (
        StartStep(name="setup", seconds=1.5, num_bytes=7, source="bucket"),
    )


PLAIN = {
    name
    for name, kind in vars(errors).items()
    if isinstance(kind, type)
    and issubclass(kind, CloudError)
    and not issubclass(kind, ThrottledError)
}


@pytest.mark.parametrize("name", sorted(PLAIN))
def test_errors_keep_their_class(make: Make, name: str) -> None:
    child = make()
    with pytest.raises(CloudError) as caught:
        child.terminate([name])
    assert type(caught.value).__name__ == name
    assert str(caught.value) == f"{name} is said"


def test_errors_keep_their_fields(make: Make) -> None:
    child = make()
    with pytest.raises(ThrottledError, match="slow down") as throttled:
        child.terminate(["throttled"])
    assert throttled.value.retry_after_s == 7.5
    with pytest.raises(errors.QueuedError, match="wait") as queued:
        child.terminate(["queued"])
    assert queued.value.retry_after_s == 2.5
    with pytest.raises(UserCodeError, match="setup failed") as setup:
        child.terminate(["setup"])
    assert setup.value.traceback == "its output"


def test_a_private_error_arrives_as_its_base_class(make: Make) -> None:
    child = make()
    with pytest.raises(errors.NoCapacityError, match="unheard of"):
        child.terminate(["own"])


def test_a_bug_of_the_provider_is_an_error_of_one_line(make: Make) -> None:
    child = make()
    with pytest.raises(CloudError) as caught:
        child.terminate(["bug"])
    assert str(caught.value) == "odd: terminate failed unexpectedly: ZeroDivisionError: 1/0"
    assert child.pid is not None


def test_an_error_of_the_factory_is_raised_and_leaves_no_process(make: Make) -> None:
    with pytest.raises(MisconfiguredError, match="no such region"):
        make(refuse="no such region")


def test_calls_run_at_the_same_time(make: Make) -> None:
    child = make(together=8)
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(child.offers) for _ in range(8)]
        assert [answer.result() for answer in answers] == [(OFFER,)] * 8


def test_a_call_that_takes_too_long_fails_and_the_next_is_answered(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spottrain.cloud.process.child.ANSWER_S", 0.5)
    child = make()
    before = child.pid
    with pytest.raises(CloudError, match=r"odd: terminate: no answer in 0.5 s"):
        child.terminate(["hang"])
    _gone(before)
    assert in_time(child.offers) == (OFFER,)
    assert child.pid != before


def in_time(call: Callable[[], Any]) -> Any:
    """Ask until the child was quick enough: the machine may be busy."""
    for _ in range(20):
        try:
            return call()
        except CloudError:
            continue
    raise AssertionError("never answered")


def _gone(pid: int | None) -> None:
    assert pid is not None
    assert not _runs(pid)


def test_a_child_that_dies_fails_its_calls_and_is_started_again(make: Make) -> None:
    child = make(together=2)
    before = child.pid
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(child.offers)
        with pytest.raises(CloudError, match="its SDK process has exited"):
            child.launch(replace(WISH, token="die"))
        with pytest.raises(CloudError, match="exited"):
            waiting.result()
    _gone(before)
    assert len(child.launch(WISH).vms) == 2
    assert child.pid != before


def test_a_child_killed_while_idle_is_restarted_by_the_next_call(make: Make) -> None:
    child = make()
    os.kill(child.pid, signal.SIGKILL)
    _await_end_of_listening(child)
    assert child.offers() == (OFFER,)


def _await_end_of_listening(child: ChildProvider) -> None:
    for thread in threading.enumerate():
        if thread.name == "cloud-child":
            thread.join(600)
    assert child.pid is None


def test_a_young_child_is_not_replaced_because_its_login_has_expired(
    make: Make,
) -> None:
    child = make()
    before = child.pid
    with pytest.raises(errors.LoginExpiredError):
        child.terminate(["LoginExpiredError"])
    assert child.offers() == (OFFER,)
    assert child.pid == before


def test_after_close_every_call_fails(make: Make) -> None:
    child = make()
    pid = child.pid
    child.close()
    child.close()
    _gone(pid)
    with pytest.raises(CloudError, match="is already closed"):
        child.offers()


PARENT = f"""
import sys, threading
from spottrain.cloud.process.child import in_child
child = in_child({FACTORY!r}, {{}})
sys.stdout.write(f"{{child.pid}}\\n")
sys.stdout.flush()
child.terminate(["hang"])
"""


def test_a_child_dies_with_its_parent(make: Make) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        handle = os.pidfd_open(pid)
        try:
            parent.kill()
            assert select.select([handle], [], [], 600)[0], "it outlived its parent"
        finally:
            os.close(handle)


def test_a_call_has_the_time_that_a_cloud_may_take_and_the_manager_waits_longer() -> None:
    """A child that is killed takes all its other calls with it."""
    azure = AzureSettings(instance_types=())
    gcp = GcpSettings(project="p", instance_types=())
    four_rounds_s = 4 * azure.allocation_s  # of 16 VMs at once
    network_and_vms_s = 2 * gcp.launch_s
    assert max(four_rounds_s, network_and_vms_s) < SLOW_S["launch"] < LAUNCH_S
    assert ANSWER_S < CALL_S

"""Our own memory of what a lagging list does not show yet."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.builders import a_vm, an_offer

from spottrain.cloud.lag.recent import RecentCalls
from spottrain.cloud.port.provider import Vm, VmState

OFFER = an_offer(cloud="c", gpu_memory_bytes=1)


def vm(name: str, state: VmState = VmState.STARTING, job: str = "j") -> Vm:
    return a_vm(name, OFFER, job=job, intent="i", state=state, private_address="")


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_launched_vm_is_listed_while_the_list_may_lag() -> None:
    clock = Clock()
    recent = RecentCalls(10, clock)
    recent.launched([vm("a")])
    assert recent.reconcile("j", []) == (vm("a"),)
    assert recent.reconcile("another", []) == ()
    assert recent.expects("a")
    running = vm("a", VmState.RUNNING)
    assert recent.reconcile("j", [running]) == (running,)
    clock.now_s = 11
    assert recent.reconcile("j", []) == ()
    assert not recent.expects("a")


def test_a_terminated_vm_is_never_listed_as_running() -> None:
    clock = Clock()
    recent = RecentCalls(10, clock)
    recent.launched([vm("a"), vm("b")])
    recent.terminated(["a", "b"])
    (listed,) = recent.reconcile("j", [vm("a", VmState.RUNNING)])
    assert listed.state is VmState.STOPPING
    gone = vm("a", VmState.TERMINATED)
    assert recent.reconcile("j", [gone]) == (gone,)
    assert not recent.expects("b")


@given(
    st.sets(st.sampled_from("abcdef")),
    st.sets(st.sampled_from("abcdef")),
    st.sets(st.sampled_from("abcdef")),
)
def test_no_vm_is_listed_twice_and_only_ended_ones_are_missing(
    launched: set[str], terminated: set[str], listed: set[str]
) -> None:
    recent = RecentCalls(10, Clock())
    recent.launched(vm(name) for name in sorted(launched))
    recent.terminated(sorted(terminated))
    seen = recent.reconcile("j", [vm(name, VmState.RUNNING) for name in sorted(listed)])
    ids = [each.vm_id for each in seen]
    assert len(ids) == len(set(ids))
    assert set(ids) == listed | (launched - terminated)
    for each in seen:
        alive = each.state in (VmState.STARTING, VmState.RUNNING)
        assert alive == (each.vm_id not in terminated)


def test_an_unlisted_vm_is_looked_up_by_name() -> None:
    recent = RecentCalls(10, Clock())
    recent.launched([vm("a"), vm("b"), vm("c")])
    recent.terminated(["c"])
    asked: list[str] = []

    def look(unlisted: Vm) -> Vm | None:
        asked.append(unlisted.vm_id)
        return vm("a", VmState.RUNNING) if unlisted.vm_id == "a" else None

    assert recent.reconcile("j", [], look) == (vm("a", VmState.RUNNING),)
    assert asked == ["a", "b"]

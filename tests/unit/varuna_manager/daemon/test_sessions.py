from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.gpus import use

from spottrain.varuna_manager.daemon.sessions import (
    AgentSessions,
    MeasurementStreams,
    OutOfStepError,
    reconnect_s,
)
from spottrain.varuna_manager.jobs.identity import token_sha256
from spottrain.wire import messages


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Line:
    """Links with a clock that tests move, and who was heard again."""

    def __init__(self, *vm_ids: str) -> None:
        self.clock = Clock()
        self.heard: list[str] = []
        self.sessions = AgentSessions(self.clock, self.heard.append)
        self.sequence = 0
        for vm_id in vm_ids:
            self.sessions.admit(vm_id, token_sha256(f"token of {vm_id}"))

    def beat(self, vm_id: str, received: int = 0) -> tuple[messages.Command, ...]:
        self.sequence += 1
        beat = messages.Heartbeat(vm_id=vm_id, sequence=self.sequence, received=received)
        return asyncio.run(self.sessions.heartbeat(beat, 0.0)).commands


def stop(generation: int) -> messages.Command:
    return messages.StopGeneration(generation=generation, checkpoint=False)


def test_only_the_holder_of_a_vms_token_speaks_for_it() -> None:
    sessions = Line("a", "b").sessions
    assert sessions.vm_of("token of a") == "a"
    assert sessions.vm_of("token of b") == "b"
    assert sessions.vm_of("token of c") is None
    assert sessions.vm_of("") is None
    sessions.revoke("a")
    assert sessions.vm_of("token of a") is None
    assert sessions.admitted == {"b"}


def test_admitting_twice_keeps_what_waits_and_a_new_token_replaces_the_old() -> None:
    line = Line("a")
    line.sessions.send("a", stop(1))
    line.sessions.admit("a", token_sha256("token of a"))
    assert line.beat("a") == (stop(1),)
    line.sessions.admit("a", token_sha256("another"))
    assert line.sessions.vm_of("token of a") is None
    assert line.sessions.vm_of("another") == "a"


def test_a_fenced_vm_gets_no_commands() -> None:
    line = Line("a")
    line.sessions.revoke("a")
    line.sessions.send("a", stop(1))
    line.sessions.admit("a", token_sha256("token of a"))
    assert line.beat("a") == ()


def test_what_gpus_do_is_known_of_vms_that_are_heard() -> None:
    line = Line("a", "b")
    line.sessions.watch("a")
    beat = messages.Heartbeat(vm_id="a", sequence=1, received=0, gpus=(use(),))
    asyncio.run(line.sessions.heartbeat(beat, 0.0))
    line.beat("b")
    assert line.sessions.gpus() == {"a": (use(),)}
    line.clock.now_s += 10.0
    line.sessions.silent(5.0)
    assert line.sessions.gpus() == {}


def test_silence_is_reported_once_and_so_is_its_end() -> None:
    line = Line("a", "b")
    line.sessions.watch("a")
    line.clock.now_s += 3
    line.sessions.watch("b")
    assert line.sessions.silent(5.0) == []
    line.clock.now_s += 3
    assert line.sessions.silent(5.0) == ["a"]
    assert line.sessions.silent(5.0) == []
    line.beat("a")
    assert line.heard == ["a"]
    line.clock.now_s += 4
    assert line.sessions.silent(5.0) == ["b"]
    assert line.heard == ["a"]


def test_a_vm_that_never_registered_or_is_gone_is_not_silent() -> None:
    line = Line("a", "b")
    line.sessions.watch("stranger")
    line.sessions.watch("b")
    line.sessions.revoke("b")
    line.clock.now_s += 100
    assert line.sessions.silent(5.0) == []


def test_after_a_restart_agents_have_time_to_find_the_manager() -> None:
    line = Line("a")
    line.sessions.watch("a", grace_s=5.0)
    line.clock.now_s += 9
    assert line.sessions.silent(5.0) == []
    line.clock.now_s += 2
    assert line.sessions.silent(5.0) == ["a"]


def test_a_vm_that_never_finds_the_next_manager_hides_no_loss_of_another() -> None:
    line = Line("a", "b")
    for vm_id in "ab":
        line.sessions.watch(vm_id, grace_s=30.0)
    line.beat("b")
    line.clock.now_s += 6
    assert line.sessions.silent(5.0) == ["b"]
    line.clock.now_s += 30
    assert line.sessions.silent(5.0) == ["a"]


def test_a_pause_of_the_manager_shortens_no_grace() -> None:
    line = Line("a")
    line.sessions.watch("a", grace_s=30.0)
    line.sessions.forgive()
    line.sessions.excuse(["a"])
    line.clock.now_s += 34
    assert line.sessions.silent(5.0) == []
    line.clock.now_s += 2
    assert line.sessions.silent(5.0) == ["a"]


def test_no_vm_is_silent_while_the_manager_itself_did_not_listen() -> None:
    line = Line("a", "b")
    line.sessions.watch("a")
    line.sessions.watch("b")
    line.clock.now_s += 100
    line.sessions.forgive()
    assert line.sessions.silent(5.0) == []
    line.clock.now_s += 6
    assert line.sessions.silent(5.0) == ["a", "b"]


def test_a_vm_that_cannot_call_is_not_silent_as_long_as_that_lasts() -> None:
    line = Line("a", "b")
    line.sessions.watch("a")
    line.sessions.watch("b")
    line.clock.now_s += 4
    line.sessions.excuse(["a", "stranger"])
    line.clock.now_s += 4
    assert line.sessions.silent(5.0) == ["b"]
    line.clock.now_s += 4
    assert line.sessions.silent(5.0) == ["a"]


def test_stale_heartbeat_is_refused_and_a_repeated_one_is_not() -> None:
    sessions = Line("a").sessions
    for sequence in (3, 3, 4):
        beat = messages.Heartbeat(vm_id="a", sequence=sequence, received=0)
        asyncio.run(sessions.heartbeat(beat, 0.0))
    stale = messages.Heartbeat(vm_id="a", sequence=3, received=0)
    with pytest.raises(OutOfStepError, match="got sequence 3 after 4"):
        asyncio.run(sessions.heartbeat(stale, 0.0))


def test_a_second_poll_of_one_vm_ends_the_first() -> None:
    async def both() -> list[tuple[messages.Command, ...]]:
        sessions = Line("a").sessions
        polls = [
            asyncio.create_task(
                sessions.heartbeat(messages.Heartbeat(vm_id="a", sequence=i, received=0), s)
            )
            for i, s in enumerate((60.0, 0.0))
        ]
        return [(await poll).commands for poll in polls]

    assert asyncio.run(both()) == [(), ()]


@given(
    actions=st.lists(st.sampled_from(["send", "beat", "lost answer", "restart"])),
    before=st.integers(0, 5),
)
def test_commands_arrive_in_order_and_once_whatever_is_lost(
    actions: list[str], before: int
) -> None:
    line = Line("a")
    received: list[messages.Command] = [stop(-1)] * before
    sent = list(received)
    for number, action in enumerate(actions):
        if action == "send":
            sent.append(stop(number))
            line.sessions.send("a", sent[-1])
        elif action == "restart":
            line = Line("a")
            sent = list(received)  # the core sends again what is still needed
        else:
            commands = line.beat("a", len(received))
            received += commands if action == "beat" else ()
    received += line.beat("a", len(received))
    assert received == sent


def test_a_heartbeat_takes_the_same_time_in_a_large_fleet() -> None:
    def cost_s(num_vms: int) -> float:
        line = Line(*(f"vm-{i}" for i in range(num_vms)))
        for i in range(num_vms):
            line.sessions.watch(f"vm-{i}")

        async def beats() -> float:
            start = time.process_time()
            for i in range(2000):
                beat = messages.Heartbeat(vm_id=f"vm-{i % num_vms}", sequence=i, received=0)
                line.sessions.send(beat.vm_id, stop(i))
                await line.sessions.heartbeat(beat, 0.0)
            return time.process_time() - start

        return asyncio.run(beats())

    small, large = (min(cost_s(n) for _ in range(3)) for n in (100, 10_000))
    assert large < 30 * small


# --- Measurements ---------------------------------------------------------------------


def batch(first: int, count: int, oldest: int = 0) -> messages.ReportBatch:
    """Measurements of these numbers, and no facts."""
    reports = (
        messages.MinibatchAdopted(generation=1, step=n, loss=0.0, grad_norm=0.0)
        for n in range(first, first + count)
    )
    return messages.ReportBatch(
        vm_id="a",
        first=0,
        reports=(),
        first_measurement=first,
        oldest_measurement=oldest,
        measurements=tuple(messages.Measured(after=0, report=r) for r in reports),
    )


def steps(measured: tuple[messages.Measured, ...] | None) -> list[int]:
    assert measured is not None
    return [one.report.step for one in measured]


def test_measurements_are_taken_once_and_acknowledged_once_written() -> None:
    streams = MeasurementStreams()
    assert steps(streams.take(batch(0, 3))) == [0, 1, 2]
    assert steps(streams.take(batch(1, 3))) == [3]
    answer = streams.answer(batch(1, 3), 7)
    assert (answer.received, answer.measured, answer.next_measurement) == (7, 0, 4)
    streams.wrote({"a": 3})
    assert streams.answer(batch(4, 0), 7).measured == 3


def test_a_manager_that_begins_anew_asks_for_what_was_not_written() -> None:
    streams = MeasurementStreams()
    late = batch(9, 2, oldest=5)
    assert streams.take(late) is None, "5 to 8 are missing, and nobody is fenced"
    answer = streams.answer(late, 0)
    assert (answer.measured, answer.next_measurement) == (5, 5)
    assert steps(streams.take(batch(5, 6, oldest=5))) == [5, 6, 7, 8, 9, 10]


def test_a_new_agent_of_a_vm_counts_from_the_beginning() -> None:
    line, streams = Line("a"), MeasurementStreams()
    line.beat("a")
    line.sessions.send("a", stop(1))
    line.sessions.renew("a")
    line.sequence = -1
    assert line.beat("a") == ()
    assert line.sessions.vm_of("token of a") == "a"
    assert steps(streams.take(batch(0, 3))) == [0, 1, 2]
    streams.forget("a")
    assert steps(streams.take(batch(0, 1))) == [0]


def test_a_large_fleet_has_longer_to_reach_a_new_manager() -> None:
    assert 5.0 < reconnect_s(16) < 5.1
    assert reconnect_s(10_000) > 2 * 13.3  # as docs/operating.md measured it

"""Real supervisors measure together: parallel, alone, and with a participant that dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.builders import slots_of
from tests.integration.fleet import Fleet, Host, Zygote
from tests.integration.jobs import until
from tests.integration.struck_runs import NUM_SECTIONS, job_spec

from spottrain import machine
from spottrain.morphing.plan.profiles import (
    BETWEEN_AS_WITHIN,
    LINKS_ASSUMED,
    WITHIN_AS_BETWEEN,
    check_profile,
)
from spottrain.wire import messages
from spottrain.wire.model import Profile


@pytest.fixture
def fleet(zygote: Zygote, tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(job_spec(tmp_path), "ab", tmp_path / "log", zygote) as fleet:
        fleet.ready()
        yield fleet


def begin(
    fleet: Fleet,
    names: str,
    number: int = -1,
    sizes: Sequence[int] = (),
    checkpoint: str = "",
    tensor_sizes: Sequence[int] = (),
) -> messages.Calibrate:
    """Tell all what a manager would tell them: a name that comes again is a VM's next slot, if
    it has one."""
    counts = {name: machine.num_slots for name, machine in fleet.machines.items()}
    participants = tuple(
        replace(slot, index=slot.index % counts[slot.vm_id]) for slot in slots_of(names)
    )
    fleet.generation = number
    host, port = fleet.open_store(names[0])
    command = messages.Calibrate(
        generation=number,
        participants=participants,
        store_host=host,
        store_port=port,
        microbatch_sizes=tuple(sizes),
        tensor_sizes=tuple(tensor_sizes),
        checkpoint=checkpoint,
    )
    for name in dict.fromkeys(names):
        fleet.machines[name].send(command)
    return command


def end(fleet: Fleet) -> Profile:
    return fleet.wait_for(
        "profile",
        lambda _, r: r.profile if isinstance(r, messages.Calibrated) else None,
    )


def test_two_vms_measure_everything_together(fleet: Fleet) -> None:
    begin(fleet, "ab", sizes=(1, 2), checkpoint=fleet.initialise())

    profile = end(fleet)

    check_profile(profile)
    assert profile.microbatch_sizes == (1, 2)
    assert len(profile.sections_at(2)) == NUM_SECTIONS
    assert (profile.device, profile.software) == (machine.device(), machine.software())
    assert profile.sources == (WITHIN_AS_BETWEEN,)
    rings = [(ring.ranks, ring.rings, ring.on_device) for ring in profile.rings]
    assert rings == [(2, 1, False)]
    for one in profile.microbatches:
        beside = one.overheads
        assert beside is not None
        times_s = beside.forward_s, beside.recompute_s, beside.backward_s
        assert min(*times_s, beside.posting_s) > 0
    progress = [r for _, r in fleet.history if isinstance(r, messages.CalibrationProgress)]
    assert [(p.done, p.total) for p in progress] == [(n, 4) for n in (1, 2, 3, 4)]


@pytest.mark.rotated
def test_messages_within_a_vm_are_measured_from_device_to_device(
    zygote: Zygote, tmp_path: Path
) -> None:
    """gloo carries both here; the profile has the faster way, and no word of a failure."""
    hosts = {"a": Host(num_slots=2, device="tests.fakes.deferred:3")}
    spec = job_spec(tmp_path)
    with Fleet(spec, "a", tmp_path / "log", zygote, hosts=hosts) as fleet:
        fleet.ready()
        begin(fleet, "aa", checkpoint=fleet.initialise())

        profile = end(fleet)

    assert profile.sources == (BETWEEN_AS_WITHIN,)
    assert profile.within_vm.bandwidth_bytes_per_s > 0


@pytest.mark.rotated
def test_one_slot_talks_to_itself(fleet: Fleet) -> None:
    begin(fleet, "aa")

    profile = end(fleet)

    assert profile.sources == (BETWEEN_AS_WITHIN,)
    assert profile.between_vms == profile.within_vm
    assert [ring.between_vms for ring in profile.rings] == [False]


def test_a_process_alone_assumes_links(fleet: Fleet) -> None:
    fleet.machines["a"].send(messages.Calibrate())

    assert end(fleet).sources == (LINKS_ASSUMED,)


def test_transfers_and_both_updates_are_measured_on_a_device(
    zygote: Zygote, tmp_path: Path
) -> None:
    hosts = {name: Host(device="tests.fakes.deferred:3") for name in "ab"}
    spec = job_spec(tmp_path)
    with Fleet(spec, "ab", tmp_path / "log", zygote, hosts=hosts) as fleet:
        fleet.ready()
        begin(fleet, "ab", sizes=(1, 2), checkpoint=fleet.initialise())

        profile = end(fleet)

    check_profile(profile)
    assert profile.upload_bytes_per_s > 0
    assert profile.download_bytes_per_s > 0
    assert profile.host_optimizer_s_per_byte > 0
    assert profile.optimizer_s_per_byte > 0
    assert profile.quantise_s_per_byte > 0
    # gloo, in the place of NCCL, has summed on the devices, too.
    rings = [(r.ranks, r.rings, r.between_vms, r.on_device) for r in profile.rings]
    assert rings == [(2, 1, True, False), (2, 1, True, True)]
    assert {s.output_element_bytes for s in profile.sections_at(1)[:-1]} == {4}


@pytest.mark.rotated
def test_every_size_sees_the_same_sections(fleet: Fleet) -> None:
    begin(fleet, "ab", sizes=(1, 4))

    profile = end(fleet)

    one, four = profile.sections_at(1), profile.sections_at(4)
    assert [4 * s.output_bytes for s in one] == [s.output_bytes for s in four]
    assert all(a.saved_bytes < b.saved_bytes for a, b in zip(one, four, strict=True))


@contextmanager
def dividing_fleet(
    zygote: Zygote,
    folder: Path,
    slots: Mapping[str, int],
    device: str = "cpu",
    environment: Mapping[str, str] | None = None,
    *,
    sequence: bool = False,
) -> Iterator[Fleet]:
    hosts = {name: Host(num_slots=count, device=device) for name, count in slots.items()}
    spec = replace(job_spec(folder), entrypoint="tensor_jobs:gpt", sequence_parallel=sequence)
    names, log = tuple(slots), folder / "log"
    with Fleet(spec, names, log, zygote, environment, hosts=hosts) as fleet:
        fleet.ready()
        yield fleet


def assert_divided(profile: Profile, size: int, microbatch_sizes: Sequence[int]) -> None:
    check_profile(profile)
    (group,) = profile.groups
    assert group.size == size
    assert [one.microbatch_size for one in group.microbatches] == [*microbatch_sizes]
    for alone, divided in zip(profile.microbatches, group.microbatches, strict=True):
        for whole, part in zip(alone.sections, divided.sections, strict=True):
            assert part.index == whole.index
            assert part.saved_bytes < whole.saved_bytes
            assert part.output_bytes == whole.output_bytes
            assert part.update_bytes == whole.update_bytes
            assert min(part.forward_s, part.recompute_s, part.backward_s) > 0


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("tests.fakes.deferred:3", marks=pytest.mark.rotated)]
)
def test_sections_are_measured_in_groups_that_divide_their_matrices(
    zygote: Zygote, tmp_path: Path, device: str
) -> None:
    with dividing_fleet(zygote, tmp_path, {"a": 2}, device) as fleet:
        checkpoint = fleet.initialise()
        begin(fleet, "aa", sizes=(1, 2), checkpoint=checkpoint, tensor_sizes=(2, 4))
        profile = end(fleet)

    assert_divided(profile, 2, (1, 2))
    progress = [r for _, r in fleet.history if isinstance(r, messages.CalibrationProgress)]
    assert [(p.done, p.total) for p in progress] == [(n, 5) for n in range(1, 6)]


@pytest.mark.rotated
def test_groups_that_divide_the_sequence_are_measured_with_parts_of_it(
    zygote: Zygote, tmp_path: Path
) -> None:
    profiles = []
    for sequence in (False, True):
        folder = tmp_path / str(sequence)
        folder.mkdir()
        with dividing_fleet(zygote, folder, {"a": 2}, sequence=sequence) as fleet:
            begin(fleet, "aa", tensor_sizes=(2,))
            profiles.append(end(fleet))

    whole, parts = (one.groups[0].microbatches[0].sections for one in profiles)
    assert [one.sequence_parallel for one in profiles] == [False, True]
    for before, after in zip(whole[1:-1], parts[1:-1], strict=True):  # blocks alone
        assert after.saved_bytes < 0.8 * before.saved_bytes


@pytest.mark.rotated
def test_the_vm_with_the_most_slots_measures_groups_of_what_others_measured_alone(
    zygote: Zygote, tmp_path: Path
) -> None:
    with dividing_fleet(zygote, tmp_path, {"a": 1, "b": 3}) as fleet:
        begin(fleet, "abbb", sizes=(2,), tensor_sizes=(2,))

        profile = end(fleet)

    assert_divided(profile, 2, (2,))


@pytest.mark.rotated
def test_of_long_micro_batches_groups_measure_the_smallest_and_scale_the_others(
    zygote: Zygote, tmp_path: Path
) -> None:
    long = {"TENSOR_SLEEP_S": "0.3"}
    with dividing_fleet(zygote, tmp_path, {"a": 2}, environment=long) as fleet:
        begin(fleet, "aa", sizes=(1, 2), tensor_sizes=(2,))
        profile = end(fleet)

    assert_divided(profile, 2, (1, 2))
    (group,) = profile.groups
    small, large = profile.microbatches
    for k, (less, more) in enumerate(zip(*(m.sections for m in group.microbatches), strict=True)):
        alone = large.sections[k].forward_s / small.sections[k].forward_s
        assert more.forward_s / less.forward_s == pytest.approx(alone)


@pytest.mark.rotated
def test_a_member_of_a_group_that_dies_ends_the_round_for_all(
    zygote: Zygote, tmp_path: Path
) -> None:
    slow = {"TINY_SLEEP_S": "0.1"}
    with dividing_fleet(zygote, tmp_path, {"a": 1, "b": 2}, environment=slow) as fleet:
        begin(fleet, "abb", tensor_sizes=(2,))
        first_progress(fleet, -1, "links")

        os.kill(measuring_on(fleet, "b")[-1], signal.SIGKILL)

        broken = messages.GenerationBroken
        fleet.wait_for("end at a", lambda name, r: (name == "a" and isinstance(r, broken)) or None)
        begin(fleet, "bb", number=-2, tensor_sizes=(2,))
        assert_divided(end(fleet), 2, (2,))


@pytest.fixture
def slow_fleet(zygote: Zygote, tmp_path: Path) -> Iterator[Fleet]:
    slow = {"TINY_SLEEP_S": "0.05"}
    with Fleet(job_spec(tmp_path), "ab", tmp_path / "log", zygote, slow) as fleet:
        fleet.ready()
        yield fleet


def measuring_on(fleet: Fleet, name: str) -> list[int]:
    """Return the processes that a supervisor without a store has forked."""
    leader = fleet.machines[name].pid
    text = Path(f"/proc/{leader}/task/{leader}/children").read_text()
    return [int(pid) for pid in text.split()]


def first_progress(fleet: Fleet, number: int, what: str = "") -> None:
    def is_it(_: str, r: object) -> bool | None:
        if not isinstance(r, messages.CalibrationProgress):
            return None
        return (r.generation == number and r.what.startswith(what)) or None

    fleet.wait_for("progress", is_it)


def test_a_participant_that_dies_ends_the_round_for_all(slow_fleet: Fleet) -> None:
    begin(slow_fleet, "ab", sizes=(1, 2))
    first_progress(slow_fleet, -1)

    (pid,) = measuring_on(slow_fleet, "b")
    os.kill(pid, signal.SIGKILL)

    said: dict[str, messages.Report] = {}

    def both(name: str, report: object) -> bool | None:
        if isinstance(report, messages.WorkerDied | messages.GenerationBroken):
            said[name] = report
        return True if len(said) == 2 else None

    slow_fleet.wait_for("end of the round", both)
    dead, survivor = said["b"], said["a"]
    assert isinstance(dead, messages.WorkerDied)
    assert (dead.generation, dead.slot) == (-1, 0)
    assert "SIGKILL" in dead.reason
    assert isinstance(survivor, messages.GenerationBroken)
    assert survivor.generation == -1

    begin(slow_fleet, "aa", number=-2)
    check_profile(end(slow_fleet))


@pytest.mark.rotated
def test_a_newer_round_ends_the_one_before(slow_fleet: Fleet) -> None:
    begin(slow_fleet, "ab", sizes=(1, 2))
    first_progress(slow_fleet, -1)
    older = measuring_on(slow_fleet, "b")

    command = begin(slow_fleet, "ab", number=-2)
    slow_fleet.machines["b"].send(command)  # doubles are ignored

    check_profile(end(slow_fleet))
    ended = [r for _, r in slow_fleet.history if isinstance(r, messages.Calibrated)]
    assert [r.generation for r in ended] == [-2]
    assert not set(older) & set(measuring_on(slow_fleet, "b"))


@pytest.mark.rotated
def test_a_round_that_is_given_up_never_begins(fleet: Fleet) -> None:
    for machine_ in fleet.machines.values():
        machine_.send(messages.AbandonGeneration(generation=-1))
    begin(fleet, "ab")
    begin(fleet, "ab", number=-2)

    end(fleet)

    ended = [r for _, r in fleet.history if isinstance(r, messages.Calibrated)]
    assert [r.generation for r in ended] == [-2]


def test_what_the_users_code_raises_is_the_users_error(zygote: Zygote, tmp_path: Path) -> None:
    spec = replace(job_spec(tmp_path), entrypoint="odd_jobs:unreadable_job")
    with Fleet(spec, "a", tmp_path / "log", zygote) as fleet:
        fleet.ready()
        fleet.machines["a"].send(messages.Calibrate())
        report = fleet.wait_for(
            "error", lambda _, r: r if isinstance(r, messages.UserCodeFailed) else None
        )

    assert "OSError" in report.message


@pytest.mark.rotated
def test_others_do_not_report_what_follows_from_an_error_of_the_users_code(
    zygote: Zygote, tmp_path: Path
) -> None:
    spec = replace(job_spec(tmp_path), entrypoint="odd_jobs:once_unreadable_job")
    once = {"TINY_ONCE": str(tmp_path / "once")}
    with Fleet(spec, "ab", tmp_path / "log", zygote, once) as fleet:
        fleet.ready()
        begin(fleet, "ab")
        fleet.wait_for("error", lambda _, r: isinstance(r, messages.UserCodeFailed) or None)
        # The first one's supervisor also has the store.
        until(
            "the end of both",
            lambda: (len(measuring_on(fleet, "a")), measuring_on(fleet, "b")) == (1, []),
        )
        begin(fleet, "ab", number=-2)
        end(fleet)
    left = messages.GenerationBroken | messages.WorkerDied
    assert not [r for _, r in fleet.history if isinstance(r, left)]

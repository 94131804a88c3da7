"""Documents about a job for people and programs."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tests.builders import a_plan, a_spec, an_offer, model_facts, slots_of
from tests.view import View, changed, settings_with

from spottrain.manifest import CheckpointEntry
from spottrain.pricing.billing.ledger import Ledger
from spottrain.varuna_manager.core.model.commands import Outcome
from spottrain.varuna_manager.core.model.records import (
    BudgetAlert,
    Generation,
    GenerationPhase,
    GenerationSummary,
    Interruption,
    Progress,
    RankPhase,
    SlowVm,
    Tally,
    VmPhase,
    VmRecord,
)
from spottrain.varuna_manager.core.model.settings import JobSettings
from spottrain.varuna_manager.core.model.state import JobPhase, State
from spottrain.varuna_manager.format import dollars, duration, predicted_time, size, step_time
from spottrain.varuna_manager.reporting import documents, tables, text
from spottrain.varuna_manager.reporting.history import JobHistory
from spottrain.wire.plan import Plan

SPEC = a_spec(
    name="demo",
    seed=0,
    steps=200,
    minibatch_size=16,
    microbatch_size=4,
    reduction="exact",
    checkpoint_path="/ckpt",
    lease_s=60.0,
)
FACTS = model_facts((), fingerprint="f", heldout_len=1)
OFFER = an_offer(
    region="local",
    zone="local-a",
    instance_type="cpu",
    usd_per_hour=3.6,
    gpu_memory_bytes=1,
)


def plan_on(*vm_ids: str, depth: int = 2) -> Plan:
    return a_plan(
        depth,
        len(vm_ids) // depth,
        microbatch_size=4,
        virtual_nodes=4,
        slots=slots_of(vm_ids),
        step_s=0.2,
    )


def generation_of(plan: Plan) -> Generation:
    return Generation(
        number=3,
        plan=plan,
        reason="a VM came",
        phase=GenerationPhase.RUNNING,
        since_s=1100.0,
        opened_at_s=1090.0,
        checkpoint="step-40",
        participants=plan.slots,
        ranks=dict.fromkeys(plan.slots, RankPhase.STARTED),
        from_step=50,
        started_at_s=1100.0,
        measured_step_s=0.25,
        timed=3,
    )


def vm(vm_id: str, **changes: Any) -> VmRecord:
    record = VmRecord(
        vm_id=vm_id,
        intent="i",
        offer=OFFER,
        on_demand_usd_per_hour=9.0,
        launched_at_s=1000.0,
        known_at_s=1000.0,
        phase=VmPhase.READY,
        private_address="127.0.0.1",
        num_slots=1,
    )
    return replace(record, **changes)


def ledger_of(*vm_ids: str) -> Ledger:
    """Four VMs that run, and one that has cost 0.50 dollars."""
    gone = replace(OFFER, usd_per_hour=1.8)
    ledger = Ledger().opened(
        "vm-9", gone, on_demand_usd_per_hour=3.6, launched_at_s=0.0, seen_at_s=0.0
    )
    ledger = ledger.ended("vm-9", 1000.0)
    for vm_id in vm_ids:
        ledger = ledger.opened(
            vm_id,
            OFFER,
            on_demand_usd_per_hour=9.0,
            launched_at_s=1000.0,
            seen_at_s=1000.0,
        )
    return ledger


LEDGER = ledger_of(*"abcd")
RUNNING = changed(
    State(
        phase=JobPhase.ACTIVE,
        settings=settings_with(
            JobSettings(uid="u", spec=SPEC, facts=FACTS), max_vms=4, max_usd=2.0
        ),
        submitted_at_s=1000.0,
        now_s=1150.0,
        activity="training",
        last_message="vm-9 was killed: [the cloud says so]",
    ),
    vms={name: vm(name) for name in "abcd"},
    current_generation=generation_of(plan_on("a", "b", "c", "d")),
    checkpoints=(CheckpointEntry(name="step-40", step=40),),
    progress=Progress(
        step=61,
        highest_step=61,
        loss_first=5.5,
        loss_last=3.0,
        heldout_first=5.6,
        first_commit_at_s=1010.0,
        last_commit_at_s=1130.0,
    ),
    tally=Tally(preemptions_unnoticed=1),
    ledger=LEDGER,
    generations=(
        GenerationSummary(
            generation=1,
            pipeline_depth=2,
            data_parallel_width=1,
            num_slots=2,
            from_step=0,
            to_step=50,
            reason="start",
            predicted_step_s=0.4,
            measured_step_s=0.5,
            started_at_s=1010.0,
            ended_at_s=1090.0,
        ),
        GenerationSummary(
            generation=2,
            pipeline_depth=2,
            data_parallel_width=2,
            num_slots=4,
            from_step=None,
            to_step=50,
            reason="never trained",
            predicted_step_s=0.4,
            measured_step_s=None,
            started_at_s=1090.0,
            ended_at_s=1091.0,
        ),
    ),
    interruptions=(
        Interruption(
            interruption="kill",
            vm_id="vm-9",
            at_s=1088.0,
            reason="gone",
            generation=1,
            cost_s=3.25,
        ),
    ),
)
ENDED = changed(
    replace(
        RUNNING,
        phase=JobPhase.ENDED,
        outcome=Outcome(kind="succeeded", exit_code=0, reason="all steps are done"),
    ),
    current_generation=None,
    vms={},
    ledger=ledger_of(),
)


def text_of(*parts: Any) -> str:
    console = Console(width=150, record=True, file=None, quiet=False, stderr=True)
    with console.capture() as captured:
        for part in parts:
            console.print(part, markup=False)
    return captured.get()


def test_the_report_has_every_documented_field() -> None:
    report = documents.report(RUNNING, JobHistory(), True, 1200.0)
    promised = (
        "state steps_done loss_first loss_last heldout_loss heldout_loss_first "
        "preemptions_noticed preemptions_unnoticed silent_losses plans "
        "slow_vms_replaced slow_vms "
        "minibatches_lost minibatches_recomputed usd_spent usd_on_demand "
        "examples_per_s wall_s cost timeline submitted_at_s minibatch_size"
    )
    assert set(promised.split()) <= set(report)
    columns = {"generation", "pipeline_depth", "data_parallel_width", "from_step"}
    assert all(columns | {"reason"} <= set(plan) for plan in report["plans"])
    assert json.loads(json.dumps(report)) == report


def test_gpu_hours_are_shown_where_they_are_capped() -> None:
    capped = replace(RUNNING, settings=settings_with(RUNNING.job, max_gpu_hours=8.0))
    for state, told in ((RUNNING, False), (capped, True)):
        status = documents.status(state, True, 1200.0)
        report = documents.report(state, JobHistory(), True, 1200.0)
        assert status["gpu_hours"] == report["cost"]["gpu_hours"] > 0
        assert (" of 8 GPU-hours" in tables.money_line(status)) is told
        assert (" of 8 GPU-hours" in " ".join(text.summary(report))) is told


def test_slow_vms_and_alerts_of_the_budget_are_timed_from_the_submission() -> None:
    slow = SlowVm(vm_id="a", found_at_s=1100.0, slowness=2.0, evidence="late", replaced_by="e")
    alert = BudgetAlert(share=0.5, at_s=1120.0, spent=1.0, cap=2.0)
    report = documents.report(
        changed(RUNNING, slow_vms=(slow,), alerts=(alert,)), JobHistory(), True, 1200.0
    )
    [found] = report["slow_vms"]
    assert (found["vm_id"], found["at_s"], found["replaced_by"]) == ("a", 100.0, "e")
    [told] = report["budget_alerts"]
    assert (told["share"], told["at_s"]) == (0.5, 120.0)


def test_the_report_lists_only_plans_that_trained() -> None:
    plans = documents.report(RUNNING, JobHistory(), True, 1200.0)["plans"]
    assert [(p["generation"], p["from_step"], p["ran_s"]) for p in plans] == [
        (1, 0, 80.0),
        (3, 50, 100.0),
    ]
    assert plans[1]["measured_step_s"] == 0.25
    assert plans[1]["predicted_step_s"] == 0.2


def test_money_and_speed_are_counted_up_to_the_moment_asked_for() -> None:
    report = documents.report(RUNNING, JobHistory(), True, 1100.0)
    assert report["usd_spent"] == pytest.approx(0.5 + 4 * 0.15)
    assert report["usd_on_demand"] == pytest.approx(1.0 + 4 * 0.375)
    assert report["examples_per_s"] == pytest.approx(60 * 16 / 120)
    assert report["wall_s"] == 100.0


def test_time_stands_still_after_the_end() -> None:
    assert documents.report(ENDED, JobHistory(), False, 9e9) == documents.report(
        ENDED, JobHistory(), False, 1150.0
    )
    assert documents.report(ENDED, JobHistory(), False, 9e9)["state"] == "succeeded"


@pytest.mark.parametrize(
    ("state", "managed", "word"),
    [
        (RUNNING, True, "running"),
        (RUNNING, False, "unmanaged"),
        (
            changed(RUNNING, current_generation=None),
            True,
            "waiting",
        ),
        (replace(ENDED, phase=JobPhase.ENDING), True, "ending"),
        (ENDED, True, "succeeded"),
    ],
)
def test_the_state_is_one_word(state: State, managed: bool, word: str) -> None:
    assert documents.job_state(state, managed) == word


def test_status_shows_the_state_of_a_job() -> None:
    status = documents.status(RUNNING, True, 1100.0)
    assert status["step"] == 61
    assert status["examples_per_s"] == pytest.approx(64.0)
    assert status["time_left_s"] == pytest.approx(139 * 0.25)
    assert status["usd_per_hour"] == pytest.approx(4 * 3.6)
    assert status["plan"]["reason"] == "a VM came"
    assert len(status["fleet"]) == 4
    assert json.loads(json.dumps(status)) == status


def test_a_range_says_too_little_of_the_time_that_is_left() -> None:
    plan = replace(plan_on("a", "b"), predicted_max_s=1.6)
    shared = changed(RUNNING, current_generation=replace(generation_of(plan), measured_step_s=None))
    assert documents.status(shared, True, 1100.0)["time_left_s"] is None
    assert documents.status(shared, True, 1100.0)["plan"]["predicted_max_s"] == 1.6
    known = replace(generation_of(plan), measured_step_s=0.5)
    status = documents.status(changed(RUNNING, current_generation=known), True, 1100.0)
    assert status["time_left_s"] == pytest.approx(139 * 0.5)


def safety_of(state: State) -> tuple[dict[str, Any], str]:
    """What a state's status says of losses, as data and as a line."""
    status = documents.status(state, True, 1100.0)
    return status["safety"], tables.safety_line(status)


@pytest.mark.parametrize(
    ("vm_ids", "depth", "at_once", "spared"),
    [
        ("abcd", 2, 1, "abcd"),
        ("aabb", 2, 1, "abcd"),
        ("abab", 2, 0, "cd"),
        ("abcb", 2, 0, "acd"),
        ("ab", 2, 0, "cd"),
        ("abcd", 1, 3, "abcd"),
        ("abcx", 2, 0, "acd"),  # x is gone
    ],
)
def test_a_vm_can_be_lost_if_every_stage_has_a_copy_elsewhere(
    vm_ids: str, depth: int, at_once: int, spared: str
) -> None:
    plan = plan_on(*vm_ids)
    if depth == 1:
        plan = replace(
            plan_on(*vm_ids),
            pipeline_depth=1,
            data_parallel_width=4,
            stage_bounds=(0, 2),
            replica_bounds=(0, 1, 2, 3, 4),
        )
    safety, line = safety_of(changed(RUNNING, current_generation=generation_of(plan)))
    assert (safety["vms_at_once"], "".join(safety["vms_spared"])) == (at_once, spared)
    assert safety["survives_any_vm"] is (at_once > 0)
    if at_once > 1:
        assert line == "any 3 VMs at once can be lost without losing progress"


def test_a_silent_vm_may_be_gone_already() -> None:
    silent = replace(View(RUNNING).vm("d"), silent_since_s=1090.0)
    state = changed(
        RUNNING,
        current_generation=generation_of(plan_on(*"abcd")),
        vms={**View(RUNNING).vms, "d": silent},
    )
    assert safety_of(state)[0]["vms_spared"] == ["a", "c", "d"]


def test_the_safety_shows_what_a_loss_would_cost() -> None:
    vms = {name: View(RUNNING).vm(name) for name in "ab"}
    alone = changed(RUNNING, vms=vms, current_generation=generation_of(plan_on("a", "b")))
    assert safety_of(alone) == (
        {
            "survives_any_vm": False,
            "vms_at_once": 0,
            "vms_spared": [],
            "survives_any_worker": True,
            "copied_step": None,
            "copy_lag_steps": None,
            "checkpoint_step": 40,
            "lag_steps": 21,
            "checkpoint_every_steps": 10,
            "checkpoint_cost_s": None,
        },
        "losing a VM may cost 21 steps, back to step 40",
    )


def test_copies_on_other_vms_limit_what_a_loss_costs() -> None:
    plan = replace(plan_on("a", "b"), data_parallel_width=1, peer_copies=1)
    state = changed(RUNNING, current_generation=generation_of(plan), copied_step=58)
    safety, line = safety_of(state)
    assert (safety["copied_step"], safety["copy_lag_steps"]) == (58, 3)
    assert line.endswith(
        "losing another VM may cost 3 steps, back to copies of step 58; several at once "
        "21 steps, to step 40"
    )
    without = {name: vm for name, vm in View(state).vms.items() if name != "b"}
    assert safety_of(changed(state, vms=without))[0]["copied_step"] is None


def test_the_interval_of_checkpoints_is_told_once_it_is_chosen() -> None:
    job = replace(RUNNING.job, spec=replace(RUNNING.job.spec, checkpoint_every_steps=0))
    chosen = replace(View(RUNNING).progress, checkpoint_every_steps=47, checkpoint_cost_s=0.31)
    lines = [
        tables.checkpoints_line({"safety": safety_of(state)[0]})
        for state in (
            RUNNING,
            replace(RUNNING, settings=job),
            changed(replace(RUNNING, settings=job), progress=chosen),
        )
    ]
    assert lines == [
        "every 10 steps",
        "",
        "every 47 steps, each slows training by 0.31 s",
    ]


def test_vms_that_can_be_lost_are_named_where_others_cannot() -> None:
    mixed = changed(RUNNING, current_generation=generation_of(plan_on("a", "b", "c", "b")))
    assert safety_of(mixed)[1] == (
        "a, c, d can be lost without losing progress; losing another VM may cost 21 "
        "steps, back to step 40"
    )


def test_between_plans_the_memory_of_the_one_before_counts() -> None:
    """From a loss until the next plan trains, too."""
    before = plan_on("a", "b", "c", "d")
    vms = {name: View(RUNNING).vm(name) for name in "abd"}
    between = changed(
        RUNNING,
        current_generation=None,
        previous_plan=before,
        vms=vms,
        generations=View(RUNNING).generations[:1],
    )
    assert safety_of(between)[0]["vms_spared"] == ["b", "d"]
    after = replace(generation_of(plan_on("a", "b")), started_at_s=None)
    starting, _ = safety_of(changed(between, current_generation=after))
    assert starting["vms_spared"] == ["b", "d"]


def test_state_on_gpus_is_lost_with_a_worker() -> None:
    plan = replace(plan_on("a", "b"), data_parallel_width=1, state="device")
    on_gpus = changed(RUNNING, current_generation=generation_of(plan))
    safety, line = safety_of(on_gpus)
    assert not safety["survives_any_worker"]
    assert "losing another VM or a killed worker may cost 21 steps" in line


@pytest.mark.parametrize(("vms", "survives"), [("aa", False), ("aabb", True)])
def test_state_on_gpus_that_one_vm_shares_is_lost_with_a_worker(vms: str, survives: bool) -> None:
    plan = a_plan(1, len(vms), num_sections=2, slots=slots_of(vms), state="device")
    assert documents.survives_any_worker(plan)
    assert documents.survives_any_worker(replace(plan, shared_state=(1, 1))) == survives


def test_the_live_panel_shows_everything() -> None:
    text = text_of(tables.live_panel(documents.status(RUNNING, True, 1100.0), 1088.0))
    for part in (
        "demo · running · 1 min 40 s",
        "61 of 200",
        "about 35 s left",
        "3.000",
        "64.0 examples/s",
        "$1.10 of $2.00 · $14.40/hour",
        "4 ready · any one VM can be lost without",
        "2x2 since step 50: a VM came",
        "vm-9 was killed: [the cloud says so]",
    ):
        assert part in text


def test_the_summary_lists_plans_interruptions_and_money() -> None:
    text = text_of(*tables.summary(documents.report(ENDED, JobHistory(), False, 0.0)))
    for part in (
        "killed",
        "3.2 s",
        "2x1",
        "500 ms",
        "demo: succeeded after 2 min 30 s (all steps are done)",
        "5.500 → 3.000",
        "$0.5000, on demand $1.00 (50% saved)",
        "0 lost, 0 recomputed",
    ):
        assert part in text


def test_a_job_that_has_just_begun_can_be_shown() -> None:
    new = State(phase=JobPhase.ACTIVE, settings=RUNNING.settings, submitted_at_s=1.0)
    status = documents.status(new, True, 2.0)
    text = text_of(
        tables.live_panel(status, None),
        *tables.summary(documents.report(new, JobHistory(), True, 2.0)),
    )
    assert "plan         none" in text
    assert "Interruptions: none" in text
    assert "step 0/200" in tables.plain_line(status)


def test_the_fleet_is_counted_by_what_its_vms_do() -> None:
    vms = {
        "a": vm("a"),
        "b": vm("b"),
        "c": vm("c", silent_since_s=1.0),
        "d": vm("d", leaves_at_s=1.0),
        "e": vm("e", phase=VmPhase.STARTING),
        "f": vm("f", phase=VmPhase.REGISTERED),
    }
    status = documents.status(changed(RUNNING, vms=vms), True, 1100.0)
    assert documents.fleet_line(status) == "2 ready, 1 silent, 1 leaving, 2 booting"


def test_a_vm_that_the_plan_leaves_out_is_a_spare() -> None:
    two = generation_of(plan_on("a", "b"))
    status = documents.status(changed(RUNNING, current_generation=two), True, 1100.0)
    assert documents.fleet_line(status) == "2 ready, 2 spare"
    assert text_of(tables.fleet_table(status)).count("spare") == 2


@pytest.mark.parametrize(
    ("told", "text"),
    [
        (duration(3.24), "3.2 s"),
        (duration(59.4), "59 s"),
        (duration(125), "2 min 05 s"),
        (duration(3600 * 5 + 240), "5 h 04 min"),
        (duration(None), "-"),
        (step_time(0.4123), "412 ms"),
        (step_time(65), "1 min 05 s"),
        (predicted_time(0.4123, None), "412 ms"),
        (predicted_time(7.5, 12.0), "7500 ms to 12 s"),
        (dollars(0.01234), "$0.0123"),
        (dollars(1234.5), "$1,234.50"),
        (dollars(0), "$0.00"),
        (size(999), "999 B"),
        (size(12_345_678), "12.3 MB"),
        (size(5e15), "5,000.0 TB"),
    ],
)
def test_numbers_read_well(told: str, text: str) -> None:
    assert told == text


@given(st.floats(min_value=0, max_value=1e9))
def test_every_number_has_words(value: float) -> None:
    for words in (duration, step_time, dollars, size):
        assert 0 < len(words(value)) < 20

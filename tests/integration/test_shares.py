"""Another share of the mini-batch in the middle of a generation; no bit changes."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.faults import Action, environment_of
from tests.integration.fleet import Fleet, Zygote, make_plan, read_weights
from tests.integration.struck_runs import NUM_SECTIONS, job_spec
from tests.tiers import first_always

from spottrain.codec import decode
from spottrain.pipeline.base.faults import Hook
from spottrain.varuna_manager.cli.traces.timeline import merge
from spottrain.wire import messages
from spottrain.wire.messages import ShareMinibatch, TraceMinibatches
from spottrain.wire.numerics import Numerics
from spottrain.wire.plan import Plan, Slot
from spottrain.wire.timeline import RankTimeline

STEPS = 8
SLOWLY = {"TINY_SLEEP_S": "0.1"}
"""Slow enough that another share comes in before the last step is done."""


@pytest.fixture(scope="module")
def longer(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the weights of an undisturbed run of ``STEPS`` mini-batches."""
    folder = tmp_path_factory.mktemp("undisturbed")
    spec = job_spec(folder, steps=STEPS)
    with Fleet(spec, "a", folder / "log", zygote) as fleet:
        fleet.ready()
        plan = make_plan(spec, 1, 1, "a", NUM_SECTIONS)
        return fleet.train(lambda _: plan, fleet.initialise())


class SharingFleet(Fleet):
    """Tells every machine other shares, as soon as a generation is begun."""

    shares: Sequence[tuple[int, ...]] = ()

    def run(
        self,
        plan: Plan,
        checkpoint: str,
        donors: Sequence[Slot] = (),
        evaluate: bool = False,
        save_only: bool = False,
        code: str = "",
        numerics: Numerics | None = None,
    ) -> None:
        super().run(plan, checkpoint, donors, evaluate, save_only, code, numerics)
        for number, bounds in enumerate(self.shares, start=1):
            if len(bounds) == len(plan.replica_bounds):
                self.share(number, bounds)

    def share(
        self,
        number: int,
        bounds: tuple[int, ...],
        machines: str = "",
        generation: int = 0,
    ) -> None:
        """Tell some machines, all by default, a share of a generation."""
        command = ShareMinibatch(
            generation=generation or self.generation,
            number=number,
            replica_bounds=bounds,
        )
        for name in machines or tuple(self.machines):
            self.machines[name].send(command)

    def traces(self) -> list[messages.TraceWritten]:
        """Return what ranks have recorded so far."""
        return [r for _, r in self.history if isinstance(r, messages.TraceWritten)]

    def wait_for_traces(self, count: int) -> list[messages.TraceWritten]:
        """Return what ranks have recorded, once that many have."""
        return self.wait_for(
            "traces", lambda *_: found if len(found := self.traces()) == count else None
        )

    def computed(self) -> list[tuple[int, ...]]:
        """Return, for each mini-batch of the newest generation, what every rank has."""
        rows: dict[int, dict[str, int]] = {}
        for name, r in self.history:
            match r:
                case messages.MinibatchCommitted(generation=self.generation, step=step):
                    rows.setdefault(step, {})[name] = r.microbatches
        return [tuple(count for _, count in sorted(rows[step].items())) for step in sorted(rows)]


@pytest.mark.parametrize("schedule", first_always(["varuna", "1f1b", "gpipe"]))
def test_shares_change_in_the_middle_for_all_ranks_at_once(
    zygote: Zygote, longer: dict[str, bytes], tmp_path: Path, schedule: str
) -> None:
    spec = job_spec(tmp_path, steps=STEPS)
    with SharingFleet(spec, "abcd", tmp_path / "log", zygote, SLOWLY) as fleet:
        fleet.ready()
        plan = make_plan(spec, 2, 2, "abcd", NUM_SECTIONS, schedule=schedule)
        fleet.run(plan, fleet.initialise())
        fleet.share(9, (0, 3, 4), generation=7)  # of another generation
        fleet.wait_for_step(1)
        fleet.share(1, (0, 1, 4), "abc")  # d does not know: nobody changes over
        fleet.wait_for_step(3)
        fleet.share(2, (0, 3, 4))
        assert fleet.wait_for_end(set("abcd"))
        rows = fleet.computed()

    assert read_weights(tmp_path / "checkpoints") == longer
    assert len(rows) == STEPS
    assert rows == sorted(rows)
    assert set(rows) == {(2, 2, 2, 2), (3, 3, 1, 1)}
    assert rows.index((3, 3, 1, 1)) >= 3


def test_ranks_tell_and_record_what_they_do_without_changing_a_bit(
    zygote: Zygote, longer: dict[str, bytes], tmp_path: Path
) -> None:
    spec = job_spec(tmp_path, steps=STEPS)
    with SharingFleet(spec, "ab", tmp_path / "log", zygote, SLOWLY) as fleet:
        fleet.ready()
        plan = make_plan(spec, 2, 1, "ab", NUM_SECTIONS, schedule="gpipe")
        fleet.run(plan, fleet.initialise())
        for machine in fleet.machines.values():
            machine.send(TraceMinibatches(generation=1, number=7, minibatches=2))
        profiles = fleet.wait_for_traces(2)
        for machine in fleet.machines.values():
            command = TraceMinibatches(generation=1, number=8, minibatches=1, content="timeline")
            machine.send(command)
        assert fleet.wait_for_end(set("ab"))
        told = [
            (name, r) for name, r in fleet.history if isinstance(r, messages.MinibatchCommitted)
        ]
        traces = fleet.traces()

    assert read_weights(tmp_path / "checkpoints") == longer
    assert sorted((trace.number, trace.rank) for trace in traces) == [
        *((7, 0), (7, 1), (8, 0), (8, 1))
    ]
    assert {(t.last_step - t.first_step, t.number) for t in traces} == {(2, 7), (1, 8)}
    check_timeline([trace for trace in traces if trace.number == 8])
    for trace in profiles:
        file = Path(trace.path)
        names = [e["name"] for e in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]]
        assert names.count("forward 3") == 2
        assert "aten::linear" in names
        file.unlink()

    for name, r in told:
        assert 0 < r.busy_s <= r.tasks_s <= r.step_s
        assert r.microbatches == 4
        assert r.recomputes == (4 if name == "a" else 0)


def check_timeline(written: list[messages.TraceWritten]) -> None:
    """Check what the ranks of P=2 have recorded of one mini-batch."""
    files = [Path(one.path) for one in sorted(written, key=lambda one: one.rank)]
    measured = merge([decode(RankTimeline, gzip.decompress(file.read_bytes())) for file in files])
    for file in files:
        file.unlink()
    order = [[str(s.task) for s in measured.tasks if s.stage == k] for k in (0, 1)]
    assert order[0] == [
        "F0",
        "F1",
        "F2",
        "F3",
        "R0",
        "B0",
        "R1",
        "B1",
        "R2",
        "B2",
        "R3",
        "B3",
    ]
    assert sorted(order[1]) == ["B0", "B1", "B2", "B3", "F0", "F1", "F2", "F3"]
    done = {(s.stage, str(s.task)): (s.start_s, s.end_s) for s in measured.tasks}
    assert len(measured.messages) == 8
    for one in measured.messages:
        work = "B" if one.is_gradient else "F"
        begun_s, _ = done[one.sender, f"{work}{one.microbatch}"]
        needed_s, _ = done[one.receiver, f"{work}{one.microbatch}"]
        assert begun_s < one.start_s < one.end_s < needed_s
    assert [(s.stage, s.phase) for s in measured.phases] == [
        (stage, phase) for stage in (0, 1) for phase in ("reduction", "commit", "update")
    ]
    for stage in (0, 1):
        ends_s = [s.end_s for s in measured.tasks if s.stage == stage]
        phases = [s for s in measured.phases if s.stage == stage]
        assert max(ends_s) <= phases[0].start_s
        assert all(s.start_s < s.end_s <= measured.end_s for s in phases)


AROUND = [
    (Hook.PREPARED, 0, Action.KILL_WORKER),
    (Hook.GATHERED, 0, Action.KILL_VM),
    (Hook.DECIDED, 0, Action.KILL_WORKER),
    (Hook.DECIDED, 0, Action.KILL_VM),
    (Hook.FLIPPED, 0, Action.KILL_WORKER),
    (Hook.FLIPPED, 0, Action.KILL_VM),
    (Hook.APPLIED, 0, Action.KILL_VM),
    (Hook.REPORTED, 0, Action.KILL_WORKER),
    (Hook.FORWARD, 1, Action.KILL_VM),
    (Hook.REDUCE, 1, Action.KILL_WORKER),
    (Hook.PREPARED, 1, Action.KILL_VM),
]
"""Places before, at and after the change-over that follows mini-batch 0."""


@pytest.mark.rotated
@pytest.mark.parametrize(("hook", "step", "action"), AROUND)
def test_a_rank_that_is_killed_around_the_change_over_costs_nothing(
    zygote: Zygote,
    undisturbed: dict[str, bytes],
    tmp_path: Path,
    hook: Hook,
    step: int,
    action: Action,
) -> None:
    spec = job_spec(tmp_path)
    mark = tmp_path / "mark"
    blow = {"hook": hook, "rank": 2, "action": action, "step": step, "mark": str(mark)}
    environment = environment_of([blow])

    def choose(machines: Sequence[str]) -> Plan:
        shape = (2, 2) if len(machines) == 4 else (1, 3)
        return make_plan(spec, *shape, machines, NUM_SECTIONS)

    with SharingFleet(spec, "abcd", tmp_path / "log", zygote, environment) as fleet:
        fleet.shares = [(0, 3, 4)]
        fleet.ready()
        weights = fleet.train(choose, fleet.initialise())

    assert mark.exists(), "the blow did not strike"
    assert weights == undisturbed
    assert fleet.committed_twice() == []

"""Another share of the mini-batch in the middle of a generation; no bit changes."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.integration.fleet import Fleet, Zygote, make_plan, read_weights
from tests.integration.struck_runs import NUM_SECTIONS, job_spec

from spottrain.pipeline.base.faults import ENVIRONMENT_VARIABLE, Action, Hook
from spottrain.wire import messages
from spottrain.wire.messages import ShareMinibatch, TraceMinibatches
from spottrain.wire.model import Plan, Slot

STEPS = 8
SLOWLY = {"TINY_SLEEP_S": "0.03"}
"""Slow enough that another share comes in before the last step is done."""


@pytest.fixture(scope="module")
def longer(
    zygote: Zygote, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
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
    ) -> None:
        super().run(plan, checkpoint, donors, evaluate)
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

    def computed(self) -> list[tuple[int, ...]]:
        """Return, for each mini-batch of the newest generation, what every rank has."""
        rows: dict[int, dict[str, int]] = {}
        for name, r in self.history:
            match r:
                case messages.MinibatchCommitted(generation=self.generation, step=step):
                    rows.setdefault(step, {})[name] = r.microbatches
        return [
            tuple(count for _, count in sorted(rows[step].items()))
            for step in sorted(rows)
        ]


@pytest.mark.parametrize("schedule", ["varuna", "1f1b", "gpipe"])
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
    zygote: Zygote, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    spec = job_spec(tmp_path)
    with Fleet(spec, "ab", tmp_path / "log", zygote, SLOWLY) as fleet:
        fleet.ready()
        plan = make_plan(spec, 2, 1, "ab", NUM_SECTIONS, schedule="gpipe")
        fleet.run(plan, fleet.initialise())
        for machine in fleet.machines.values():
            machine.send(TraceMinibatches(generation=1, number=7, minibatches=2))
        assert fleet.wait_for_end(set("ab"))
        told = [
            (name, r)
            for name, r in fleet.history
            if isinstance(r, messages.MinibatchCommitted)
        ]
        traces = [r for _, r in fleet.history if isinstance(r, messages.TraceWritten)]

    assert read_weights(tmp_path / "checkpoints") == undisturbed
    assert sorted(trace.rank for trace in traces) == [0, 1]
    ((first, last),) = {(trace.first_step, trace.last_step) for trace in traces}
    assert last == first + 2
    for trace in traces:
        file = Path(trace.path)
        names = [
            e["name"]
            for e in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        ]
        assert names.count("forward 3") == 2
        assert "aten::linear" in names
        file.unlink()

    for name, r in told:
        assert 0 < r.busy_s <= r.tasks_s <= r.step_s
        assert r.microbatches == 4
        assert r.recomputes == (4 if name == "a" else 0)


AROUND = [
    (Hook.PREPARED, 0),
    (Hook.GATHERED, 0),
    (Hook.DECIDED, 0),
    (Hook.FLIPPED, 0),
    (Hook.APPLIED, 0),
    (Hook.REPORTED, 0),
    (Hook.FORWARD, 1),
    (Hook.REDUCE, 1),
    (Hook.PREPARED, 1),
]
"""Places before, at and after the change-over that follows mini-batch 0."""


@pytest.mark.parametrize(("hook", "step"), AROUND)
@pytest.mark.parametrize("action", [Action.KILL_WORKER, Action.KILL_VM])
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
    environment = {ENVIRONMENT_VARIABLE: json.dumps([blow])}

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

"""``spottrain simulate async-schedule`` and ``async-step``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.unit.varuna_manager.cli.simulate.test_schedule import Simulate, simulating, spec

from tests.commands import Run


@pytest.fixture
def simulate(run: Run, tmp_path: Path) -> Simulate:
    return simulating(run, tmp_path, "async-step")


def test_asynchronous_schedules_name_the_version_of_each_task(run: Run) -> None:
    options = ("-o", "json", "--no-recompute")
    code, out, _ = run("simulate", "async-schedule", "pipedream", "-P", "4", "-M", "5", *options)
    assert code == 0
    assert [tasks.split()[-1] for tasks in json.loads(out)] == [
        f"B4@{version}" for version in (1, 2, 3, 4)
    ]
    _, out, _ = run(
        *[
            "simulate",
            "async-schedule",
            "pipedream",
            "-P",
            "4",
            "-M",
            "5",
            "--vertical-sync",
            *options,
        ]
    )
    assert {tasks.split()[-1] for tasks in json.loads(out)} == {"B4@1"}
    _, out, _ = run("simulate", "async-schedule", "2bw", "-P", "3", "-M", "3", *options)
    assert all(tasks.endswith("B8@1") for tasks in json.loads(out))
    for arguments, words in (
        (("2bw", "-P", "4", "-M", "3"), "as many micro-batches"),
        (("1f1b", "-P", "4", "-M", "4"), "one of pipedream, 2bw"),
        (("2bw", "-P", "1000", "-M", "1000"), "take fewer"),
    ):
        code, _, err = run("simulate", "async-schedule", *arguments)
        assert code == 2
        assert words in err


@pytest.mark.parametrize(("kind", "versions"), [("pipedream", 4), ("2bw", 2)])
def test_a_pipeline_that_never_drains_has_no_bubble(
    simulate: Simulate, kind: str, versions: int
) -> None:
    code, out, _ = simulate(spec(schedule=kind))
    step = json.loads(out)
    assert code == 0
    assert step["minibatch_s"] == pytest.approx(24)
    assert step["idle_s"] == pytest.approx([0.0] * 4)
    assert step["weight_versions"][0] == versions
    _, out, _ = simulate(spec(schedule=kind, allreduce_s=30))
    assert json.loads(out)["minibatch_s"] == 30
    code, _, err = simulate(spec(schedule="2bw", num_microbatches=3))
    assert (code, "as many as there are stages" in err) == (2, True)


def test_a_timeline_shows_the_first_mini_batches(run: Run, tmp_path: Path) -> None:
    file, trace = tmp_path / "spec.json", tmp_path / "trace.json"
    file.write_text(json.dumps(spec(schedule="2bw")))
    code, out, _ = run("simulate", "async-step", file, "--timeline", trace)
    assert (code, "beside an all-reduce of 0.500 s" in out) == (0, True)
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(event.get("cat") == "forward" for event in events) == 8 * 8 * 4

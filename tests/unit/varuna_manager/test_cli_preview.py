"""``spottrain plan`` for a profile as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from spottrain.varuna_manager.cli import main

PROFILES = Path(__file__).parents[3] / "examples" / "profiles"
SLOW = PROFILES / "slow-link.json"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setenv("COLUMNS", "160")

    def answer(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["spottrain", "plan", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return answer


def test_a_plan_is_explained_by_all_that_was_weighed(run: Run) -> None:
    code, out, _ = run(SLOW, "--gpus", "4", "--explain", "-o", "json")
    assert code == 0
    document = json.loads(out)
    best, *others = document["candidates"]
    assert best["shape"] == document["plan"]
    assert best["why_not"] == ""
    assert all(other["why_not"] for other in others)
    assert {c["pipeline_depth"] for c in document["candidates"]} == {1, 2, 3, 4}
    assert {"step_s", "examples_per_s", "usd_per_million_examples"} <= best.keys()
    assert best["stage_bytes"] <= best["device_bytes"]
    assert document["profile_origin"] == "written"


def test_the_table_is_short_unless_it_is_to_explain(run: Run) -> None:
    _, short, _ = run(SLOW, "--gpus", "4")
    _, long, _ = run(SLOW, "--gpus", "4", "--explain")
    assert "more with --explain" in short
    assert len(long.splitlines()) > len(short.splitlines())
    assert "chosen" in short
    assert "slower than" in long


def test_rows_that_differ_in_nothing_but_a_name_are_one(run: Run) -> None:
    _, out, _ = run(SLOW, "--gpus", "4", "--explain")
    rows = [line.split()[:2] for line in out.splitlines()]
    assert ["2x2", "varuna/1f1b/gpipe"] in rows
    assert ["2x2", "gpipe"] not in rows


def test_memory_is_told_in_megabytes(run: Run) -> None:
    _, out, _ = run(PROFILES / "small-memory.json", "--gpus", "2", "--explain")
    assert " MB, a device has 1,200.0 MB" in out
    assert " bytes" not in out


def test_wishes_replace_what_the_file_says(run: Run) -> None:
    _, out, _ = run(
        *(SLOW, "--gpus", "4", "--schedule", "1f1b", "--recompute", "-o", "json"),
        *("--objective", "examples_per_dollar", "--minibatch-size", "64"),
    )
    document = json.loads(out)
    assert document["objective"] == "examples_per_dollar"
    assert document["minibatch_size"] == 64
    assert {c["schedule"] for c in document["candidates"]} == {"1f1b"}


def test_where_no_plan_fits_it_says_what_is_needed(run: Run) -> None:
    code, out, err = run(PROFILES / "gpt2-2.5b-v100.json", "--gpus", "2")
    assert code == 5
    assert "the model needs" in " ".join(out.split())
    assert err.startswith("error: gpt2-2.5b-v100.json: no plan: the model needs")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--gpus says on how many"),
        (("--gpus", "4", "--schedule", "fifo"), "--schedule must be one of"),
        (("--gpus", "4", "--objective", "fame"), "--objective must be one of"),
        (("--gpus", "4", "--minibatch-size", "6"), "multiple of one of"),
    ],
)
def test_wishes_that_cannot_be_are_refused(
    run: Run, arguments: tuple[str, ...], message: str
) -> None:
    code, _, err = run(SLOW, *arguments)
    assert code == 2
    assert message in " ".join(err.split())


def test_a_job_file_says_its_own_machines(run: Run, tmp_path: Path) -> None:
    code, _, err = run(tmp_path / "job.yaml", "--gpus", "4")
    assert code == 2
    assert "go with a profile as JSON" in " ".join(err.split())


def test_a_calibrated_profile_is_planned_with_facts(run: Run, tmp_path: Path) -> None:
    whole = json.loads(SLOW.read_text())
    bare, facts = tmp_path / "bare.json", tmp_path / "facts.json"
    bare.write_text(json.dumps(whole["profile"]))
    facts.write_text(json.dumps(whole["facts"]))
    code, _, err = run(bare, "--gpus", "4")
    assert code == 2
    assert "needs --facts" in err
    sizes = ("--minibatch-size", "512", "--gpu-memory-gib", "15", "--usd-per-hour", "1")
    code, out, _ = run(bare, "--gpus", "4", "--facts", facts, *sizes, "-o", "json")
    assert code == 0
    _, same, _ = run(SLOW, "--gpus", "4", "-o", "json")
    assert json.loads(out)["plan"] == json.loads(same)["plan"]

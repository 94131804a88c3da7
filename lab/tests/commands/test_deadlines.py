"""``spottrain simulate deadlines``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands import Answer, Run


@pytest.fixture
def run(run: Run) -> Run:
    def answer(*arguments: str | Path | float, command: str = "deadlines") -> Answer:
        code, out, err = run("simulate", command, *arguments)
        return Answer(code, out, " ".join(err.split()))

    return answer


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rows = [f"0,add,vm{n}" for n in range(20)]
    rows += ["7200000,remove,vm3", "20000000,add,vm20"]
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(rows))
    return path


@pytest.mark.rotated
def test_a_group_of_markets_answers_with_a_row_for_each_rule(run: Run) -> None:
    code, out, _ = run("--markets", "2", "--processes", "1", "-o", "json")
    assert code == 0
    group = json.loads(out)["markets 1 to 2"]
    rules = {row["rule"]: row for row in group["rules"]}
    assert rules["cost-optimal"]["in_time"] == rules["cost-optimal"]["in_budget"] == 2
    assert rules["cost-optimal"]["over_bound"] < rules["on-demand only"]["over_bound"]
    assert sum(row["jobs"] for row in group["by_slack"]) == 2
    assert group["broken"] == []


def test_a_trace_is_played_with_jobs_of_several_deadlines(run: Run, trace: Path) -> None:
    code, out, _ = run("--trace", trace, "--markets", "0", "--processes", "1")
    assert code == 0
    assert "trace.csv" in out
    assert "6 of 6" in out
    assert "coverage of 90 % intervals" in out


def test_a_trace_is_played_with_the_fleets_and_deadlines_asked_for(run: Run, trace: Path) -> None:
    asked = ("--vms", 1, "--vms", 3, "--slack", 1.25, "--markets", 0, "-o", "json")
    again = trace.with_name("again.csv")
    again.write_text(trace.read_text())
    files = ("--trace", trace, "--trace", again)
    code, out, _ = run(*files, *asked, "--processes", 1)
    assert code == 0
    groups = json.loads(out)
    assert list(groups) == ["trace.csv", "again.csv", "2 traces together"]
    assert [groups[name]["rules"][0]["jobs"] for name in groups] == [2, 2, 4]
    rows = groups["2 traces together"]["coverage"]
    assert [(row["of"], row["intervals"], row["level"]) for row in rows[:3]] == [
        ("finish", "as forecast", 0.9),
        ("finish", "corrected by the other markets", 0.8),
        ("finish", "corrected by the other markets", 0.9),
    ]
    assert rows[0]["forecasts"] == 12
    assert [row["intervals"] for row in groups["trace.csv"]["coverage"]] == [
        "as forecast"
    ] * 4  # of each policy, finish and cost
    by_slack = groups["trace.csv"]["by_slack"]
    assert [(row["from"], row["jobs"]) for row in by_slack] == [(1.15, 2)]


def test_traces_are_the_zones_of_one_market(run: Run, trace: Path) -> None:
    again = trace.with_name("again.csv")
    again.write_text("0,add,a\n9000000,remove,a")
    files = ("--trace", trace, "--trace", again, "--zones", "--markets", 0)
    asked = ("--vms", 21, "--slack", 2, "--processes", 1, "-o", "json")
    code, out, _ = run(*files, *asked)
    assert code == 0
    (group,) = json.loads(out).values()
    assert group["one_zone"] is None
    rules = {row["rule"]: row for row in group["rules"]}
    assert rules["redundancy"]["jobs"] == rules["12-minute look-ahead"]["jobs"] == 1
    # 20 VMs of one zone and one of the other train as fast as the whole fleet on demand.
    assert rules["spot only, wait"]["in_time"] == 1


def test_fleets_and_deadlines_without_a_trace_that_lasts_as_long_are_refused(
    run: Run, tmp_path: Path
) -> None:
    code, _, err = run("--vms", 1)
    assert code == 2
    assert "got no --trace" in err
    short = tmp_path / "short.csv"
    short.write_text("0,add,vm0\n600000,remove,vm0")
    code, _, err = run("--trace", short, "--slack", 3, "--markets", 0)
    assert code == 2
    assert "short.csv: a trace of 600 s is too short for --slack 3" in err


def test_nothing_to_play_and_a_missing_trace_are_refused(run: Run, tmp_path: Path) -> None:
    code, _, err = run("--markets", "0")
    assert code == 2
    assert "nothing to replay" in err
    code, _, err = run("--trace", tmp_path / "none.csv")
    assert code == 2
    assert "none.csv" in err

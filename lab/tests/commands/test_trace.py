"""``spottrain simulate trace``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.morphing.spot import workload

from spottrain.codec import encode
from tests.commands import Run

ROWS = ["0,add,a", "0,add,b", "60000,add,c", "900000,remove,a", "4000000,add,d"]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "spot.csv"
    file.write_text("\n".join(ROWS))
    return file


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    file = tmp_path / "profile.json"
    file.write_text(encode(workload()))
    return file


def test_the_answer_tells_examples_lost_time_and_dollars_of_every_rule(
    run: Run, trace: Path, profile: Path
) -> None:
    command = ("simulate", "trace", trace, "--profile", profile)
    code, out, _ = run(*command, "-o", "json")
    assert code == 0
    document = json.loads(out)
    assert [row["rule"] for row in document["rules"]] == [
        "when it pays",
        "at every change",
        "width only",
        "12-minute look-ahead",
        "redundancy",
        "restart all",
    ]
    for row in document["rules"]:
        assert row["usd"] == pytest.approx(document["vm_hours"] * 2.0)
        assert 0 < row["examples"] <= document["all_knowing"]["examples"]
        spent_s = row["training_s"] + sum(row["lost_s"].values())
        assert spent_s == pytest.approx(document["trace_s"])
    assert document["profile_origin"] == "written"
    code, out, _ = run(*command)
    assert code == 0
    assert "all-knowing" in out


def test_a_file_needs_no_command_before_it(run: Run, trace: Path, profile: Path) -> None:
    code, out, _ = run("simulate", trace, "--profile", profile, "-o", "json")
    assert code == 0
    assert json.loads(out)["trace"] == "spot.csv"
    code, _, err = run("simulate", "trase", "--profile", profile)
    assert code == 2
    assert "No such command" in err


def test_several_zones_and_a_smaller_fleet_are_played(run: Run, trace: Path, profile: Path) -> None:
    other = trace.with_name("other.json")
    other.write_text(json.dumps({"metadata": {"gap_seconds": 600}, "data": [2, 1, 2]}))
    command = ("simulate", trace, other, "--profile", profile, "-o", "json")
    code, out, _ = run(*command)
    document = json.loads(out)
    assert (code, document["trace"]) == (0, "spot.csv, other.json")
    assert (document["most_vms"], document["trace_s"]) == (5, 1800.0)
    code, out, _ = run(*command, "--vms", 2)
    document = json.loads(out)
    assert (code, document["most_vms"]) == (0, 2)
    assert document["vm_hours"] == pytest.approx(1.0), "what is lost is replaced"


def test_corrections_of_a_trace_are_reported(run: Run, trace: Path, profile: Path) -> None:
    trace.write_text("\n".join([*reversed(ROWS), ROWS[0]]))
    code, out, err = run("simulate", trace, "--profile", profile, "-o", "json")
    assert code == 0
    assert "sorted by time" in err
    assert "1 duplicate rows" in err
    assert len(json.loads(out)["notices"]) == 2


def test_a_calibrated_profile_is_taken_with_facts(run: Run, trace: Path, tmp_path: Path) -> None:
    bare, facts = tmp_path / "bare.json", tmp_path / "facts.json"
    bare.write_text(encode(workload().profile))
    facts.write_text(encode(workload().facts))
    command = ("simulate", trace, "--profile", bare)
    code, _, err = run(*command)
    assert code == 2
    assert "--facts" in err
    code, _, err = run(*command, "--facts", facts)
    assert code == 2
    assert "--gpu-memory-gib" in err
    sizes = ("--minibatch-size", "64", "--gpu-memory-gib", "1", "--usd-per-hour", "2")
    code, out, _ = run(*command, "--facts", facts, *sizes, "-o", "json")
    assert code == 0
    assert json.loads(out)["minibatch_size"] == 64


def test_bad_input_is_one_line_and_exit_code_2(
    run: Run, trace: Path, profile: Path, tmp_path: Path
) -> None:
    def message(*arguments: str | Path) -> str:
        code, out, err = run("simulate", *arguments)
        assert (code, out) == (2, "")
        assert err.startswith("error: ")
        return err

    assert "nowhere: " in message("trace", "nowhere", "--profile", profile)
    assert "nowhere: " in message(trace, "--profile", "nowhere")
    assert "multiple" in message(trace, "--profile", profile, "--minibatch-size", "7")
    assert "notice_s" in message(trace, "--profile", profile, "--notice-s", "nan")
    for many in ("nan", "inf"):
        said = message(trace, "--profile", profile, "--gpu-memory-gib", many)
        assert f"--gpu-memory-gib must be a number above 0: got {many}" in said
    assert "nowhere.csv: " in message("nowhere.csv", "--profile", profile)
    tiny = tmp_path / "tiny.json"
    tiny.write_text(encode(replace(workload(), gpu_memory_bytes=76 << 20)))
    assert "GPUs of" in message(trace, "--profile", tiny)
    profile.write_text("{")
    assert "JSON" in message(trace, "--profile", profile)
    trace.write_text("what is this")
    profile.write_text(encode(workload()))
    assert "row 1" in message(trace, "--profile", profile)

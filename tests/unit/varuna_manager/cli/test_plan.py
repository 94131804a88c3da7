"""``spottrain plan`` for a profile as JSON."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from spottrain.codec import from_data
from spottrain.morphing.plan.workload import Workload
from spottrain.pricing.prices.history import History
from spottrain.pricing.prices.price import Price
from spottrain.varuna_manager.offers.preview import (
    SearchScope,
    preview_workload,
    workload_inputs,
)
from tests.commands import Run, runs

PROFILES = Path(__file__).parents[4] / "examples" / "profiles"
SLOW = PROFILES / "slow-link.json"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setenv("COLUMNS", "160")
    return runs(monkeypatch, capsys, "plan")


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


def test_a_plan_from_a_busy_machine_s_profile_tells_between_what_times_it_is(
    run: Run, tmp_path: Path
) -> None:
    workload = json.loads(SLOW.read_text())
    workload["profile"]["origin"] = "measured"
    calm, path = json.dumps(workload), tmp_path / "workload.json"
    for one in workload["profile"]["microbatches"]:
        for section in one["sections"]:
            section |= {"forward_spread": 0.5, "backward_spread": 0.5}
    told = []
    for text in (calm, json.dumps(workload)):
        path.write_text(text)
        code, out, _ = run(path, "--gpus", "4")
        assert code == 0
        told.append(re.findall(r"a mini-batch takes (\d+) ms to (\d+) s: .* by 50%", out))
    nothing, ((least, most),) = told
    assert nothing == []
    assert 1000 * int(most) == pytest.approx(3 * int(least), rel=0.05)


def test_what_stale_gradients_would_save_is_explained(run: Run) -> None:
    asked = (PROFILES / "compute-bound.json", "--gpus", "4", "--depth", "4")
    code, out, _ = run(*asked, "--explain")
    assert code == 0
    assert re.search(r"2bw +\dx\d would be \d+\.\d% faster with semantics: stale_by_one", out)
    _, short, _ = run(*asked)
    assert "2bw" not in short


def stale_gain(**changes: object) -> float:
    text = (PROFILES / "compute-bound.json").read_text()
    inputs = workload_inputs(from_data(Workload, json.loads(text)), 4)
    inputs = replace(
        inputs,
        schedule="1f1b",
        recompute=False,
        pipeline_depth=4,
        **changes,  # type: ignore[arg-type]
    )
    document = preview_workload("job", inputs, (), SearchScope(stale=True), "fp32")
    return float(document["stale_by_one"]["gain"])


@pytest.mark.rotated
def test_without_a_drain_the_bubble_is_saved() -> None:
    """(p - 1) / m, where computing takes nearly all the time."""
    assert stale_gain(minibatch_size=64, microbatch_size=4) == pytest.approx(3 / 16, rel=0.1)


def test_with_fewer_microbatches_than_stages_less_of_the_bubble_is_saved() -> None:
    """Of six tasks' time three are saved at most: a mini-batch waits for the commit before
    the one before."""
    assert 0.3 < stale_gain(minibatch_size=12) < 1.0


def test_recompute_in_segments_is_said_where_nothing_else_fits(run: Run) -> None:
    small = PROFILES / "small-memory.json"
    asked = small, "--gpus", "16", "--depth", "7", "--schedule", "1f1b"
    _, out, _ = run(*asked)
    assert "1f1b recompute in 3 segments, 2 in flight" in out
    code, out, _ = run(*asked, "--explain", "-o", "json")
    assert code == 0
    best, *others = json.loads(out)["candidates"]
    assert (best["recompute"], best["segments"]) == (True, 3)
    assert all(" MB" in c["why_not"] for c in others if c["segments"] == 1)
    assert run(*asked, "--no-recompute")[0] == 5


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


def test_memory_is_shown_in_megabytes(run: Run) -> None:
    _, out, _ = run(PROFILES / "small-memory.json", "--gpus", "2", "--explain")
    assert " 1,200.0 MB" in out
    assert " bytes" not in out


def test_options_override_the_file(run: Run) -> None:
    _, out, _ = run(
        *(SLOW, "--gpus", "4", "--schedule", "1f1b", "--recompute", "-o", "json"),
        *("--objective", "examples_per_dollar", "--minibatch-size", "64"),
    )
    document = json.loads(out)
    assert document["objective"] == "examples_per_dollar"
    assert document["minibatch_size"] == 64
    assert {c["schedule"] for c in document["candidates"]} == {"1f1b"}


VARUNA = (
    *(PROFILES / "gpt2-2.5b-v100.json", "--gpus", "36"),
    *("--minibatch-size", "8192", "--schedule", "varuna", "--recompute"),
)


def test_flops_are_those_of_the_formula_over_the_predicted_time(run: Run) -> None:
    _, out, _ = run(*VARUNA, "-o", "json")
    document = json.loads(out)
    layers, hidden, length, vocabulary = 54, 1920, 1024, 50304
    layer = 24 * length * hidden**2 + 4 * length**2 * hidden
    per_example = 3 * (layers * layer + 2 * length * hidden * vocabulary)
    tflops = document["candidates"][0]["examples_per_s"] * per_example / 36 / 1e12
    assert document["tflops_per_gpu"] == pytest.approx(tflops)
    assert document["mfu"] == pytest.approx(tflops / 125)
    _, out, _ = run(*VARUNA)
    assert f"compute  {tflops:.1f} TFLOP/s " in out


def test_a_model_whose_flops_are_not_known_shows_none(run: Run) -> None:
    _, out, _ = run(SLOW, "--gpus", "4", "-o", "json")
    document = json.loads(out)
    assert (document["tflops_per_gpu"], document["mfu"]) == (None, None)
    _, out, _ = run(SLOW, "--gpus", "4")
    assert "TFLOP" not in out


def test_where_no_plan_fits_it_says_what_is_needed(run: Run) -> None:
    code, out, err = run(PROFILES / "gpt2-2.5b-v100.json", "--gpus", "2")
    assert code == 5
    lead, reason = "error: gpt2-2.5b-v100.json: no plan: ", " ".join(err.split())
    assert reason.startswith(lead)
    assert reason.removeprefix(lead) in " ".join(out.split())


@pytest.mark.rotated
def test_both_homes_of_a_gpu_s_state_are_shown(run: Run) -> None:
    model = PROFILES / "varuna-8.3b.json", "--gpus", "72", "--depth", "24"
    asked = *model, "--schedule", "varuna", "--recompute"
    _, out, _ = run(*asked, "-o", "json")
    document = json.loads(out)
    best, *_, other = document["candidates"]
    assert document["plan"] == "24x3"
    assert (best["state"], other["state"]) == ("host", "device")
    for row in best, other:
        assert row["stage_bytes"] <= row["device_bytes"]
        assert row["host_stage_bytes"] <= row["host_bytes"]
    assert best["update_s"] > other["update_s"]
    _, out, _ = run(*asked, "--explain")
    assert "UPDATE" in out
    assert "plan     24x3, varuna recompute, state on the host" in out
    _, out, _ = run(*asked, "--state", "device", "-o", "json")
    assert {c["state"] for c in json.loads(out)["candidates"]} == {"device"}
    code, _, err = run(*asked, "--state", "host", "--host-memory-gib", "8")
    assert code == 5
    assert "of a VM" in " ".join(err.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpus", "4", "--schedule", "fifo"), "--schedule must be one of"),
        (("--gpus", "4", "--objective", "fame"), "--objective must be one of"),
        (("--gpus", "4", "--minibatch-size", "6"), "multiple of one of"),
        (("--gpus", "4", "--state", "disk"), "--state must be one of host, device"),
        (("--gpus", "4", "--precision", "fp8"), "--precision must be one of"),
        (("--gpus", "4", "--host-memory-gib", "nan"), "--host-memory-gib must be"),
    ],
)
def test_impossible_options_are_refused(run: Run, arguments: tuple[str, ...], message: str) -> None:
    code, _, err = run(SLOW, *arguments)
    assert code == 2
    assert message in " ".join(err.split())


def test_a_job_file_says_its_own_machines(run: Run, tmp_path: Path) -> None:
    code, _, err = run(tmp_path / "job.yaml", "--gpus", "4")
    assert code == 2
    assert "need a profile as JSON" in " ".join(err.split())


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


@pytest.fixture
def on_v100(tmp_path: Path) -> Path:
    """A stated profile, as if of a GPU that the catalogue knows."""
    workload = json.loads(SLOW.read_text())
    workload["profile"]["device"] = "V100"
    path = tmp_path / "v100.json"
    path.write_text(json.dumps(workload))
    return path


def remember(home: Path, *prices: Price) -> None:
    with History(home / "market.sqlite") as history:
        history.record_prices(prices)


@pytest.mark.rotated
def test_clouds_offers_are_ranked_by_what_a_dollar_trains(
    run: Run, home: Path, on_v100: Path
) -> None:
    now_s = time.time()
    spot = Price(
        cloud="aws",
        region="us-east-1",
        zone="us-east-1a",
        instance_type="p4d.24xlarge",
        spot=True,
        usd_per_hour=1.0,
        since_s=now_s - 60.0,
        seen_s=now_s - 60.0,
        source="test",
    )
    old = replace(spot, zone="us-east-1c", seen_s=now_s - 3e5, since_s=now_s - 3e5)
    remember(home, spot, replace(spot, zone="us-east-1b", usd_per_hour=1.125), old)
    asked = (on_v100, "--gpus", "16", "--clouds", "aws", "--offline")
    code, out, err = run(*asked, "-o", "json")
    assert code == 0
    document = json.loads(out)
    best, second = document["offers"][:2]
    assert [best["zone"], second["zone"]] == ["us-east-1a", "us-east-1b"]
    assert document["choice"] == "aws us-east-1a p4d.24xlarge spot"
    assert best["examples_per_usd"] > second["examples_per_usd"]
    assert best["is_estimate"]
    assert best["vms"] == 2
    assert 60 <= best["age_s"] < 100
    stale = next(row for row in document["offers"] if row["zone"] == "us-east-1c")
    assert "price" in stale["why_not"]
    assert "prices" in " ".join(document["warnings"])
    code, out, err = run(*asked)
    assert code == 0
    assert "12.2% more than aws us-east-1b" in " ".join(out.split())
    assert "--explain" in out
    assert "prices" in err


def test_a_job_on_gpus_is_estimated_where_this_machine_has_none(run: Run, home: Path) -> None:
    code, out, err = run(PROFILES.parent / "aws.yaml", "--offline", "-o", "json")
    assert code == 0
    assert "measuring" not in err
    document = json.loads(out)
    assert document["profile_origin"] == "estimated"
    assert document["rests_on"]
    assert document["exceeds"] == []
    assert all(row["is_estimate"] for row in document["offers"])
    assert list((home / "profiles").glob("*")) == []  # a launch measures


def test_a_size_alone_is_planned_without_torch_and_checked_against_limits(home: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.argv[0] = 'spottrain'\n"
        "from spottrain.varuna_manager.cli.main import main; main()"
    )
    asked = ["plan", "--params", "1e8", "--tokens", "1e9", "--gpus", "1", "--clouds", "gcp"]

    def answer(*more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, *asked, "--offline", *more]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    document = json.loads(answer("-o", "json").stdout)
    best = document["by_gpu"][0]
    assert document["profile_origin"] == "estimated"
    assert document["tokens"] >= 1e9 > document["tokens"] - document["minibatch_size"] * 4096
    assert {row["losses_basis"] for row in document["by_gpu"]} == {"assumed"}
    assert "on demand" not in document["changes"][0]["change"]
    short = answer("--max-usd", f"{best['total_usd'] / 4:.4f}")
    assert short.returncode == 4
    ends = re.search(r"the money ends at step ([\d,]+) of ([\d,]+)", short.stdout)
    assert ends is not None
    step, steps = (int(number.replace(",", "")) for number in ends.groups())
    assert step == pytest.approx(steps / 4, abs=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "plan needs a job file, a model's config.json, or the size"),
        (("--params", "7"), "--params: a model has 1e6 to 1e13 parameters: got 7"),
        (("--params", "1e9", SLOW), "both describe a model"),
        (("--params", "1e9", "--tokens", "-1"), "--tokens must be above 0"),
        (("--params", "1e9", "--steps", "10"), "--steps, --facts, .* need a profile as JSON"),
        ((SLOW, "--tokens", "1e9"), "belong to --params or a model's config.json"),
    ],
)
def test_a_model_is_described_once(
    run: Run, home: Path, arguments: tuple[str | Path, ...], message: str
) -> None:
    code, _, err = run(*arguments)
    assert code == 2
    assert re.search(message, " ".join(err.split()))


@pytest.mark.rotated
def test_without_credentials_dated_prices_serve_and_the_best_fleet_is_planned(
    run: Run, home: Path, on_v100: Path
) -> None:
    asked = (on_v100, "--clouds", "aws,azure,gcp", "--offline", "--gpus", "8", "--steps", "1000")
    code, out, _ = run(*asked, "-o", "json")
    assert code == 0
    document = json.loads(out)
    rows = document["by_gpu"]
    names = [row["gpu"] for row in rows]
    assert len(names) == len(set(names)) >= 10
    assert {row["cloud"] for row in document["offers"]} == {"aws", "azure", "gcp"}
    worths = [row["examples_per_usd"] for row in rows]
    assert worths == sorted(worths, reverse=True)
    best = rows[0]
    fleet = document["fleet"]
    assert {vm["instance_type"] for vm in fleet} == {best["instance_type"]}
    assert len(fleet) == best["vms"]
    assert document["plan"] == best["plan"]
    step_s = document["candidates"][0]["step_s"]
    assert best["examples_per_s"] == pytest.approx(document["minibatch_size"] / step_s)
    assert document["examples"] == 1000 * document["minibatch_size"]
    training = document["examples"] / best["examples_per_usd"]
    assert best["total_usd"] == pytest.approx(training)
    assert best["total_usd"] >= best["hours"] * best["fleet_usd_per_hour"] * 0.999
    assert "dated prices, spot ones estimates" in " ".join(document["warnings"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--clouds", "aws,lunar"), "no such cloud: got lunar"),
        (("--clouds", "aws"), "which has no published peak"),
    ],
)
def test_clouds_that_cannot_be_compared_are_refused(
    run: Run, home: Path, on_v100: Path, arguments: tuple[str, ...], message: str
) -> None:
    file = on_v100 if "no such cloud" in message else SLOW
    code, _, err = run(file, "--gpus", "4", "--offline", *arguments)
    assert code == 2
    assert message in " ".join(err.split())

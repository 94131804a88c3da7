"""``spottrain simulate pool``."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.commands import Run

Pool = Callable[..., tuple[int, str, str]]
CSV = """worker_type,job_type,scale_factor,steps_per_s
v100,A3C,1,8.0
k80,A3C,1,4.0
v100,LM (batch size 10),1,40.0
k80,LM (batch size 10),1,4.0
"""
TRACE = "\n".join(
    f"{job}\tpython3 main.py\tdir\t-n\t1\t{steps}\t1\t1\t{slo}\t{at_s}"
    for job, steps, slo, at_s in (
        ("A3C", 14400, -1, 0),
        ("LM (batch size 10)", 72000, 4, 0),
        ("LM (batch size 10)", 72000, -1, 900),
    )
)


@pytest.fixture
def pool(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    (tmp_path / "jobs.trace").write_text(TRACE)
    (tmp_path / "isolated-throughputs.csv").write_text(CSV)
    monkeypatch.chdir(tmp_path)
    return functools.partial(run, "simulate", "pool")


def test_a_trace_is_replayed_with_sizes_elastic_and_fixed(pool: Run) -> None:
    code, out, err = pool(
        "jobs.trace", "--cluster", "v100=1,k80=1", "-o", "json", "--picture", "p.svg"
    )
    assert (code, err) == (0, "")
    runs = json.loads(out)["runs"]
    assert list(runs) == ["elastic", "fixed sizes"]
    for run in runs.values():
        assert (run["jobs"], run["ended"], run["refused"]) == (3, 3, 0)
        assert (run["deadlines"], run["deadlines_kept"]) == (1, 1)
        assert 0 < run["utilisation"] <= 1
        assert run["usd"] > 0
    svg = Path("p.svg").read_text()
    assert svg.startswith("<svg")
    assert "<title>job2</title>" in svg


def test_gavel_is_replayed_aware_and_unaware_of_kinds(pool: Run) -> None:
    mean_s = []
    for option in ([], ["--unaware"]):
        code, out, _ = pool(
            "jobs.trace",
            *("--cluster", "v100=1,k80=1", "--form", "gavel", "-o", "json"),
            *option,
        )
        assert code == 0
        mean_s.append(json.loads(out)["runs"]["gavel"]["mean_completion_s"])
    assert mean_s[0] < mean_s[1]


def test_a_workload_by_name_needs_no_file(pool: Run) -> None:
    code, out, _ = pool(
        "virtualflow-three", "--cluster", "v100=4", "--policy", "queue", "--seed", "2"
    )
    assert code == 0
    assert "3 of 3" in out


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["none.trace", "--cluster", "v100=1"], "none.trace: no such file"),
        (["jobs.trace", "--cluster", "v100"], "--cluster: got 'v100'; give KIND"),
        (["jobs.trace", "--cluster", "v100=0"], "give each kind 1 or more VMs"),
        (["jobs.trace", "--cluster", "tpu=8"], "no throughput of A3C on 1 workers"),
        (
            ["jobs.trace", "--cluster", "v100=1", "--policy", "best"],
            "--policy: got best; give one of fair",
        ),
        (
            ["jobs.trace", "--cluster", "v100=1", "--window", "2:9"],
            "--window: got 2:9; give FIRST:LAST within 0:3",
        ),
    ],
)
def test_what_cannot_be_replayed_is_refused_in_one_line(
    pool: Run, arguments: list[str], wanted: str
) -> None:
    code, out, err = pool(*arguments)
    assert code == 2
    assert out == ""
    assert wanted in " ".join(err.split())
    assert "Traceback" not in err

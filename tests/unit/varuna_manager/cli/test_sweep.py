"""The jobs of a sweep: their values and names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spottrain.errors import ConfigError
from spottrain.varuna_manager.cli.pool.sweep import combinations


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    data = {"name": "job", "env": {"LR": 0.1}, "checkpoint": {"path": "s3://bucket/all/"}}
    path.write_text(json.dumps(data))
    return path


def swept(file: Path, *grid: str, **fixed: Any) -> dict[str, Any]:
    return {one["name"]: one for one in map(dict, combinations(file, grid, fixed))}


def test_a_job_for_each_combination_says_its_values_in_its_name(file: Path) -> None:
    jobs = swept(file, "lr=1e-3,3e-4", "seed=1,2", steps=9)
    assert list(jobs) == [
        "job-lr-1e-3-seed-1",
        "job-lr-1e-3-seed-2",
        "job-lr-3e-4-seed-1",
        "job-lr-3e-4-seed-2",
    ]
    assert jobs["job-lr-3e-4-seed-1"] == {
        "steps": 9,
        "name": "job-lr-3e-4-seed-1",
        "checkpoint.path": "s3://bucket/all/job-lr-3e-4-seed-1",
        "env.LR": "3e-4",
        "seed": 1,
    }


def test_values_may_be_lists(file: Path) -> None:
    jobs = swept(file, "aws.regions=[us-east-1, us-west-2],[eu-west-1]")
    assert [job["aws.regions"] for job in jobs.values()] == [
        ["us-east-1", "us-west-2"],
        ["eu-west-1"],
    ]


@pytest.mark.parametrize(
    ("grid", "error"),
    [
        (["sede=1"], "sede: is no key of the job file, .* did you mean seed"),
        (["dropout=0.1"], "for a variable of your code write env.dropout"),
        (["seed=1,1"], "two jobs would be named job-seed-1; give each value once"),
        (["seed=1", "seed=2"], "seed: is given twice"),
        (["steps=3"], "steps: is given twice"),
        (["seed="], "seed: must have values"),
        (["seed"], "sweep: must be KEY=VALUE"),
    ],
)
def test_a_grid_that_cannot_be_meant_is_refused(file: Path, grid: list[str], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        swept(file, *grid, steps=9)

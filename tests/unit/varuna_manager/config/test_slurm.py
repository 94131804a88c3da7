"""The job file's part about a Slurm cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spottrain.errors import ConfigError
from spottrain.varuna_manager.config.job import load_config, parse_config
from spottrain.varuna_manager.config.slurm import seconds

EXAMPLE = Path(__file__).parents[4] / "examples" / "slurm.yaml"
JOB: dict[str, Any] = {
    "name": "job",
    "entrypoint": "train:job",
    "minibatch_size": 8,
    "steps": 1,
    "resources": {"provider": "slurm", "max_vms": 3},
    "checkpoint": {"path": "/shared"},
    "slurm": {"partitions": ["a", "b"]},
}


def changed(**slurm: Any) -> dict[str, Any]:
    return {**JOB, "slurm": {**JOB["slurm"], **slurm}}


def test_every_partition_may_give_as_many_nodes_as_the_job_wants() -> None:
    config = parse_config(changed(slots=4, usd_per_gpu_hour=0.5), "x")
    assert [(zone.name, zone.capacity) for zone in config.zones] == [("a", 3), ("b", 3)]
    assert {zone.spot_usd_per_hour for zone in config.zones} == {2.0}


@pytest.mark.parametrize(
    ("limit", "limit_s"),
    [
        ("5", 300),
        ("5:30", 330),
        ("1:05:30", 3930),
        ("2-1", 176_400),
        ("2-1:05", 176_700),
        ("2-1:05:30", 176_730),
    ],
)
def test_time_limits_are_read_as_sbatch_does(limit: str, limit_s: int) -> None:
    """The formats of sbatch(1), ``--time``."""
    assert seconds(limit) == limit_s


def test_its_gpus_settle_the_precision() -> None:
    assert parse_config(changed(gpu="A100-80GB"), "x").precision == "bf16"
    assert parse_config(changed(), "x").precision == "fp32"


def test_the_example_is_accepted() -> None:
    config = load_config(EXAMPLE)
    settings = config.slurm.settings()
    assert settings.time_limit == "4:00:00"
    assert settings.login == "here"


@pytest.mark.parametrize(
    ("job", "key"),
    [
        (changed(partitions=[]), "slurm.partitions"),
        ({**JOB, "checkpoint": {}}, "checkpoint.path"),
        ({**JOB, "budget": {"max_usd": 5.0}}, "slurm.usd_per_gpu_hour"),
        ({**JOB, "morphing": {"objective": "examples_per_dollar"}}, "slurm.usd_per_gpu_hour"),
        (changed(sbatch=["--requeue"]), "slurm.sbatch"),
        (changed(sbatch=["--partition=x"]), "slurm.sbatch"),
        (changed(sbatch=["-pother"]), "slurm.sbatch"),
        (changed(sbatch=["script.sh"]), "slurm.sbatch"),
        (changed(manager_sbatch=["--no-requeue"]), "slurm.manager_sbatch"),
        (changed(time_limit="soon"), "slurm.time_limit"),
        (changed(time_limit="2"), "notice_s"),
        (changed(partitions=["a,b"]), "slurm.partitions"),
        (changed(gpu="A1000"), "slurm.gpu"),
    ],
)
def test_what_cannot_run_is_refused(job: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        parse_config(job, "x")


def test_options_of_sbatch_without_a_key_are_passed_on() -> None:
    options = ("--mem=64G", "--exclusive", "-x", "n1")
    with pytest.raises(ConfigError, match=r"slurm\.sbatch"):
        parse_config(changed(sbatch=list(options)), "x")
    config = parse_config(changed(sbatch=["--mem=64G", "--exclusive", "-xn1"]), "x")
    assert config.slurm.settings().options == ("--mem=64G", "--exclusive", "-xn1")

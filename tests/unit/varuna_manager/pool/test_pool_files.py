"""Pool files and job files of a pool: what they mean, and what is refused in one line."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from spottrain.errors import ConfigError
from spottrain.pricing.sharing.policies import POLICIES
from spottrain.varuna_manager.cli.pool.submit import machine_of
from spottrain.varuna_manager.config.files import key_paths
from spottrain.varuna_manager.config.pool import (
    Policy,
    PoolConfig,
    load_job_of,
    load_pool,
    parse_pool,
)
from spottrain.varuna_manager.pool.store.settings import (
    settings_of,
    supplies_of,
)

ROOT = Path(__file__).parents[4]
POOL: dict[str, Any] = {
    "name": "lab",
    "max_vms": 4,
    "teams": {"vision": {"weight": 2, "order": "fifo"}},
}
JOB: dict[str, Any] = {
    "name": "job",
    "entrypoint": "train:job",
    "minibatch_size": 8,
    "steps": 10,
}


def pool(**changes: Any) -> PoolConfig:
    return parse_pool({**POOL, **changes}, "lab.yaml")


def job_file(folder: Path, **changes: Any) -> Path:
    path = folder / "job.yaml"
    path.write_text(json.dumps({**JOB, **changes}))
    return path


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"max_vms": 0}, "max_vms: must be greater than 0: got 0"),
        (
            {"teams": {"vision": {"weight": 0}}},
            "teams.vision.weight: must be greater than or equal to 0.001: got 0",
        ),
        (
            {"teams": {"vision": {"weight": -1}}},
            "teams.vision.weight: must be greater than or equal to 0.001: got -1",
        ),
        (
            {"teams": {"vision": {"max_vms": 9}}},
            "teams.vision.max_vms: must be at most the pool's, 4: got 9",
        ),
        (
            {
                "budget": {"max_usd": 5},
                "teams": {"vision": {"max_usd": 5.5}},
            },
            "teams.vision.max_usd: must be at most the pool's, 5: got 5.5",
        ),
        ({"budget": {"per": "month"}}, "budget: per needs max_usd"),
        ({"policy": "random"}, "policy: must be 'fair', 'priority'"),
        ({"clouds": "ssh"}, "clouds"),
        ({"clouds": "slurm"}, "slurm needs slurm.partitions"),
        (
            {"clouds": "slurm", "slurm": {"partitions": ["p"]}, "budget": {"max_usd": 5}},
            "slurm.usd_per_gpu_hour",
        ),
        ({"polcy": "fair"}, "polcy: unknown key; did you mean policy?"),
        ({"jobs": [{"file": "a.yaml", "priority": 0}]}, "priority: must be greater"),
    ],
)
def test_a_wrong_pool_file_is_one_line(changes: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError) as refused:
        pool(**changes)
    assert error in str(refused.value)
    assert "\n" not in str(refused.value)


def test_unknown_kinds_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="got a100; the pool's clouds offer cpu"):
        supplies_of(pool(kinds={"a100": 2}), {"local/cpu": 0.1})


def test_the_file_becomes_the_core_s_settings_to_the_micro_dollar() -> None:
    config = pool(budget={"max_usd": 0.3, "max_usd_per_hour": 12.1}, lease_s=60.0)
    settings = settings_of(config)
    assert settings.limits.max_microusd == 300_000
    assert settings.limits.max_microusd_per_hour == 12_100_000
    assert settings.budget_per == "life"
    assert settings.teams["vision"].weight == 2
    assert settings.teams["vision"].order == "fifo"
    assert math.isinf(settings.teams["vision"].limits.max_microusd)
    assert settings.grant_s / 4 >= settings.shortest_grant_s, "renewed in time"


def test_the_file_knows_every_policy() -> None:
    assert Policy.__args__ == tuple(POLICIES)  # type: ignore[attr-defined]


def test_a_job_of_a_pool_takes_machines_and_market_from_it(tmp_path: Path) -> None:
    zone = {"name": "a", "capacity": 3, "spot_usd_per_hour": 2.5}
    config = pool(local={"zones": [zone]})
    event = {"at_s": 5.0, "kind": "kill"}
    job = load_job_of(config, job_file(tmp_path, local={"events": [event]}))
    assert job.resources.max_vms == 4
    assert [one.capacity for one in job.local.zones] == [3]
    assert [one.kind for one in job.local.events] == ["kill"]
    own = job_file(tmp_path, resources={"max_vms": 2, "min_vms": 2})
    assert load_job_of(config, own).resources.max_vms == 2


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"aws": {}}, "job.yaml: aws: the pool lab says it; remove it"),
        (
            {"resources": {"provider": "aws"}},
            "job.yaml: resources.provider: the pool lab rents from local: got aws",
        ),
        (
            {"manager": {"lease_s": 900}},
            "manager.lease_s: must be at most the pool's lease_s, 600: got 900",
        ),
        (
            {"resources": {"min_vms": 9}},
            "job.yaml: resources.min_vms: must be at most the VMs of pool lab, 4: got 9",
        ),
    ],
)
def test_a_job_file_that_contradicts_its_pool_is_refused(
    tmp_path: Path, changes: dict[str, Any], error: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        load_job_of(pool(), job_file(tmp_path, **changes))
    assert error in str(refused.value)


def test_a_job_of_a_pool_over_slurm_runs_in_the_pool_s_partitions(tmp_path: Path) -> None:
    shared = pool(clouds="slurm", slurm={"partitions": ["p"], "slots": 4})
    path = job_file(tmp_path, checkpoint={"path": "/shared"})
    config = load_job_of(shared, path)
    assert (config.resources.provider, config.slurm) == ("slurm", shared.slurm)
    assert machine_of(config) == "", "its VMs are returned, and submitted anew"
    own = job_file(tmp_path, checkpoint={"path": "/shared"}, slurm={"partitions": ["q"]})
    with pytest.raises(ConfigError, match="slurm: the pool lab says it"):
        load_job_of(shared, own)


def test_the_example_is_valid_and_so_are_its_jobs() -> None:
    config = load_pool(ROOT / "examples" / "pool.yaml")
    names = [load_job_of(config, Path(job.file)).name for job in config.jobs]
    assert names == ["thesis", "paper", "urgent"]


def test_every_key_is_documented() -> None:
    page = (ROOT / "docs" / "pool.md").read_text()
    told = set(re.findall(r"^\| `([a-z_.]+)` \|", page, re.MULTILINE))
    clouds = ("local.", "aws.", "azure.", "gcp.", "slurm.")
    known = {key for key in key_paths(PoolConfig) if not key.startswith(clouds)}
    assert known <= told, known - told


def machine(folder: Path, clouds: Any = "aws", **changes: Any) -> str:
    """Return what the VMs of a job are made of in a pool."""
    kinds = {
        "aws": {"instance_types": ["c7i.large"]},
        "gcp": {"instance_types": ["c3-standard-4"], "project": "ours"},
    }
    names = [] if clouds == "local" else [clouds] if isinstance(clouds, str) else clouds
    sections = {name: kinds[name] for name in names}
    rented = {
        "checkpoint": {"path": "s3://bucket/job"},
        "resources": {"device": "cpu"},
    }
    given = {**rented, **changes} if names else changes
    folder.mkdir(exist_ok=True)
    return machine_of(load_job_of(pool(clouds=clouds, **sections), job_file(folder, **given)))


def test_vms_go_to_jobs_whose_own_are_made_of_the_same(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    assert machine(a) == machine(b, name="other", steps=9) != ""
    assert machine(a) != machine(b, manager={"lease_s": 300})
    installs = {"setup": "pip install -r needed.txt"}
    assert machine(a, **installs) == machine(b, **installs) != machine(a)
    (b / "needed.txt").write_text("lightning")
    assert machine(a, **installs) != machine(b, **installs)
    assert machine(a) == machine(b), "without setup the code leaves nothing"
    assert machine(a, clouds="local") == "local"
    assert machine(a, clouds="gcp") == ""
    assert machine(a, clouds=["aws", "gcp"]) == ""

"""A job in exact mode goes on elsewhere as its first plan has settled it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.integration.jobs import HERE, Job, weights

from spottrain.varuna_manager.core.model.state import newest_plan

pytestmark = pytest.mark.rotated(parts=[4])


def profile(folder: Path, *, faster: int | None = None) -> str:
    """Write that blocks take most of the time, and that sums within a VM take none.

    Args:
        faster: A micro-batch size at which nothing takes any time.
    """
    said = json.loads((HERE / "tiny_profile.json").read_text())
    said["within_vm"] |= {"latency_s": 1e-6, "bandwidth_bytes_per_s": 1e12}
    for one in said["microbatches"]:
        for section in one["sections"][1:-1]:
            section |= dict.fromkeys(("forward_s", "backward_s", "recompute_s"), 0.1)
    if faster is not None:
        none = dict.fromkeys(("forward_s", "backward_s", "recompute_s"), 1e-6)
        sections = [section | none for section in said["microbatches"][0]["sections"]]
        said["microbatches"].insert(0, {"microbatch_size": faster, "sections": sections})
    path = folder / "profile.json"
    path.write_text(json.dumps(said))
    return str(path)


def test_another_machine_goes_on_as_the_first_plan_has_settled_it_or_waits(
    tmp_path: Path,
) -> None:
    place = tmp_path / "store"
    settings: dict[str, Any] = {
        "entrypoint": "tiny_job:divided_job",
        "steps": 50,
        "minibatch_size": 2,  # one micro-batch, which neither replicas nor stages make faster
        "profile": profile(tmp_path),
        "resources": {"max_vms": 1},
        "local": {"zones": [{"name": "pairs", "capacity": 1, "slots": 2}]},
    }
    with Job(tmp_path, "quiet", **settings) as quiet:
        assert quiet.launch().code == 0
        assert {plan.shape for plan in quiet.state().history.generations} == {"1x1x2"}
        expected = weights(quiet.checkpoint_root)

    settings["checkpoint"] = {"path": str(place), "every_steps": 10}
    small = {"name": "small", "capacity": 0, "slots": 1}
    zones = {"zones": [*settings["local"]["zones"], small]}
    with Job(tmp_path, "struck", **{**settings, "local": zones}) as struck:
        struck.pace(0.05)
        assert struck.launch("--detach").code == 0
        struck.until_trains(25)
        status = struck.run("status", struck.name, "-o", "json").report
        assert (status["plan"]["shape"], status["plan"]["tensor_parallel"]) == ("1x1x2", 2)
        struck.market("capacity", zone="small", count=1)
        struck.market("kill", zone="pairs")
        why = "VMs of 2 slots, that divide matrices, which reduction: exact keeps from the first"
        struck.until("it waits", lambda state: why in state.activity)
        struck.kill_everything()
    shutil.rmtree(tmp_path / "home")

    settings["local"] = {"zones": [{"name": "fours", "capacity": 1, "slots": 4}, small]}
    settings["profile"] = profile(tmp_path, faster=1)
    with Job(tmp_path, "small", **settings, microbatch_size=1) as smaller:
        refused = smaller.launch("--adopt")
        assert refused.code == 2
        assert "is of a job with microbatch_size: 2" in refused.error
    with Job(tmp_path, "again", **settings) as again:
        assert again.launch("--adopt").code == 0
        newest = newest_plan(again.state())
        assert newest is not None
        assert newest.microbatch_size == 2
        (plan,) = again.state().history.generations
        assert plan.shape == "1x1x2"
        assert (plan.from_step or 0) >= 20
        assert weights(place) == expected

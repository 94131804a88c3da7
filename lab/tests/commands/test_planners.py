"""``spottrain simulate planners``."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.commands import Run

PROFILES = Path(__file__).resolve().parents[3] / "examples/profiles"


def planners(run: Run, *options: str) -> str:
    file = PROFILES / "compute-bound.json"
    code, out, _ = run("simulate", "planners", file, "--gpus", "4", *options)
    assert not code
    return out


def test_what_other_systems_would_do_is_said(run: Run) -> None:
    out = planners(run, "--gpus-per-vm", "2", "--depth", "4")
    assert "tensor   t = 1: 4x1, " in out
    assert re.search(r"tensor +t = 2: \dx\d, ", out)
    assert "no partition with unequal replication would be faster" in out


def test_without_several_devices_in_a_vm_nothing_can_be_shared(run: Run) -> None:
    assert json.loads(planners(run, "-o", "json"))["tensor"] == []

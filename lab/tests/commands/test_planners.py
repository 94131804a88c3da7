"""``spottrain simulate planners``."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from spottrain.varuna_manager.cli.main import main

PROFILES = Path(__file__).resolve().parents[3] / "examples/profiles"


def planners(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: str
) -> str:
    file = str(PROFILES / "compute-bound.json")
    arguments = ["spottrain", "simulate", "planners", file, "--gpus", "4", *options]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    return capsys.readouterr().out


def test_what_other_systems_would_do_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = planners(monkeypatch, capsys, "--gpus-per-vm", "2", "--depth", "4")
    assert "tensor   t = 1: 4x1, " in out
    assert re.search(r"tensor +t = 2: \dx\d, ", out)
    assert "no partition with unequal replication would be faster" in out


def test_without_several_devices_in_a_vm_nothing_can_be_shared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert json.loads(planners(monkeypatch, capsys, "-o", "json"))["tensor"] == []

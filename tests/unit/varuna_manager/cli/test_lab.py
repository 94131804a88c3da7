"""The commands that spottrain-lab adds to ``spottrain simulate``."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from spottrain.varuna_manager.cli import main as cli
from spottrain.varuna_manager.cli.main import LAB, SIMULATIONS
from tests.commands import Run


@pytest.fixture
def simulate(run: Run) -> Run:
    return functools.partial(run, "simulate")


def test_it_adds_its_commands_and_no_others() -> None:
    assert set(cli.Simulations().places) == {*SIMULATIONS, *LAB}


@pytest.mark.parametrize("name", LAB)
def test_each_is_there(simulate: Run, name: str) -> None:
    code, out, _ = simulate(name, "--help")
    assert (code, f"simulate {name}" in out) == (0, True)


def test_one_answers(simulate: Run, tmp_path: Path) -> None:
    times = {"64": 0.025, "128": 0.045}
    types = [{"name": "fast", "count": 2, "virtual_node_s": times}]
    sums = {"bytes": 1e8, "bandwidth_bytes_per_s": 2e9, "latency_s": 1e-4}
    spec = {"minibatch_size": 1024, "types": types, "allreduce": sums}
    file = tmp_path / "mix.json"
    file.write_text(json.dumps(spec))
    code, out, err = simulate("mix", str(file), "-o", "json")
    assert (code, err) == (0, "")
    assert json.loads(out)["best"]["step_s"] > 0


@pytest.mark.parametrize("arguments", [("mix", "mix.json"), ("trace.csv",)])
def test_without_it_they_say_what_to_install(
    simulate: Run, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setattr(cli, "entry_points", lambda **_: ())
    code, _, err = simulate(*arguments)
    assert code == 2
    assert "pip install ./lab" in err
    assert len(err.splitlines()) == 1

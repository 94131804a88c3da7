"""``spottrain simulate mix``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.commands import Answer, Run


@pytest.fixture
def mix(run: Run, tmp_path: Path) -> Run:
    def answer(spec: Any, *options: str) -> Answer:
        file = tmp_path / "mix.json"
        file.write_text(json.dumps(spec))
        return run("simulate", "mix", file, *options)

    return answer


def spec(**changes: Any) -> dict[str, Any]:
    plain = {
        "minibatch_size": 4096,
        "types": [
            {"name": "fast", "count": 2, "virtual_node_s": {"64": 0.025, "128": 0.045}},
            {"name": "slow", "count": 8, "virtual_node_s": {"64": 0.1, "128": 0.18}},
        ],
        "allreduce": {"bytes": 1e8, "bandwidth_bytes_per_s": 2e9, "latency_s": 1e-4},
    }
    return {**plain, **changes}


def test_a_mix_that_pays_is_found_and_compared_with_each_type(mix: Run) -> None:
    code, out, err = mix(spec(), "-o", "json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["mixed"]
    shares = {share["name"]: share for share in document["best"]["shares"]}
    assert shares["fast"]["virtual_nodes"] * shares["fast"]["virtual_node_examples"] == (1024)
    assert shares["slow"]["virtual_nodes"] * shares["slow"]["virtual_node_examples"] == 256
    best_s = document["best"]["step_s"]
    assert all(alone["step_s"] > 1.4 * best_s for alone in document["alone"].values())


def test_people_get_a_table_and_a_verdict(mix: Run) -> None:
    code, out, _ = mix(spec())
    assert code == 0
    assert "more examples/s than the best type alone" in out
    assert "fast alone" in out
    slow_link = {"bytes": 1e8, "bandwidth_bytes_per_s": 1e8}
    _, out, _ = mix(spec(allreduce=slow_link))
    assert "mixing does not pay" in out


def test_a_type_that_cannot_compute_the_minibatch_is_reported(mix: Run) -> None:
    types = [
        {"name": "a", "count": 1, "virtual_node_s": {"3": 1.0}},
        {"name": "b", "count": 1, "virtual_node_s": {"2": 1.0}},
    ]
    code, out, _ = mix(spec(types=types, minibatch_size=5))
    assert code == 0
    assert "no type alone" in out
    assert "impossible" in out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"minibatch_size": 0}, "minibatch_size: must be greater than 0"),
        ({"minibatch_size": 4097}, "mix.json: no split over the workers"),
        ({"types": []}, "types: "),
        ({"types": [{"name": "a", "count": 1}]}, "types[0].virtual_node_s: is missing"),
        ({"allreduced": 1}, "allreduced: unknown key; did you mean allreduce?"),
        (
            {"types": [{"name": "a", "count": 1, "virtual_node_s": {"x": 1.0}}]},
            "virtual_node_s",
        ),
        (
            {"types": [{"name": "a", "count": 1, "virtual_node_s": {"1": -1.0}}]},
            "must be greater than 0",
        ),
    ],
)
def test_bad_files_are_refused_in_one_line(mix: Run, changes: dict[str, Any], message: str) -> None:
    code, out, err = mix(spec(**changes))
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err

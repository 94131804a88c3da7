"""``spottrain schedule`` and ``spottrain simulate step``."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.commands import Run

TIMES = {"forward_s": 1.0, "backward_s": 2.0}


Simulate = Callable[[Any], tuple[int, str, str]]


def simulating(run: Run, folder: Path, command: str) -> Simulate:
    """Return what runs a command of ``spottrain simulate`` on a file, as JSON or as text."""

    def answer(spec: Any) -> tuple[int, str, str]:
        file = folder / "spec.json"
        file.write_text(spec if isinstance(spec, str) else json.dumps(spec))
        return run("simulate", command, file, "-o", "json")

    return answer


@pytest.fixture
def simulate(run: Run, tmp_path: Path) -> Simulate:
    return simulating(run, tmp_path, "step")


def spec(**changes: Any) -> dict[str, Any]:
    plain = {
        "schedule": "1f1b",
        "num_microbatches": 8,
        "stages": [dict(TIMES) for _ in range(4)],
        "links": [{"send_s": 0} for _ in range(3)],
        "allreduce_s": 0.5,
    }
    return {**plain, **changes}


def test_a_schedule_is_printed_one_string_a_stage(run: Run) -> None:
    code, out, err = run("schedule", "varuna", "-P", "4", "-M", "8", "-o", "json")
    assert (code, err) == (0, "")
    lists = json.loads(out)
    assert len(lists) == 4
    assert lists[2].startswith("F0 F1 F2 R0 B0 R1 B1 R2 B2 F3")
    assert lists[3].startswith("F0 B0 F1 B1")


def test_a_long_schedule_is_plain_lines(run: Run) -> None:
    code, out, _ = run("schedule", "gpipe", "-P", "2", "-M", "5000")
    lines = out.splitlines()
    assert code == 0
    assert [line[:8] for line in lines] == ["0: F0 F1", "1: F0 F1"]
    assert all(line.endswith((" B4999", " B0")) for line in lines)


def test_a_schedule_has_options(run: Run) -> None:
    _, out, _ = run(*["schedule", "gpipe", "-P", "2", "-M", "2", "--no-recompute", "-o", "json"])
    assert json.loads(out) == ["F0 F1 B0 B1"] * 2
    _, out, _ = run(*["schedule", "interleaved", "-P", "2", "-M", "2", "-v", "2", "-o", "json"])
    assert "R0.1" in json.loads(out)[0]
    code, out, _ = run(*["schedule", "1f1b", "-P", "1", "-M", "1"])
    assert code == 0
    assert "F0 B0" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("dapple -P 4 -M 8", "varuna, 1f1b, gpipe, interleaved: got"),
        ("interleaved -P 4 -M 6 -v 2", "got 6 for 4; take 4 or 8"),
        ("varuna -P 0 -M 8", "needs a stage and a micro-batch"),
        ("varuna -P 4 -M 8 -v 2", "only interleaved schedules have several chunks"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(run: Run, arguments: str, message: str) -> None:
    code, out, err = run("schedule", *arguments.split())
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_a_timeline_shows_every_task_wait_and_message(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "spec.json"
    file.write_text(json.dumps(spec()))
    trace = tmp_path / "trace.json"
    code, _, err = run("simulate", "step", file, "--timeline", trace)
    assert (code, err) == (0, "")
    events = json.loads(trace.read_text())["traceEvents"]
    kinds = Counter(event["cat"] for event in events if event["ph"] == "X")
    assert (kinds["forward"], kinds["backward"]) == (32, 32)
    assert (kinds["activation"], kinds["gradient"]) == (24, 24)
    assert kinds["reduction"] == 4
    ends = [e["ts"] + e["dur"] for e in events if e.get("cat") == "reduction"]
    assert max(ends) == pytest.approx(33.5e6)
    waits_s = sum(e["dur"] for e in events if e.get("cat") == "wait") / 1e6
    tasks_s = [event["ts"] + event["dur"] for event in events if event.get("cat") == "backward"]
    assert waits_s > 0
    assert max(tasks_s) == pytest.approx(33e6)
    picture = tmp_path / "trace.svg"
    code, _, err = run("simulate", "step", file, "--timeline", picture)
    assert (code, err) == (0, "")
    drawn = ElementTree.fromstring(picture.read_text())
    titles = [e.text or "" for e in drawn.iter("{http://www.w3.org/2000/svg}title")]
    drawn_waits = sum(title.startswith("wait") for title in titles)
    assert len(titles) == 68 + kinds["wait"] + 48
    assert drawn_waits == kinds["wait"]
    assert "F0: 0 to 1 s" in titles
    for wrong, words in (
        (tmp_path / "a.png", "must end in"),
        ("no/a.svg", "cannot be"),
    ):
        code, _, err = run("simulate", "step", file, "--timeline", wrong)
        assert code == 2
        assert words in err


@pytest.mark.parametrize("kind", ["1f1b", "gpipe"])
@pytest.mark.parametrize("conditions", ["runtime", "in-order"])
def test_a_step_takes_what_the_closed_form_says(
    simulate: Simulate, kind: str, conditions: str
) -> None:
    code, out, err = simulate(spec(schedule=kind, conditions=conditions))
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert answer["minibatch_s"] == pytest.approx((8 + 4 - 1) * 3.0 + 0.5)
    assert answer["busy_s"] == [24.0] * 4
    assert answer["idle_s"] == [9.0] * 4
    assert answer["peak_in_flight"] == ([4, 3, 2, 1] if kind == "1f1b" else [8] * 4)


def test_a_seed_gives_the_same_step_again(simulate: Simulate) -> None:
    jitter = {"relative": 0.1, "seed": 3}
    first, again = (simulate(spec(jitter=jitter))[1] for _ in range(2))
    assert first == again
    assert json.loads(first)["conditions"] == "runtime"


def test_interleaving_and_names_are_known(simulate: Simulate) -> None:
    named = [{"name": f"gpu {p}", **TIMES} for p in range(4)]
    assert simulate(spec(stages=named)) == simulate(spec())
    answer = json.loads(simulate(spec(schedule="interleaved", chunks=2))[1])
    assert answer["minibatch_s"] == pytest.approx(8 * 3.0 + 3 * 3.0 / 2 + 0.5)


def test_a_table_shows_the_same(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "spec.json"
    file.write_text(json.dumps(spec()))
    code, out, _ = run("simulate", "step", file)
    assert code == 0
    assert "mini-batch 33.500 s" in out
    assert "9.000 s" in out


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in spec().items() if name != key}


def stage(**changes: Any) -> dict[str, Any]:
    return spec(stages=[{**TIMES, **changes}, *[dict(TIMES)] * 3])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (without("num_microbatches"), "num_microbatches: is missing"),
        (without("stages"), "stages: is missing"),
        (spec(stages=[{"forward_s": 1.0}] * 4), "stages[0].backward_s: is missing"),
        (
            stage(forward_s=-1.0),
            "stages[0].forward_s: must be greater than 0: got -1.0",
        ),
        (stage(forward_s=0), "stages[0].forward_s: must be greater than 0: got 0"),
        (stage(backward_s=math.nan), "stages[0].backward_s: must be"),
        (stage(backward_s=math.inf), "stages[0].backward_s: must be a finite"),
        (stage(forward_s="1.0"), "stages[0].forward_s: must be a number"),
        (stage(recompute_s=-1.0), "stages[0].recompute_s: must be greater than or"),
        (stage(recompute_s=1.0), "stages[1].recompute_s: is missing or 0, but other"),
        (spec(allreduce_s=math.nan), "allreduce_s: must be"),
        (spec(links=[{"send_s": -1}] * 3), "links[0].send_s: must be greater than or"),
        (spec(links=[{}] * 3), "links[0]: needs either send_s or all of latency_s"),
        (
            spec(links=[{"send_s": 1, "latency_s": 1}] * 3),
            "links[0]: needs either send_s or all of latency_s",
        ),
        (spec(links=[{"send_s": 1}] * 2), "need as many stages and 3 links: got 4"),
        (spec(num_microbatches=0), "num_microbatches: must be greater than 0"),
        (spec(num_microbatches=2.5), "num_microbatches: must be a valid integer"),
        (spec(schedule="dapple"), "schedule: must be 'varuna', '1f1b', 'gpipe' or "),
        (spec(schedule="interleaved", num_microbatches=6), "got 6 for 4; take 4 or 8"),
        (spec(schedule="interleaved", bound=2), "has no bound of its own: got 2"),
        (spec(num_microbatches=10**40), "a schedule has at most 5e+18 tasks"),
        (spec(stages=[]), "stages: "),
        (spec(sages=[]), "sages: unknown key; did you mean stages?"),
        (spec(conditions="original"), "conditions: must be 'runtime' or 'in-order'"),
        ([1, 2], "must hold keys and values: got a list"),
        ("{", "is not JSON"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(simulate: Simulate, wrong: Any, message: str) -> None:
    code, out, err = simulate(wrong)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1
    assert "Traceback" not in err


def test_no_file_is_said_too(run: Run, tmp_path: Path) -> None:
    code, _, err = run("simulate", "step", tmp_path / "none.json")
    assert code == 2
    assert "none.json: no such file; check the path" in err
    code, _, err = run("simulate", "step", tmp_path)
    assert code == 2
    assert str(tmp_path) in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("schedule", "varuna", "-P", "4"), "Missing option"),
        (("schedule", "varuna", "-P", "4", "-M", "x"), "Invalid value for"),
        (("schedule", "varuna", "-P", "4", "-M", "4", "--fo"), "No such option: --fo"),
        (("xyzzy",), "No such command 'xyzzy'"),
    ],
)
def test_a_wrong_command_line_is_reported_in_one_line(
    run: Run, arguments: tuple[str, ...], message: str
) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert " -h'\n" in err
    assert err.count("\n") == 1


def test_nothing_asked_shows_the_help(run: Run) -> None:
    for arguments in ((), ("simulate",)):
        code, out, err = run(*arguments)
        assert code == 2
        assert "Usage: " in out
        assert err == ""

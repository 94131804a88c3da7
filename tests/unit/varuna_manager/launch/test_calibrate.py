"""Measuring on this machine, with stubs for supervisors; and the command that does it."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.fakes.gpus import VARIABLE, FakeGpus
from tests.fakes.nvml import pynvml
from tests.unit.varuna_manager.story import FACTS, PROFILE

from spottrain import machine
from spottrain.codec import encode
from spottrain.errors import UserCodeError
from spottrain.varuna_manager.config.job import JobConfig, parse_config
from spottrain.varuna_manager.jobs import profiles
from spottrain.varuna_manager.launch import calibrate, inspect
from spottrain.wire.messages import CalibrationProgress
from spottrain.wire.model import GroupProfile, Profile
from tests.commands import Run

CONFIG: JobConfig = parse_config(
    {"name": "demo", "entrypoint": "train:job", "minibatch_size": 2, "steps": 1}, "job"
)
PROGRESS = CalibrationProgress(generation=-1, done=1, total=1, what="all")

STUB = """
import json, sys
from spottrain.wire import messages
from spottrain.codec import decode, encode
from spottrain.wire.model import Profile

def say(report):
    print(encode(report), flush=True)

greeting = json.loads(sys.stdin.readline())
say(messages.SupervisorReady(num_slots=greeting["num_slots"], torch_version="none"))
for line in sys.stdin:
    command = decode(messages.Command, line)
    if isinstance(command, messages.OpenStore):
        say(messages.StoreOpened(generation=-1, host="h", port=1))
    elif greeting["vm_id"] == command.participants[0].vm_id:
        assert {slot.vm_id for slot in command.participants} == {"vm-1", "vm-2"}
        exec(sys.argv[1])
"""
TELLS = f"""
say(decode(messages.Report, {encode(PROGRESS)!r}))
profile = decode(Profile, {encode(PROFILE)!r})
say(messages.Calibrated(profile=profile))
"""
SLOWLY = f"""
import pathlib, time
heard = pathlib.Path({{0!r}})
for done in range(1, 4):
    say(messages.CalibrationProgress(generation=-1, done=done, total=3, what="all"))
    while not heard.exists() or heard.read_text() != str(done):
        time.sleep(0.01)
profile = decode(Profile, {encode(PROFILE).replace("{", "{{").replace("}", "}}")!r})
say(messages.Calibrated(profile=profile))
"""
"""Says how far it is once it was heard."""


def stub(action: str) -> tuple[str, ...]:
    return (sys.executable, "-c", STUB, action)


def test_two_pretended_vms_measure() -> None:
    heard: list[CalibrationProgress] = []

    profile = calibrate.measure_here(CONFIG, heard.append, stub(TELLS))

    assert profile == PROFILE
    assert heard == [PROGRESS]


def test_measuring_may_take_as_long_as_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that others use, each step of it takes longer."""
    now_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: now_s)
    monkeypatch.setattr(calibrate, "time", clock)
    heard = tmp_path / "heard"

    def on_progress(progress: CalibrationProgress) -> None:
        nonlocal now_s
        now_s += 0.75 * calibrate.TIME_LIMIT_S
        heard.write_text(str(progress.done))

    profile = calibrate.measure_here(CONFIG, on_progress, stub(SLOWLY.format(str(heard))))

    assert profile == PROFILE


def test_what_the_users_code_raises_is_the_users_error() -> None:
    action = "say(messages.UserCodeFailed(message='no data', traceback='line 1'))"

    with pytest.raises(UserCodeError, match="no data") as error:
        calibrate.measure_here(CONFIG, supervisor=stub(action))

    assert error.value.traceback == "line 1"


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("sys.exit('out of luck')", "a supervisor exited: out of luck"),
        (
            "say(messages.WorkerDied(generation=-1, slot=0, reason='SIGKILL'))",
            "SIGKILL: no message",
        ),
    ],
)
def test_a_process_that_dies_is_reported_with_its_last_line(action: str, message: str) -> None:
    with pytest.raises(calibrate.MeasuringError) as error:
        calibrate.measure_here(CONFIG, supervisor=stub(action))

    assert str(error.value) == message


# --- The command ----------------------------------------------------------------------


@pytest.fixture
def run(run: Run) -> Run:
    return functools.partial(run, "calibrate")


def job_file(folder: Path, **changes: object) -> Path:
    path = folder / "job.yaml"
    data = {"name": "demo", "entrypoint": "train:job", "minibatch_size": 2, "steps": 1}
    path.write_text(json.dumps({**data, **changes}))
    return path


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Profile]:
    """The profiles that measuring here finds, one after the other."""
    found = [PROFILE]
    monkeypatch.setattr(inspect, "inspect_model", lambda config: FACTS)
    monkeypatch.setattr(machine, "device", lambda gpus, shares: PROFILE.device)
    monkeypatch.setattr(machine, "software", lambda: PROFILE.software)

    def measure(
        config: JobConfig,
        on_progress: Callable[[CalibrationProgress], None],
    ) -> Profile:
        on_progress(PROGRESS)
        return found.pop(0)

    monkeypatch.setattr(inspect, "measure_here", measure)
    return found


def test_a_profile_is_measured_once_and_kept(
    run: Run, tmp_path: Path, measured: list[Profile]
) -> None:
    path = job_file(tmp_path, microbatch_size=1)

    code, out, err = run(path, "-o", "json")
    assert code == 0
    assert json.loads(out)["device"] == PROFILE.device
    assert "measured 1 of 1: all" in err
    assert "profile kept" in err

    code, _, err = run(path)
    assert code == 0
    assert "--again measures again" in err


def test_again_measures_again(run: Run, tmp_path: Path, measured: list[Profile]) -> None:
    path = job_file(tmp_path, microbatch_size=1)
    newer = replace(PROFILE, task_overhead_s=0.5)
    measured.append(newer)
    run(path)

    assert run(path, "--again")[0] == 0

    assert profiles.read_profile(profiles.path_of(PROFILE)) == newer


def test_what_a_busy_machine_measured_is_kept_until_there_is_something_better(
    run: Run, tmp_path: Path, measured: list[Profile]
) -> None:
    sections = tuple(
        replace(section, forward_spread=0.6, backward_spread=0.6)
        for section in PROFILE.microbatches[0].sections
    )
    one = replace(PROFILE.microbatches[0], sections=sections)
    noisy, path = replace(PROFILE, microbatches=(one,)), profiles.path_of(PROFILE)
    measured[:] = [noisy, PROFILE, noisy]
    job = job_file(tmp_path, microbatch_size=1)

    assert "the machine was busy" in run(job)[2]
    assert profiles.read_profile(path) == noisy
    assert "measured in" not in run(job)[2], "no launch measures again"
    for _ in range(2):
        run(job, "--again")
        assert profiles.read_profile(path) == PROFILE


def test_the_job_files_profile_is_taken(run: Run, tmp_path: Path, measured: list[Profile]) -> None:
    profiles.write_profile(tmp_path / "mine.json", PROFILE)

    code, _, err = run(job_file(tmp_path, microbatch_size=1, profile="mine.json"))

    assert code == 0
    assert f"taken from {tmp_path / 'mine.json'}" in err
    assert measured, "nothing was measured"


def test_a_profile_is_shown_as_tables(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    group = GroupProfile(size=2, microbatches=PROFILE.microbatches[:1])
    profiles.write_profile(path, replace(PROFILE, groups=(group,)))

    code, out, _ = run("--show", path)

    assert code == 0
    for text in (PROFILE.device, "forward", "100.000 ms", "messages between VMs"):
        assert text in out
    assert "micro-batches of 1 in groups of 2 slots" in out


def test_a_profile_is_derived_shown_and_written(run: Run, tmp_path: Path) -> None:
    path, derived = tmp_path / "a.json", tmp_path / "b.json"
    profiles.write_profile(path, PROFILE)

    arguments = ("--device", "V100", "--ratio", "2", "--write", derived)
    code, out, _ = run("--derive", path, *arguments)

    assert code == 0
    assert "profile derived" in out
    assert "50.000 ms" in out
    again = profiles.read_profile(derived, FACTS)
    assert (again.device, again.origin) == ("V100", "derived")
    assert json.loads(run("--show", derived, "-o", "json")[1])["device"] == "V100"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "calibrate needs a job file"),
        (("--show",), "no profile is kept yet"),
        (("--derive", "a.json"), "--derive needs a profile, --device and --ratio"),
        (("--ratio", "2"), "need --derive"),
        (("--show", "none.json"), "none.json: no such profile"),
    ],
)
def test_what_is_missing_is_reported(run: Run, arguments: tuple[str, ...], message: str) -> None:
    code, _, err = run(*arguments)

    assert code == 2
    assert message in err


def test_a_ratio_of_nothing_is_refused(run: Run, tmp_path: Path) -> None:
    profiles.write_profile(tmp_path / "a.json", PROFILE)

    code, _, err = run("--derive", tmp_path / "a.json", "--device", "x", "--ratio", "0")

    assert code == 2
    assert "ratio" in err


def test_two_vms_share_a_gpu_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = FakeGpus(tmp_path / "nvml.json")
    monkeypatch.setenv(VARIABLE, str(gpus.file))
    monkeypatch.setitem(sys.modules, "pynvml", pynvml)
    found = calibrate.devices_here(CONFIG)
    assert found.slots.memory_shares == (0.5,)
    assert found.name == "NVIDIA A10G, 1/2 each"
    gpus.change(rows=[0, 1, 0, 1])
    with pytest.raises(calibrate.MeasuringError, match="GPU 0"):
        calibrate.devices_here(CONFIG)
    gpus.set(error=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    assert len(calibrate.devices_here(CONFIG).slots.devices) in (1, 2)

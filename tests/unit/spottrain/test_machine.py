from __future__ import annotations

import platform
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import spottrain
from spottrain import machine


def test_the_device_is_named_with_its_threads() -> None:
    name, _, threads = machine.device().rpartition(", ")

    assert name
    assert threads == "1 thread"


def test_software_is_all_that_times_depend_on() -> None:
    import torch

    assert machine.software() == (
        f"spottrain {spottrain.__version__}, torch {torch.__version__}, "
        f"python {platform.python_version()}"
    )


def test_a_computer_keeps_its_name_and_has_cores_and_memory() -> None:
    assert machine.machine_id() == machine.machine_id() != ""
    assert machine.cores() >= 1
    assert 0 < machine.available_bytes() < sys.maxsize


_LIMITED = """
import resource, pathlib
from spottrain import machine
machine._STATUS = pathlib.Path("/nowhere")  # as if root had no capabilities
resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, {hard}))
before = machine.locked_memory_bytes()
machine.raise_locked_memory_limit()
print(before, machine.locked_memory_bytes())
"""


def test_the_limit_of_locked_memory_is_raised_as_far_as_this_user_may() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    code = _LIMITED.format(hard=hard)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert before == 4096
    assert after in (0, hard)


def test_a_capability_lifts_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nCapEff:\t0000000000004000\n")
    monkeypatch.setattr(machine, "_STATUS", status)
    assert machine.locked_memory_bytes() == 0


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where control groups are, with this process in one of each version."""
    own = tmp_path / "own"
    own.write_text("4:memory:/outer/inner\n3:cpu,cpuacct:/outer/inner\n0::/outer/inner\n")
    monkeypatch.setattr(machine, "_OWN_GROUPS", own)
    monkeypatch.setattr(machine, "_GROUPS", tmp_path)
    for root in ("", "cpu", "memory"):
        (tmp_path / root / "outer" / "inner").mkdir(parents=True)
    return tmp_path


def test_memory_is_that_of_the_computer_or_of_its_container(groups: Path) -> None:
    whole = machine.memory_bytes()
    assert whole >= machine.available_bytes()
    for file in ("memory.max", "outer/memory.max", "memory/outer/inner/memory.limit_in_bytes"):
        for text, have in (("max", whole), ("4096", 4096), (str(2 * whole), whole)):
            (groups / file).write_text(f"{text}\n")
            assert machine.memory_bytes() == have


def test_cores_are_those_of_the_computer_or_of_its_container(
    groups: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert machine.cores() == 8
    for folder in ("", "outer", "outer/inner"):
        for text, have in (("200000", 2), ("50000", 1), ("1600000", 8), ("max", 8)):
            (groups / folder / "cpu.max").write_text(f"{text} 100000\n")
            assert machine.cores() == have


def test_cores_are_those_of_a_container_of_the_first_version(
    groups: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    (groups / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    for text, have in (("300000", 3), ("-1", 8)):
        (groups / "cpu" / "cpu.cfs_quota_us").write_text(f"{text}\n")
        assert machine.cores() == have


def test_a_container_may_lack_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_SHARED_MEMORY", tmp_path)
    assert machine.shared_memory_bytes() > 0
    monkeypatch.setattr(machine, "_SHARED_MEMORY", tmp_path / "nothing")
    assert machine.shared_memory_bytes() == 0


@pytest.mark.parametrize(
    ("node", "cpulist", "threads", "runs_on"),
    [
        ("1", "4-5,7", 3, {4, 5, 7}),
        ("1", "4-5,7", 4, None),
        ("0", "0-7", 1, None),
        ("-1", "4-5,7", 1, None),
        ("1", "20-23", 1, None),
    ],
)
def test_a_process_runs_on_its_gpu_s_node_if_that_has_enough_cores(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    node: str,
    cpulist: str,
    threads: int,
    runs_on: set[int] | None,
) -> None:
    device, nodes = tmp_path / "0000:3b:00.0", tmp_path / "nodes"
    device.mkdir()
    (device / "numa_node").write_text(f"{node}\n")
    (nodes / f"node{max(0, int(node))}").mkdir(parents=True)
    (nodes / f"node{max(0, int(node))}" / "cpulist").write_text(f"{cpulist}\n")
    monkeypatch.setattr(machine, "_PCI_DEVICES", tmp_path)
    monkeypatch.setattr(machine, "_NODES", nodes)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    chosen: list[set[int]] = []
    monkeypatch.setattr("os.sched_setaffinity", lambda _, cores: chosen.append(cores))

    machine.run_near("0000:3b:00.0", threads)
    machine.run_near("", threads)

    assert chosen == ([] if runs_on is None else [runs_on])


def test_a_user_s_allocator_settings_win(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "PYTORCH_ALLOC_CONF"
    assert machine.supervisor_environment({})[name] == "expandable_segments:True"
    own = {name: "backend:cudaMallocAsync", "OMP_NUM_THREADS": "7"}
    made = machine.supervisor_environment(own)
    assert (made[name], made["OMP_NUM_THREADS"]) == (own[name], "1")


def test_jobs_of_a_pool_share_a_gpu_and_others_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(machine.OWNER_VARIABLE, raising=False)
    assert machine.owner("thesis") == "thesis"
    monkeypatch.setenv(machine.OWNER_VARIABLE, "pool lab")  # as its daemon does
    assert machine.owner("thesis") == machine.owner("paper") == "pool lab"

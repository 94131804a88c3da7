"""GPUs as NVML describes them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.fakes.gpus import FakeGpus, facts, use
from tests.fakes.nvml import pynvml

from spottrain.gpus import nvml
from spottrain.gpus.health import GpuHealth, GpuUser, Xid

Put = Callable[..., FakeGpus]


def test_a_gpu_is_described(machine_with: Put) -> None:
    machine_with(2)
    with nvml.open_nvml() as driver:
        assert driver.gpus() == tuple(facts(index, uncorrected_ecc_errors=0) for index in range(2))


def test_what_a_gpu_has_not_is_unknown_or_well(machine_with: Put) -> None:
    gpus = machine_with()
    gpus.change(mig=None, ecc=None, rows=None, reasons=None, recovery=None)
    with nvml.open_nvml() as driver:
        (gpu,) = driver.gpus()
        assert gpu == facts()
        assert driver.health(gpu) == GpuHealth()


def test_older_drivers_know_clock_reasons_by_another_name(machine_with: Put) -> None:
    machine_with(reasons=0x40).set(driver="525.60.13")
    with nvml.open_nvml() as driver:
        (gpu,) = driver.gpus()
        assert gpu.cuda == "12.8"
        assert driver.health(gpu).clock_event_reasons == 0x40


def test_health_is_read(machine_with: Put) -> None:
    gpus = machine_with(rows=[1, 2, 1, 0], recovery=2)
    with nvml.open_nvml() as driver:
        (gpu,) = driver.gpus()
        health = driver.health(gpu)
        assert health == GpuHealth(row_remap_pending=True, recovery_action=2)
        gpus.change(lost=True)
        assert driver.health(gpu) == GpuHealth(is_lost=True)
        gpus.change(uuid="GPU-another")  # the driver has taken it off its list
        assert driver.health(gpu) == GpuHealth(is_lost=True)
        with pytest.raises(nvml.GpuLostError, match="GPU 0 does not answer"):
            driver.gpus()


@pytest.mark.parametrize("driver_version", ["580.95.05", "535.1"])
def test_what_a_gpu_does_is_read_as_far_as_its_driver_says(
    machine_with: Put, driver_version: str
) -> None:
    gpus = machine_with(use=97, used_bytes=3 * 10**9, milliwatts=151_200, celsius=64)
    gpus.set(driver=driver_version)
    with nvml.open_nvml() as driver:
        (gpu,) = driver.gpus()
        assert driver.use(gpu) == use()
        gpus.change(use=None, milliwatts=None, celsius=None)
        bare = driver.use(gpu)
        assert (bare.utilisation, bare.power_w, bare.temperature_c) == (None, None, None)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "no NVIDIA driver is installed"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "installed but not loaded"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "reboot the machine"),
        (999, "cannot be initialised: NVML Error with code 999"),
    ],
)
def test_why_there_is_no_nvml_is_told(machine_with: Put, code: int, why: str) -> None:
    machine_with().set(error=code)
    with pytest.raises(nvml.NoNvmlError, match=why), nvml.open_nvml():
        pass


def test_without_the_library_there_is_no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(nvml.NoNvmlError, match="pip install"), nvml.open_nvml():
        pass


def test_the_real_library_says_that_there_is_no_driver_here() -> None:
    if nvml.driver_is_loaded():
        pytest.skip("this machine has a driver")
    why = "no NVIDIA driver is installed"
    with pytest.raises(nvml.NoNvmlError, match=why), nvml.open_nvml():
        pass


def test_the_fake_has_the_names_of_the_real_library() -> None:
    library = pytest.importorskip("pynvml")
    ours = [name for name in vars(pynvml) if name.lower().startswith("nvml")]
    assert len(ours) > 30
    for name in ours:
        assert hasattr(library, name), name
        if isinstance(value := getattr(pynvml, name), int):
            assert value == getattr(library, name), name


def test_xids_arrive_and_waiting_ends(machine_with: Put) -> None:
    gpus = machine_with(2)
    with nvml.open_nvml() as driver:
        both = driver.gpus()
        with driver.xids(both) as next_xid:
            assert next_xid is not None
            assert next_xid(1) is None
            gpus.change(1, xids=[79, 48])
            assert next_xid(1000) == Xid(79, both[1].uuid)
            assert next_xid(1000) == Xid(48, both[1].uuid)
            assert next_xid(1) is None


def test_gpus_without_events_are_not_waited_for(machine_with: Put) -> None:
    machine_with().change(xids=None)
    with nvml.open_nvml() as driver, driver.xids(driver.gpus()) as next_xid:
        assert next_xid is None


def test_memory_of_a_gpu_is_that_of_one_process(
    machine_with: Put, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine_with(pids=[11, 12, 13], pid_bytes={"11": 5, "12": 7})
    (tmp_path / "self/ns").mkdir(parents=True)
    os.symlink("pid:[4026531836]", tmp_path / "self/ns/pid")
    monkeypatch.setattr(nvml, "_PROCESSES", tmp_path)
    with nvml.open_nvml() as driver:
        (gpu,) = driver.gpus()
        known = [driver.memory_of(gpu.uuid, pid) for pid in (11, 12, 13, 14)]
        assert known == [5, 7, None, None]
        (tmp_path / "self/ns/pid").unlink()
        assert driver.memory_of(gpu.uuid, 11) is None


def test_the_address_of_a_gpu_is_as_the_kernel_writes_it(machine_with: Put) -> None:
    machine_with()
    with nvml.open_nvml() as driver:
        (gpu,) = driver.gpus()
        assert driver.pci_address(gpu.uuid) == "0000:3b:00.0"


def test_processes_of_other_jobs_are_found(
    machine_with: Put, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine_with(pids=[11, 12, 13, 11])
    for pid, name, environment in (
        (11, "python", b"A=1\0SPOTTRAIN_JOB=mine\0"),
        (12, "python", b"SPOTTRAIN_JOB=mine-too\0"),
    ):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "comm").write_text(f"{name}\n")
        (tmp_path / str(pid) / "environ").write_bytes(environment)
    (tmp_path / "self/ns").mkdir(parents=True)
    os.symlink("pid:[4026531836]", tmp_path / "self/ns/pid")
    monkeypatch.setattr(nvml, "_PROCESSES", tmp_path)
    with nvml.open_nvml() as driver:
        (gpu,) = driver.gpus()
        others = driver.users(gpu, "mine")
        assert others == (GpuUser(12, "python"), GpuUser(13, "ended"))
        (tmp_path / "self/ns/pid").unlink()
        os.symlink("pid:[4026532001]", tmp_path / "self/ns/pid")
        assert driver.users(gpu, "mine") == (), "pids of a container are others"

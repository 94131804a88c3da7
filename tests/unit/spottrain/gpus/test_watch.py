"""GPUs that fail or slow down while a VM trains."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.fakes.gpus import FakeGpus, use

from spottrain.gpus import watch
from spottrain.gpus.nvml import open_nvml
from spottrain.wire.messages import GpuSick, GpuThrottled

Put = Callable[..., FakeGpus]
HOT = 0x20
"""A reason that is reported, so that a test knows that the watch has begun."""


class Watched:
    """What a watch over the machine's GPUs says, until it or the test ends it."""

    def __init__(self, act: Callable[[Watched], None] = lambda watched: None) -> None:
        self.reports: list[GpuSick | GpuThrottled] = []
        self.restarted: list[tuple[str, str]] = []
        self.notes: list[str] = []
        self.closing = threading.Event()
        self.act = act

    def report(self, report: GpuSick | GpuThrottled) -> None:
        self.reports.append(report)
        self.act(self)

    def restart(self, uuid: str, reason: str) -> None:
        self.restarted.append((uuid, reason))
        self.closing.set()

    def run(self) -> None:
        with open_nvml() as driver:
            watch.GpuWatch(driver, driver.gpus(), self.report, self.restart, self.notes.append).run(
                self.closing
            )


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "WAIT_MS", 1)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"xids": [79]}, "XID 79: the GPU has fallen off the bus"),
        ({"rows": [0, 1, 0, 1]}, "a failed row of memory cannot be replaced"),
        ({"recovery": 1}, "asks for a reset of the GPU"),
    ],
)
def test_a_failed_gpu_is_reported_once(
    machine_with: Put, change: dict[str, object], why: str
) -> None:
    gpus = machine_with(2)
    gpus.change(0, reasons=HOT)
    watched = Watched(lambda _: gpus.change(1, **change))
    watched.run()
    throttled, report = watched.reports
    assert isinstance(throttled, GpuThrottled)
    assert isinstance(report, GpuSick)
    assert report.reason.startswith("GPU 1 (NVIDIA A10G): ")
    assert why in report.reason


def test_a_lost_gpu_is_reported_even_if_waiting_fails(machine_with: Put) -> None:
    gpus = machine_with()
    with open_nvml() as driver:
        found = driver.gpus()
        gpus.change(lost=True)
        watched = Watched()
        watch.GpuWatch(driver, found, watched.report, watched.restart, watched.notes.append).run(
            watched.closing
        )
    (report,) = watched.reports
    assert isinstance(report, GpuSick)
    assert "fallen off the bus" in report.reason


def test_a_kernel_that_failed_restarts_the_workers_of_its_gpu(
    machine_with: Put,
) -> None:
    gpus = machine_with(2)
    gpus.change(0, reasons=HOT)
    watched = Watched(lambda _: gpus.change(1, xids=[63, 31]))
    watched.run()
    ((uuid, reason),) = watched.restarted
    assert uuid == "GPU-00000001-aaaa"
    assert "XID 31" in reason
    assert [type(report) for report in watched.reports] == [GpuThrottled]
    assert len(watched.notes) == 2


def test_a_hot_gpu_is_reported_and_so_is_that_it_has_cooled(machine_with: Put) -> None:
    gpus = machine_with(reasons=HOT | 0x04)

    def act(watched: Watched) -> None:
        gpus.change(reasons=0x04)
        if len(watched.reports) == 2:
            watched.closing.set()

    watched = Watched(act)
    watched.run()
    reason = "GPU 0 (NVIDIA A10G): thermal slowdown by software"
    assert watched.reports == [GpuThrottled(reason=reason), GpuThrottled(reason="")]


def test_gpus_without_events_are_looked_at_all_the_same(machine_with: Put) -> None:
    machine_with(recovery=2).change(xids=None)
    watched = Watched()
    watched.run()
    assert [type(report) for report in watched.reports] == [GpuSick]


@pytest.mark.parametrize("change", [{"rows": [0, 0, 1, 0]}, {"recovery": 1}, {"xids": [154]}])
def test_an_own_gpu_that_waits_for_a_reset_is_used_until_then(
    machine_with: Put, change: dict[str, Any]
) -> None:
    gpus = machine_with()
    gpus.change(reasons=HOT)
    reports: list[GpuSick | GpuThrottled] = []
    notes: list[str] = []
    closing = threading.Event()

    def report(one: GpuSick | GpuThrottled) -> None:
        reports.append(one)
        gpus.change(reasons=0, **change)
        if len(reports) == 2:
            closing.set()

    def restart(uuid: str, reason: str) -> None:
        pytest.fail(reason)

    with open_nvml() as driver:
        own = watch.GpuWatch(driver, driver.gpus(), report, restart, notes.append, is_own=True)
        own.run(closing)
    assert [one.kind for one in reports] == ["gpu_throttled"] * 2


def test_the_last_look_says_what_gpus_do(machine_with: Put) -> None:
    machine_with(2, use=97, used_bytes=3 * 10**9, milliwatts=151_200, celsius=64)
    closing = threading.Event()
    with open_nvml() as driver:
        look = watch.GpuWatch(
            driver, driver.gpus(), lambda _: closing.set(), lambda *_: None, lambda _: None
        )
        looking = threading.Thread(target=look.run, args=(closing,))
        looking.start()
        while not look.uses:
            closing.wait(0.01)
        closing.set()
        looking.join()
    assert look.uses == (use(0), use(1))

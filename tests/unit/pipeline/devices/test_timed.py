"""The stand-in whose computations and transfers take declared time."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.gpus import VARIABLE, FakeGpus
from tests.fakes.timed import BUS_BYTES_PER_S, CONTEXT_BYTES, Figures, TimedDevice, open_device

FIGURES = Figures(
    half_flops=1e9,
    single_flops=1e8,
    memory_bytes=CONTEXT_BYTES + (1 << 20),
    memory_bytes_per_s=1e8,
    bus_bytes_per_s=1e7,
    launch_s=1e-6,
)
BYTES = 4000
COMPUTES_S = 2 * BYTES / FIGURES.memory_bytes_per_s
COPIES_S = BYTES / FIGURES.bus_bytes_per_s


def there(device: TimedDevice) -> torch.Tensor:
    return device.allocate(BYTES).view(torch.float32)


def here(device: TimedDevice) -> torch.Tensor:
    return device.allocate_host((BYTES // 4,), torch.float32)


def test_the_host_runs_ahead_and_is_held_where_it_waits() -> None:
    device = TimedDevice(FIGURES)
    with device.using():
        tensor = there(device)
        began = device.mark()
        for _ in range(10):
            tensor.neg_()
        assert device.clock() < COMPUTES_S
        assert device.held_s() == 0.0
        device.reach(device.mark())

    assert device.clock() - began == pytest.approx(10 * COMPUTES_S, rel=0.02)
    assert device.held_s() == pytest.approx(10 * COMPUTES_S, rel=0.02)


def test_an_upload_to_new_memory_runs_beside_computations_and_a_download_after_them() -> None:
    device = TimedDevice(FIGURES)
    with device.using():
        tensor = there(device).neg_()
        up = device.upload(here(device))
        down = device.download(tensor)
        device.finish(up)
        uploaded_s = device.clock()
        device.finish(down)

    assert uploaded_s == pytest.approx(COPIES_S, rel=0.01)
    assert device.clock() == pytest.approx(COMPUTES_S + COPIES_S, rel=0.01)


def test_what_waits_for_an_upload_is_computed_after_it_and_the_host_goes_on() -> None:
    device = TimedDevice(FIGURES)
    with device.using():
        device.wait(device.upload(here(device))).neg_()
        assert device.clock() < COPIES_S
        device.synchronise()

    assert device.clock() == pytest.approx(COPIES_S + COMPUTES_S, rel=0.01)


def test_matrices_are_multiplied_as_fast_as_their_type_allows() -> None:
    device = TimedDevice(replace(FIGURES, memory_bytes_per_s=1e15))
    times_s = []
    with device.using():
        for dtype in (torch.float32, torch.bfloat16):
            matrix = device.allocate(64 * 64 * dtype.itemsize).view(dtype).view(64, 64)
            began = device.mark()
            matrix @ matrix
            times_s.append(device.elapsed_s([(began, device.mark())]))

    assert times_s == pytest.approx([2 * 64**3 / 1e8, 2 * 64**3 / 1e9], rel=0.01)


def test_reading_a_value_holds_the_host() -> None:
    device = TimedDevice(FIGURES)
    with device.using():
        there(device).sum().item()

    assert device.clock() > BYTES / FIGURES.memory_bytes_per_s
    assert device.host_reads


@given(st.lists(st.sampled_from(["compute", "up", "down", "wait", "finish", "reach"]), max_size=30))
def test_time_never_goes_back_and_nothing_is_faster_than_declared(acts: list[str]) -> None:
    device = TimedDevice(FIGURES)
    marks, hosts, transfers = [0.0], [0.0], []
    with device.using():
        tensor, count = there(device), dict.fromkeys(["compute", "up", "down"], 0)
        for act in acts:
            if act in count:
                count[act] += 1
            if act == "compute":
                tensor = tensor + 1
            elif act == "up":
                transfers.append(device.upload(here(device)))
            elif act == "down":
                transfers.append(device.download(tensor))
            elif act == "reach":
                device.reach(marks[-1])
            elif transfers:
                getattr(device, act)(transfers[-1])
            marks.append(device.mark())
            hosts.append(device.clock())
        device.synchronise()

    assert all(a <= b for times in (marks, hosts) for a, b in itertools.pairwise(times))
    busiest_s = max(count["compute"] * COMPUTES_S, count["up"] * COPIES_S, count["down"] * COPIES_S)
    everything_s = sum(
        count[act] * each_s
        for act, each_s in (("compute", COMPUTES_S), ("up", COPIES_S), ("down", COPIES_S))
    )
    launches_s = FIGURES.launch_s * device.operations
    host_s = 1e-3  # what it allocates
    assert busiest_s * (1 - 1e-9) <= device.clock() <= everything_s + launches_s + host_s


# --- what befalls a GPU -----------------------------------------------------------------


@given(st.lists(st.one_of(st.integers(1, 1 << 19), st.none()), max_size=20))
def test_memory_is_bounded(wanted: list[int | None]) -> None:
    """``None`` frees what was taken last."""
    device = TimedDevice(FIGURES)
    held: list[torch.Tensor] = []
    for num_bytes in wanted:
        if num_bytes is None:
            held = held[:-1]
            continue
        if sum(x.numel() for x in held) + num_bytes <= 1 << 20:
            held.append(device.allocate(num_bytes))
        else:
            with pytest.raises(torch.OutOfMemoryError) as refused:
                device.allocate(num_bytes)
            found = re.search(
                r"Tried to allocate ([0-9.]+) (bytes|KiB|MiB|GiB)", str(refused.value)
            )
            assert found is not None
            assert int(found[1]) == num_bytes


def test_a_computation_that_needs_too_much_is_refused_and_others_go_on() -> None:
    device = TimedDevice(FIGURES)
    with device.using():
        tensor = device.allocate(1 << 19)
        with pytest.raises(torch.OutOfMemoryError):
            torch.cat([tensor, tensor])
        tensor.add_(1)


def told_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[FakeGpus, TimedDevice]:
    gpus = FakeGpus(tmp_path / "nvml.json", name="NVIDIA L4", scale=0.0)
    monkeypatch.setenv(VARIABLE, str(gpus.file))
    return gpus, open_device("GPU-00000000-aaaa")


def test_a_kernel_that_hangs_holds_who_waits_for_it_but_no_rescue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus, device = told_by(tmp_path, monkeypatch)
    tensor = torch.ones(4)
    gpus.change(hangs=True)
    mark = device.mark()
    left = threading.Event()

    def wait() -> None:
        device.reach(mark)
        left.set()

    threading.Thread(target=wait, daemon=True).start()
    target = torch.zeros(4)
    device.rescue(tensor, target)

    assert target.tolist() == [1.0] * 4
    assert device.is_usable()
    assert not left.is_set()


def test_a_lost_gpu_is_of_no_use_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus, device = told_by(tmp_path, monkeypatch)
    gpus.change(lost=True)
    with pytest.raises(RuntimeError, match="CUDA error"):
        device.mark()

    assert not device.is_usable()
    uses: list[Callable[[], Any]] = [
        device.synchronise,
        lambda: device.upload(here(device)),
        lambda: device.rescue(torch.ones(1), torch.ones(1)),
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match="CUDA error"):
            use()


def test_a_slow_bus_is_told_by_the_times_of_transfers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus, device = told_by(tmp_path, monkeypatch)
    times_s = []
    for share in (1.0, 0.1):
        gpus.change(bus_share=share)
        began_s = device.clock()
        device.finish(device.upload(here(device)))
        times_s.append(device.clock() - began_s)

    assert times_s[1] == pytest.approx(10 * times_s[0])


# --- without numbers --------------------------------------------------------------------

OPERATIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "matrices": lambda x: x @ x.T,
    "views": lambda x: x.T.reshape(-1, 2, x.shape[0]).permute(1, 0, 2),
    "in place": lambda x: x.mul_(2).add_(x),
    "several": lambda x: torch.topk(x, 2, dim=1),
    "softmax": lambda x: torch.nn.functional.softmax(x.to(torch.bfloat16), dim=-1),
    "reads": lambda x: x.sum().item(),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_without_numbers_shapes_types_times_and_memory_are_the_same(name: str) -> None:
    figures = replace(FIGURES, memory_bytes=1 << 32)
    found = []
    for numbers in (True, False):
        device = TimedDevice(figures, numbers=numbers)
        with device.using():
            tensor = device.allocate(128 * 64 * 4).view(torch.float32).view(128, 64)
            result = OPERATIONS[name](tensor)
            leaves = result if isinstance(result, tuple) else (result,)
            shapes = [(x.shape, x.dtype) for x in leaves if isinstance(x, torch.Tensor)]
            device.synchronise()
        found.append((shapes, device.clock(), device.peak_bytes()))

    assert found[0] == found[1]


def test_without_numbers_a_large_model_takes_no_memory_of_this_machine() -> None:
    device = TimedDevice(Figures.of("H100"), numbers=False)
    with device.using():
        weights = device.allocate(60 << 30).view(torch.bfloat16).view(1 << 15, -1)
        (weights[:, : 1 << 15] @ weights[: 1 << 15, : 1 << 15]).sum().item()

    assert (device.peak_bytes() or 0) > 60 << 30


@pytest.mark.parametrize("gpu", BUS_BYTES_PER_S)
def test_declared_figures_are_those_of_the_catalogue(gpu: str) -> None:
    figures = Figures.of(gpu)

    assert figures.single_flops < figures.half_flops
    assert figures.bus_bytes_per_s < figures.memory_bytes_per_s

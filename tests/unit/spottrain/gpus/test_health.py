"""Verdicts on GPUs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.gpus import facts

from spottrain.gpus.health import (
    GpuHealth,
    GpuUser,
    action_on,
    conflict,
    describe_xid,
    sickness,
    slowdowns,
)

GPU = facts()
SICK = [48, 64, 74, 79, 94, 95, 119, 120, 140, 154]


@given(st.integers(0, 1000))
def test_an_xid_calls_for_what_nvidia_advises(number: int) -> None:
    action = action_on(number)
    assert (action == "return_vm") == (number in SICK)
    assert (action == "restart_worker") == (number in (13, 31, 43))
    assert describe_xid(number, GPU).startswith(f"GPU 0 (NVIDIA A10G): XID {number}: ")


@pytest.mark.parametrize(
    ("health", "why"),
    [
        (GpuHealth(is_lost=True), "has fallen off the bus"),
        (GpuHealth(row_remap_failed=True), "cannot be replaced"),
        (GpuHealth(row_remap_pending=True), "waits for a reset"),
        (GpuHealth(recovery_action=2), "asks for a reboot"),
        (GpuHealth(recovery_action=99), "asks for recovery action 99"),
    ],
)
def test_a_sick_gpu_is_told_in_a_line(health: GpuHealth, why: str) -> None:
    text = sickness(GPU, health)
    assert why in text
    assert "\n" not in text


@given(st.integers(0, 0xFFFF))
def test_only_heat_and_power_brakes_make_a_gpu_slow(bits: int) -> None:
    health = GpuHealth(clock_event_reasons=bits)
    assert len(slowdowns(health)) == (bits & 0xE8).bit_count()
    assert sickness(GPU, health) == ""


def test_the_power_cap_is_ordinary() -> None:
    assert slowdowns(GpuHealth(clock_event_reasons=0x04 | 0x01)) == ()


def test_who_else_uses_a_gpu_is_told() -> None:
    assert conflict(GPU, ()) == ""
    many = [GpuUser(pid, "python") for pid in range(1, 6)]
    assert conflict(GPU, many[:1]).startswith(
        "GPU 0 (NVIDIA A10G) is in use by process 1 (python): end it"
    )
    assert "3 (python) and 2 more" in conflict(GPU, many)

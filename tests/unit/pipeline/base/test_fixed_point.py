from __future__ import annotations

import importlib
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spottrain.pipeline.base import fixed_point
from spottrain.pipeline.base.fixed_point import (
    ATTEMPT_BITS,
    HEADROOM_BITS,
    MAX_ATTEMPTS,
    NOT_FINITE,
    ZERO,
)

TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
reals = st.floats(-1e6, 1e6, width=32)
virtual_nodes = st.integers(1, 1 << 20)


def plain_sum(gradients: list[torch.Tensor], used: int) -> list[int]:
    """Return sums of integers, computed by nobody's kernel."""
    scaled = [[Fraction(g) * Fraction(2) ** used for g in one.tolist()] for one in gradients]
    return [sum(map(round, column)) for column in zip(*scaled, strict=True)]


@given(st.lists(st.lists(reals, min_size=3, max_size=3), min_size=1, max_size=6), st.data())
def test_sums_are_those_of_whole_numbers_in_any_order(
    rows: list[list[float]], data: st.DataObject
) -> None:
    gradients = [torch.tensor(row) for row in rows]
    used = fixed_point.exponent(20, 0, len(rows), torch.float32)
    parts = [torch.zeros(3, dtype=torch.int64) for _ in range(3)]

    for gradient in data.draw(st.permutations(gradients)):
        fixed_point.add_quantised(data.draw(st.sampled_from(parts)), gradient, used)

    assert torch.stack(parts).sum(0).tolist() == plain_sum(gradients, used)


@given(virtual_nodes, st.floats(allow_nan=False, allow_infinity=False, width=32))
def test_what_is_in_range_cannot_overflow_a_sum(nodes: int, value: float) -> None:
    gradient = torch.tensor([value])
    magnitude = int(fixed_point.magnitudes(fixed_point.peak(gradient)))
    for attempt in range(MAX_ATTEMPTS):
        used = fixed_point.exponent(None, attempt, nodes, torch.float32)
        if fixed_point.in_range(magnitude, used, nodes):
            total = torch.zeros(1, dtype=torch.int64)
            fixed_point.add_quantised(total, gradient, used)
            assert total.tolist() == plain_sum([gradient], used)
            assert abs(int(total)) * nodes < 1 << 63
            return
    raise AssertionError("no attempt takes a finite gradient")


@pytest.mark.parametrize("dtype", TYPES)
@given(nodes=virtual_nodes, committed=st.none() | st.integers(-200, 800))
def test_the_last_attempt_takes_the_largest_number_of_any_type(
    dtype: torch.dtype, nodes: int, committed: int | None
) -> None:
    largest = torch.tensor([torch.finfo(dtype).max], dtype=dtype)
    used = fixed_point.exponent(committed, MAX_ATTEMPTS - 1, nodes, dtype)

    magnitude = int(fixed_point.magnitudes(fixed_point.peak(largest)))

    assert fixed_point.in_range(magnitude, used, nodes)


@given(virtual_nodes, st.integers(-140, 127), st.none() | st.integers(-200, 800))
def test_the_next_minibatch_may_have_gradients_so_much_larger(
    nodes: int, magnitude: int, committed: int | None
) -> None:
    following = fixed_point.next_exponent(committed, magnitude, nodes)

    used = fixed_point.exponent(following, 0, nodes, torch.float32)
    assert fixed_point.in_range(magnitude + HEADROOM_BITS, used, nodes)
    further = fixed_point.exponent(following, 1, nodes, torch.float32)
    assert further == used - ATTEMPT_BITS


@given(virtual_nodes, st.none() | st.integers(-200, 800))
def test_gradients_of_zeros_leave_the_exponent(nodes: int, committed: int | None) -> None:
    assert fixed_point.next_exponent(committed, ZERO, nodes) == committed
    assert fixed_point.in_range(ZERO, 800, nodes)


@given(st.lists(reals, min_size=1, max_size=9))
def test_a_magnitude_is_the_least_power_of_two_above_every_value(
    values: list[float],
) -> None:
    peak = fixed_point.peak(torch.tensor(values))

    magnitude = int(fixed_point.magnitudes(peak))

    largest = max(map(abs, values))
    if largest == 0:
        assert magnitude == ZERO
    else:
        assert 2.0 ** (magnitude - 1) <= largest < 2.0**magnitude


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_no_number_is_told_from_what_is_out_of_range(value: float) -> None:
    peak = fixed_point.peak(torch.tensor([1.0, value, 2.0]))

    magnitude = int(fixed_point.magnitudes(peak))

    assert magnitude == NOT_FINITE
    assert fixed_point.in_range(magnitude, 800, 1)


@given(st.lists(reals, min_size=1, max_size=50), st.sampled_from(TYPES[:2]))
def test_a_sum_is_rounded_to_the_type_of_its_gradient(
    values: list[float], dtype: torch.dtype
) -> None:
    gradient = torch.tensor(values, dtype=dtype)
    magnitude = int(fixed_point.magnitudes(fixed_point.peak(gradient)))
    committed = fixed_point.next_exponent(None, magnitude, 4)
    used = fixed_point.exponent(committed, 0, 4, dtype)
    total = torch.zeros(len(values), dtype=torch.int64)
    fixed_point.add_quantised(total, gradient, used)
    target = torch.empty_like(gradient)

    fixed_point.dequantise(total, used, target)

    # 48 bits below the largest value: what is above that is exact.
    step = 0.0 if magnitude == ZERO else 2.0 ** (magnitude - 48)
    assert torch.all((target - gradient).abs() <= step)


def test_long_tensors_are_converted_in_pieces_alike() -> None:
    gradient = torch.randn((1 << 18) + 77, generator=torch.Generator().manual_seed(1))
    total = torch.zeros(gradient.numel(), dtype=torch.int64)

    fixed_point.add_quantised(total, gradient, 40)

    expected = (gradient.double() * 2.0**40).round().long()
    assert torch.equal(total, expected)


def truncate(total: torch.Tensor, gradient: torch.Tensor, used: int, highest: torch.Tensor) -> None:
    fixed_point.add(total, (gradient.double() * 2.0**used).trunc() * 2.0**-used, used, highest)


def forget_the_peak(
    total: torch.Tensor, gradient: torch.Tensor, used: int, highest: torch.Tensor
) -> None:
    fixed_point.add(total, gradient, used, highest.clone())


def let_infinity_pass(
    total: torch.Tensor, gradient: torch.Tensor, used: int, highest: torch.Tensor
) -> None:
    fixed_point.add(total, gradient.nan_to_num(0, 0, 0), used, highest)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_kernel_with_other_bits_is_not_used(dtype: torch.dtype) -> None:
    cpu = torch.device("cpu")
    assert fixed_point.agrees(fixed_point.add, cpu, dtype)
    for wrong in (truncate, forget_the_peak, let_infinity_pass):
        assert not fixed_point.agrees(wrong, cpu, dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_the_kernel_has_the_bits_of_the_eager_sum(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, or by triton's interpreter."""
    has_gpu = torch.cuda.is_available()
    if not has_gpu:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("triton")
    fused = importlib.import_module("spottrain.pipeline.base.triton_sums").add

    assert fixed_point.agrees(fused, torch.device("cuda" if has_gpu else "cpu"), dtype)

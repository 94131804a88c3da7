"""FLOPs, parameters and times are those of the dissertation's chapter 4."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain.morphing.errors import PlanError
from spottrain.morphing.plan.flops import ComputeUse
from spottrain.morphing.plan.transformer import TransformerShape
from spottrain_lab.planners.gpt import gpt_shape, minibatch_flops, training_time_s

DAY_S = 86400.0
A100 = 312e12
"""Peak FLOP/s that table 4.1 compares with."""

TABLE_4_1 = [
    # billions, h, l, GPUs, batch, TFLOP/s per GPU, % of peak, PFLOP/s, s per iteration
    (1.7, 2304, 24, 32, 512, 137, 44, 4.4, 3.53),
    (3.6, 3072, 30, 64, 512, 138, 44, 8.8, 3.70),
    (7.5, 4096, 36, 128, 512, 142, 46, 18.2, 3.70),
    (18.4, 6144, 40, 256, 1024, 135, 43, 34.6, 9.40),
    (39.1, 8192, 48, 512, 1536, 138, 44, 70.8, 14.45),
    (76.1, 10240, 60, 1024, 1792, 140, 45, 143.8, 16.06),
    (145.6, 12288, 80, 1536, 2304, 148, 47, 227.1, 24.82),
    (310.1, 16384, 96, 1920, 2160, 155, 50, 297.4, 37.61),
    (529.6, 20480, 105, 2520, 2520, 163, 52, 410.2, 54.08),
    (1008.0, 25600, 128, 3072, 3072, 163, 52, 502.0, 102.63),
]
"""PTD-P's table 4.1; the last column is F of equation 4.2 over nX."""


def gpt(hidden: int, layers: int) -> TransformerShape:
    """One of the dissertation's models: 2,048 tokens, a vocabulary of 51,200."""
    return gpt_shape(layers=layers, hidden=hidden, context=2048, vocabulary=51200)


@pytest.mark.parametrize("row", TABLE_4_1, ids=lambda row: f"{row[0]}B")
def test_table_4_1(row: tuple[float, ...]) -> None:
    billions, h, l, n, batch, teraflops, percent, petaflops, iteration_s = row
    model, gpus = gpt(int(h), int(l)), int(n)
    assert round(model.num_parameters / 1e9, 1) == pytest.approx(billions, abs=0.06)
    flops = minibatch_flops(model, int(batch), recompute=True)
    time_s = flops / (gpus * teraflops * 1e12)
    assert time_s == pytest.approx(iteration_s, abs=0.006)
    device_s = gpus * time_s
    use = ComputeUse(flops=flops, device_s=device_s, peak_flops=A100 * device_s)
    assert use.flops_per_s == pytest.approx(teraflops * 1e12)
    assert use.utilisation is not None
    assert round(100 * use.utilisation) == percent
    assert gpus * teraflops / 1e3 == pytest.approx(petaflops, rel=0.005, abs=0.05)


@given(
    st.builds(
        gpt_shape,
        layers=st.integers(1, 200),
        hidden=st.integers(1, 30_000),
        context=st.integers(1, 100_000),
        vocabulary=st.integers(1, 300_000),
    ),
    st.integers(1, 10_000),
)
def test_equations_4_2_and_4_3_as_they_are_printed(m: TransformerShape, batch: int) -> None:
    l, h, s, v = m.layers, m.hidden, m.context, m.vocabulary
    printed = 96 * batch * s * l * h**2 * (1 + s / (6 * h) + v / (16 * l * h))
    assert minibatch_flops(m, batch, recompute=True) == pytest.approx(printed)
    without = 72 * batch * s * l * h**2 * (1 + s / (6 * h) + v / (12 * l * h))
    assert minibatch_flops(m, batch, recompute=False) == pytest.approx(without)
    parameters = 12 * l * h**2 * (1 + 13 / (12 * h) + (v + s) / (12 * l * h))
    assert m.num_parameters - 2 * h == pytest.approx(parameters)


@pytest.mark.parametrize(
    ("tokens", "parameters", "gpus", "teraflops", "days"),
    [(300e9, 175e9, 1024, 140, 33.9), (450e9, 1.008e12, 3072, 163, 83.9)],
)
def test_training_times_of_equation_4_4(
    tokens: float, parameters: float, gpus: int, teraflops: float, days: float
) -> None:
    def time_s(recompute: bool) -> float:
        return training_time_s(
            tokens=tokens,
            num_parameters=parameters,
            devices=gpus,
            flops_per_s=teraflops * 1e12,
            recompute=recompute,
        )

    assert round(time_s(True) / DAY_S, 1) == days
    assert time_s(False) == pytest.approx(time_s(True) * 6 / 8)


TABLE_4_2 = [
    # hidden, layers, batch, GPUs, TFLOP/s per GPU, days for 300 billion tokens
    (12288, 96, 1536, 384, 144, 90),
    (12288, 96, 1536, 768, 88, 74),
    (12288, 96, 1536, 1536, 44, 74),
    (20480, 105, 2560, 640, 138, 169),
    (20480, 105, 2240, 1120, 98, 137),
    (20480, 105, 2240, 2240, 48, 140),
    (12288, 96, 1536, 384, 153, 84),
    (12288, 96, 1536, 768, 149, 43),
    (12288, 96, 1536, 1536, 141, 23),
    (20480, 105, 2240, 560, 171, 156),
    (20480, 105, 2240, 1120, 167, 80),
    (20480, 105, 2240, 2240, 159, 42),
]


@pytest.mark.parametrize("row", TABLE_4_2, ids=str)
def test_table_4_2_by_equation_4_2(row: tuple[int, ...]) -> None:
    """Within a day, since the table rounds TFLOP/s."""
    hidden, layers, batch, gpus, teraflops, days = row
    model = gpt(hidden, layers)
    iterations = 300e9 / (batch * model.context)
    total = iterations * minibatch_flops(model, batch, recompute=True)
    assert total / (gpus * teraflops * 1e12) / DAY_S == pytest.approx(days, abs=1.0)


def test_equation_4_4_is_a_tenth_low_at_a_billion_and_close_at_a_trillion() -> None:
    def error(model: TransformerShape) -> float:
        exact = minibatch_flops(model, 1, recompute=True)
        rough = 8 * model.context * model.num_parameters
        return exact / rough - 1

    assert error(gpt(2304, 24)) == pytest.approx(0.116, abs=0.001)
    assert error(gpt(25600, 128)) == pytest.approx(0.013, abs=0.001)


def test_varuna_s_200_billion_parameters_without_recompute() -> None:
    """Section 7.1: 0.022 examples/s/GPU, or 27.3 TFLOP/s/GPU, recompute removed."""
    model = gpt_shape(layers=100, hidden=12960, context=1024, vocabulary=50304)
    per_example = minibatch_flops(model, 1, recompute=False)
    assert 0.0215 * per_example < 27.3e12 < 0.0225 * per_example
    assert 0.0215 * minibatch_flops(model, 1, recompute=True) > 27.3e12


def test_a_gpt_of_no_size_is_refused() -> None:
    with pytest.raises(PlanError, match="hidden size of a transformer must be above 0: got 0"):
        gpt_shape(layers=2, hidden=0, context=8, vocabulary=4)

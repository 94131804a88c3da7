"""Learning-rate schedules: properties, and those of transformers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain import schedules
from spottrain.errors import UserCodeError
from spottrain.schedules import Schedule

Lengths = tuple[int, int]


@st.composite
def lengths(draw: st.DrawFn) -> Lengths:
    """Numbers of all steps and of those of the warm-up."""
    steps = draw(st.integers(1, 400))
    return steps, draw(st.integers(0, steps))


def theirs(name: str, **arguments: object) -> Callable[[int], float]:
    """Return what a schedule of transformers sets a learning rate of 1 to."""
    torch = pytest.importorskip("torch")
    optimization = pytest.importorskip("transformers.optimization")
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    schedule = getattr(optimization, name)(optimizer, **arguments)
    factor: Callable[[int], float] = schedule.lr_lambdas[0]
    return factor


def check(schedule: Schedule, steps: int, warmup: int, final: float) -> None:
    factors = [schedule(step) for step in range(steps + 3)]
    assert all(0 <= factor <= 1 for factor in factors)
    assert factors[:warmup] == pytest.approx([step / warmup for step in range(warmup)])
    fall = factors[warmup:]
    assert fall == sorted(fall, reverse=True)
    if warmup < steps:
        assert fall[0] == 1
    assert factors[steps:] == pytest.approx([final] * 3, abs=1e-15)
    assert [schedule(step) for step in range(steps + 3)] == factors


@given(lengths(), st.floats(0, 1))
def test_cosine(given_lengths: Lengths, final: float) -> None:
    steps, warmup = given_lengths
    ours = schedules.cosine(warmup_steps=warmup, final=final, steps=steps)
    if warmup < steps:
        check(ours, steps, warmup, final)


@given(lengths())
def test_cosine_and_linear_are_those_of_transformers(given_lengths: Lengths) -> None:
    steps, warmup = given_lengths
    same = {"num_warmup_steps": warmup, "num_training_steps": steps}
    pairs = [
        (schedules.cosine, theirs("get_cosine_schedule_with_warmup", **same)),
        (schedules.linear, theirs("get_linear_schedule_with_warmup", **same)),
    ]
    for ours, expected in pairs:
        schedule = ours(warmup_steps=warmup, steps=steps)
        for step in range(steps):
            assert schedule(step) == pytest.approx(expected(step), abs=1e-15)


@given(lengths(), st.integers(0, 400), st.floats(0, 1))
def test_wsd(given_lengths: Lengths, decay: int, final: float) -> None:
    steps, warmup = given_lengths
    decay = min(decay, steps - warmup)
    ours = schedules.wsd(warmup_steps=warmup, decay_steps=decay, final=final, steps=steps)
    if decay:
        check(ours, steps, warmup, final)
    assert all(ours(step) == 1 for step in range(warmup, steps - decay))
    expected = theirs(
        "get_wsd_schedule",
        num_warmup_steps=warmup,
        num_training_steps=steps,
        num_decay_steps=decay,
        decay_type="linear",
    )
    plain = schedules.wsd(warmup_steps=warmup, decay_steps=decay, steps=steps)
    for step in range(steps):
        assert plain(step) == pytest.approx(expected(step), abs=1e-15)


def test_the_jobs_steps_are_asked_for_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(schedules.STEPS_VARIABLE, "100")
    assert schedules.linear(warmup_steps=0.1)(55) == pytest.approx(0.5)
    monkeypatch.setenv(schedules.STEPS_VARIABLE, "200")
    assert schedules.linear(warmup_steps=0.1)(110) == pytest.approx(0.5)


def test_what_does_not_suit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(schedules.STEPS_VARIABLE, raising=False)
    with pytest.raises(UserCodeError, match="set SPOTTRAIN_STEPS, or give steps="):
        schedules.cosine()
    with pytest.raises(UserCodeError, match=r"warmup_steps .*: got 1\.5$"):
        schedules.linear(warmup_steps=1.5, steps=10)
    with pytest.raises(UserCodeError, match=r"decay_steps .*: got -1$"):
        schedules.wsd(decay_steps=-1, steps=10)
    with pytest.raises(UserCodeError, match="final must be from 0 to 1: got 2"):
        schedules.linear(final=2, steps=10)


def test_a_job_that_is_shorter_than_its_warm_up_warms_up_only() -> None:
    for schedule in (
        schedules.cosine(warmup_steps=20, steps=10),
        schedules.wsd(warmup_steps=20, decay_steps=5, steps=10),
    ):
        assert [schedule(step) for step in range(10)] == [x / 20 for x in range(10)]

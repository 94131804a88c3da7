"""Scales, ticks and paths of pictures over time."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain.varuna_manager.reporting.html import plot
from spottrain.varuna_manager.reporting.html.plot import (
    Frame,
    nice_range,
    nice_top,
    time_ticks,
)

FRAME = Frame(from_s=100.0, to_s=200.0, top=10.0, height=130)


def test_the_corners_are_where_they_belong() -> None:
    assert (FRAME.x(100.0), FRAME.x(200.0)) == (86.0, 986.0)
    assert (FRAME.y(0.0), FRAME.y(10.0)) == (110.0, 14.0)


@given(st.floats(-1e9, 1e9), st.floats(-1e9, 1e9))
def test_nothing_is_drawn_outside_of_its_frame(at_s: float, value: float) -> None:
    assert FRAME.left <= FRAME.x(at_s) <= FRAME.end
    assert FRAME.above <= FRAME.y(value) <= FRAME.base


@given(st.floats(1e-9, 1e12))
def test_the_top_is_round_and_not_far_above(value: float) -> None:
    top = nice_top(value)
    assert value <= top * (1 + 1e-12)
    assert top <= 2 * value * (1 + 1e-9)


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_an_axis_of_values_ends_at_round_numbers(bottom: float, span: float) -> None:
    low, high, distance = nice_range(bottom, bottom + span)
    assert distance in {nice_top(distance), nice_top(distance * (1 - 1e-9))}
    slack = 1e-6 * distance
    assert low - slack <= bottom <= low + distance + slack
    assert high - distance - slack <= bottom + span <= high + slack
    assert 1 <= round((high - low) / distance) <= 4


def test_an_axis_of_losses_can_be_read() -> None:
    assert nice_range(1.203, 5.499) == (0.0, 6.0, 1.5)


def test_a_top_of_nothing_is_one() -> None:
    assert [nice_top(value) for value in (0.0, -1.0, float("inf"))] == [1.0] * 3


@given(st.floats(0.1, 1e10))
def test_an_axis_has_a_few_ticks(span_s: float) -> None:
    ticks = time_ticks(span_s)
    assert 1 <= len(ticks) <= 13
    assert ticks[0] == 0.0
    assert ticks[-1] <= span_s


@pytest.mark.parametrize(
    ("seconds", "step_s", "label"),
    [
        (45.0, 5.0, "45 s"),
        (600.0, 300.0, "10 min"),
        (5400.0, 1800.0, "1:30"),
        (39600.0, 3600.0, "11 h"),
        (172800.0, 86400.0, "2 d"),
    ],
)
def test_ticks_are_told_as_coarsely_as_they_lie(seconds: float, step_s: float, label: str) -> None:
    assert plot.elapsed(seconds, step_s) == label


def test_lines_step_and_areas_close() -> None:
    points = [(100.0, 0.0), (150.0, 10.0)]
    assert plot.step_path(FRAME, points, 200.0) == "M86.0 110.0H536.0V14.0H986.0"
    assert plot.area_path(FRAME, points, 200.0).endswith("H986.0V110H86.0Z")
    assert plot.line_path(FRAME, points) == "M86.0 110.0L536.0 14.0"
    assert plot.step_path(FRAME, [], 1.0) == plot.line_path(FRAME, []) == ""
    assert plot.area_path(FRAME, [], 1.0) == plot.path("", "line") == ""


def test_a_picture_is_well_formed_and_says_what_it_is() -> None:
    parts = [plot.axes(FRAME, [(5.0, "<5>")]), plot.path("M0 0", "line", "a & b")]
    drawn = plot.picture(FRAME, "one", "<title>", "what & why", parts)
    root = ElementTree.fromstring(drawn)
    assert root.attrib["aria-labelledby"] == "one-t one-d"
    assert [e.text for e in root if e.tag in ("title", "desc")] == [
        "<title>",
        "what & why",
    ]
    assert "<5>" in [e.text for e in root.iter("text")]
    assert [e.text for e in root.iter("path") for e in e] == ["a & b"]

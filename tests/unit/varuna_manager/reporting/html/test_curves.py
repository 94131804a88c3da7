"""Curves over mini-batches."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain.varuna_manager.reporting.html.curves import Curves, figures


@pytest.mark.parametrize(("count", "pieces"), [(1, 1), (2, 2), (3, 1)])
def test_two_evaluations_are_no_slope(count: int, pieces: int) -> None:
    line = [(100.0 * n, 5.0 - n) for n in range(count)]
    curves = Curves(loss=[], heldout={"books": line}, grad_norm=[], learning_rate=[])
    (figure,) = figures({"job": curves})
    (data,) = re.findall(r'class="line c0" d="([^"]+)"', figure.svg)
    assert data.count("M") == pieces
    heights = [set(re.findall(r" ([0-9.]+)", piece)) for piece in data.split("M")[1:]]
    assert all(len(one) == 1 for one in heights) == (count < 3)


@given(st.floats(-1e4, 1e4), st.floats(1e-3, 1e3))
def test_the_labels_of_an_axis_differ(bottom: float, span: float) -> None:
    line = [(100.0 * n, bottom + n * span / 3) for n in range(4)]
    curves = Curves(loss=[], heldout={"books": line}, grad_norm=[], learning_rate=[])
    (figure,) = figures({"job": curves})
    labels = re.findall(r'class="tick value"[^>]*>([^<]+)<', figure.svg)
    assert len(labels) == len(set(labels)) >= 2

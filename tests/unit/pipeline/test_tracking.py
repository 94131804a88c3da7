from __future__ import annotations

import torch
from torch import nn

from spottrain.pipeline.tracking import TensorTracker


def test_what_is_held_counts_until_it_is_released() -> None:
    tracker = TensorTracker(100, ())
    small, large = torch.zeros(5), torch.zeros(20)

    tracker.hold(small)
    tracker.hold(large)
    tracker.release(large)
    tracker.hold(small)

    assert tracker.peak_bytes == 100 + 20 + 80


def test_saved_tensors_count_but_neither_parameters_nor_the_input() -> None:
    linear = nn.Linear(8, 8, bias=False)
    tracker = TensorTracker(0, linear.parameters())
    activation = torch.randn(4, 8, requires_grad=True)

    with tracker.graph((0, 0), activation, keep=True):
        # Saved: the input, the transposed weight, and for tanh its own output.
        torch.tanh(linear(activation))

    assert tracker.peak_bytes == 4 * 8 * 4
    assert tracker.largest_saved_bytes == 4 * 8 * 4


def test_once_settled_a_graph_counts_as_the_largest_did() -> None:
    tracker = TensorTracker(0, ())
    with tracker.graph((0, 0), None, keep=True):
        torch.tanh(torch.ones(10, requires_grad=True) * 1)
    first = tracker.peak_bytes
    tracker.release_graph((0, 0))
    tracker.settle()

    with tracker.graph((1, 0), None, keep=True):
        pass
    with tracker.graph((2, 0), None, keep=True):
        pass

    assert first == 40
    assert tracker.peak_bytes == 80


def test_a_forward_without_a_graph_counts_nothing() -> None:
    tracker = TensorTracker(7, ())

    with torch.no_grad(), tracker.graph((0, 0), None, keep=False):
        torch.tanh(torch.ones(10))

    assert tracker.peak_bytes == 7

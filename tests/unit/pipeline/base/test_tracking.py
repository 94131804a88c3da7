from __future__ import annotations

import threading
from contextlib import AbstractContextManager

import torch
from torch import nn

from spottrain.pipeline.base.tracking import (
    WATCHED_TASKS,
    KnownTasks,
    LiveBytes,
    TensorTracker,
    batch_bytes,
    section_bytes,
    update_bytes,
)


def keeping_nothing() -> AbstractContextManager[None]:
    return torch.autograd.graph.saved_tensors_hooks(lambda t: None, lambda n: n)


def layer(width: int = 8) -> nn.Linear:
    linear = nn.Linear(width, width, bias=False)
    linear.weight.grad = torch.zeros_like(linear.weight)
    return linear


def test_a_tensor_counts_until_it_is_freed_in_whatever_thread() -> None:
    live = LiveBytes()
    held = [torch.zeros(5)]
    live.adopt(held[0])
    live.adopt(held[0][2:])  # the same memory
    assert live.now_bytes == 20

    ending = threading.Thread(target=held.clear)
    ending.start()
    ending.join()

    assert live.now_bytes == 0
    assert live.peak_bytes == 20


def test_tensors_that_operations_make_count_and_their_inputs_do_not() -> None:
    given = torch.ones(10)
    live = LiveBytes()
    with live:
        view = given[:5]
        made = view + 1
        made += 1
    assert live.now_bytes == made.numel() * 4
    assert live.peak_bytes == made.numel() * 4


def test_a_backward_s_own_tensors_count_and_then_vanish() -> None:
    linear = layer()
    activation = torch.randn(4, 8, requires_grad=True)
    live = LiveBytes()
    with live:
        torch.tanh(linear(activation)).sum().backward()  # type: ignore[no-untyped-call]
    assert activation.grad is not None
    assert live.now_bytes == 4 * 8 * 4  # the gradient that was made for the input
    # The gradient of the weight is added to the one that is there.
    assert live.peak_bytes >= 8 * 8 * 4 + 2 * 4 * 8 * 4


def test_a_section_s_bytes_are_its_saved_tensors_and_its_peak() -> None:
    linear = layer()
    activation = torch.randn(4, 8, requires_grad=True)
    one = 4 * 8 * 4

    found, sent = section_bytes(
        lambda: [torch.tanh(torch.relu(linear(activation)))], keeping_nothing
    )

    (only,) = sent
    assert not only.requires_grad
    # tanh keeps its output, which is sent; relu keeps its own; linear keeps its input.
    assert (found.saved_bytes, found.output_bytes) == (one, one)
    assert found.recompute_bytes == 2 * one
    assert found.forward_bytes == 2 * one
    assert found.largest_saved_bytes == one
    assert found.backward_bytes >= 2 * one


def test_a_loss_is_not_sent_and_a_frozen_section_has_no_backward() -> None:
    linear = nn.Linear(8, 8).requires_grad_(False)
    given = torch.randn(4, 8)
    found, sent = section_bytes(lambda: (linear(given).square().sum(), 4.0), keeping_nothing)
    assert sent == []
    assert (found.output_bytes, found.backward_bytes) == (0, 0)


def test_the_first_step_of_an_optimizer_makes_its_state() -> None:
    linear = layer()
    optimizer = torch.optim.AdamW(linear.parameters())
    assert update_bytes(optimizer.step) >= 2 * 8 * 8 * 4


def test_a_micro_batch_is_counted_however_it_is_nested() -> None:
    assert batch_bytes({"a": [torch.zeros(3)], "b": (torch.zeros(2), "text")}) == 20


def train_one(tracker: TensorTracker, number: int, linear: nn.Linear) -> None:
    unit = (number, 0)
    activation = torch.randn(4, 8, requires_grad=True)
    tracker.adopt(activation)
    (out,) = tracker.forward(
        "recompute", unit, True, lambda: [torch.tanh(torch.relu(linear(activation)))]
    )
    tracker.backward(unit, lambda: out.sum().backward())  # type: ignore[no-untyped-call]


def test_unwatched_tasks_count_like_watched_ones() -> None:
    tracker, linear = TensorTracker(100), layer()
    train_one(tracker, 0, linear)
    peak = tracker.peak_bytes
    assert peak > 100 + 4 * 4 * 8 * 4
    assert tracker.settle()
    assert not tracker.settle()

    for number in range(3):
        train_one(tracker, number, linear)
    assert tracker.peak_bytes == peak

    outs = [
        tracker.forward("recompute", (j, 0), True, lambda: [torch.zeros(4, 8)]) for j in range(8)
    ]
    assert tracker.peak_bytes >= 100 + len(outs) * 2 * 4 * 8 * 4


def test_only_the_first_tasks_of_a_kind_are_watched() -> None:
    tracker, linear = TensorTracker(0), layer()
    for number in range(2 * WATCHED_TASKS):
        train_one(tracker, number, linear)
    watched = tracker.peak_bytes

    other = TensorTracker(0)
    train_one(other, 0, linear)
    assert watched == other.peak_bytes


def test_a_stage_that_is_known_is_watched_no_more() -> None:
    known = KnownTasks()
    first = TensorTracker(100, known)
    train_one(first, 0, layer())
    assert not known.task_bytes  # a generation that breaks before has shown too little
    first.settle()

    second = TensorTracker(100, known)
    assert second.largest_saved_bytes == first.largest_saved_bytes > 0
    train_one(second, 0, layer())
    assert second.peak_bytes == first.peak_bytes
    with_more = second.forward("recompute", (1, 0), True, lambda: [(torch.ones(10**6) * 2).sum()])
    assert with_more[0].item() == 2 * 10**6
    assert second.peak_bytes < 4 * 10**6  # nobody has looked


def test_a_forward_without_a_graph_leaves_its_output_only() -> None:
    tracker = TensorTracker(7)
    for _ in range(2):
        with torch.no_grad():
            out = tracker.forward("forward", (0, 0), False, lambda: [torch.ones(10).exp().neg()])
        tracker.settle()
        del out
    assert tracker.peak_bytes == 7 + 2 * 40
    assert tracker.largest_saved_bytes == 0


def test_tensors_made_outside_of_tasks_count_in_the_first_mini_batch() -> None:
    tracker = TensorTracker(0)
    with tracker.watch():
        torch.zeros(10)
    tracker.settle()
    with tracker.watch():
        torch.zeros(1000)
    assert tracker.peak_bytes == 40

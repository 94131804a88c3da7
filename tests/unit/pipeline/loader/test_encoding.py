from __future__ import annotations

import gc
import os
import threading
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves

from spottrain.pipeline.loader.encoding import (
    UnsendableError,
    read_batch,
    write_batch,
)

DTYPES = (torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex128)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    offset, dtype = draw(st.integers(0, 20)), draw(st.sampled_from(DTYPES))
    memory = torch.randint(0, 2, (offset + 100,)).to(dtype)
    tensor = memory[offset : offset + torch.Size(shape).numel()].reshape(shape)
    match draw(st.sampled_from(["as it is", "transposed", "expanded", "sliced"])):
        case "transposed":
            return tensor.movedim(0, -1) if shape else tensor
        case "expanded":
            return tensor.unsqueeze(0).expand(3, *shape)
        case "sliced":
            return tensor[..., ::2] if shape else tensor
    return tensor


@given(batch=st.dictionaries(st.text(max_size=3), st.lists(tensors(), max_size=3)))
def test_tensors_keep_values_layout_and_alignment(batch: dict[str, Any]) -> None:
    read = read_batch(write_batch(batch))

    assert list(read) == list(batch)
    pairs = zip(tree_leaves(batch), tree_leaves(read), strict=True)
    for before, after in pairs:
        assert torch.equal(before, after)
        assert (before.dtype, before.stride()) == (after.dtype, after.stride())
        if before.numel():
            assert before.data_ptr() % 64 == after.data_ptr() % 64


def test_what_was_one_tensor_is_one_tensor() -> None:
    tokens = torch.arange(5)
    one, two, rest = read_batch(write_batch((tokens, tokens, {"length": 5})))

    assert one is two
    assert rest == {"length": 5}


def test_a_small_part_of_a_large_tensor_travels_alone() -> None:
    corpus = torch.arange(1 << 20)
    fd = write_batch(corpus[77:99])

    assert os.fstat(fd).st_size < 4096
    assert torch.equal(read_batch(fd), corpus[77:99])


def test_numpy_sparse_and_trainable_tensors_arrive_too() -> None:
    sparse = torch.eye(3).to_sparse()
    batch = numpy.arange(6).reshape(2, 3), sparse, torch.ones(2, requires_grad=True)
    array, again, leaf = read_batch(write_batch(batch))

    assert (array == batch[0]).all()
    assert torch.equal(again.to_dense(), torch.eye(3))
    assert leaf.requires_grad


def test_memory_is_freed_with_the_last_tensor_and_may_be_written() -> None:
    tensor = read_batch(write_batch([torch.zeros(1000)]))[0].view(10, 100)
    tensor += 1
    assert tensor.sum() == 1000
    mapped = "memfd:batch"
    with open("/proc/self/maps") as maps:
        assert mapped in maps.read()
    del tensor
    gc.collect()
    with open("/proc/self/maps") as maps:
        assert mapped not in maps.read()


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            threading.Lock(),
            "cannot go from a loader process to a worker: cannot pickle",
        ),
        (lambda: 0, "let collate return tensors"),
        (torch.empty(2, device="meta"), "a tensor on meta: return tensors on the CPU"),
    ],
)
def test_what_cannot_be_sent_is_refused(batch: Any, message: str) -> None:
    with pytest.raises(UnsendableError, match=message):
        write_batch([batch])

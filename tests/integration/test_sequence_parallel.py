"""Ranks that divide matrices, and between them the sequence: what one rank alone would train."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integration.fleet import Zygote
from tests.integration.test_tensor_parallel import Trained, train


@pytest.fixture(scope="module")
def alone(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(zygote, tmp_path_factory.mktemp("alone"), "gpt", (1, 1, 1))


@pytest.mark.parametrize("shape", [(1, 1, 2), (2, 1, 2)], ids=str)
def test_ranks_that_divide_the_sequence_train_what_one_rank_does(
    zygote: Zygote, tmp_path: Path, alone: Trained, shape: tuple[int, int, int]
) -> None:
    train(zygote, tmp_path, "gpt", shape, sequence=True).assert_close(alone)

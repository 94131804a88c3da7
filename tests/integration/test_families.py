"""Models that people train: cut into stages, killed, exported, to the same bits.

All of them: ``python -m tests.bench.bench_models``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integration.family_runs import outcome_of
from tests.integration.fleet import Zygote


@pytest.mark.rotated
@pytest.mark.parametrize(
    ("name", "sections"),
    [
        ("GPT by hand, weights tied twice", 4),
        ("GPT by hand, checkpoint(block, x)", 4),
        ("GPT by hand, a Sequential", 4),
        ("Convolution and LSTM, CutPoint", 3),
        ("ResNet by hand, GroupNorm", 9),
        ("ResNet by hand, channels_last", 9),
        ("ResNet by hand, BatchNorm", 9),
        ("ResNet by hand, spectral_norm", 9),
        ("EfficientNet by hand, BatchNorm", 5),
        ("GPT by hand, residuals outside", 4),
        ("GPT by hand, residuals in place", 4),
        ("GPT by hand, blocks in reverse", 4),
        ("DiT by hand", 4),
        ("GPT by hand, R-Drop", 4),
        ("ResNet by hand, BatchNorm, SimSiam", 9),
        ("Llama, DPO with a reference", 4),
        ("wav2vec2", 1),
    ],
)
def test_a_family_keeps_its_bits_through_a_kill(
    zygote: Zygote, tmp_path: Path, name: str, sections: int
) -> None:
    outcome = outcome_of(name, zygote, tmp_path)

    assert outcome.refused == ""
    assert outcome.sections == sections
    assert (outcome.stages, outcome.trained) == ("same bits", "same bits")
    assert outcome.exported == "loads"


def test_a_family_with_skips_over_blocks_is_cut_at_all_of_them(tmp_path: Path) -> None:
    outcome = outcome_of("UNet by hand", None, tmp_path)

    assert (outcome.refused, outcome.sections, outcome.stages) == ("", 6, "same bits")

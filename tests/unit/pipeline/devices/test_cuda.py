from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from spottrain.pipeline.devices import cuda

BACKENDS: Any = torch.backends
PRECISIONS = (
    (BACKENDS, "none"),
    (BACKENDS.cuda.matmul, "none"),
    (BACKENDS.cudnn, "none"),
    (BACKENDS.cudnn.conv, "tf32"),
    (BACKENDS.cudnn.rnn, "tf32"),
)


@pytest.fixture
def flags(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Bring all flags back to torch's defaults."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    matmul = BACKENDS.cuda.matmul
    matmul.allow_fp16_reduced_precision_reduction = True
    matmul.allow_bf16_reduced_precision_reduction = True
    BACKENDS.cudnn.allow_tf32 = True
    for place, precision in PRECISIONS:
        place.fp32_precision = precision


@pytest.mark.usefixtures("flags")
@pytest.mark.parametrize("allowed", ["all", "cudnn", "before 2.9", "nothing"])
def test_nothing_computes_in_tf32_whatever_the_user_has_allowed(allowed: str) -> None:
    if allowed == "all":
        BACKENDS.fp32_precision = "tf32"
    if allowed == "cudnn":
        BACKENDS.cudnn.fp32_precision = "tf32"
    if allowed == "before 2.9":
        torch.set_float32_matmul_precision("high")
        BACKENDS.cudnn.allow_tf32 = True

    cuda._make_deterministic()

    operations = BACKENDS.cuda.matmul, BACKENDS.cudnn.conv, BACKENDS.cudnn.rnn
    assert [one.fp32_precision for one in operations] == ["ieee"] * 3
    # Nor does what asks by the older names meet an error.
    assert BACKENDS.cuda.matmul.allow_tf32 is False
    assert BACKENDS.cudnn.allow_tf32 is False

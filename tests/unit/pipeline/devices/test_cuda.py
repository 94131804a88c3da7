from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from spottrain.errors import UserCodeError
from spottrain.pipeline.devices import cuda
from spottrain.pipeline.devices.open import prepare_device

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


@pytest.mark.usefixtures("flags")
def test_user_code_may_use_cuda_once_the_workers_gpu_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    prepare_device("cpu", deterministic=True)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(UserCodeError, match="before the worker has chosen its GPU"):
        prepare_device("cuda:GPU-a", deterministic=True)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    prepare_device("cuda:GPU-a", deterministic=True)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-a"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    cuda.choose_gpu("GPU-a", deterministic=True)

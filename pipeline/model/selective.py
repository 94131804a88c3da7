"""Selective recompute: of a block stays what is dear to compute, the rest is made again.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022),
section 5: what attention computes of queries and keys takes most of a block's activations and few of
its FLOPs. Kept are the outputs of matrix products by weights, of convolutions and of fused
attention kernels; scores, softmax, dropout, norms and activation functions are computed again in
the backward, by torch's selective checkpoints. No bit of a gradient changes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from spottrain.errors import UserCodeError
from spottrain.pipeline.model.job import TrainingJob
from spottrain.pipeline.model.skeleton import build_skeleton, compiled_in

_KEPT = frozenset(
    f"aten::{name}"
    for name in (
        "mm",
        "addmm",
        "_grouped_mm",
        "convolution",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
)
"""Operators whose outputs are kept."""


def _policy(
    _: SelectiveCheckpointContext, operator: torch._ops.OpOverload, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    kept = operator._schema.name in _KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def recomputed_selectively(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a block's ``forward`` that keeps little for its backward."""
    contexts = partial(create_selective_checkpoint_contexts, _policy)

    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return run


def check_selective(job: TrainingJob) -> None:
    """Check that operators of blocks can be seen one by one.

    Raises:
        UserCodeError: They are compiled.
    """
    if name := compiled_in(build_skeleton(job.model)):
        raise UserCodeError(
            f"morphing.recompute must be auto, true or false for a compiled model: got selective, "
            f"and {name} is compiled; leave torch.compile out"
        )

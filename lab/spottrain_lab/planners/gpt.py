"""A GPT's shape, FLOPs and training time, by Narayanan's dissertation (chapter 4).

FLOPs are counted as ``spottrain.morphing.plan.flops`` says.
"""

from __future__ import annotations

from spottrain.morphing.plan.flops import MODEL_PASSES
from spottrain.morphing.plan.transformer import TransformerShape

HARDWARE_PASSES = 4
"""Hardware FLOPs in forwards where all of it is recomputed."""


def gpt_shape(
    *,
    layers: int,
    hidden: int,
    heads: int = 1,
    context: int,
    vocabulary: int,
    keeps_scores: bool = False,
) -> TransformerShape:
    """Return the shape of a GPT-2, with 12h² + 13h parameters a layer.

    Only saved scores depend on the number of heads.

    Raises:
        PlanError: A number is not above 0.
    """
    return TransformerShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        key_value_heads=heads,
        head_size=hidden // heads,
        feed_forward=4 * hidden,
        is_gated=False,
        vocabulary=vocabulary,
        context=context,
        is_tied=True,
        has_positions=True,
        has_biases=True,
        keeps_scores=keeps_scores,
    )


def minibatch_flops(shape: TransformerShape, minibatch_size: int, *, recompute: bool) -> int:
    """Return the FLOPs of one mini-batch, forward and backward.

    Args:
        shape: See ``gpt_shape``.
        minibatch_size: Examples of it.
        recompute: Count the layers' recomputed forward too, as equation 4.2 does; the logits
            are not recomputed.
    """
    passes = HARDWARE_PASSES if recompute else MODEL_PASSES
    layers = passes * shape.layers * shape.layer_flops
    return minibatch_size * (layers + MODEL_PASSES * shape.head_flops)


def training_time_s(
    *,
    tokens: float,
    num_parameters: float,
    devices: int,
    flops_per_s: float,
    recompute: bool,
) -> float:
    """Return roughly how long training takes: 8TP / nX, without recompute 6TP / nX.

    Equation 4.4. It leaves out attention and embeddings, so it is up to a tenth too low
    for models of a billion parameters, and close for much larger ones.

    Args:
        tokens: To train on.
        num_parameters: Of the model.
        devices: Number of them.
        flops_per_s: Of each, as measured: hardware FLOPs if ``recompute``.
        recompute: Whether forwards run again before the backward.
    """
    passes = HARDWARE_PASSES if recompute else MODEL_PASSES
    return 2 * passes * tokens * num_parameters / (devices * flops_per_s)

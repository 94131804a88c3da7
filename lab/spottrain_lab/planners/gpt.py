"""A GPT's parameters, FLOPs and training time, by Narayanan's dissertation (chapter 4).

FLOPs are counted as ``spottrain.morphing.plan.flops`` says.
"""

from __future__ import annotations

from dataclasses import dataclass

from spottrain.morphing.errors import PlanError
from spottrain.morphing.plan.flops import MODEL_PASSES

HARDWARE_PASSES = 4
"""Hardware FLOPs in forwards where all of it is recomputed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GptShape:
    """A GPT as chapter 4 of Narayanan's dissertation counts it (l, h, s, V there).

    Its feed-forward is 4 times as wide as ``hidden``; the head is the embedding.

    Raises:
        PlanError: A number is not above 0.
    """

    layers: int
    hidden: int
    sequence: int
    vocabulary: int

    def __post_init__(self) -> None:
        sizes = (self.layers, self.hidden, self.sequence, self.vocabulary)
        if min(sizes) < 1:
            raise PlanError(
                "layers, hidden, sequence and vocabulary of a GPT must be above 0: got "
                f"{', '.join(map(str, sizes))}; correct them"
            )

    @property
    def num_parameters(self) -> int:
        """Equation 4.3, which has position embeddings but not the last LayerNorm."""
        layer = 12 * self.hidden**2 + 13 * self.hidden
        return self.layers * layer + (self.vocabulary + self.sequence) * self.hidden

    @property
    def layer_flops(self) -> int:
        """One layer's forward over one example: 24sh² + 4s²h."""
        return 24 * self.sequence * self.hidden**2 + 4 * self.sequence**2 * self.hidden

    @property
    def head_flops(self) -> int:
        """The forward of the logits over one example: 2shV."""
        return 2 * self.sequence * self.hidden * self.vocabulary

    def minibatch_flops(self, minibatch_size: int, *, recompute: bool) -> int:
        """Return the FLOPs of one mini-batch, forward and backward.

        Args:
            minibatch_size: Examples of it.
            recompute: Count the layers' recomputed forward too, as equation 4.2 does;
                the logits are not recomputed.
        """
        passes = HARDWARE_PASSES if recompute else MODEL_PASSES
        layers = passes * self.layers * self.layer_flops
        return minibatch_size * (layers + MODEL_PASSES * self.head_flops)


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

"""A transformer's facts from its shape alone, for a model that nobody has built yet.

FLOPs are counted as ``plan.flops`` says, bytes as the tracer counts them in a model whose
parameters are float32: a test compares both with models of Hugging Face.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from spottrain.morphing.errors import PlanError
from spottrain.wire.model import ModelFacts, SectionFacts, TiedParameter

VALUE_BYTES = 4
"""Of a parameter, of an activation as it is built, and of each of Adam's two moments."""
WIDTH_PER_LAYER = 128
"""Hidden size over layers, where only the size of a model is known: Llama's at 7 and 13
billion parameters, and GPT-3's at 175 billion."""
HEAD_SIZE = 128
MANY_HEADS = 32
"""From here on their number is one that ranks can divide, as that of published models is."""
VOCABULARY = 32_000
"""Llama's, where only the size of a model is known."""
GATED_WIDTH = 8 / 3
"""Of a feed-forward with a gate, over the hidden size: as many parameters as 4 without."""
SCORE_BYTES = 10
"""Saved for each attention score that exists: the scores, their softmax and a dropout mask,
5 bytes in two-byte types (Korthikanti et al. 2022, section 4.1)."""
ENDLESS = 10**9
"""Length of a data set that nobody has named."""
TENSOR_SIZES = (2, 4, 8)
"""Numbers of ranks that may divide matrices: up to the GPUs of most VMs."""
LEAST_END_BYTES = 16_000_000
"""Parameters before all blocks, or after them, that are worth a section of their own."""


def heavy_ends(param_bytes: Sequence[int]) -> tuple[bool, bool]:
    """Return whether an embedding and a head are worth sections of their own.

    Args:
        param_bytes: Of sections, a block each: the first with what comes before all blocks,
            the last with what comes after them.
    """
    block = statistics.median_low(param_bytes)
    heavy = block + max(block, LEAST_END_BYTES)
    return param_bytes[0] > heavy, param_bytes[-1] > heavy


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    """A decoder or encoder of equal layers, each cut off as a section.

    Raises:
        PlanError: A number is not above 0.
    """

    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    head_size: int
    feed_forward: int
    is_gated: bool
    """Whether the feed-forward has three matrices, as Llama's, or two, as GPT-2's."""
    vocabulary: int
    context: int
    """Tokens of an example."""
    is_tied: bool = False
    """Whether the head is the embedding."""
    has_positions: bool = False
    """Whether there is an embedding of positions."""
    has_biases: bool = False
    """Whether matrices have biases, and norms are LayerNorms."""
    experts: int = 1
    active_experts: int = 1
    """Of ``experts`` those that each token uses."""
    keeps_scores: bool = False
    """Whether the backward needs every attention score, as before fused kernels."""

    def __post_init__(self) -> None:
        sizes = {
            "layers": self.layers,
            "hidden size": self.hidden,
            "attention heads": self.heads,
            "key-value heads": self.key_value_heads,
            "head size": self.head_size,
            "feed-forward size": self.feed_forward,
            "vocabulary": self.vocabulary,
            "context": self.context,
            "experts": self.experts,
            "active experts": self.active_experts,
        }
        for name, size in sizes.items():
            if size < 1:
                raise PlanError(f"{name} of a transformer must be above 0: got {size}; correct it")

    @classmethod
    def of_size(cls, num_parameters: float, context: int) -> TransformerShape:
        """Return the shape of a Llama of about so many parameters.

        Args:
            num_parameters: Embedding and head included.
            context: Tokens of an example.

        Raises:
            PlanError: There is no such model.
        """
        if not 1e6 <= num_parameters <= 1e13:
            raise PlanError(
                f"a model has 1e6 to 1e13 parameters: got {num_parameters:g}; correct it"
            )
        best = cls._llama(1, context)
        while best.num_parameters < num_parameters:
            smaller, best = best, cls._llama(best.layers + 1, context)
        if best.layers > 1 and (
            num_parameters - smaller.num_parameters < best.num_parameters - num_parameters
        ):
            return smaller
        return best

    @classmethod
    def _llama(cls, layers: int, context: int) -> TransformerShape:
        hidden = WIDTH_PER_LAYER * layers
        heads, grain = hidden // HEAD_SIZE, max(TENSOR_SIZES)
        if heads >= MANY_HEADS:
            heads = grain * round(heads / grain)
        return cls(
            layers=layers,
            hidden=hidden,
            heads=heads,
            key_value_heads=heads,
            head_size=HEAD_SIZE,
            feed_forward=grain * round(GATED_WIDTH * hidden / grain),
            is_gated=True,
            vocabulary=VOCABULARY,
            context=context,
        )

    @property
    def attention_width(self) -> int:
        """Of all queries of a token."""
        return self.heads * self.head_size

    @property
    def attention_parameters(self) -> int:
        """Matrices of queries, keys, values and the output."""
        keys = self.key_value_heads * self.head_size
        return self.hidden * (2 * self.attention_width + 2 * keys)

    @property
    def feed_forward_parameters(self) -> int:
        """Matrices of one expert."""
        return (3 if self.is_gated else 2) * self.hidden * self.feed_forward

    @property
    def matrix_parameters(self) -> int:
        """Of a layer."""
        router = self.hidden * self.experts if self.experts > 1 else 0
        return self.attention_parameters + router + self.experts * self.feed_forward_parameters

    @property
    def layer_parameters(self) -> int:
        """With norms and biases."""
        norms = 2 * self.hidden * (2 if self.has_biases else 1)
        if not self.has_biases:
            return self.matrix_parameters + norms
        keys = self.key_value_heads * self.head_size
        attention = self.attention_width + 2 * keys + self.hidden
        feed_forward = (2 if self.is_gated else 1) * self.feed_forward + self.hidden
        return self.matrix_parameters + norms + attention + self.experts * feed_forward

    @property
    def embedding_parameters(self) -> int:
        """Of tokens and positions."""
        rows = self.vocabulary + (self.context if self.has_positions else 0)
        return rows * self.hidden

    @property
    def num_parameters(self) -> int:
        """All of them; a tied embedding counts once."""
        head = 0 if self.is_tied else self.vocabulary * self.hidden
        norm = self.hidden * (2 if self.has_biases else 1)
        return self.layers * self.layer_parameters + self.embedding_parameters + head + norm

    @property
    def layer_flops(self) -> int:
        """A layer's forward over one example: of a GPT 24sh² + 4s²h."""
        router = self.hidden * self.experts if self.experts > 1 else 0
        used = self.active_experts * self.feed_forward_parameters
        products = 2 * self.context * (self.attention_parameters + router + used)
        return products + 4 * self.context**2 * self.attention_width

    @property
    def head_flops(self) -> int:
        """The forward of the logits over one example: 2shV."""
        return 2 * self.context * self.hidden * self.vocabulary

    @property
    def layer_saved_bytes(self) -> int:
        """What a layer's forward over one example saves for its backward.

        The inputs of its norms and matrices, and what its activation function takes and
        gives.
        """
        keys = self.key_value_heads * self.head_size
        # Inputs of two norms, these norms, queries, and the output of the attention.
        values = 4 * self.hidden + 2 * self.attention_width + 2 * keys
        values += self.active_experts * (4 if self.is_gated else 2) * self.feed_forward
        scores = SCORE_BYTES * self.heads * self.context**2 if self.keeps_scores else 0
        return VALUE_BYTES * self.context * values + scores

    @property
    def head_saved_bytes(self) -> int:
        """The same of the head: the last norm, the logits and their softmax."""
        return VALUE_BYTES * self.context * (2 * self.hidden + 2 * self.vocabulary)

    @property
    def tensor_sizes(self) -> tuple[int, ...]:
        """Numbers of ranks that can divide the matrices of layers, and a head of its own: as
        Llama's plan in transformers does (Megatron-LM's). Experts are not divided."""
        if self.experts > 1:
            return ()
        whole = [self.heads, self.key_value_heads, self.feed_forward]
        whole += [] if self.is_tied else [self.vocabulary]
        return tuple(n for n in TENSOR_SIZES if not any(size % n for size in whole))

    def facts(self, name: str) -> ModelFacts:
        """Return its facts, trained by Adam: a section for each layer; the embedding and the
        head are sections of their own where they are heavy, as in a model that is built.

        Args:
            name: Its fingerprint.
        """
        width = VALUE_BYTES * self.context * self.hidden
        shared = VALUE_BYTES * self.vocabulary * self.hidden
        parts = [self._embedding, *[self._layer] * self.layers, self._head]
        blocks = _joined(parts, (False, False))
        parts = _joined(parts, heavy_ends([VALUE_BYTES * part.parameters for part in blocks]))
        last = len(parts) - 1
        if self.is_tied and last == 0:
            parts = [parts[0]._replace(parameters=self.num_parameters)]
        tied = TiedParameter(name="embedding", sections=(0, last), param_bytes=shared)
        return ModelFacts(
            fingerprint=name,
            num_parameters=self.num_parameters,
            blocks="layers",
            sections=tuple(
                SectionFacts(
                    index=index,
                    param_bytes=VALUE_BYTES * part.parameters,
                    optimizer_bytes=2 * VALUE_BYTES * part.parameters,
                    activation_bytes_per_example=0 if index == last else width,
                    lowered_bytes=VALUE_BYTES * part.matrices,
                    flops_per_example=part.flops,
                    saved_bytes_per_example=part.saved_bytes,
                    divided_share=part.divided / max(1, part.multiplied),
                    divided_bytes=VALUE_BYTES * part.divided,
                    divided_sums=part.sums,
                    divided_gathers=part.gathered / self.hidden,
                )
                for index, part in enumerate(parts)
            ),
            tied=(tied,) if self.is_tied and last else (),
            dataset_len=ENDLESS,
            heldout_len=0,
            tensor_sizes=self.tensor_sizes,
        )

    @property
    def _embedding(self) -> _Part:
        return _Part(parameters=self.embedding_parameters)

    @property
    def _layer(self) -> _Part:
        divides = bool(self.tensor_sizes)
        return _Part(
            parameters=self.layer_parameters,
            matrices=self.matrix_parameters,
            flops=self.layer_flops,
            saved_bytes=self.layer_saved_bytes,
            multiplied=self.matrix_parameters,
            divided=self.matrix_parameters if divides else 0,
            # Outputs of the attention, and of the feed-forward.
            sums=2 if divides else 0,
        )

    @property
    def _head(self) -> _Part:
        matrix = self.vocabulary * self.hidden
        norm = self.hidden * (2 if self.has_biases else 1)
        own, divides = 0 if self.is_tied else matrix, bool(self.tensor_sizes)
        return _Part(
            parameters=matrix + norm,
            matrices=own,
            flops=self.head_flops,
            saved_bytes=self.head_saved_bytes,
            multiplied=matrix,
            divided=own if divides else 0,
            sums=1 if own and divides else 0,
            gathered=self.vocabulary if own and divides else 0,
        )


class _Part(NamedTuple):
    """What a section holds and does, or a part of it."""

    parameters: int
    matrices: int = 0
    flops: int = 0
    saved_bytes: int = 0
    multiplied: int = 0
    """Elements of matrices that something is multiplied by, a tied head's among them."""
    divided: int = 0
    """Of these, those that ranks divide in tensor parallelism."""
    sums: int = 0
    """Over these ranks, in a backward."""
    gathered: int = 0
    """Features that a forward gathers from these ranks."""


def _joined(parts: list[_Part], apart: tuple[bool, bool]) -> list[_Part]:
    """Return parts whose first and last are joined to their neighbours if not ``apart``."""
    for is_apart, end, neighbour in zip(apart, (0, -1), (1, -2), strict=True):
        if not is_apart:
            both = zip(parts[end], parts[neighbour], strict=True)
            parts = [*parts]
            parts[neighbour] = _Part(*map(sum, both))
            del parts[end]
    return parts

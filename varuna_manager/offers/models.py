"""Models that are planned without a job file: of a size, or of a config.json of the Hub.

Neither needs torch, nor weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from spottrain.errors import ConfigError
from spottrain.morphing.errors import PlanError
from spottrain.morphing.plan.transformer import TransformerShape
from spottrain.morphing.plan.workload import Workload
from spottrain.pricing.prices.catalogue import catalogue
from spottrain.pricing.ranking.estimate import estimated_profile
from spottrain.pricing.ranking.gpu_speed import peak_flops
from spottrain.wire.model import Precision

GATED = frozenset(
    "llama mistral mixtral qwen2 qwen3 gemma gemma2 phi3 olmo olmo2 smollm3 granite stablelm "
    "starcoder cohere".split()
) - {"starcoder"}
"""``model_type`` of families whose feed-forward has a gate."""
PLAIN = frozenset("gpt2 gpt_neo gpt_neox opt bloom bert roberta gpt_bigcode phi".split())
"""Of families whose feed-forward has two matrices, 4 times as wide where nothing is said."""
LEARNED_POSITIONS = frozenset("gpt2 gpt_neo opt bert roberta gpt_bigcode".split())
TIED = frozenset("gpt2 gpt_neo opt bloom bert roberta gpt_bigcode gemma gemma2 cohere".split())
"""Families whose head is the embedding where nothing is said."""
NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "n_embed"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "key_value_heads": ("num_key_value_heads",),
    "head_size": ("head_dim",),
    "feed_forward": ("intermediate_size", "n_inner", "ffn_dim"),
    "vocabulary": ("vocab_size",),
    "context": ("max_position_embeddings", "n_positions", "seq_length"),
}
"""What families call the same number."""
LONGEST_CONTEXT = 8192
"""Tokens of an example where only the longest that a model can take is known."""
MINIBATCH_TOKENS = ((1e9, 5e5), (5e9, 1e6), (30e9, 2e6), (math.inf, 4e6))
"""Tokens of a mini-batch of models with up to so many parameters: about GPT-3's (Brown et
al. 2020, table 2.1)."""
TOKENS_PER_PARAMETER = 20
"""Trained on where nothing is said (Hoffmann et al. 2022, table 3)."""
SIZES = (1, 2, 4, 8, 16)
"""Micro-batches to plan with."""


def is_hub_config(data: object) -> bool:
    """Return whether parsed JSON is a model's config.json, as on the Hugging Face Hub."""
    return isinstance(data, dict) and "model_type" in data


def shape_of(
    data: Mapping[str, Any], source: str, context: int | None = None
) -> TransformerShape:
    """Return the shape that a model's config.json describes.

    Args:
        data: The parsed file.
        source: Its name, for errors.
        context: Tokens of an example; None: as many as the model can take, 8,192 at most.

    Raises:
        ConfigError: The family is not known, or a number is missing or wrong.
    """
    family = data["model_type"]
    if family not in GATED | PLAIN:
        raise ConfigError(
            f"{source}: model_type is none whose shape is known: got {family}; known are "
            f"{', '.join(sorted(GATED | PLAIN))}; or give its size with --params"
        )
    found = {what: _number(data, names, source) for what, names in NAMES.items()}
    for what in ("layers", "hidden", "heads", "vocabulary"):
        if found[what] is None:
            raise ConfigError(f"{source}: {NAMES[what][0]} is missing; add it")
    hidden, heads = found["hidden"] or 0, found["heads"] or 1
    longest = min(found["context"] or LONGEST_CONTEXT, LONGEST_CONTEXT)
    experts = _number(data, ("num_local_experts",), source) or 1
    try:
        return TransformerShape(
            layers=found["layers"] or 0,
            hidden=hidden,
            heads=heads,
            key_value_heads=found["key_value_heads"] or heads,
            head_size=found["head_size"] or hidden // heads,
            feed_forward=found["feed_forward"] or 4 * hidden,
            is_gated=family in GATED,
            vocabulary=found["vocabulary"] or 0,
            context=context or longest,
            is_tied=bool(data.get("tie_word_embeddings", family in TIED)),
            has_positions=family in LEARNED_POSITIONS,
            has_biases=family in PLAIN,
            experts=experts,
            active_experts=_number(data, ("num_experts_per_tok",), source) or experts,
        )
    except PlanError as error:
        raise ConfigError(f"{source}: {error}") from error


def _number(data: Mapping[str, Any], names: tuple[str, ...], source: str) -> int | None:
    for name in names:
        value = data.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{source}: {name} must be a whole number above 0: got {value!r}")
        return value
    return None


def minibatch_size_of(shape: TransformerShape) -> int:
    """Return the examples of a mini-batch, a power of two, where nothing is said."""
    tokens = next(t for most, t in MINIBATCH_TOKENS if shape.num_parameters <= most)
    return 1 << max(0, round(math.log2(tokens / shape.context)))


def steps_of(shape: TransformerShape, tokens: float | None, minibatch_size: int) -> int:
    """Return the mini-batches that train on so many tokens.

    Args:
        shape: The model's.
        tokens: All together; None: 20 for each parameter.
        minibatch_size: Examples.
    """
    wanted = tokens or TOKENS_PER_PARAMETER * shape.num_parameters
    return max(1, math.ceil(wanted / (minibatch_size * shape.context)))


def workload_of(
    shape: TransformerShape, name: str, minibatch_size: int, precision: Precision
) -> Workload:
    """Return a model and its estimated profile.

    Args:
        shape: The model's.
        name: Its name.
        minibatch_size: Examples.
        precision: Of the matrix multiplications.

    Raises:
        ConfigError: The peak of no GPU is published at that precision.
    """
    facts = shape.facts(name)
    known = [g for g in catalogue().gpus.values() if peak_flops(g, facts, precision)]
    gpu = next(iter(known), next(iter(catalogue().gpus.values())))
    sizes = [size for size in SIZES if minibatch_size % size == 0]
    profile = estimated_profile(facts, gpu, precision, sizes)
    return Workload(
        sources=profile.sources,
        facts=facts,
        profile=profile,
        minibatch_size=minibatch_size,
        gpu_memory_bytes=gpu.memory_bytes,
        usd_per_hour=0.0,
        precision=precision,
        is_gpu=True,
    )

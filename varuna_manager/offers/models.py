"""Models that are planned without a job file: of a size, or of a config.json of the Hub.

Neither needs torch, nor weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from spottrain.errors import ConfigError
from spottrain.morphing.errors import PlanError
from spottrain.morphing.plan.transformer import TransformerShape
from spottrain.morphing.plan.workload import Workload
from spottrain.pricing.prices.catalogue import CLOUDS, catalogue
from spottrain.pricing.ranking.estimate import estimated_profile
from spottrain.pricing.ranking.gpu_speed import peak_flops
from spottrain.varuna_manager.offers.estimates import NO_LIMITS, PlanLimits
from spottrain.varuna_manager.offers.preview import (
    SearchScope,
    preview_workload,
    workload_inputs,
)
from spottrain.wire.model import Precision, WireType

GATED = frozenset(
    [
        "llama",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen3",
        "gemma",
        "gemma2",
        "phi3",
        "olmo",
        "olmo2",
        "smollm3",
        "granite",
        "stablelm",
        "cohere",
    ]
)
"""``model_type`` of families whose feed-forward has a gate."""
PLAIN = frozenset(
    ["gpt2", "gpt_neo", "gpt_neox", "opt", "bloom", "bert", "roberta", "gpt_bigcode", "phi"]
)
"""Of families whose feed-forward has two matrices, 4 times as wide where nothing is said."""
LEARNED_POSITIONS = frozenset(["gpt2", "gpt_neo", "opt", "bert", "roberta", "gpt_bigcode"])
TIED = frozenset(
    [
        "gpt2",
        "gpt_neo",
        "opt",
        "bloom",
        "bert",
        "roberta",
        "gpt_bigcode",
        "gemma",
        "gemma2",
        "cohere",
    ]
)
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
LONGEST_CONTEXT, USUAL_CONTEXT = 8192, 4096
"""Tokens of an example where only the longest that a model can take is known, and where not
even that is."""
MINIBATCH_TOKENS = ((1e9, 5e5), (5e9, 1e6), (30e9, 2e6), (math.inf, 4e6))
"""Tokens of a mini-batch of models with up to so many parameters: about GPT-3's (Brown et
al. 2020, table 2.1)."""
TOKENS_PER_PARAMETER = 20
"""Trained on where nothing is said (Hoffmann et al. 2022, table 3)."""
SIZES = (1, 2, 4, 8, 16)
"""Micro-batches to plan with."""
KINDS = 8
"""Kinds of GPU that are planned: more do not fit on a screen."""
WIRE: Mapping[Precision, WireType] = {"fp32": "own", "bf16": "bf16", "fp16": "own"}
"""As a job file has it that says nothing of it."""


def is_hub_config(data: object) -> bool:
    """Return whether parsed JSON is a model's config.json, as on the Hugging Face Hub."""
    return isinstance(data, dict) and "model_type" in data


def shape_of(data: Mapping[str, Any], source: str, context: int | None = None) -> TransformerShape:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """A model to plan for."""

    name: str
    shape: TransformerShape
    minibatch_size: int
    steps: int
    precision: Precision
    limits: PlanLimits

    @classmethod
    def of(
        cls,
        name: str,
        shape: TransformerShape,
        *,
        tokens: float | None = None,
        minibatch_size: int | None = None,
        precision: Precision = "bf16",
        limits: PlanLimits = NO_LIMITS,
    ) -> ModelRequest:
        """Return a request of which some things are left open.

        Args:
            name: Of the model.
            shape: Its shape.
            tokens: To train on; None: 20 for each parameter.
            minibatch_size: Examples; None: about as many tokens as models of that size have.
            precision: Of the matrix multiplications.
            limits: Of money and time.

        Raises:
            ConfigError: The number of tokens is not above 0.
        """
        if tokens is not None and not 0 < tokens < 1e18:
            raise ConfigError(
                f"--tokens must be above 0 and below 1e18: got {tokens:g}; correct it"
            )
        size = minibatch_size or minibatch_size_of(shape)
        wanted = tokens or TOKENS_PER_PARAMETER * shape.num_parameters
        return cls(
            name=name,
            shape=shape,
            minibatch_size=size,
            steps=max(1, math.ceil(wanted / (size * shape.context))),
            precision=precision,
            limits=limits,
        )


def preview_model(
    request: ModelRequest,
    gpus: int,
    changes: Mapping[str, Any],
    scope: SearchScope,
    *,
    every: bool = False,
) -> dict[str, Any]:
    """Return what a model would be trained on, for how long and what for.

    Args:
        gpus: Of a fleet, at most.
        changes: What else is asked of plans, by the names of ``PlanInputs``.
        scope: Which clouds to compare; none: all.
        every: Plan for every kind of GPU.

    Raises:
        ConfigError: Nothing can be estimated at that precision; a cloud is not known.
    """
    workload = workload_of(request)
    inputs = replace(workload_inputs(workload, gpus), wire=WIRE[request.precision])
    # As good as the others within the error of estimates, and the only one to search.
    inputs = replace(inputs, **{"schedule": "varuna", **changes})
    scope = replace(
        scope,
        clouds=scope.clouds or CLOUDS,
        exact=1,
        gpus=None if every else KINDS,
    )
    try:
        document = preview_workload(
            request.name,
            inputs,
            workload.sources,
            scope,
            request.precision,
            request.steps,
            request.limits,
        )
    except PlanError as error:
        raise ConfigError(f"{request.name}: {error}") from error
    rows = document.get("by_gpu", [])
    exceeded = [
        request.limits.exceeded(row["total_usd"], row["hours"], request.steps) for row in rows
    ]
    # Each line is of the cheapest, unless a dearer one is within all limits.
    lines = exceeded[0] if exceeded and all(exceeded) else []
    tokens = request.steps * request.minibatch_size * request.shape.context
    return document | {
        "exceeds": lines,
        "steps": request.steps,
        "tokens": tokens,
        "context": request.shape.context,
    }


def workload_of(request: ModelRequest) -> Workload:
    """Return a model and its estimated profile, on any GPU.

    Raises:
        ConfigError: The peak of no GPU is published at that precision.
    """
    facts, precision = request.shape.facts(request.name), request.precision
    known = [g for g in catalogue().gpus.values() if peak_flops(g, facts, precision)]
    gpu = next(iter(known), next(iter(catalogue().gpus.values())))
    sizes = [size for size in SIZES if request.minibatch_size % size == 0]
    profile = estimated_profile(facts, gpu, precision, sizes)
    return Workload(
        sources=profile.sources,
        facts=facts,
        profile=profile,
        minibatch_size=request.minibatch_size,
        gpu_memory_bytes=gpu.memory_bytes,
        usd_per_hour=0.0,
        precision=precision,
        is_gpu=True,
    )

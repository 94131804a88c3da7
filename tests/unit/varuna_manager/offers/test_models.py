"""Models without a job file: of a config.json, or of a size."""

from __future__ import annotations

from typing import Any

import pytest

from spottrain.errors import ConfigError
from spottrain.morphing.plan.transformer import TransformerShape
from spottrain.varuna_manager.offers.estimates import PlanLimits
from spottrain.varuna_manager.offers.models import (
    GATED,
    PLAIN,
    ModelRequest,
    is_hub_config,
    minibatch_size_of,
    shape_of,
    workload_of,
)

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}


def test_a_config_of_the_hub_is_known_by_its_family() -> None:
    assert is_hub_config(LLAMA)
    assert not is_hub_config({"facts": {}, "profile": {}})
    assert not is_hub_config([])
    assert not GATED & PLAIN


def test_a_config_says_the_shape() -> None:
    shape = shape_of(LLAMA, "config.json")
    assert shape.num_parameters == 6_738_415_616
    assert shape.context == 8192
    assert shape_of(LLAMA, "config.json", 2048).context == 2048
    gpt2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12,
            "vocab_size": 50257, "n_positions": 1024}  # fmt: skip
    assert shape_of(gpt2, "config.json").num_parameters == 124_439_808


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "t5"}, "model_type is none whose shape is known: got t5"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": 0}, "vocab_size must be a whole number above 0: got 0"),
        ({"num_attention_heads": "32"}, "num_attention_heads must be .* got '32'"),
    ],
)
def test_a_config_that_says_too_little_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"c.json: {message}"):
        shape_of({**LLAMA, **change}, "c.json")


def test_what_is_left_open_is_as_usual() -> None:
    shape = TransformerShape.of_size(7e9, 4096)
    assert minibatch_size_of(shape) == 512
    request = ModelRequest.of("7B", shape)
    tokens = request.steps * request.minibatch_size * shape.context
    assert tokens == pytest.approx(20 * shape.num_parameters, rel=1e-3)
    workload = workload_of(request)
    assert workload.profile.origin == "estimated"
    assert workload.minibatch_size == 512


def test_limits_say_at_which_step_they_are_reached() -> None:
    limits = PlanLimits(max_usd=5.0, max_hours=10.0)
    assert limits.exceeded(4.0, 9.0, 2000) == []
    money, time = limits.exceeded(20.0, 40.0, 2000)
    assert money.startswith("the money ends at step 500 of 2,000: ")
    assert time.startswith("time ends at step 500 of 2,000: ")

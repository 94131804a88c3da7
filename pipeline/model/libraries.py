"""Models of Hugging Face's libraries within the user's model.

The libraries are not imported: what the user's code has not imported is not there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import nn

from spottrain.pipeline.model.sections import helper_names

TRANSFORMERS, PEFT = "transformers.modeling_utils", "peft.peft_model"
"""Python modules in which ``PreTrainedModel`` and ``PeftModel`` are defined."""


def modules_of(model: nn.Module, where: str, kind: str) -> Iterator[tuple[str, Any]]:
    """Yield modules of a class, by name, outer ones first; none that is in a helper.

    Args:
        model: The user's.
        where: Python module that defines the class, which need not be imported.
        kind: Name of the class.
    """
    known: Callable[..., object] | None = getattr(sys.modules.get(where), kind, None)
    if isinstance(known, type):
        helpers = tuple(f"{name}." for name in helper_names(model))
        for name, module in model.named_modules():
            if isinstance(module, known) and not name.startswith(helpers):
                yield name, module


def pretrained_in(model: nn.Module) -> tuple[str, Any] | None:
    """Return the outermost transformers model in a model, and the prefix of its names."""
    for name, module in modules_of(model, TRANSFORMERS, "PreTrainedModel"):
        return f"{name}." if name else "", module
    return None


def base_name(model: nn.Module) -> str:
    """Return what transformers calls the weights that a model began with, if anything.

    A path within the user's code is relative to that: every machine has it elsewhere.
    """
    found = pretrained_in(model)
    config = found[1].config if found else None
    name = str(getattr(config, "_name_or_path", "") or "")
    for folder in filter(os.path.isabs, sys.path):  # the first is that of the user's code
        if os.path.isabs(name) and Path(name).is_relative_to(folder):
            return str(Path(name).relative_to(folder))
    return name

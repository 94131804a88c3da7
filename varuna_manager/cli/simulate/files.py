"""Reads the files that people give to ``spottrain simulate``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from spottrain.errors import ConfigError
from spottrain.varuna_manager.config.files import explain, read_text

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Part(BaseModel):
    """A part of a JSON file: unknown keys are refused, and text where a number belongs."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


SpecT = TypeVar("SpecT", bound=Part)


def read_spec(path: Path, model: type[SpecT]) -> SpecT:
    """Read and check a JSON file.

    Raises:
        ConfigError: It does not exist, is not JSON, or does not fit ``model``; one line.
    """
    try:
        data = json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{path.name}: is not JSON: {error}; fix the file") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path.name}: must hold keys and values: got a {type(data).__name__}")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{path.name}: {explain(error, model)}") from error

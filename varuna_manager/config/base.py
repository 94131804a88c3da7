"""The base of all sections of a job file, and types that they share."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationInfo

from spottrain.errors import ConfigError
from spottrain.storage.store import (
    OBJECT_SCHEMES,
    StorageError,
    is_url,
    local_folder,
    parse_url,
)


class Section(BaseModel):
    """The base of all sections: strict, frozen, no unknown keys."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


JOB_NAME = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"


def _job_name(name: str) -> str:
    if not re.fullmatch(JOB_NAME, name):
        raise ValueError("must be at most 63 of a-z, 0-9 and -, without - at the ends")
    return name


def _entrypoint(text: str) -> str:
    module, colon, function = text.partition(":")
    parts = [*module.split("."), function]
    if not colon or not all(part.isidentifier() for part in parts):
        raise ValueError("must be module:function, such as train:training_job")
    return text


def _store_place(text: str) -> str:
    try:
        if text and local_folder(text) is None:
            parse_url(text)
    except StorageError as error:
        raise ValueError(f"{error}") from error
    if not text:
        raise ValueError("must be a folder or the URL of a bucket")
    misspelt = re.match(rf"({'|'.join((*OBJECT_SCHEMES, 'file'))}):/*", text)
    if misspelt and not is_url(text):
        raise ValueError(f"must begin with {misspelt[1]}:// to be a URL: got {text}")
    return text


def below(base: Path, path: str | Path) -> Path:
    """Return a path of a job file, which may begin with ``~``; relative to its folder.

    Raises:
        ConfigError: ``~name`` is nobody's, or links lead in a circle.
    """
    try:
        return (base / Path(path).expanduser()).resolve()
    except RuntimeError as error:
        reason = str(error).rstrip(".").lower()
        raise ConfigError(f"{path}: {reason}; write a folder's whole path") from error


def _below_base(path: str, info: ValidationInfo) -> str:
    base: Path | None = info.context
    return path if base is None else str(below(base, path))


JobName = Annotated[str, AfterValidator(_job_name)]
"""Name of a job; valid in tags, paths and host names."""
Entrypoint = Annotated[str, AfterValidator(_entrypoint)]
"""The function that returns the user's training job."""
StorePlace = Annotated[str, AfterValidator(_store_place)]
"""A folder or a bucket's URL, see ``spottrain.storage.store``."""
BELOW_BASE = AfterValidator(_below_base)
LocalPath = Annotated[str, BELOW_BASE]
"""A path on this machine, relative to the job file; absolute once that is loaded."""

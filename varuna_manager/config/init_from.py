"""The key ``init_from`` of the job file: weights of another training to begin with."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from spottrain.errors import ConfigError
from spottrain.storage.store import StorageError, is_url, local_folder, parse_url
from spottrain.varuna_manager.config.base import JOB_NAME, Section, below


class InitFromConfig(Section):
    """Weights to begin with, instead of those that `model()` makes."""

    path: str
    """A job of this machine, the URL of a job's checkpoints, a checkpoint's folder, a
    safetensors file or folder, or a folder of `save_pretrained`; paths are relative to
    the job file."""
    strict: bool = True
    """Refuse weights that lack a parameter, have others, or other shapes; `false`: take
    those that fit."""

    def absolute(self, base: Path) -> InitFromConfig:
        """Return it with a path that does not depend on the current folder.

        Args:
            base: The job file's folder.

        Raises:
            ConfigError: It is no path that exists, and no name of a job.
        """
        try:
            folder = local_folder(self.path)
            if folder is None:
                parse_url(self.path)
                return self
        except StorageError as error:
            raise ConfigError(f"init_from.path: {error}") from error
        path = below(base, folder)
        if path.exists():
            return self.model_copy(update={"path": str(path)})
        if re.fullmatch(JOB_NAME, self.path) and not is_url(self.path):
            return self
        raise ConfigError(
            f"init_from.path: there is no file or folder {path}; name a job, a "
            "checkpoint, or a file or folder of weights"
        )


def _spelt_out(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


InitFrom = Annotated[
    InitFromConfig,
    BeforeValidator(_spelt_out, json_schema_input_type=str | InitFromConfig),
]
"""The section, or just its path."""

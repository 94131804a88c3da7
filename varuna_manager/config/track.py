"""The section of a job file about trackers of experiments; see docs/metrics.md."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationInfo

from spottrain.errors import ConfigError
from spottrain.varuna_manager.config.base import Section

Name = Annotated[str, Field(min_length=1)]

PACKAGES: Mapping[str, str] = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
}
"""What each tracker is installed as; also an extra of spottrain."""
WANDB_KEY = "WANDB_API_KEY"
"""Environment variable that W&B logs in with."""


class WandbConfig(Section):
    """A run of Weights & Biases. Its API key is taken from the environment or from
    `wandb login`."""

    project: Name
    """Project of the run."""
    entity: Name | None = None
    """Team or user that the project belongs to; by default your own."""
    mode: Literal["online", "offline"] = "online"
    """`offline`: the run is kept in the job's folder until `wandb sync`."""


def _absolute(uri: str, info: ValidationInfo) -> str:
    """Return a tracking URI, whose SQLite file is relative to the job file."""
    base: Path | None = info.context
    scheme, mark, path = uri.partition(":///")
    if base is None or scheme != "sqlite" or not mark or path.startswith("/"):
        return uri
    return f"sqlite:///{(base / path).resolve()}"


class MlflowConfig(Section):
    """A run of MLflow."""

    tracking_uri: Annotated[Name, AfterValidator(_absolute)]
    """Server or database, such as http://host:5000 or sqlite:////home/me/mlflow.db."""
    experiment: Name = "spottrain"
    """Experiment of the run; it is created if there is none."""

    @property
    def has_server(self) -> bool:
        """True if it is reached over the network, from any machine."""
        return self.tracking_uri.startswith(("http://", "https://"))


class TrackConfig(Section):
    """Where measurements are written besides the job's `metrics.jsonl`."""

    tensorboard: bool = False
    """Write TensorBoard files into the folder `tensorboard` of the job's folder."""
    wandb: WandbConfig | None = None
    """Log to Weights & Biases."""
    mlflow: MlflowConfig | None = None
    """Log to MLflow."""
    tags: tuple[Name, ...] = ()
    """What the run is found by in W&B and MLflow."""

    @property
    def asked(self) -> tuple[str, ...]:
        """Names of the trackers asked for."""
        return tuple(name for name in PACKAGES if getattr(self, name))


def check_trackers(track: TrackConfig, secrets: Iterable[str], *, on_vm: bool) -> None:
    """Check that the trackers asked for can be used where the manager will run.

    Args:
        track: Of the job file.
        secrets: Names of environment variables that the manager will have.
        on_vm: On a VM of its own, which ends with the job.

    Raises:
        ConfigError: A package is missing, or what is written would be lost.
    """
    for name in track.asked:
        if on_vm and (why := _why_not_on_vm(track, name, secrets)):
            raise ConfigError(f"track.{name}: with --manager-vm {why}")
        if importlib.util.find_spec(PACKAGES[name]) is None:
            raise ConfigError(
                f"track.{name}: the package {PACKAGES[name]} is not installed here; "
                f"install it: pip install {name}"
            )


def _why_not_on_vm(track: TrackConfig, name: str, secrets: Iterable[str]) -> str:
    """Return why a tracker cannot be used on the manager's VM; empty if it can."""
    lost = "would be on the manager's VM, which ends with the job"
    match name:
        case "wandb" if track.wandb is not None and track.wandb.mode == "offline":
            return f"an offline run {lost}; set mode: online"
        case "wandb" if WANDB_KEY not in secrets:
            return f"its key must be known there; add {WANDB_KEY} to secrets"
        case "mlflow" if track.mlflow is not None and not track.mlflow.has_server:
            return (
                f"files {lost}; name a server, such as http://host:5000: got "
                f"{track.mlflow.tracking_uri}"
            )
        case "tensorboard":
            return f"its files {lost}; remove it, and read metrics.jsonl in checkpoint.path"
        case _:
            return ""

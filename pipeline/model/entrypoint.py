"""Loads the user's entrypoint; turns what the user's code raises into one line."""

from __future__ import annotations

import importlib
import math
import numbers
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from spottrain.errors import SpottrainError, UserCodeError
from spottrain.pipeline.model.job import Callbacks, TrainingJob

_MOVED = (
    "Cannot copy out of meta tensor",
    "Torch not compiled with CUDA",
    "No CUDA GPUs are available",
    "Found no NVIDIA driver",
    "Cannot re-initialize CUDA",
)
"""Parts of what torch says when code moves tensors by itself."""
_BY_INPUTS = "appears to not have been used in the graph"
"""Part of what torch says when a loss differentiates by what the model was given."""
_LEAVE_INPUTS = (
    "; a loss may differentiate by what the model returns, but not by what it is given or "
    "by parameters (double backward, as for gradient penalties): its stage has only its own"
)
_MAX_REASON = 500
"""Characters of what user code raises: it may hold a whole tensor."""
_LEAVE_DEVICES = (
    "; remove .to(device), .cuda() and device=: every machine moves its part of the "
    "model, and batches, to its device"
)


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Run the user's code; what it raises leaves as a UserCodeError.

    Args:
        what: What is being done, as the subject of the message, e.g. ``"loss"``.

    Raises:
        UserCodeError: The code raised; carries the user's traceback.
        OutOfMemoryError: The device had no memory left: that may be the plan's fault.
    """
    try:
        yield
    except (SpottrainError, torch.OutOfMemoryError):
        raise
    except (Exception, SystemExit) as error:
        reason = (str(error).splitlines() or [""])[0]
        if len(reason) > _MAX_REASON:
            reason = f"{reason[:_MAX_REASON]}... (cut; the whole is in the traceback)"
        advice = _LEAVE_DEVICES if any(part in reason for part in _MOVED) else ""
        if what == "loss" and _BY_INPUTS in reason:
            advice = _LEAVE_INPUTS
        reason = reason.rstrip(".") if advice else reason
        raise UserCodeError(
            f"{what} raised {type(error).__name__}: {reason}{advice}",
            traceback.format_exc(),
        ) from error


def load_job(entrypoint: str, workdir: Path) -> TrainingJob:
    """Import and call the user's entrypoint.

    Puts ``workdir`` first on ``sys.path``, for the life of the process.

    Args:
        entrypoint: ``"module:function"``, the module as seen from ``workdir``.
        workdir: The folder of the user's code.

    Raises:
        UserCodeError: Module or function is missing, raises, or does not return a
            TrainingJob.
    """
    module_name, _, function_name = entrypoint.partition(":")
    if not module_name or not function_name.isidentifier():
        raise UserCodeError(
            f"entrypoint must be module:function: got {entrypoint!r}; "
            "name the function that returns your TrainingJob"
        )
    folder = str(workdir.resolve())
    if folder in sys.path:
        sys.path.remove(folder)
    sys.path.insert(0, folder)
    function = _function(_import(module_name, folder), function_name)
    with user_code(f"entrypoint {entrypoint}"):
        job = function()
    if not isinstance(job, TrainingJob):
        raise UserCodeError(
            f"entrypoint {entrypoint} must return a spottrain.TrainingJob: got {type(job).__name__}"
        )
    _check_parts(job)
    return job


def _check_parts(job: TrainingJob) -> None:
    """Refuse objects in place of the functions that make or use them.

    Raises:
        UserCodeError: There is one.
    """
    if isinstance(job.model, nn.Module):
        kind = type(job.model).__name__
        raise UserCodeError(
            f"model must be a function that builds the model: got a {kind} that is built "
            f"already; give the function, such as model=lambda: {kind}(...)"
        )
    parts = {
        "model": (job.model, "model=lambda: Model(...)"),
        "loss": (job.loss, "def loss(model, batch): ..."),
        "optimizer": (
            job.optimizer,
            "optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=3e-4)",
        ),
        "lr_schedule": (
            job.lr_schedule or float,
            "lr_schedule=lambda step: min(1, (step + 1) / 100)",
        ),
        "collate": (job.collate, "collate=torch.utils.data.default_collate"),
    }
    callbacks = job.callbacks
    if not isinstance(callbacks, Callbacks):
        raise UserCodeError(
            f"callbacks must be spottrain.Callbacks: got a {type(callbacks).__name__}; write "
            "e.g. callbacks=spottrain.Callbacks(on_best=function)"
        )
    if not (isinstance(callbacks.limit_s, numbers.Real) and 0 < callbacks.limit_s < math.inf):
        raise UserCodeError(
            f"callbacks.limit_s must be a number of seconds above zero: got {callbacks.limit_s!r}"
        )
    parts |= {
        f"callbacks.{name}": (value, "def upload(info): ...")
        for name, value in callbacks.asked.items()
    }
    for name, (value, line) in parts.items():
        if not callable(value):
            raise UserCodeError(
                f"{name} must be a function: got a {type(value).__name__}; write e.g. {line}"
            )
    norm = job.clip_grad_norm
    if norm is not None and not (isinstance(norm, numbers.Real) and 0 < norm < math.inf):
        raise UserCodeError(f"clip_grad_norm must be a number above zero, or None: got {norm!r}")
    for name in job.heldout_sets:
        if not name or "/" in name:
            raise UserCodeError(
                f"a held-out set must have a name without '/': got {name!r}; its metrics "
                "are called such as name/loss"
            )


def _import(name: str, folder: str) -> ModuleType:
    importlib.invalidate_caches()
    try:
        with user_code(f"importing {name}"):
            return importlib.import_module(name)
    except UserCodeError as error:
        cause = error.__cause__
        missing = cause.name if isinstance(cause, ModuleNotFoundError) else None
        if missing is not None and (name == missing or name.startswith(f"{missing}.")):
            raise UserCodeError(
                f"entrypoint module {name!r} not found: looked in {folder}; "
                "check entrypoint and workdir"
            ) from error
        raise


def _function(module: ModuleType, name: str) -> Callable[[], Any]:
    function = getattr(module, name, None)
    if not callable(function):
        raise UserCodeError(
            f"entrypoint function {name!r} not found: {module.__name__} "
            f"({getattr(module, '__file__', 'built in')}) has no such function"
        )
    return function  # type: ignore[no-any-return]

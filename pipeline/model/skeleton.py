"""Builds the user's model: without memory for its parameters, or whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from spottrain.errors import UserCodeError
from spottrain.pipeline.base.heap import mmap_large_blocks
from spottrain.pipeline.model.entrypoint import user_code
from spottrain.pipeline.model.job import TrainingJob


def build_skeleton(factory: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Build the model with parameters on the meta device and real buffers.

    Each parameter is freed as soon as a module takes it, so no more than one of them is
    ever in memory; initialising what is on the meta device does nothing.

    Raises:
        UserCodeError: The factory raised, e.g. because it reads or moves parameters.
    """
    what = "model, built without parameters,"
    with _seeded(seed), user_code(what), _on_meta(), mmap_large_blocks():
        model = factory()
    return _checked(model)


def materialise(job: TrainingJob, seed: int) -> nn.Module:
    """Build the whole model on the CPU; the same bits for the same seed.

    Raises:
        UserCodeError: The factory raised or does not return a module.
    """
    with _seeded(seed), user_code("model"):
        model = job.model()
    return _checked(model)


def _checked(model: object) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise UserCodeError(
            f"model must build a torch.nn.Module: got {type(model).__name__}"
        )
    return model


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the CPU's random numbers, and put them back as they were."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


@contextmanager
def _on_meta() -> Iterator[None]:
    """Put every parameter on the meta device as it is registered with a module."""
    plain = nn.Module.register_parameter
    twins = WeakIdKeyDictionary()  # one parameter in two modules stays one

    def register(
        module: nn.Module, name: str, param: nn.Parameter | None = None
    ) -> None:
        if param is not None and not param.is_meta:
            if param not in twins:
                data = torch.empty_like(param.detach(), device="meta")
                twins[param] = nn.Parameter(data, param.requires_grad)
            twin: nn.Parameter = twins[param]
            twin.__dict__.update(param.__dict__)
            param = twin
        plain(module, name, param)

    nn.Module.register_parameter = register  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = plain  # type: ignore[method-assign]

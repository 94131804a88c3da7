"""Builds the user's model: without memory for its parameters, or whole."""

from __future__ import annotations

import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from spottrain.errors import UserCodeError
from spottrain.pipeline.base.heap import mmap_large_blocks
from spottrain.pipeline.model.entrypoint import user_code
from spottrain.pipeline.model.job import CutPoint, TrainingJob
from spottrain.pipeline.model.sections import Attached

_COMPILE = "_spottrain_compile"
"""Attribute of a module that is to be compiled: how."""
_READ = ("meta tensor", "'Meta' backend", "MetaTensor")
"""Parts of what torch says when a model's factory reads parameters."""


def build_skeleton(factory: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Build the model with parameters on the meta device and real buffers.

    Each parameter is freed as soon as a module takes it, so no more than one of them is
    ever in memory; initialising what is on the meta device does nothing.

    Raises:
        UserCodeError: The factory raised, e.g. because it reads or moves parameters.
    """
    what = "model, built without parameters,"
    try:
        with (
            _seeded(seed),
            user_code(what),
            _on_meta(),
            mmap_large_blocks(),
            _compiling_later(),
        ):
            return _checked(factory())
    except UserCodeError as error:
        reason = str(error.__cause__)
        if "Cannot copy" in reason or not any(part in reason for part in _READ):
            raise
        raise UserCodeError(
            f"{error}; the function must not read values of parameters (.item(), an if on "
            "a tensor), which are on no machine while stages are built; for "
            "resize_token_embeddings pass mean_resizing=False",
            error.traceback,
        ) from error


def materialise(job: TrainingJob, seed: int) -> nn.Module:
    """Build the whole model on the CPU; the same bits for the same seed.

    Raises:
        UserCodeError: The factory raised or does not return a module.
    """
    with _seeded(seed), user_code("model"), _compiling_later():
        return _checked(job.model())


def _checked(model: object) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise UserCodeError(f"model must build a torch.nn.Module: got {type(model).__name__}")
    if not _is_compiled(model):
        return model
    original: nn.Module = model._orig_mod
    setattr(original, _COMPILE, model.dynamo_ctx)
    return original


def _is_compiled(module: nn.Module) -> TypeGuard[Any]:
    """Return whether ``torch.compile`` returned a module."""
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def run_eagerly() -> AbstractContextManager[Any]:
    """Let compiled functions run as they are written."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled
        return nullcontext()
    eagerly: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return eagerly


def compile_blocks(model: nn.Module, blocks: Sequence[str]) -> None:
    """Compile what the model's factory asked for.

    Where that holds blocks, each of them is compiled by itself: a compiled function
    cannot be left and entered between two of them.

    Args:
        model: As ``build_skeleton`` made it.
        blocks: Names of the modules between which it may be cut.
    """
    for name, module in list(model.named_modules()):
        compiled = _is_compiled(module)
        how = module.dynamo_ctx if compiled else module.__dict__.pop(_COMPILE, None)
        held = [block for block in blocks if block.startswith(f"{name}." if name else "")]
        by_hand = _is_compiled_function(module.__dict__.get("forward"))
        if held and ((by_hand and not compiled) or (how and _is_cut_point(model, held))):
            raise UserCodeError(
                f"model cannot be cut within {name or type(module).__name__}, which "
                "torch.compile has made one function: compile its blocks instead, such as "
                "block.compile() for each of them"
            )
        if how is None:
            continue
        if held and compiled:
            module.forward = module._orig_mod.__call__
        for each in map(model.get_submodule, held) if held else [module] * (not compiled):
            each.forward = how(each.forward)
            # Else a shape's kernels would depend on those seen before.
            torch._dynamo.config.automatic_dynamic_shapes = False


def _is_cut_point(model: nn.Module, names: Sequence[str]) -> bool:
    return any(isinstance(model.get_submodule(name), CutPoint) for name in names)


def _is_compiled_function(function: object) -> bool:
    """Return whether ``torch.compile`` returned a function."""
    return hasattr(function, "_torchdynamo_orig_callable")


def _compiling_later() -> AbstractContextManager[None]:
    """Let ``nn.Module.compile`` leave a note on the module only."""

    def compile_later(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        how = functools.partial(torch.compile, *args, **kwargs)
        setattr(module, _COMPILE, how)

    return replaced(nn.Module, "compile", compile_later)


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Give an attribute another value for a while."""
    plain = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, plain)


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

    def register(module: nn.Module, name: str, param: nn.Parameter | None = None) -> None:
        if param is not None and not param.is_meta:
            if param not in twins:
                twins[param] = _twin_of(param)
            twin: nn.Parameter = twins[param]
            param = twin
        plain(module, name, param)

    with replaced(nn.Module, "register_parameter", register):
        yield


def _twin_of(parameter: nn.Parameter) -> nn.Parameter:
    """Return one on the meta device; what is attached to either is attached to both."""
    data = torch.empty_like(parameter.detach(), device="meta")
    twin = Attached.of(parameter).parameter(data, parameter.requires_grad)
    twin.__dict__ = parameter.__dict__
    if parameter._backward_hooks is None:
        parameter._backward_hooks = OrderedDict()
    twin._backward_hooks = parameter._backward_hooks
    return twin

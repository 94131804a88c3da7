"""Builds the user's model: without memory for its parameters, whole, or some of them at a
time.

What the model's code draws at random follows from the seed and from how often it has drawn
before, not from what was drawn. So nothing has to be drawn for a parameter that is left out,
and a parameter has the same bits whichever others are built beside it.
"""

from __future__ import annotations

import functools
import gc
import itertools
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from spottrain.errors import UserCodeError
from spottrain.pipeline.base.heap import mmap_large_blocks
from spottrain.pipeline.base.operations import OperationMode
from spottrain.pipeline.model.entrypoint import user_code
from spottrain.pipeline.model.job import CutPoint, TrainingJob
from spottrain.pipeline.model.order import random_seed
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
        return _build(factory, seed, what, _Registrations())
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
    with _Draws():
        return _build(job.model, seed, "model")


def first_values(
    job: TrainingJob, seed: int, parts: Iterable[Collection[str]]
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield parameters and buffers with their first values, those of one part after the other.

    No more than a part is in memory at a time: what was yielded is gone once the next one is
    asked for. Parameters have the bits that ``materialise``
    gives them. The model's code runs once for each part; where it computes one part from
    another, the whole model is built instead.

    Args:
        job: Of the user.
        seed: Of the job.
        parts: Names of parameters and buffers; of tied ones, that under which they come first.

    Raises:
        UserCodeError: The factory raised or does not return a module.
    """
    numbers = _numbers(job, seed)
    whole: nn.Module | None = None
    for names in parts:
        values = None
        if whole is None:
            kept = {numbers[name] for name in names if name in numbers}
            values = _values_of_some(job, seed, names, kept)
        if values is None:
            whole = whole or materialise(job, seed)
            values = _values_in(whole, names)
        yield values
        values.clear()
        gc.collect()  # models hold cycles


def _numbers(job: TrainingJob, seed: int) -> dict[str, int]:
    """Return which registration gives each parameter, as far as one does."""
    taken = _Registrations()
    try:
        with _Draws(), _Disguise():
            model = _build(job.model, seed, "model", taken)
    except UserCodeError:  # that building the whole model raises, too, or does not
        return {}
    return {n: taken.numbers[one] for n, one in model.named_parameters() if one in taken.numbers}


def _values_of_some(
    job: TrainingJob, seed: int, names: Collection[str], kept: Collection[int]
) -> dict[str, torch.Tensor] | None:
    """Return the values of parameters; ``None``: they follow from those of others."""
    try:
        with _Draws(), _Disguise():
            model = _build(job.model, seed, "model", _Registrations(kept))
    except UserCodeError:  # as above
        return None
    values = _values_in(model, names)
    return None if any(value.is_meta for value in values.values()) else values


def _values_in(model: nn.Module, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return parameters and buffers of a model, by name."""
    values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: values[name].detach() for name in names}


def _build(
    factory: Callable[[], nn.Module],
    seed: int,
    what: str,
    registrations: _Registrations | None = None,
) -> nn.Module:
    """Build the model, with the values of all parameters or of those that are kept."""
    on_meta = _on_meta(registrations) if registrations else nullcontext()
    with _seeded(seed), user_code(what), on_meta, mmap_large_blocks(), _compiling_later():
        return _checked(factory())


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
    _refuse_graphs(model)


def compiled_in(model: nn.Module) -> str:
    """Return a module of a skeleton that is to be compiled; empty: there is none."""
    found = (
        name or type(module).__name__
        for name, module in model.named_modules()
        if _is_compiled(module)
        or _COMPILE in module.__dict__
        or _is_compiled_function(module.__dict__.get("forward"))
    )
    return next(found, "")


def _refuse_graphs(model: nn.Module) -> None:
    """Refuse what torch would record as CUDA graphs.

    Outputs of a graph are in memory that its next run writes to, while those of the
    micro-batch before are still on their way to another stage, or kept for a backward.
    """
    for name, module in model.named_modules():
        config_of = getattr(module.__dict__.get("forward"), "get_compiler_config", None)
        if config_of is not None and (config_of() or {}).get("triton.cudagraphs"):
            raise UserCodeError(
                f"torch.compile must not use CUDA graphs: got mode or options with them for "
                f"{name or type(module).__name__}, whose output the next micro-batch would write "
                "over; use mode='max-autotune-no-cudagraphs', or none"
            )


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


def of_any_size() -> AbstractContextManager[None]:
    """Let BatchNorm train on one value of each channel, where only shapes matter."""
    return replaced(functional, "_verify_batch_size", lambda size: None)


def on_device(buffer: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a buffer on a device; zeros for one made from parameters, which has no values."""
    if buffer.is_meta and device.type != "meta":
        return torch.zeros_like(buffer, device=device)
    return buffer.to(device)


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


class _Draws(OperationMode):
    """Seeds a generator anew before each operation that draws from it.

    With what follows from the last seed that the model's code or ``_seeded`` gave it, and
    from the number of operations since: not from what these have drawn.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seeds: dict[torch.Generator, tuple[int, int, int]] = {}
        """The seed that was given, the operations since, and the seed for the last one."""

    def operate(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation."""
        if torch.Tag.nondeterministic_seeded in operation.tags:
            self._seed(kwargs.get("generator") or torch.default_generator)
        return operation(*args, **kwargs)

    def _seed(self, generator: torch.Generator) -> None:
        present = generator.initial_seed()
        given, count, last = self._seeds.get(generator, (present, 0, present))
        if present != last:  # given since
            given, count = present, 0
        seed = random_seed(given, count)
        generator.manual_seed(seed)
        self._seeds[generator] = given, count + 1, seed


class _Disguise(TorchFunctionMode):
    """Lets parameters without memory say that they are the CPU's.

    Code that treats them otherwise, as ``nn.init.orthogonal_`` does, would draw less often.
    """

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a function of torch's."""
        if function == _IS_META:
            return False
        result = function(*args, **(kwargs or {}))
        return torch.device("cpu") if function == _DEVICE and result.type == "meta" else result


_IS_META, _DEVICE = (getattr(torch.Tensor, name).__get__ for name in ("is_meta", "device"))


class _Registrations:
    """Parameters in the order in which modules take them.

    Args:
        kept: Numbers of those that keep their values; others go to the meta device.
    """

    def __init__(self, kept: Collection[int] = ()) -> None:
        self._kept = kept
        self._next = itertools.count()
        self._given = WeakIdKeyDictionary()  # one parameter in two modules stays one
        self.numbers: MutableMapping[nn.Parameter, int] = WeakIdKeyDictionary()
        """Of the parameters that modules have."""

    def take(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return what a module is to have in place of a parameter."""
        if parameter not in self._given:
            number = next(self._next)
            given = parameter if number in self._kept else _twin_of(parameter)
            self._given[parameter] = given
            self.numbers[given] = number
        given_before: nn.Parameter = self._given[parameter]
        return given_before


@contextmanager
def _on_meta(registrations: _Registrations) -> Iterator[None]:
    """Put parameters on the meta device as they are registered with a module."""
    plain = nn.Module.register_parameter

    def register(module: nn.Module, name: str, param: nn.Parameter | None = None) -> None:
        if param is not None and param.untyped_storage().device.type != "meta":
            param = registrations.take(param)
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

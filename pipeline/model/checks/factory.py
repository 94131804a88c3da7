"""Checks what the user's function builds as a model: what stages are to build alike."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from spottrain.errors import UserCodeError
from spottrain.pipeline.model.job import TrainingJob
from spottrain.pipeline.model.sections import ModelLayout
from spottrain.pipeline.model.skeleton import build_skeleton

_COPIERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def check_factory(job: TrainingJob) -> tuple[nn.Module, nn.Module]:
    """Check that the job builds the same model every time, but anew; return two.

    Raises:
        UserCodeError: It does not, or what it builds cannot be built again elsewhere.
    """
    model, other = (build_skeleton(job.model, seed) for seed in (0, 1))
    theirs = {id(module) for module in other.modules()}
    for name, module in model.named_modules():
        if id(module) in theirs and any(True for _ in module.parameters()):
            what = f"its module {name}" if name else f"the same {type(model).__name__}"
            raise UserCodeError(
                f"model must build a new model each time it is called: it returned {what} "
                "twice; build all of it inside the function, such as model=lambda: "
                f"{type(model).__name__}(...)"
            )
        if isinstance(module, _COPIERS):
            raise UserCodeError(
                f"model must not be in {type(module).__name__}: spottrain itself trains "
                "copies of the model side by side; return what is inside"
            )
        if (
            isinstance(module, nn.Embedding | nn.EmbeddingBag)
            and module.sparse
            and module.weight.requires_grad
        ):
            raise UserCodeError(
                f"model must have dense gradients, which replicas can sum: {name} is an "
                f"{type(module).__name__} with sparse=True; leave sparse out, and use an "
                "optimizer for dense gradients"
            )
    for name, parameter in model.named_parameters():
        _check_attached(name, parameter)
    for name, module in model.named_modules():
        _check_attributes(name, module)
    return model, other


def check_buffers(model: nn.Module, other: nn.Module, layout: ModelLayout) -> None:
    """Check that stages have the same buffers, whoever builds them.

    Args:
        model: The user's.
        other: The same, built with another seed.
        layout: Of it.

    Raises:
        UserCodeError: A buffer that no forward changes is random, or made from parameters.
    """
    one, two = dict(model.named_buffers()), dict(other.named_buffers())
    for name, buffer in one.items():
        if name in layout.specs:  # its first value is written once
            continue
        if buffer.is_meta:
            _refuse_made_from_parameters(f"buffer {name} of the model")
        if not torch.equal(buffer, two[name]):
            raise UserCodeError(
                f"buffer {name} of the model is random: make it from a torch.Generator "
                "with a seed of its own, or make it a parameter"
            )


def refuse_layer_drop(model: nn.Module) -> None:
    """Refuse to cut a model that leaves blocks out at random.

    Raises:
        UserCodeError: It does.
    """
    for name, module in model.named_modules():
        for attribute in ("layerdrop", "drop_layer", "layer_drop"):
            rate = getattr(module, attribute, None)
            rate = getattr(getattr(module, "config", None), attribute, rate)
            if isinstance(rate, int | float) and rate > 0:
                raise UserCodeError(
                    f"model leaves layers out at random ({name or 'the model'} has "
                    f"{attribute} {rate}), but all blocks must run once each: set "
                    f"{attribute} to 0 in its config"
                )


def _check_attributes(name: str, module: nn.Module) -> None:
    """Check that a module holds no tensors without values but its parameters."""
    for attribute, value in vars(module).items():
        if attribute in ("_parameters", "_buffers", "_modules"):
            continue
        if any(
            isinstance(leaf, torch.Tensor) and leaf.is_meta and not isinstance(leaf, nn.Parameter)
            for leaf in tree_leaves(value)
        ):
            what = type(module).__name__ + (f" ({name})" if name else "")
            _refuse_made_from_parameters(f"attribute {attribute} of {what}")


def _refuse_made_from_parameters(what: str) -> NoReturn:
    raise UserCodeError(
        f"{what} is made from values of parameters, which are on no machine while stages are "
        "built: make it from their shapes, such as torch.zeros(w.shape), or make it a "
        "parameter with requires_grad=False, which keeps the values that it begins with; of "
        "spectral_norm use that in torch.nn.utils.parametrizations"
    )


def _check_attached(name: str, parameter: nn.Parameter) -> None:
    """Check that what is attached to a parameter can be carried over to a stage's."""
    after = list((parameter._post_accumulate_grad_hooks or {}).values())
    hooks = (parameter._backward_hooks or {}).values()
    after += [hook for hook in hooks if hook.__module__ == torch.autograd.graph.__name__]
    if parameter.requires_grad:
        # Whoever hooks into the node keeps it, and gives it its dictionary of hooks.
        node = parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        for register in (node.register_hook, node.register_prehook):  # type: ignore[union-attr]
            handle = register(lambda *_: None)
            at_node = handle.hooks_dict_ref()
            handle.remove()
            after += at_node.values() if at_node else ()
    if after:
        what = getattr(after[0], "__qualname__", type(after[0]).__name__)
        raise UserCodeError(
            f"parameter {name} has a hook on its sum of gradients or on several gradients "
            f"({what}), which are summed over micro-batches and machines here: change a "
            "gradient by register_hook of the parameter, update it in the optimizer"
        )
    for attribute, value in parameter.__dict__.items():
        if any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in tree_leaves(value)):
            raise UserCodeError(
                f"attribute {attribute!r} of parameter {name} holds a parameter, or what was "
                "made from one: on another machine it would have no values; keep the "
                "parameter's name there"
            )

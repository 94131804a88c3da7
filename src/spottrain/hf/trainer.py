"""A ``TrainingJob`` of what a ``Trainer`` of transformers is given."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from spottrain.errors import UserCodeError
from spottrain.hf.losses import causal_lm_loss, masked_lm_loss
from spottrain.pipeline.model.job import ExampleDataset, LossResult, NamedParameters, TrainingJob
from spottrain.schedules import job_steps

_LOSSES = {"ForCausalLM": causal_lm_loss, "LMHeadModel": causal_lm_loss}
_LOSSES |= {"ForMaskedLM": masked_lm_loss}
"""By the end of a model's class."""
_UNSUITED = {
    "label_smoothing_factor": 0.0,
    "neftune_noise_alpha": None,
    "optim_target_modules": None,
    "use_liger_kernel": False,
}
"""Arguments with an effect on the weights that is not kept, and their defaults."""


def from_trainer(
    args: Any,
    model_init: Callable[[], nn.Module],
    train_dataset: ExampleDataset,
    *,
    eval_dataset: Any = None,
    data_collator: Callable[[list[Any]], Any] | None = None,
    loss: Callable[[nn.Module, Any], LossResult] | None = None,
) -> TrainingJob:
    """Return the job that trains as ``transformers.Trainer`` would with these.

    Optimizer, weight decay, learning-rate schedule and clipping are those that ``args`` ask
    for, columns that the model does not take are left out, and the loss is the model's own.
    What concerns machines and moments is in the job file: ``minibatch_size`` (Trainer's
    batch size per device, times devices, times accumulation), ``steps``, ``seed``,
    ``runtime.precision``, ``evaluation``, ``track``.

    Args:
        args: ``transformers.TrainingArguments``.
        model_init: Builds the model, each time a new one.
        train_dataset: Map-style.
        eval_dataset: One, or several by name.
        data_collator: As Trainer's; by default transformers' ``default_data_collator``.
        loss: As of a ``TrainingJob``; needed for models that are neither causal nor masked
            language models.

    Raises:
        UserCodeError: An argument has an effect that would be lost, or a loss is needed.
    """
    from transformers import Trainer, default_data_collator

    for name, default in _UNSUITED.items():
        if (given := getattr(args, name, default)) != default:
            raise UserCodeError(f"from_trainer: {name} is not supported: got {given}; remove it")
    if isinstance(model_init, nn.Module):
        raise UserCodeError(
            "from_trainer: model_init must be a function that builds a new model: got a model; "
            "write model_init=lambda: AutoModelForCausalLM.from_pretrained(…)"
        )
    with torch.device("meta"):
        model = model_init()
    # Names, since an optimizer is given the parameters of one section.
    decayed = set(Trainer.get_decay_parameter_names(None, model))
    taken = {*inspect.signature(model.forward).parameters, "labels", *(args.label_names or ())}
    collate = data_collator or default_data_collator

    def optimizer(named: NamedParameters) -> torch.optim.Optimizer:
        kind, settings = Trainer.get_optimizer_cls_and_kwargs(args, None)
        groups = [
            {"params": [x for name, x in named if (name in decayed) is decays], "weight_decay": by}
            for decays, by in ((True, args.weight_decay), (False, 0.0))
        ]
        made: torch.optim.Optimizer = kind(groups, **settings)
        return made

    def collated(examples: list[Any]) -> Any:
        if args.remove_unused_columns:
            examples = [{k: v for k, v in x.items() if k in taken} for x in examples]
        return collate(examples)

    return TrainingJob(
        model=model_init,
        dataset=train_dataset,
        heldout=eval_dataset,
        loss=loss or _loss_of(model),
        optimizer=optimizer,
        lr_schedule=_schedule(args),
        clip_grad_norm=args.max_grad_norm or None,
        collate=collated,
    )


def _loss_of(model: nn.Module) -> Callable[[nn.Module, Any], LossResult]:
    kinds = [kind.__name__ for kind in type(model).__mro__]
    base = getattr(model, "get_base_model", None)  # of peft
    kinds += [type(base()).__name__] if base is not None else []
    for kind in kinds:
        for end, loss in _LOSSES.items():
            if kind.endswith(end):
                return loss
    raise UserCodeError(
        f"from_trainer: no loss is known for {kinds[0]}: give loss=, which returns the sum of "
        "losses and their number"
    )


def _schedule(args: Any) -> Callable[[int], float]:
    """Return the factor on the learning rate by step, as ``args`` ask for.

    Raises:
        UserCodeError: It depends on more than the step.
    """
    from transformers import get_scheduler

    steps = job_steps()
    made = get_scheduler(
        args.lr_scheduler_type,
        torch.optim.SGD([torch.zeros(())], lr=1.0),
        num_warmup_steps=args.get_warmup_steps(steps),
        num_training_steps=steps,
        scheduler_specific_kwargs=dict(args.lr_scheduler_kwargs or {}),
    )
    if not isinstance(made, torch.optim.lr_scheduler.LambdaLR):
        raise UserCodeError(
            f"from_trainer: lr_scheduler_type {args.lr_scheduler_type} does not follow from the "
            "step alone; take cosine, linear or the like"
        )
    (factor,) = made.lr_lambdas
    return lambda step: float(factor(step))

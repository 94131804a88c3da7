"""A ``TrainingJob`` of what a ``Trainer`` of Lightning is given."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import RandomSampler, SequentialSampler

from spottrain.errors import UserCodeError
from spottrain.pipeline.model.job import Callbacks, LossResult, NamedParameters, TrainingJob
from spottrain.schedules import job_steps

_OWN_LOOP = (
    *("backward", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step"),
    *("configure_gradient_clipping", "configure_callbacks", "configure_sharded_model"),
    *("configure_model", "transfer_batch_to_device"),
    *("on_before_batch_transfer", "on_after_batch_transfer"),
)
"""Methods that only a loop of Lightning's would call, besides those of ``ModelHooks``."""
_UNCALLED = ("on_test_", "on_predict_")
_LOSSES = ("val_loss", "loss")
"""Under which a ``validation_step`` that returns nothing logs its loss."""


class LightningStep(nn.Module):
    """A LightningModule whose ``forward`` is its ``training_step``, or in evaluation mode its
    ``validation_step``: it returns the loss, and what was logged by name."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the mean loss of a batch and the means that were logged, all scalars."""
        module, logged = self.module, dict[str, torch.Tensor]()

        def log(name: str, value: Any, *_: Any, **__: Any) -> None:
            logged[name] = torch.as_tensor(value, dtype=torch.float32).detach()

        def log_dict(values: Mapping[str, Any], *_: Any, **__: Any) -> None:
            for name, value in values.items():
                log(name, value)

        vars(module).update(log=log, log_dict=log_dict)
        try:
            validates = not self.training and _overrides(module, "validation_step")
            step = module.validation_step if validates else module.training_step
            has_index = "batch_idx" in inspect.signature(step).parameters
            loss = step(batch, 0) if has_index else step(batch)
        finally:
            del module.log, module.log_dict
        if isinstance(loss, Mapping):
            loss = loss["loss"]
        if loss is None:
            loss = next((logged.pop(name) for name in _LOSSES if name in logged), None)
        if loss is None:
            raise UserCodeError(
                f"lightning.job: {step.__name__} must return its loss: got None; return it, or "
                "log it as val_loss"
            )
        return loss, logged


def job(
    module: Callable[[], Any],
    datamodule: Any,
    *,
    clip_grad_norm: float | None = None,
    callbacks: Callbacks | None = None,
) -> TrainingJob:
    """Return the job that trains as ``lightning.Trainer`` would with these.

    Loss and metrics of a batch are taken for means over its examples. Optimizer and schedule
    are those of ``configure_optimizers``; what it asks of the trainer is in the job file:
    ``minibatch_size`` (the loader's batch size, times devices, times accumulation), ``steps``,
    ``seed``, ``runtime.precision``, ``evaluation``, ``track``. Names of weights begin with
    ``module.``.

    Args:
        module: Builds the LightningModule, each time a new one.
        datamodule: With ``train_dataloader``, whose data set is map-style, and
            ``val_dataloader`` where held-out examples are to be evaluated.
        clip_grad_norm: Trainer's ``gradient_clip_val``.
        callbacks: As of a ``TrainingJob``.

    Raises:
        UserCodeError: Something has an effect that would be lost; names it.
    """
    if isinstance(module, nn.Module):
        raise UserCodeError(
            "lightning.job: module must be a function that builds a new module: got a module; "
            f"write lambda: {type(module).__name__}(…)"
        )
    with torch.device("meta"):
        skeleton = module()
    _check_hooks(skeleton)
    datamodule.prepare_data()
    datamodule.setup("fit")
    train, heldout = _loader(datamodule, "train_dataloader"), None
    if _overrides(datamodule, "val_dataloader"):
        heldout = _loader(datamodule, "val_dataloader")
        if heldout.collate_fn is not train.collate_fn:
            raise UserCodeError(
                "lightning.job: the collate_fn of val_dataloader must be that of train_dataloader: "
                "got another; use one for both"
            )
    made, config = _configured(skeleton)

    def loss(model: nn.Module, batch: Any) -> LossResult:
        mean, logged = model(batch)
        number = float(next(len(x) for x in tree_leaves(batch) if isinstance(x, torch.Tensor)))
        metrics = {name: (value * number, number) for name, value in logged.items()}
        return mean * number, number, metrics

    return TrainingJob(
        model=lambda: LightningStep(module()),
        dataset=train.dataset,
        heldout=None if heldout is None else heldout.dataset,
        loss=loss,
        optimizer=_optimizer(made, LightningStep(skeleton)),
        lr_schedule=None if config is None else _schedule(made, config, len(train)),
        clip_grad_norm=clip_grad_norm,
        collate=train.collate_fn,
        callbacks=callbacks or Callbacks(),
    )


def _overrides(owner: Any, name: str) -> bool:
    """Return whether a class of the user's has a method instead of Lightning's."""
    method = getattr(type(owner), name, None)
    return method is not None and not method.__module__.startswith(
        ("lightning.", "pytorch_lightning.")
    )


def _lost_hooks(module: Any) -> Iterator[str]:
    hooks = next(x for x in type(module).__mro__ if x.__name__ == "ModelHooks")
    yield from (name for name in vars(hooks) if not name.startswith((*_UNCALLED, "_")))
    yield from _OWN_LOOP


def _check_hooks(module: Any) -> None:
    if not module.automatic_optimization:
        raise UserCodeError(
            "lightning.job: manual optimization (automatic_optimization = False) is not "
            "supported: the loop is spottrain's; return the loss from training_step"
        )
    for name in _lost_hooks(module):
        if _overrides(module, name):
            raise UserCodeError(
                f"lightning.job: {name} would not be called: the loop is spottrain's; remove it "
                f"from {type(module).__name__}, or do what it does in training_step"
            )


def _loader(datamodule: Any, name: str) -> Any:
    """Return the one loader that a method returns; its data set has examples by position."""
    loader = getattr(datamodule, name)()
    if not isinstance(loader, torch.utils.data.DataLoader):
        raise UserCodeError(
            f"lightning.job: {name} must return one DataLoader: got {type(loader).__name__}"
        )
    if not (hasattr(loader.dataset, "__getitem__") and hasattr(loader.dataset, "__len__")):
        raise UserCodeError(
            f"lightning.job: the data set of {name} must be map-style: got "
            f"{type(loader.dataset).__name__}; give it __len__ and __getitem__"
        )
    if not isinstance(loader.sampler, RandomSampler | SequentialSampler):
        raise UserCodeError(
            f"lightning.job: the sampler of {name} would be lost: got "
            f"{type(loader.sampler).__name__}; examples are drawn by the job's seed, so remove it"
        )
    return loader


def _configured(module: Any) -> tuple[torch.optim.Optimizer, Any]:
    """Return the optimizer of ``configure_optimizers`` and the configuration of its scheduler,
    if there is one."""
    from lightning.pytorch.core import optimizer as theirs

    try:
        found = module.configure_optimizers()
    except RuntimeError as error:
        raise UserCodeError(
            f"lightning.job: configure_optimizers raised {error}; it may not ask the trainer: "
            "spottrain.schedules.job_steps() is the number of steps"
        ) from error
    optimizers, schedulers, monitor = theirs._configure_optimizers(found)
    if len(optimizers) != 1:
        raise UserCodeError(
            f"lightning.job: configure_optimizers must return one optimizer: got {len(optimizers)}"
        )
    configs = theirs._configure_schedulers_automatic_opt(schedulers, monitor)
    if len(configs) > 1 or any(one.reduce_on_plateau for one in configs):
        raise UserCodeError(
            "lightning.job: configure_optimizers must return at most one scheduler, which follows "
            f"from the step alone: got {', '.join(type(x.scheduler).__name__ for x in configs)}"
        )
    return optimizers[0], configs[0] if configs else None


def _optimizer(
    made: torch.optim.Optimizer, step: LightningStep
) -> Callable[[NamedParameters], torch.optim.Optimizer]:
    """Return what makes an optimizer like this one for the parameters of one section."""
    names = {id(parameter): name for name, parameter in step.named_parameters()}
    settings = [
        {
            **{key: value for key, value in group.items() if key != "initial_lr"},
            "lr": group.get("initial_lr", group["lr"]),
            "params": {names[id(parameter)] for parameter in group["params"]},
        }
        for group in made.param_groups
    ]
    takes = inspect.signature(type(made)).parameters
    defaults = {key: value for key, value in made.defaults.items() if key in takes}

    def optimizer(named: NamedParameters) -> torch.optim.Optimizer:
        groups = [
            {**group, "params": [x for name, x in named if name in group["params"]]}
            for group in settings
        ]
        return type(made)([group for group in groups if group["params"]], **defaults)

    return optimizer


def _schedule(
    optimizer: torch.optim.Optimizer, config: Any, steps_per_epoch: int
) -> Callable[[int], float]:
    """Return the factor on the learning rate by step, as a scheduler sets it.

    Raises:
        UserCodeError: It changes more, or not all rates alike.
    """
    every = config.frequency * (steps_per_epoch if config.interval == "epoch" else 1)
    before = [_beside_rate(group) for group in optimizer.param_groups]
    factors = []
    for _ in range(job_steps() // every + 1):
        rates = {group["lr"] / group["initial_lr"] for group in optimizer.param_groups}
        changed = before != [_beside_rate(group) for group in optimizer.param_groups]
        if changed or max(rates) - min(rates) > 1e-12:
            raise UserCodeError(
                f"lightning.job: {type(config.scheduler).__name__} must give all groups one factor "
                "on their learning rates, and change nothing else; take LambdaLR or the like"
            )
        factors.append(float(max(rates)))
        optimizer.step()  # without gradients it does nothing; schedulers want it before theirs
        config.scheduler.step()
    return lambda step: factors[min(step // every, len(factors) - 1)]


def _beside_rate(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("lr", "params")}

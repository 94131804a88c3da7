"""Formats that weights are exported in: safetensors, torch's own, Hugging Face's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from spottrain.errors import UserCodeError
from spottrain.pipeline.model.entrypoint import user_code
from spottrain.pipeline.model.libraries import PEFT, TRANSFORMERS, base_name, modules_of
from spottrain.wire.model import ExportedWeights, ExportFormat

MAX_SHARD_BYTES = 5 * 10**9
"""Size above which Hugging Face's format is split into files with an index."""
_KIND = {"format": "pt"}
"""Metadata of safetensors files that transformers wants to see."""

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class StateDict:
    """What ``model.state_dict()`` returns, with the values of a checkpoint."""

    model: nn.Module
    """The user's model; its parameters are on the meta device."""
    tensors: Tensors
    """By every name: a tied parameter's value comes under all of its names."""
    frozen: frozenset[str]
    """Names of parameters that are not trained."""

    @classmethod
    def of(cls, model: nn.Module, values: Mapping[str, torch.Tensor]) -> StateDict:
        """Return the state dict of a model, buffers included.

        Args:
            model: From ``build_skeleton``.
            values: Of every parameter, and of buffers that forwards change, under the first
                of its names.

        Raises:
            UserCodeError: The state dict holds something else than parameters and
                buffers.
        """
        named = [*model.named_parameters(), *model.named_buffers()]
        names = {id(tensor): name for name, tensor in named if name in values}
        tensors: Tensors = {}
        frozen = set()
        with user_code("state_dict"):
            state = model.state_dict(keep_vars=True)
        for name, value in state.items():
            if (first := names.get(id(value))) is not None:
                is_parameter = isinstance(value, nn.Parameter)
                tensors[name] = values[first] if is_parameter else values[first].to(value.dtype)
                if is_parameter and not value.requires_grad:
                    frozen.add(name)
            elif isinstance(value, torch.Tensor) and not value.is_meta:
                tensors[name] = value.detach()
            else:
                raise UserCodeError(
                    f"state_dict: {name} is neither a parameter nor a buffer with a "
                    "value; keep it out of the state dict (register_buffer with "
                    "persistent=False, no get_extra_state)"
                )
        return cls(model, tensors, frozenset(frozen))

    def chosen(self, *, full: bool) -> Tensors:
        """Return all tensors, or, unless ``full``, those that are not frozen."""
        left_out = frozenset() if full else self.frozen
        return {k: v for k, v in self.tensors.items() if k not in left_out}


class Writer(Protocol):
    """Writes a state dict into an empty folder in one format."""

    def __call__(self, state: StateDict, folder: Path, /, *, full: bool) -> ExportedWeights:
        """Write it; ``full``: frozen parameters, too."""


def write_safetensors(state: StateDict, folder: Path, *, full: bool) -> ExportedWeights:
    """Write ``model.safetensors``; a tied parameter comes under each of its names.

    The format knows no shared memory, so that the file holds a copy for each name.
    """
    tensors, seen = {}, set()
    for name, tensor in state.chosen(full=full).items():
        value = tensor.contiguous()
        key = value.untyped_storage().data_ptr()
        tensors[name] = value.clone() if key in seen else value
        seen.add(key)
    save_file(tensors, folder / "model.safetensors", _KIND)
    load = (
        "from safetensors.torch import load_file",
        "load_file('{}/model.safetensors')",
    )
    return _of_state_dict(state, "model.safetensors", load, full=full)


def write_torch(state: StateDict, folder: Path, *, full: bool) -> ExportedWeights:
    """Write ``model.pt``, which ``torch.load`` reads with ``weights_only=True``."""
    torch.save(state.chosen(full=full), folder / "model.pt")
    load = ("import torch", "torch.load('{}/model.pt', weights_only=True)")
    return _of_state_dict(state, "model.pt", load, full=full)


def _of_state_dict(
    state: StateDict, file: str, load: tuple[str, str], *, full: bool
) -> ExportedWeights:
    left_out = tuple(sorted(set(state.tensors) - set(state.chosen(full=full))))
    strict = ", strict=False" if left_out else ""
    return ExportedWeights(
        files=(file,),
        left_out=left_out,
        base=base_name(state.model),
        load=(load[0], f"model.load_state_dict({load[1]}{strict})"),
    )


def write_hf(state: StateDict, folder: Path, *, full: bool) -> ExportedWeights:
    """Write what the model's own ``save_pretrained`` writes: transformers' or peft's.

    Raises:
        UserCodeError: The model is of neither library, or has parameters beside.
    """
    prefix, model = _pretrained(state)
    names = [name for name in state.tensors if name.startswith(prefix)]
    tensors = {name.removeprefix(prefix): state.tensors[name] for name in names}
    kind = type(model).__name__
    load = f"{kind}.from_pretrained('{{}}')"
    library, left_out = type(model).__module__, frozenset[str]()
    if library.startswith("transformers."):
        library = "transformers"
    if _is_adapter(model):
        if full:
            raise UserCodeError(
                "--full: adapters of peft are saved without their base; use --format "
                "safetensors or torch for everything"
            )
        library, left_out = "peft", state.frozen
        kind, load = "PeftModel", "PeftModel.from_pretrained(base, '{}')"
    try:
        with user_code("save_pretrained"):
            model.save_pretrained(folder, state_dict=tensors, max_shard_size=MAX_SHARD_BYTES)
    except UserCodeError as error:
        if isinstance(error.__cause__, OSError | SafetensorError):
            raise error.__cause__ from error  # the disk's fault
        raise
    files = (p.relative_to(folder) for p in folder.rglob("*") if p.is_file())
    return ExportedWeights(
        files=tuple(sorted(str(p) for p in files if not p.parts[0].startswith("."))),
        left_out=tuple(sorted(left_out)),
        base=base_name(model),
        load=(f"from {library} import {kind}", load),
    )


WRITERS: Mapping[ExportFormat, Writer] = {
    "safetensors": write_safetensors,
    "torch": write_torch,
    "hf": write_hf,
}


def _pretrained(state: StateDict) -> tuple[str, Any]:
    """Return the one model in the user's that can save itself, and its name as prefix."""
    found = [
        *modules_of(state.model, PEFT, "PeftModel"),
        *modules_of(state.model, TRANSFORMERS, "PreTrainedModel"),
    ]
    if not found:
        raise UserCodeError(
            f"format hf: {type(state.model).__name__} is not, and does not hold, a "
            "transformers model; use --format safetensors or torch"
        )
    name, model = found[0]
    prefix = f"{name}." if name else ""
    inside = {id(t) for one, t in state.tensors.items() if one.startswith(prefix)}
    if outside := [one for one, t in state.tensors.items() if id(t) not in inside]:
        raise UserCodeError(
            f"format hf: {outside[0]} is outside of {name}, the transformers model; use "
            "--format safetensors or torch"
        )
    return prefix, model


def _is_adapter(model: nn.Module) -> bool:
    return any(True for _ in modules_of(model, PEFT, "PeftModel"))

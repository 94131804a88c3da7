"""``python -m spottrain.pipeline.weights.export``: a checkpoint as others load it.

Runs in a child of the CLI, which never imports torch. Parameters come from the
checkpoint, section by section; names, ties and buffers from the user's model, built
without memory for its parameters. Written tensors are mapped from files, so that memory
holds no more than a section, and the disk the weights twice for a while.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from spottrain.errors import SpottrainError, UserCodeError
from spottrain.manifest import CheckpointError, Manifest, read_manifest
from spottrain.optim import EMA
from spottrain.pipeline.model.entrypoint import load_job
from spottrain.pipeline.model.inspect import answer
from spottrain.pipeline.model.job import TrainingJob
from spottrain.pipeline.model.sections import without_helpers
from spottrain.pipeline.model.skeleton import build_skeleton
from spottrain.pipeline.state.checkpoint import (
    STATE_SEPARATOR,
    load_section,
    state_name,
)
from spottrain.pipeline.weights.formats import WRITERS, StateDict
from spottrain.storage.open import open_store
from spottrain.storage.store import Store
from spottrain.wire.model import ExportedWeights, ExportFormat

_TEXTS = (".json", ".md", ".txt", ".yaml", ".yml")


def export(
    job: TrainingJob,
    store: Store,
    checkpoint: str,
    format: ExportFormat,
    folder: Path,
    *,
    full: bool = False,
    ema: bool = False,
    code: Path | None = None,
    origin: str = "",
) -> ExportedWeights:
    """Write the weights of a checkpoint into a folder.

    Args:
        job: The user's.
        store: Where its checkpoints are.
        checkpoint: Name of a complete one.
        format: To write.
        folder: Exists; written to.
        full: Frozen parameters of the trained model too, where by themselves only trained ones
            are written; those of helpers never are.
        ema: The moving average of the weights (``spottrain.optim.keep_ema``) instead.
        code: Where this process reads the user's code: a copy that goes away.
        origin: The folder that it is a copy of; empty: not on this machine.

    Raises:
        UserCodeError: The user's model cannot be built, or does not suit the format.
        CheckpointError: The checkpoint is damaged, or of another model.
        UnreachableError: The store cannot be asked.
        SpottrainError: The folder cannot be written to, e.g. as the disk is full.
    """
    manifest = read_manifest(store, checkpoint)
    model = build_skeleton(job.model)
    with (
        tempfile.TemporaryDirectory(dir=folder, prefix=".parts-") as parts,
        _writing(folder),
    ):
        values = gather_parameters(store, manifest, Path(parts), ema=ema)
        check_values(model, values, manifest.name)
        state = StateDict.of(without_helpers(model), values)
        written = WRITERS[format](state, folder, full=full)
        if code is not None:
            name_origin(folder, code, origin)
        return written


def name_origin(folder: Path, code: Path, origin: str) -> None:
    """Put the place that code was copied from where libraries have named the copy, as for
    the base of an adapter; without ``origin`` names are relative to the code.
    """
    copies = sorted({str(code), str(code.resolve())}, key=len, reverse=True)
    for path in (p for p in folder.rglob("*") if p.suffix in _TEXTS and p.is_file()):
        text = before = path.read_text(encoding="utf-8", errors="surrogateescape")
        for copy in copies:
            text = text.replace(f"{copy}/", f"{origin}/" if origin else "")
            text = text.replace(copy, origin or ".")
        if text != before:
            path.write_text(text, encoding="utf-8", errors="surrogateescape")


def gather_parameters(
    store: Store, manifest: Manifest, parts: Path, *, ema: bool = False
) -> dict[str, torch.Tensor]:
    """Return the parameters of a checkpoint, mapped from files in the folder ``parts``.

    A tied parameter comes once, from the first section that has it. With ``ema`` each is
    its moving average, if it has one, in its own type.

    Raises:
        UserCodeError: ``ema`` is asked for, and no parameter has one.
    """
    values: dict[str, torch.Tensor] = {}
    averaged = False
    for section in range(manifest.num_sections):
        tensors = load_section(store, manifest, section)
        found = {
            name: tensor
            for name, tensor in tensors.items()
            if STATE_SEPARATOR not in name and name not in values
        }
        averages = {
            name: tensors[key].to(tensor.dtype)
            for name, tensor in found.items()
            if ema and (key := state_name(name, EMA)) in tensors
        }
        averaged = averaged or bool(averages)
        found |= averages
        path = parts / f"section-{section}.safetensors"
        save_file(found, path)
        with safe_open(path, framework="pt") as file:
            values |= {name: file.get_tensor(name) for name in found}
    if ema and not averaged:
        raise UserCodeError(
            f"checkpoint {manifest.name} has no moving average of the weights: have the "
            "optimizer keep one, by spottrain.optim.keep_ema, or omit --ema"
        )
    return values


def check_values(model: nn.Module, values: Mapping[str, torch.Tensor], checkpoint: str) -> None:
    """Check that a checkpoint's parameters are those of the model, buffers that forwards
    change among them.

    Raises:
        CheckpointError: Names the first one that is not.
    """
    changed = ((name, b) for name, b in model.named_buffers() if name in values)
    wanted = {name: tuple(p.shape) for name, p in [*model.named_parameters(), *changed]}
    got = {name: tuple(value.shape) for name, value in values.items()}
    for name in [*wanted, *got]:
        if wanted.get(name) != got.get(name):
            raise CheckpointError(
                f"checkpoint {checkpoint} is of another model: {name} must be "
                f"{wanted.get(name, 'absent')}, got {got.get(name, 'nothing')}"
            )


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turn what a full disk or a forbidden folder raises into one line."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise SpottrainError(f"cannot write to {folder.parent}: {reason}") from error
    except RuntimeError as error:  # of torch.save
        if "PytorchStreamWriter" not in str(error):
            raise
        raise SpottrainError(f"cannot write to {folder.parent}: is the disk full?") from error


def main(arguments: list[str] | None = None) -> int:
    """Write the weights; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m spottrain.pipeline.weights.export")
    parser.add_argument("entrypoint", help="module:function")
    parser.add_argument("workdir", type=Path)
    parser.add_argument("store", help="folder or URL of the checkpoints")
    parser.add_argument("checkpoint", help="name of one of them")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--format", choices=sorted(WRITERS), required=True)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--ema", action="store_true")
    parser.add_argument("--origin", default="", help="what workdir is a copy of")
    chosen = parser.parse_args(arguments)

    def run() -> ExportedWeights:
        return export(
            load_job(chosen.entrypoint, chosen.workdir),
            open_store(chosen.store),
            chosen.checkpoint,
            chosen.format,
            chosen.folder,
            full=chosen.full,
            ema=chosen.ema,
            code=chosen.workdir,
            origin=chosen.origin,
        )

    return answer(run)


if __name__ == "__main__":
    sys.exit(main())

"""``spottrain export``: a job's weights, for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spottrain.errors import ConfigError
from spottrain.units import counted
from spottrain.varuna_manager.cli.console import (
    Output,
    OutputOption,
    say,
    show,
    show_json,
)
from spottrain.varuna_manager.format import size
from spottrain.varuna_manager.launch import weights
from spottrain.wire.model import ExportFormat


def export(
    name: Annotated[
        str,
        typer.Argument(help="Name of a job, or the URL of its checkpoints."),
    ],
    to: Annotated[Path, typer.Option(help="Folder to write; missing or empty.")],
    kind: Annotated[
        ExportFormat,
        typer.Option(
            "--format",
            help="safetensors or torch: a state dict. hf: what from_pretrained loads.",
        ),
    ] = "safetensors",
    step: Annotated[
        int | None,
        typer.Option(help="Step of the checkpoint; by default the newest."),
    ] = None,
    checkpoint: Annotated[str | None, typer.Option(help="Name of the checkpoint's folder.")] = None,
    best: Annotated[
        bool, typer.Option("--best", help="The best checkpoint by evaluation.")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Frozen parameters, too (as with LoRA).")
    ] = False,
    ema: Annotated[
        bool,
        typer.Option("--ema", help="The moving average of the weights (keep_ema)."),
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Write a checkpoint's weights as PyTorch or transformers load them.

    Of a model with frozen parameters, safetensors and torch hold what was trained.
    """
    if (step is not None) + (checkpoint is not None) + best > 1:
        raise ConfigError("--step, --checkpoint and --best name one each; give one")
    done = weights.export(
        name,
        to,
        kind,
        step=step,
        checkpoint=checkpoint,
        best=best,
        full=full,
        ema=ema,
    )
    if output is Output.JSON:
        show_json(_document(done))
    else:
        _show_table(done, kind)


def _show_table(done: weights.Export, kind: ExportFormat) -> None:
    files = done.weights.files
    what = files[0] if len(files) == 1 else f"{len(files)} files"
    show(f"step {done.checkpoint.step} of {done.job}: {what}, {size(done.num_bytes)}")
    show(*(f"    {line}" for line in done.load))
    if left_out := done.weights.left_out:
        base = f" of {done.weights.base}" if done.weights.base else ""
        hint = "" if kind == "hf" else "; --full writes them, too"
        say(f"{counted(len(left_out), 'frozen parameter')}{base} left out{hint}")


def _document(done: weights.Export) -> dict[str, object]:
    return {
        "job": done.job,
        "checkpoint": done.checkpoint.name,
        "step": done.checkpoint.step,
        "folder": str(done.folder),
        "files": done.weights.files,
        "bytes": done.num_bytes,
        "left_out": done.weights.left_out,
        "base": done.weights.base,
        "load": done.load,
    }

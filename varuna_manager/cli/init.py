"""``spottrain init`` and ``spottrain quickstart``: begin with an example that works."""

from __future__ import annotations

import shutil
from enum import StrEnum
from importlib.metadata import files
from pathlib import Path
from typing import Annotated

import typer

import spottrain
from spottrain.errors import ConfigError
from spottrain.varuna_manager.cli.console import say


class Starter(StrEnum):
    """What a job may begin from."""

    QUICKSTART = "quickstart"
    NANOGPT = "nanogpt"
    PRETRAIN = "pretrain"
    HF = "hf"
    VIT = "vit"


STARTERS = {
    Starter.QUICKSTART: ("quickstart.yaml", "byte_gpt.py"),
    Starter.NANOGPT: ("nanogpt.yaml", "nanogpt.py", "byte_gpt.py"),
    Starter.PRETRAIN: ("pretrain.yaml", "pretrain_aws.yaml", "pretrain.py"),
    Starter.HF: ("finetune_hf.yaml", "finetune_hf_aws.yaml", "finetune_hf.py"),
    Starter.VIT: ("vit.yaml", "vit_aws.yaml", "vit.py"),
}
"""Of ``examples``, the job file first."""
_NEEDED = {
    Starter.PRETRAIN: "make ../tokens of your text with pretrain.py",
    Starter.HF: "put a model into ../model and .txt files into ../text",
    Starter.VIT: "put images into ../images, a folder for each class",
}
"""What the job file's ``data`` leads to, from its folder."""


def init(
    folder: Annotated[Path, typer.Argument(help="Where to write it.")] = Path(),
    starter: Annotated[
        Starter,
        typer.Option(
            "--from",
            help="A small GPT on a simulated spot market, nanoGPT's training loop as a job, a "
            "GPT-2 on your own text (pretrain), a model of transformers fine-tuned (hf), or a "
            "vision transformer on your images.",
        ),
    ] = Starter.QUICKSTART,
) -> None:
    """Write a job file and its code to begin with; nothing is overwritten."""
    file = write(folder, starter)
    needed = f"{_NEEDED[starter]}, then " if starter in _NEEDED else ""
    names = ", ".join(STARTERS[starter])
    say(f"wrote {names} to {folder}; {needed}run it with 'spottrain launch {file}'")


def quickstart(
    folder: Annotated[Path, typer.Argument(help="Where to write it.")] = Path(
        "spottrain-quickstart"
    ),
) -> None:
    """Train a small GPT on this machine while its simulated VMs are killed."""
    file = folder / STARTERS[Starter.QUICKSTART][0]
    if not file.exists():
        write(folder, Starter.QUICKSTART)
    # Not above: it imports what only a launch needs.
    from spottrain.varuna_manager.cli.run import launch

    launch(file)


def write(folder: Path, starter: Starter) -> Path:
    """Write an example into a folder; return its job file.

    Raises:
        ConfigError: A file is there already, or cannot be written.
    """
    names = STARTERS[starter]
    if there := [name for name in names if (folder / name).exists()]:
        raise ConfigError(f"{folder / there[0]}: exists already; name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            shutil.copyfile(_examples() / name, folder / name)
    except OSError as error:
        raise ConfigError(f"{error.filename}: cannot be written: {error.strerror}") from error
    return folder / names[0]


def _examples() -> Path:
    """Return the folder of the examples: in a checkout, or as they were installed."""
    checkout = Path(spottrain.__file__).resolve().parents[2] / "examples"
    if checkout.is_dir():
        return checkout
    installed = (file for file in files("spottrain") or () if file.name == "quickstart.yaml")
    return Path(str(next(installed).locate())).parent

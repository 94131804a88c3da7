"""``spottrain verify``: whether training through losses is right on what the user has."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from spottrain.errors import ConfigError, SpottrainError
from spottrain.files import write_whole
from spottrain.varuna_manager.cli.console import say, show
from spottrain.varuna_manager.cli.init import Starter, write
from spottrain.varuna_manager.verify.trial import STEPS, WARM_UP, Trial, run
from spottrain.varuna_manager.verify.verdict import document, page


class WrongError(SpottrainError):
    """Something that was verified is not right."""


def verify(
    gpu: Annotated[bool, typer.Option("--gpu", help="Train on this machine's GPUs.")] = False,
    cloud: Annotated[
        str | None, typer.Option(help="Rent from aws, azure or gcp; needs --max-usd.")
    ] = None,
    max_usd: Annotated[
        float | None, typer.Option(min=0.01, help="Most dollars to spend in a cloud.")
    ] = None,
    checkpoints: Annotated[
        str | None, typer.Option(help="With --cloud: URL for checkpoints, such as s3://bucket/x.")
    ] = None,
    steps: Annotated[int, typer.Option(min=2 * WARM_UP, help="Mini-batches of a job.")] = STEPS,
    to: Annotated[Path, typer.Option(help="Where to write the results.")] = Path(
        "spottrain-verify"
    ),
) -> None:
    """Train a small GPT while its VMs are taken away; check weights, bill and speed.

    Takes about ten minutes. Writes TO.json, and TO.md to paste into an issue.
    """
    if cloud is not None and (max_usd is None or checkpoints is None):
        raise ConfigError(
            "--cloud rents machines: name --max-usd, and --checkpoints, which they can reach"
        )
    if cloud is None and (max_usd is not None or checkpoints is not None):
        raise ConfigError("--max-usd and --checkpoints are for --cloud; leave them out")
    if gpu and cloud:
        raise ConfigError("--gpu is for this machine; leave it out, --cloud rents GPUs")
    if not to.absolute().parent.is_dir():
        raise ConfigError(f"--to: {to.parent}: no such folder; make it, or name another")
    with tempfile.TemporaryDirectory(prefix="spottrain-verify-") as folder:
        file = write(Path(folder), Starter.QUICKSTART)
        trial = Trial(
            file=file,
            gpu=gpu,
            cloud=cloud or "",
            max_usd=max_usd or 5.0,
            checkpoints=checkpoints or "",
            steps=steps,
        )
        verdict = run(trial, say)
    text = page(verdict)
    try:
        write_whole(to.with_suffix(".json"), json.dumps(document(verdict), indent=2) + "\n")
        write_whole(to.with_suffix(".md"), text)
    except OSError as error:
        show(text)
        raise ConfigError(f"{to}: cannot be written: {error.strerror}") from error
    show(text)
    say(f"wrote {to.with_suffix('.json')} and {to.with_suffix('.md')}")
    if wrong := [check.name for check in verdict.checks if not check.passed]:
        raise WrongError(f"verify: not right: {', '.join(wrong)}; see {to.with_suffix('.md')}")

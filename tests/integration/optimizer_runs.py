"""What becomes of an optimizer: inspected, then trained on two shapes, bits compared."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tests.integration.fleet import Fleet, Zygote, make_plan
from tests.integration.struck_runs import NUM_SECTIONS, job_spec

from spottrain.errors import UserCodeError
from spottrain.pipeline.model.checks.trial import try_optimizer
from spottrain.pipeline.model.entrypoint import load_job
from spottrain.pipeline.model.tracer import trace
from spottrain.wire.messages import JobSpec

HERE = Path(__file__).parent
STEPS, STOP = 6, 3


@dataclass(frozen=True)
class Outcome:
    """Of one optimizer."""

    kind: Literal["same bits", "other bits", "refused", "skipped"]
    reason: str = ""
    kept: str = ""
    """Values of parameter groups that are committed, in the first section."""


def outcome_of(name: str, zygote: Zygote, folder: Path) -> Outcome:
    """Inspect a row; train it at 1x1, and at 4x1 with a stop and resume between."""
    job = load_job(f"optimizer_jobs:{name}", HERE)
    try:
        try_optimizer(job, trace(job))
    except UserCodeError as error:
        if isinstance(error.__cause__, ModuleNotFoundError):
            return Outcome("skipped", str(error.__cause__))
        return Outcome("refused", str(error))
    weights = {}
    for shape in ((1, 1), (4, 1)):
        here = folder / f"{shape[0]}x{shape[1]}"
        here.mkdir(parents=True)
        spec = replace(job_spec(here, steps=STEPS), entrypoint=f"optimizer_jobs:{name}")
        checkpoint = ""
        if shape != (1, 1):
            _, checkpoint = _train(replace(spec, steps=STOP), shape, "", zygote)
        weights[shape], _ = _train(spec, shape, checkpoint, zygote)
    one, other = weights.values()
    kept = one.get("0///param_groups", b"").decode()
    return Outcome("same bits" if one == other else "other bits", kept=kept)


def _train(
    spec: JobSpec, shape: tuple[int, int], checkpoint: str, zygote: Zygote
) -> tuple[dict[str, bytes], str]:
    """Train on machines of its own; return the weights and the last checkpoint."""
    names = "abcd"[: shape[0] * shape[1]]
    log = Path(spec.checkpoint_path).parent / "log"
    with Fleet(spec, names, log, zygote) as fleet:
        fleet.ready()
        plan = make_plan(spec, *shape, names, NUM_SECTIONS)
        weights = fleet.train(lambda _: plan, checkpoint or fleet.initialise())
        return weights, fleet.newest_checkpoint()

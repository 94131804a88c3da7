"""What becomes of a model: inspected, cut into stages, trained with a kill, exported."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from tests.chains import batch_of, run_chain, same_bits, tensors_of
from tests.families import FAMILIES
from tests.faults import Action, environment_of
from tests.integration.family_jobs import entrypoint
from tests.integration.fleet import Fleet, Zygote, make_plan
from tests.integration.struck_runs import job_spec

from spottrain.errors import UserCodeError
from spottrain.pipeline.base.faults import Hook
from spottrain.pipeline.model.checks.rehearsal import rehearse
from spottrain.pipeline.model.checks.repetition import try_loss
from spottrain.pipeline.model.checks.trial import try_optimizer
from spottrain.pipeline.model.inspect import model_facts
from spottrain.pipeline.model.job import TrainingJob
from spottrain.pipeline.model.sections import ModelLayout, without_helpers
from spottrain.pipeline.model.skeleton import materialise
from spottrain.pipeline.model.tracer import trace
from spottrain.pipeline.weights.export import export
from spottrain.storage.open import open_store
from spottrain.wire.plan import Plan

HERE = Path(__file__).parent
STEPS, STRUCK = 4, 2


@dataclass(frozen=True)
class Outcome:
    """Of one model."""

    inspect_s: float
    """Time of the CPU."""
    sections: int = 0
    refused: str = ""
    uncut: str = ""
    """Why it is one section."""
    stages: str = ""
    """Chains of stages against one stage: loss and all gradients."""
    trained: str = ""
    """At 2x1, of one section 1x2, with a killed worker against 1x1."""
    exported: str = ""

    @property
    def is_wrong(self) -> bool:
        """Whether a promise is broken."""
        good = ("", "same bits", "loads")
        return not {self.stages, self.trained, self.exported} <= set(good)


def outcome_of(name: str, zygote: Zygote | None, folder: Path) -> Outcome:
    """Go through a family; it is trained only with a ``zygote``.

    Raises:
        ImportError: A library is not installed.
    """
    job = FAMILIES[name].job()
    begin_s = time.process_time()
    try:
        layout = trace(job)
        rehearse(job, layout)
        model_facts(job, layout)
        try_optimizer(job, layout)
        carried = try_loss(job, layout)
    except UserCodeError as error:
        if isinstance(error.__cause__, ImportError):
            raise error.__cause__ from error
        return Outcome(time.process_time() - begin_s, refused=str(error))
    found = Outcome(
        time.process_time() - begin_s,
        refused=f"depends on {carried}" if carried else "",
        uncut=layout.uncut,
        sections=layout.num_sections,
        stages=_compare_stages(job, layout),
    )
    if zygote is None:
        return found
    weights = []
    for depth, width in ((1, 1), (2, 1) if layout.num_sections > 1 else (1, 2)):
        here = folder / f"{depth}x{width}"
        here.mkdir(parents=True)
        checkpoint, trained = _train(name, here, (depth, width), layout.num_sections, zygote)
        weights.append(trained)
    return replace(
        found,
        trained="same bits" if weights[0] == weights[1] else "OTHER BITS",
        exported=_export(job, here / "checkpoints", checkpoint, folder),
    )


def _compare_stages(job: TrainingJob, layout: ModelLayout) -> str:
    number, tensors = layout.num_sections, tensors_of(job, layout)
    batch = batch_of(job, 3)
    with torch.random.fork_rng():
        one = run_chain(job, layout, [0, number], batch, tensors)
        for cuts in ({1}, {number - 1}, set(range(1, number))):
            bounds = sorted(cuts | {0, number})
            got = run_chain(job, layout, bounds, batch, tensors)
            equal = (same_bits(got[2][key], one[2][key]) for key in one[2])
            if not (same_bits(got[0], one[0]) and all(equal)):
                stages = [range(a, b) for a, b in pairwise(bounds)]
                return f"OTHER BITS in stages {stages}"
    return "same bits"


def _train(
    name: str, folder: Path, shape: tuple[int, int], num_sections: int, zygote: Zygote
) -> tuple[str, dict[str, bytes]]:
    """Train on depth x width workers, with the last one of several killed."""
    workers = shape[0] * shape[1]
    spec = job_spec(folder, steps=STEPS, entrypoint=entrypoint(name))
    mark = folder / "mark"
    blow = {
        "hook": Hook.UPDATED,
        "rank": workers - 1,
        "action": Action.KILL_WORKER,
        "step": STRUCK,
        "mark": str(mark),
    }
    environment = environment_of([blow]) if workers > 1 else {}

    def choose(machines: Sequence[str]) -> Plan:
        return make_plan(spec, *shape, machines, num_sections)

    with Fleet(spec, "ab"[:workers], folder / "log", zygote, environment) as fleet:
        fleet.ready()
        weights = fleet.train(choose, fleet.initialise())
        assert workers == 1 or mark.exists(), "no worker was killed"
        return fleet.newest_checkpoint(), weights


def _export(job: TrainingJob, store: Path, checkpoint: str, folder: Path) -> str:
    """Return whether a new model loads what is exported, all of it and no more."""
    written = export(job, open_store(store), checkpoint, "torch", folder, full=True)
    state = torch.load(folder / written.files[0], weights_only=True)
    model = without_helpers(materialise(job, seed=9))
    model.load_state_dict(state, strict=True)
    equal = all(torch.equal(v, model.state_dict()[k]) for k, v in state.items())
    return "loads" if equal else "OTHER VALUES"

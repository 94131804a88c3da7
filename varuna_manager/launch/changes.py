"""Changes of a job before it goes on: other code, another number of steps.

What the weights depend on must stay: the new code is compared with the packed one, by
name, before anything changes. Nothing may run meanwhile: machines have the old code.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from spottrain.codec import decode
from spottrain.errors import ConfigError, UserCodeError
from spottrain.manifest import hash_file
from spottrain.pickled import ENTRYPOINT, FILE
from spottrain.units import counted
from spottrain.varuna_manager.config.job import JobConfig
from spottrain.varuna_manager.config.ssh import check_secrets
from spottrain.varuna_manager.core.model.events import (
    CodeUpdated,
    Event,
    StepsChanged,
)
from spottrain.varuna_manager.core.model.records import VmPhase
from spottrain.varuna_manager.core.model.state import JobPhase, State
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.follow import read_state
from spottrain.varuna_manager.jobs.journal import Journal
from spottrain.varuna_manager.jobs.profiles import given_profile
from spottrain.varuna_manager.launch import data
from spottrain.varuna_manager.launch.control import manager_lock
from spottrain.varuna_manager.launch.inspect import (
    INSPECTOR,
    inspect_model,
    kept_layout,
    run_tool,
)
from spottrain.varuna_manager.launch.machines import live_vms, open_provider
from spottrain.varuna_manager.launch.workdir import (
    check_entrypoint,
    differing,
    pack,
    survey,
    unpack,
)
from spottrain.wire.model import CodeDetails, Detail, ModelFacts, Profile

_SHOWN = 3
"""Names in a line, of each kind of difference."""
_BY = "command line"


@dataclass(frozen=True, slots=True)
class Changes:
    """What a person wants to be different from now on."""

    code: bool = False
    """Pack the workdir again."""
    workdir: Path | None = None
    """Where it is now; ``None``: where it was."""
    steps: int | None = None
    """Of the whole job."""

    def __bool__(self) -> bool:
        """Return whether anything changes."""
        return self.code or self.steps is not None


def check_steps(state: State, steps: int | None) -> None:
    """Check that a job can go on with a number of steps; ``None``: those that it has.

    Raises:
        ConfigError: They are done, or it has stopped early.
    """
    done, wanted = state.history.progress.step, state.job.spec.steps
    if steps is not None and steps < done:
        raise ConfigError(
            f"--steps: {counted(done, 'step is', 'steps are')} done already: got {steps}; give at least {done}"
        )
    if state.outcome is None or state.outcome.kind != "succeeded":
        return
    name = state.job.spec.name
    if done < wanted:
        raise ConfigError(
            f"job {name} has ended: {state.outcome.reason}; to train its weights on "
            f"launch a new job with init_from: {name}"
        )
    if steps is None or steps <= wanted:
        raise ConfigError(
            f"job {name} has ended, all {wanted} steps are done; --steps with more of "
            "them trains on"
        )


def change(job: JobDir, changes: Changes, say: Callable[[str], None]) -> None:
    """Change a job that nothing runs of, all of it or nothing.

    Args:
        say: Called with what is different from now on.

    Raises:
        ConfigError: The job runs, has ended, or its weights do not fit the new code.
        UserCodeError: The new code raises.
        CloudError: It is unknown whether machines run.
    """
    name, state = job.name, read_state(job)
    if job.is_managed():
        raise ConfigError(
            f"job {name} is running; stop it with 'spottrain stop {name}', then resume it"
        )
    if job.is_down:
        raise ConfigError(f"job {name} has ended; launch a new job with init_from: {name}")
    check_steps(state, changes.steps)
    _check_nothing_runs(job, state)
    before = job.config().model_copy(update={"steps": state.job.spec.steps})
    workdir, steps = _workdir(before, changes), changes.steps or before.steps
    after = before.model_copy(update={"workdir": str(workdir), "steps": steps})
    check_secrets(before.secrets)
    os.environ.update(before.env)
    data.ensure_data(before)
    with tempfile.TemporaryDirectory(dir=job.path, prefix=".update-") as scratch:
        package, old = Path(scratch, job.workdir.name), Path(scratch, "old")
        unpack(job.workdir, old)
        new = workdir if changes.code else old
        differences = _compare(job, (before, old), (after, new), state.history.progress.step)
        # A schedule is judged by the whole job, not by a few steps of it.
        whole = after.model_copy(update={"steps": max(steps, before.steps)})
        facts = inspect_model(whole) if changes.code else state.job.facts
        events: list[Event] = []
        if changes.code:
            sent = survey(workdir, after.checkpoint.path)
            check_entrypoint(sent, after.entrypoint)
            for line in sent.lines():
                say(line)
            pack(workdir, list(sent.sizes), package, kept_layout(whole))
            files = differing(job.workdir, package)
            differences.insert(0, _shown("code", files or ["as it was"]))
            events.append(_updated(package, facts, differences, given_profile(after, facts)))
        if steps != before.steps:
            events.append(StepsChanged(at_s=time.time(), by=_BY, steps=steps))
            done = state.history.progress.step
            differences.append(
                f"{counted(steps, 'step')} instead of {before.steps}, {done} are done"
            )
        with manager_lock(job), closing(Journal(job.journal)) as journal:
            if changes.code:
                package.replace(job.workdir)
            job.write(after, facts)
            if events:
                journal.record(*events)
    for line in differences:
        say(line)


def _updated(
    package: Path, facts: ModelFacts, differences: list[str], profile: Profile | None
) -> CodeUpdated:
    return CodeUpdated(
        at_s=time.time(),
        by=_BY,
        sha256=hash_file(package),
        facts=facts,
        changes=tuple(differences),
        profile=profile,
    )


def _check_nothing_runs(job: JobDir, state: State) -> None:
    """Check that no machine has the old code, and perhaps newer weights than are saved."""
    training = [v for v in state.fleet.vms.values() if v.phase is not VmPhase.RETURNING]
    if state.phase is JobPhase.ENDED or not (training or state.launches.intents):
        return
    provider = open_provider(job)
    live = live_vms(provider, job)
    provider.close()
    if live:
        raise ConfigError(
            f"job {job.name}: {len(live)} of its machines may still train with what it "
            f"had; 'spottrain resume {job.name}' without changes, then 'spottrain stop "
            f"{job.name}' saves what they hold"
        )


def _workdir(config: JobConfig, changes: Changes) -> Path:
    folder = (changes.workdir or Path(config.workdir)).absolute()
    if changes.code and config.entrypoint == ENTRYPOINT and not (folder / FILE).is_file():
        raise ConfigError(
            f"job {config.name} was launched from a TrainingJob in Python: "
            f"spottrain.job({config.name!r}).resume(TrainingJob(...)) sends a new one"
        )
    if changes.code and not folder.is_dir():
        raise ConfigError(
            f"workdir: {folder} is not a folder on this machine; name it with --workdir"
        )
    return folder


def _compare(
    job: JobDir,
    before: tuple[JobConfig, Path],
    after: tuple[JobConfig, Path],
    step: int,
) -> list[str]:
    """Return what is different in lines, if the job's weights fit.

    Raises:
        ConfigError: They do not, or that is unknown.
        UserCodeError: The new code raises.
    """

    def details(config: JobConfig, workdir: Path) -> CodeDetails:
        text = run_tool(INSPECTOR, config, "--details-at", str(step), workdir=str(workdir))
        found: CodeDetails = decode(CodeDetails, text)
        return found

    with ThreadPoolExecutor(2) as threads:
        answers = [threads.submit(details, *one) for one in (before, after)]
        new = answers[1].result()
        try:
            old = answers[0].result()
        except UserCodeError as error:
            if new.fingerprint == job.facts().fingerprint:
                return [f"the code so far cannot be compared: {error}"]
            raise _misfit(job, ["another model, optimizer or batch than so far"]) from error
    if misfits := list(unfitting(old, new)):
        raise _misfit(job, misfits)
    return list(remarks(old, new, step))


def _misfit(job: JobDir, what: list[str]) -> ConfigError:
    return ConfigError(
        f"job {job.name}: its weights do not fit the new code: {'; '.join(what)}; "
        f"change that back, or launch a new job with init_from: {job.name}"
    )


def unfitting(old: CodeDetails, new: CodeDetails) -> Iterator[str]:
    """Yield why weights of the old code do not fit the new, a line for each kind."""
    yield from _named("parameters", old.parameters, new.parameters)
    if old.sections != new.sections and old.parameters == new.parameters:
        counts = len(old.sections), len(new.sections)
        yield f"the model is cut into other sections ({counts[0]}, now {counts[1]})"
    yield from _named("optimizer state", old.optimizer_state, new.optimizer_state)


def remarks(old: CodeDetails, new: CodeDetails, step: int) -> Iterator[str]:
    """Yield what is different and may be, a line for each kind.

    Args:
        old: The code so far.
        new: That from now on.
        step: The mini-batch whose learning rates are compared, from 0.
    """
    pairs: tuple[tuple[str, object, object], ...] = (
        ("optimizer", old.optimizer, new.optimizer),
        ("examples", old.dataset_len, new.dataset_len),
        ("tensors of an example", old.batch, new.batch),
        ("held-out sets", old.heldout_sets, new.heldout_sets),
        ("metrics", old.metrics, new.metrics),
        (
            f"learning rate in mini-batch {step + 1}",
            old.learning_rate,
            new.learning_rate,
        ),
    )
    settings = _texts(old.optimizer_settings), _texts(new.optimizer_settings)
    for key in sorted({*settings[0], *settings[1]}):
        pair = (settings[0].get(key, "none"), settings[1].get(key, "none"))
        pairs += ((f"optimizer's {key}", *pair),)
    for what, before, after in pairs:
        if before != after:
            yield f"{what}: {_text(before)}, now {_text(after)}"


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _texts(details: tuple[Detail, ...]) -> dict[str, str]:
    return {detail.name: detail.text for detail in details}


def _named(what: str, before: tuple[Detail, ...], after: tuple[Detail, ...]) -> Iterator[str]:
    old, new = _texts(before), _texts(after)
    missing = [name for name in old if name not in new]
    added = [name for name in new if name not in old]
    other = [
        f"{name} was {old[name]}, is {new[name]}"
        for name in old
        if name in new and old[name] != new[name]
    ]
    for kind, names in (("missing", missing), ("new", added), ("other", other)):
        if names:
            yield _shown(f"{kind} {what}", names)


def _shown(kind: str, names: list[str]) -> str:
    more = len(names) - _SHOWN
    return f"{kind}: {', '.join(names[:_SHOWN])}" + (f" and {more} more" if more > 0 else "")

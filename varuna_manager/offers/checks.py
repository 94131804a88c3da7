"""The checks before a launch: one list for launch, dry run, plan, pools and doctor."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from spottrain.cloud.port.provider import Offer
from spottrain.errors import ConfigError
from spottrain.pricing.prices.catalogue import catalogue
from spottrain.storage.store import is_url
from spottrain.suggest import did_you_mean
from spottrain.units import counted
from spottrain.varuna_manager.config.clouds import AnyCloud
from spottrain.varuna_manager.config.job import JobConfig
from spottrain.varuna_manager.config.notify import check_notify
from spottrain.varuna_manager.config.ssh import check_secrets
from spottrain.varuna_manager.config.track import check_trackers
from spottrain.varuna_manager.launch import data, inspect, machines, submit
from spottrain.varuna_manager.launch.workdir import check_entrypoint, survey
from spottrain.varuna_manager.offers.feasibility import check_memory
from spottrain.varuna_manager.offers.preview import check_capacity
from spottrain.varuna_manager.reporting.text import model_lines
from spottrain.wire.model import ModelFacts

Say = Callable[[str], None]
Purpose = Literal["launch", "dry run", "plan"]
"""What a job is checked for. A ``launch`` waits for machines, the others do not; a ``plan``
asks no cloud's account and no bucket, and the job may be running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Something that a job needs, which can be found out without a cloud or its model."""

    what: str
    run: Callable[[], list[str]]
    """Returns what is found, for people.

    Raises:
        SpottrainError: It is missing.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What is known of a job that has passed all checks."""

    config: JobConfig
    """Of a launch: with the commits of what it fetches from the Hugging Face Hub."""
    facts: ModelFacts
    offers: Sequence[Offer] | None
    """Of its clouds; None: the job file names machines, or clouds were not asked."""
    data_bytes: Mapping[str, float]
    """What each VM fetches, by the cloud that holds it."""


def checks_here(
    config: JobConfig,
    purpose: Purpose = "launch",
    *,
    on_vm: bool = False,
    adopt: bool = False,
) -> Iterator[Check]:
    """Yield the checks that need neither a cloud nor the model; the first that fails ends
    a launch.

    From the check of the secrets on, the process has the environment of the job.

    Args:
        purpose: What for.
        on_vm: Its manager will run on a VM.
        adopt: It takes over the checkpoints of another job.
    """
    if purpose != "plan":
        yield Check(what="name", run=lambda: _name(config))
    yield Check(what="trackers", run=lambda: _trackers(config, on_vm))
    yield Check(what="notices", run=lambda: _notices(config, on_vm))
    yield Check(what="manager", run=lambda: _manager(config, on_vm))
    yield Check(what="budget", run=lambda: _budget(config))
    if purpose != "launch" and not config.clouds:
        yield Check(what="capacity", run=lambda: _capacity(config))
    yield Check(what="secrets", run=lambda: _secrets(config))
    os.environ.update(config.env)
    if purpose != "plan" or not is_url(config.checkpoint.path or ""):
        yield Check(what="checkpoints", run=lambda: _checkpoints(config, purpose, adopt))
    yield Check(what="workdir", run=lambda: _workdir(config))


def check_here(
    config: JobConfig,
    say: Say,
    purpose: Purpose = "launch",
    *,
    on_vm: bool = False,
    adopt: bool = False,
) -> None:
    """Run ``checks_here``; show what is sent to VMs.

    Raises:
        SpottrainError: Something is missing; the first of all.
    """
    for check in checks_here(config, purpose, on_vm=on_vm, adopt=adopt):
        found = check.run()
        if check.what == "workdir":
            for line in found:
                say(line)


def check_all(
    config: JobConfig,
    say: Say,
    purpose: Purpose = "launch",
    *,
    on_vm: bool = False,
    adopt: bool = False,
) -> Checked:
    """Check a job in the order in which it is cheapest to fail.

    Args:
        say: Called with lines for people.
        purpose: What for.
        on_vm: Its manager will run on a VM.
        adopt: It takes over the checkpoints of another job.

    Raises:
        SpottrainError: It cannot be launched; the first thing that is missing.
    """
    for line in unknown_regions(config.clouds):
        say(line)
    if config.clouds and (config.budget.max_usd or config.budget.max_gpu_hours) is None:
        say("warning: no budget: nothing limits what the job costs; set budget.max_usd")
    check_here(config, say, purpose, on_vm=on_vm, adopt=adopt)
    if purpose == "launch":
        config = data.pinned(config)
    data_bytes = data.prepare_data(config, say)
    offers: Sequence[Offer] | None = None
    asks = purpose != "plan" or not config.clouds
    if asks:
        lines, offers = machines.check_machines(config, on_vm=on_vm)
        for line in lines:
            say(line)
    say(f"inspecting {config.entrypoint}")
    facts = inspect.inspect_model(config)
    for line in model_lines(facts, config.microbatch_size):
        say(line)
    check_callbacks(facts, on_vm=on_vm and bool(config.clouds))
    if asks:
        check_memory(config, facts, offers)
    return Checked(config=config, facts=facts, offers=offers, data_bytes=data_bytes)


def check_callbacks(facts: ModelFacts, *, on_vm: bool) -> None:
    """Check that what a job asks to be called can be, where its manager will run.

    Raises:
        ConfigError: On a VM of its own.
    """
    if facts.callbacks and on_vm:
        raise ConfigError(
            f"callbacks: with --manager-vm {', '.join(facts.callbacks)} would be called on the "
            "manager's VM, which has no torch; remove them, or let the manager run here"
        )


def unknown_regions(clouds: Sequence[AnyCloud]) -> Iterator[str]:
    """Yield a warning for each region that the catalogue does not know, though it knows one
    of nearly the same name. It may be newer than the catalogue, so it is not refused."""
    for cloud in clouds:
        known = catalogue().regions(cloud.cloud)
        for region in cloud.regions:
            if region not in known and (hint := did_you_mean(region, known, cutoff=0.8)):
                yield f"warning: {cloud.cloud}.regions: got {region}, which is not known; {hint}"


def _name(config: JobConfig) -> list[str]:
    submit.check_name(config.name)
    return [f"{config.name} is free"]


def _trackers(config: JobConfig, on_vm: bool) -> list[str]:
    check_trackers(config.track, config.secrets, on_vm=on_vm)
    return [", ".join(config.track.asked) or "none"]


def _notices(config: JobConfig, on_vm: bool) -> list[str]:
    check_notify(config.notify, config.secrets, on_vm=on_vm)
    return ["can be sent" if config.notify.asked else "to nobody"]


def _manager(config: JobConfig, on_vm: bool) -> list[str]:
    submit.check_manager(config, on_vm=on_vm)
    return ["on a VM of its own" if on_vm else "on this machine"]


def _budget(config: JobConfig) -> list[str]:
    submit.check_budget(config)
    caps = {"US dollars": config.budget.max_usd, "GPU-hours": config.budget.max_gpu_hours}
    limits = [f"{cap:g} {unit}" for unit, cap in caps.items() if cap is not None]
    return [f"at most {' and '.join(limits)}" if limits else "without limit"]


def _capacity(config: JobConfig) -> list[str]:
    check_capacity(config)
    return [f"at least {counted(config.resources.min_vms, 'VM')}"]


def _secrets(config: JobConfig) -> list[str]:
    check_secrets(config.secrets)
    return [f"{len(config.secrets)} named, all are set"]


def _checkpoints(config: JobConfig, purpose: Purpose, adopt: bool) -> list[str]:
    # The job of a plan may be running, and then owns the place.
    submit.check_store(config, is_new=purpose != "plan", adopt=adopt)
    place = config.checkpoint.path or "in the job's own state folder"
    if config.clouds and not is_url(place):
        place += ": a folder, which every VM must see too, such as a network file system"
    return [place]


def _workdir(config: JobConfig) -> list[str]:
    sent = survey(Path(config.workdir), config.checkpoint.path)
    check_entrypoint(sent, config.entrypoint)
    return list(sent.lines())

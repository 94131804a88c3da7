"""``spottrain calibrate``: measure a model here, show a profile, or derive one."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from spottrain.errors import ConfigError
from spottrain.morphing.errors import PlanError
from spottrain.morphing.plan.profiles import derive_profile, is_noisy, remark
from spottrain.varuna_manager.cli.console import (
    Output,
    OutputOption,
    console,
    say,
    show,
    show_json,
)
from spottrain.varuna_manager.config.job import load_config
from spottrain.varuna_manager.core.model.state import spent_usd
from spottrain.varuna_manager.format import dollars, duration, size
from spottrain.varuna_manager.jobs import profiles
from spottrain.varuna_manager.jobs.follow import read_state
from spottrain.varuna_manager.launch import data, inspect, machines, submit
from spottrain.wire.messages import CalibrationProgress
from spottrain.wire.model import LinkProfile, MicrobatchProfile, Profile, RingProfile

FileArgument = Annotated[
    Path | None,
    typer.Argument(help="Job file; with --show or --derive, a profile (JSON)."),
]
AgainOption = Annotated[
    bool, typer.Option("--again", help="Measure even if a stored profile exists.")
]
ShowOption = Annotated[
    bool, typer.Option("--show", help="Show a profile; by default the newest one kept.")
]
DeriveOption = Annotated[
    bool,
    typer.Option("--derive", help="Derive a profile for a device you do not have."),
]
DeviceOption = Annotated[str | None, typer.Option(help="With --derive: name of that device.")]
RatioOption = Annotated[
    float | None,
    typer.Option(help="With --derive: its speed relative to the measured device."),
]
OnOption = Annotated[
    str | None,
    typer.Option(
        help="Measure on one rented VM of this type: a GPU such as H100, an instance type, "
        "or a type of the job file's own machines.",
    ),
]
MaxUsdOption = Annotated[
    float | None,
    typer.Option(min=0.0, help="With --on: most dollars to spend; by default an hour of that VM."),
]
YesOption = Annotated[
    bool,
    typer.Option("--yes", "-y", help="With --on: rent it; otherwise only the cost is shown."),
]
WriteOption = Annotated[
    Path | None, typer.Option("--write", help="Also write the profile to this file.")
]


def calibrate(
    file: FileArgument = None,
    again: AgainOption = False,
    show_profile: ShowOption = False,
    derive: DeriveOption = False,
    device: DeviceOption = None,
    ratio: RatioOption = None,
    on: OnOption = None,
    max_usd: MaxUsdOption = None,
    yes: YesOption = False,
    write: WriteOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Measure a job's model on this machine: sections, links, all-reduces, optimizer.

    A launch measures by itself on the machines it rents and reuses kept profiles;
    'plan' reuses what was measured here. With --on, one VM of a type is rented for some
    minutes: what was measured there takes the place of that type's estimate.
    """
    if on is None and (max_usd is not None or yes):
        raise ConfigError("--max-usd and --yes need --on; add it")
    if max_usd == 0:
        raise ConfigError(
            "--max-usd must be more than 0: got 0; without it, nothing costs "
            "more than an hour of that VM"
        )
    if derive:
        profile = _derived(file, device, ratio)
    elif device is not None or ratio is not None:
        raise ConfigError("--device and --ratio need --derive; add it")
    elif show_profile:
        profile = profiles.read_profile(file or _newest())
    elif file is None:
        raise ConfigError("calibrate needs a job file; name one, or use --show")
    elif on is not None:
        profile = _measured_on(file, on, again, max_usd, yes)
    else:
        profile = _measured(file, again)
    if write is not None:
        profiles.write_profile(write, profile)
        say(f"profile written to {write}")
    if output is Output.JSON:
        show_json(dataclasses.asdict(profile))
    else:
        show(*profile_parts(profile))


def _measured(file: Path, again: bool) -> Profile:
    config = load_config(file)
    began_s = time.monotonic()
    with _progress() as on_progress:
        profile = inspect.calibrate(config, on_progress, again=again)
    if on_progress.called:
        again_words = "; --again measures anew" * is_noisy(profile)
        took = duration(time.monotonic() - began_s)
        say(f"measured in {took}, profile kept{remark(profile)}{again_words}")
    elif config.profile is not None:
        say(f"profile taken from {config.profile}; --again measures here")
    else:
        age = duration(time.time() - profiles.path_of(profile).stat().st_mtime)
        say(f"measured here {age} ago{remark(profile)}; --again measures again")
    return profile


def _measured_on(file: Path, on: str, again: bool, max_usd: float | None, yes: bool) -> Profile:
    """Return the profile of one VM of a type, rented for it unless one is kept."""
    # Not above: they import what measuring here does not need.
    from spottrain.varuna_manager.cli.watch import Watcher
    from spottrain.varuna_manager.offers import probe as probes
    from spottrain.varuna_manager.offers.checks import check_here

    config = load_config(file)
    probe = probes.probe_job(config, on)
    check_here(probe, say)
    facts = inspect.inspect_model(config)
    known = None if again else probes.measured_before(config, probe, facts)
    if known is not None:
        age = duration(time.time() - known.measured_at_s)
        say(f"measured {age} ago{remark(known.profile)}; --again rents a VM and measures again")
        return known.profile
    lines, offers = machines.check_machines(probe)
    for line in lines:
        say(line)
    cost = probes.cost_of(probe, offers, max_usd)
    probe = probes.capped(probe, cost.max_usd)
    submit.check_budget(probe, offers or ())
    say(
        f"one VM, {cost.what}, at {dollars(cost.usd_per_hour)} per hour: about "
        f"{dollars(cost.usd)} for {duration(cost.seconds)}, never more than "
        f"{dollars(cost.max_usd)}"
    )
    if not yes:
        raise ConfigError("nothing is rented yet: add --yes to rent it and measure")
    data_bytes = data.prepare_data(probe, say)
    job, _ = submit.submit(probe, facts, data_bytes, say, measures_only=True)
    manager = job.start()
    watcher = Watcher(job, console(stderr=True), manager=manager, may_stop=True)
    code = watcher.run()
    state = read_state(job)
    if code or state.preparation.profile is None:
        reason = "" if state.outcome is None else state.outcome.reason
        say(f"error: not measured: {reason}; 'spottrain logs {job.name}' says more")
        raise typer.Exit(code or 1)
    busy = remark(state.preparation.profile)
    say(
        f"measured on {state.preparation.profile.device} for {dollars(spent_usd(state, state.now_s))}{busy}"
    )
    return state.preparation.profile


def _derived(file: Path | None, device: str | None, ratio: float | None) -> Profile:
    if file is None or device is None or ratio is None:
        raise ConfigError("--derive needs a profile, --device and --ratio; give all three")
    try:
        return derive_profile(profiles.read_profile(file), device, ratio)
    except PlanError as error:
        raise ConfigError(f"--derive: {error}") from error


def _newest() -> Path:
    kept = sorted(profiles.folder().glob("*.json"), key=lambda path: path.stat().st_mtime)
    if not kept:
        raise ConfigError("no profile is kept yet; run 'spottrain calibrate JOB_FILE'")
    return kept[-1]


class _Listener:
    """Forwards progress and records whether there was any."""

    def __init__(self, tell: Callable[[CalibrationProgress], None]) -> None:
        self._tell = tell
        self.called = False

    def __call__(self, progress: CalibrationProgress) -> None:
        self.called = True
        self._tell(progress)


@contextmanager
def _progress() -> Iterator[_Listener]:
    """Show progress: a bar at a terminal, lines otherwise."""
    if not sys.stderr.isatty():
        yield _Listener(lambda p: say(f"measured {p.done} of {p.total}: {p.what}"))
        return
    columns = TextColumn("measuring"), BarColumn(), MofNCompleteColumn()
    last = TextColumn("{task.description}")
    with Progress(*columns, last, console=console(stderr=True), transient=True) as display:
        task = display.add_task("starting workers", total=None)

        def tell(p: CalibrationProgress) -> None:
            display.update(task, completed=p.done, total=p.total, description=p.what)

        yield _Listener(tell)


# --- Tables -------------------------------------------------------------------------------


def profile_parts(profile: Profile) -> list[RenderableType]:
    """Return a profile as text and tables for people."""
    head = [
        f"model {profile.fingerprint[:16]} on {profile.device} ({profile.software})",
        f"profile {profile.origin}",
        *profile.sources,
    ]
    every = [("", one) for one in profile.microbatches] + [
        (f" in groups of {group.size} slots", one)
        for group in profile.groups
        for one in group.microbatches
    ]
    tables: list[RenderableType] = [
        part
        for where, one in every
        for part in (f"micro-batches of {one.microbatch_size}{where}", _sections(one))
    ]
    per_gb_ms = profile.optimizer_s_per_byte * 1e12
    tail = (
        f"optimizer {per_gb_ms:.0f} ms per GB of parameters, "
        f"{profile.task_overhead_s * 1e6:.0f} us overhead per task"
    )
    return [*head, *tables, "links and all-reduces", _links(profile), tail]


def _sections(one: MicrobatchProfile) -> Table:
    table = Table("section", "forward", "recompute", "backward", "saved", "output")
    for section in one.sections:
        table.add_row(
            str(section.index),
            _time(section.forward_s, section.forward_spread),
            _time(section.recompute_s, section.recompute_spread),
            _time(section.backward_s, section.backward_spread),
            size(section.saved_bytes),
            size(section.output_bytes),
        )
    table.add_section()
    table.add_row(
        "all",
        _time(sum(section.forward_s for section in one.sections)),
        _time(sum(section.recompute_s for section in one.sections)),
        _time(sum(section.backward_s for section in one.sections)),
        size(sum(section.saved_bytes for section in one.sections)),
        "",
    )
    if (overheads := one.overheads) is not None:
        table.add_row(
            "overhead per task",
            _time(overheads.forward_s),
            _time(overheads.recompute_s),
            _time(overheads.backward_s),
            "",
            f"sent in {overheads.posting_s * 1e6:.0f} us",
        )
        if overheads.fetch_s:
            each = f"a micro-batch every {_time(overheads.fetch_s)}"
            table.add_row("loaders, beside it", each, "", "", "", "")
    return table


def _links(profile: Profile) -> Table:
    table = Table("link", "latency", "bandwidth", "jitter")
    for name, link in (
        ("messages within a VM", profile.within_vm),
        ("messages between VMs", profile.between_vms),
    ):
        table.add_row(name, *_line(link), f"{link.jitter:.0%}")
    for ring in profile.rings:
        where = "between VMs" if ring.between_vms else "within a VM"
        where += " on GPUs" * ring.on_device
        name = f"all-reduce over {ring.ranks} {where}, {ring.rings} concurrently"
        table.add_row(name, *_line(ring), "")
    return table


def _line(link: LinkProfile | RingProfile) -> tuple[str, str]:
    return f"{link.latency_s * 1e6:.0f} us", f"{size(link.bandwidth_bytes_per_s)}/s"


def _time(seconds: float, spread: float | None = None) -> str:
    around = "" if spread is None else f" ± {spread:.1%}"
    return f"{seconds * 1e3:.3f} ms{around}"

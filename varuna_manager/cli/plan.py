"""``spottrain plan``: what a launch would rent and how it would train, and why."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer

from spottrain.errors import BudgetError, CapacityError, ConfigError
from spottrain.morphing.errors import PlanError
from spottrain.morphing.plan.inputs import Objective, PlanInputs
from spottrain.morphing.plan.transformer import TransformerShape
from spottrain.morphing.plan.workload import Workload
from spottrain.pricing.ranking.rank import EXACT
from spottrain.varuna_manager.cli.console import (
    Output,
    OutputOption,
    say,
    show,
    show_json,
)
from spottrain.varuna_manager.cli.pool import commands
from spottrain.varuna_manager.cli.workload import read_json, read_workload, size_bytes
from spottrain.varuna_manager.config.job import JobConfig, load_config
from spottrain.varuna_manager.launch import inspect, preflight, weights
from spottrain.varuna_manager.offers import estimates, models
from spottrain.varuna_manager.offers import preview as previews
from spottrain.varuna_manager.offers.checks import Checked, check_all
from spottrain.varuna_manager.offers.feasibility import predict
from spottrain.varuna_manager.offers.plan_view import exceeded
from spottrain.varuna_manager.offers.preview import DEFAULT_GPUS, SearchScope
from spottrain.varuna_manager.offers.table import ranking_parts
from spottrain.varuna_manager.reporting.tables import preview_parts
from spottrain.wire.model import ModelFacts, Precision, Profile, StateHome
from spottrain.wire.plan import ScheduleKind

FileArgument = Annotated[
    Path | None,
    typer.Argument(
        help="Job file; a model's config.json, as on the Hugging Face Hub; or a model and its "
        "profile as JSON (see examples/profiles)."
    ),
]
ParamsOption = Annotated[
    float | None,
    typer.Option(help="Without a file: parameters of a model like Llama, such as 7e9."),
]
TokensOption = Annotated[
    float | None,
    typer.Option(
        help="With --params or config.json: tokens to train on; by default 20 for each parameter."
    ),
]
ContextOption = Annotated[
    int | None,
    typer.Option(min=1, help="With --params or config.json: tokens of an example."),
]
MaxUsdOption = Annotated[
    float | None,
    typer.Option(min=0.01, help="With --params or config.json: dollars that may be spent."),
]
MaxHoursOption = Annotated[
    float | None,
    typer.Option(min=0.01, help="With --params or config.json: time that it may take."),
]
ExplainOption = Annotated[
    bool,
    typer.Option("--explain", help="Show all candidates and why they were rejected."),
]
GpusOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help=f"JSON only: number of GPUs, with --clouds at most so many; {DEFAULT_GPUS} by "
        "default.",
    ),
]
StepsOption = Annotated[
    int | None,
    typer.Option(min=1, help="JSON only: mini-batches of the job, for time and cost."),
]
AllOption = Annotated[
    bool,
    typer.Option("--all", help="Show all offers, not only the best of each GPU."),
]
MinibatchOption = Annotated[
    int | None, typer.Option(min=1, help="JSON only: override the mini-batch size.")
]
FactsOption = Annotated[
    Path | None,
    typer.Option(
        help="JSON only: output of 'spottrain inspect -o json' for a calibrated profile; "
        "needs --minibatch-size, --gpu-memory-gib and --usd-per-hour."
    ),
]
MemoryOption = Annotated[float | None, typer.Option(help="JSON only: override the memory per GPU.")]
PriceOption = Annotated[float | None, typer.Option(help="JSON only: override the price per VM.")]
ObjectiveOption = Annotated[
    str | None,
    typer.Option(help="throughput or examples_per_dollar; overrides the file."),
]
ScheduleOption = Annotated[
    str | None, typer.Option(help="Schedule for all plans; overrides the file.")
]
CloudsOption = Annotated[
    str | None,
    typer.Option(
        help="Also rank offers of these clouds, such as aws,gcp, at the last known "
        "prices, with estimated throughputs."
    ),
]
OfflineOption = Annotated[bool, typer.Option("--offline", help="Do not refresh the best offers.")]
TopOption = Annotated[int, typer.Option(min=1, help="Number of offers to evaluate exactly.")]
RecomputeOption = Annotated[
    bool | None,
    typer.Option("--recompute/--no-recompute", help="For all plans; overrides the file."),
]


DepthOption = Annotated[
    int | None, typer.Option(min=1, help="JSON only: pipeline depth of all plans.")
]
GpusPerVmOption = Annotated[
    int | None,
    typer.Option(min=1, help="JSON only: GPUs in a VM; 1 by default."),
]
HostMemoryOption = Annotated[
    float | None,
    typer.Option(help="JSON only: memory of the VM of each GPU, beside the GPU's."),
]
PrecisionOption = Annotated[
    str | None, typer.Option(help="JSON only: fp32, bf16 or fp16; overrides the file.")
]
StateOption = Annotated[
    str | None,
    typer.Option(help="Home of workers' state, host or device; overrides the file."),
]
PoolOption = Annotated[
    str | None,
    typer.Option(help="Show when it would start in this pool, and what others lose."),
]


def plan(
    file: FileArgument = None,
    params: ParamsOption = None,
    tokens: TokensOption = None,
    context: ContextOption = None,
    max_usd: MaxUsdOption = None,
    max_hours: MaxHoursOption = None,
    explain: ExplainOption = False,
    every: AllOption = False,
    gpus: GpusOption = None,
    steps: StepsOption = None,
    minibatch_size: MinibatchOption = None,
    facts: FactsOption = None,
    gpu_memory_gib: MemoryOption = None,
    usd_per_hour: PriceOption = None,
    objective: ObjectiveOption = None,
    schedule: ScheduleOption = None,
    recompute: RecomputeOption = None,
    state: StateOption = None,
    depth: DepthOption = None,
    gpus_per_vm: GpusPerVmOption = None,
    host_memory_gib: HostMemoryOption = None,
    precision: PrecisionOption = None,
    clouds: CloudsOption = None,
    offline: OfflineOption = False,
    top: TopOption = EXACT,
    pool: PoolOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show which machines and which plan a launch would start with; rents nothing.

    Offers are ranked by examples per dollar, including boot time, interruptions and
    storage: < marks bounds, ~ marks estimates from the rooflines of GPUs.

    A model that was never measured is estimated: one of a job file (which needs the extra
    'train'), of a size (--params 7e9 --tokens 2e10 --context 4096), or of a config.json;
    the last two need neither torch nor a network.

    --clouds also ranks what these clouds offer: the best offer of each GPU, and what a fleet
    of it costs. Without credentials or network, it uses prices that ship with spottrain, and
    says how old they are. Given a model and its profile as JSON, which need no machine, it
    plans the best fleet of those clouds, or --gpus of the profile's own GPUs.
    """
    if pool is not None and file is not None:
        commands.launch(commands.SubmitOptions(file, pool), output, is_dry=True)
        return
    scope = SearchScope(
        clouds=tuple(clouds.split(",")) if clouds else (),
        offline=offline,
        exact=top,
        stale=explain,
    )
    changes = _changes(objective, schedule, recompute, state)
    shape = _shape(file, params, context)
    of_profile = (steps, facts, gpu_memory_gib, usd_per_hour, host_memory_gib, gpus_per_vm)
    if shape is not None:
        _refuse(
            "--steps, --facts, --gpu-memory-gib, --usd-per-hour, --host-memory-gib and "
            "--gpus-per-vm need a profile as JSON; remove them, --tokens says how long to train",
            *of_profile,
        )
        request = models.ModelRequest.of(
            f"{params:.3g} parameters" if file is None else file.name,
            shape,
            tokens=tokens,
            minibatch_size=minibatch_size,
            precision=_precision(precision) or "bf16",
            limits=estimates.PlanLimits(max_usd=max_usd, max_hours=max_hours),
        )
        changes |= {} if depth is None else {"pipeline_depth": depth}
        document = models.preview_model(request, gpus or DEFAULT_GPUS, changes, scope, every=every)
    else:
        _refuse(
            "--tokens, --context, --max-usd and --max-hours belong to --params or a model's "
            "config.json; a job file says these itself: remove them",
            *(tokens, context, max_usd, max_hours),
        )
        if file is None:
            raise ConfigError(
                "plan needs a job file, a model's config.json, or the size of a model as "
                "--params 7e9; give one"
            )
        if file.suffix != ".json":
            _refuse(
                "--gpus, --minibatch-size and the like need a profile as JSON: got "
                f"{file.name}; remove them, the job file has these values",
                *of_profile,
                *(gpus, minibatch_size, depth, precision),
            )
            config = _changed(load_config(file), changes)
            document = _of_job(config, check_all(config, say, "plan"), scope)
        else:
            workload = read_workload(file, facts, minibatch_size, gpu_memory_gib, usd_per_hour)
            workload = _on_gpu(workload, host_memory_gib, precision)
            inputs = previews.workload_inputs(workload, gpus or DEFAULT_GPUS, gpus_per_vm or 1)
            inputs = replace(inputs, **changes, pipeline_depth=depth)
            document = _of_profile(file.name, workload, inputs, scope, steps)
    _show(document, output, explain, every)


def _shape(file: Path | None, params: float | None, context: int | None) -> TransformerShape | None:
    """Return the shape of a model without a profile; None: another kind of file is given."""
    if params is not None:
        if file is not None:
            raise ConfigError(f"--params and {file.name} both describe a model; give one of them")
        try:
            return TransformerShape.of_size(params, context or models.USUAL_CONTEXT)
        except PlanError as error:
            raise ConfigError(f"--params: {error}") from error
    if file is None or file.suffix != ".json":
        return None
    data = read_json(file)
    return models.shape_of(data, file.name, context) if models.is_hub_config(data) else None


def _refuse(why: str, *values: Any) -> None:
    """Refuse options that what is planned for has no use for."""
    if any(values):
        raise ConfigError(why)


def _of_profile(
    name: str,
    workload: Workload,
    inputs: PlanInputs,
    scope: SearchScope,
    steps: int | None,
) -> dict[str, Any]:
    """Return the preview of a workload; see ``preview_workload``."""
    try:
        return previews.preview_workload(
            name, inputs, workload.sources, scope, workload.precision, steps
        )
    except PlanError as error:
        raise ConfigError(f"{name}: {error}") from error


def _on_gpu(workload: Workload, host_memory_gib: float | None, precision: str | None) -> Workload:
    """Return the workload with the command line's changes that only GPUs know."""
    known = _precision(precision)
    changes: dict[str, Any] = {} if known is None else {"precision": known}
    if host_memory_gib is not None:
        memory_bytes = size_bytes("--host-memory-gib", host_memory_gib)
        changes |= {"is_gpu": True, "host_memory_bytes": memory_bytes}
    return replace(workload, **changes)


def _changed(config: JobConfig, changes: dict[str, Any]) -> JobConfig:
    changes = dict(changes)
    home = {"state": changes.pop("state")} if "state" in changes else {}
    return config.model_copy(
        update={
            "morphing": config.morphing.model_copy(update=changes),
            "runtime": config.runtime.model_copy(update=home),
        }
    )


def _changes(
    objective: str | None,
    schedule: str | None,
    recompute: bool | None,
    state: str | None,
) -> dict[str, Any]:
    """Return the options that override the file."""
    asked: dict[str, Any] = {
        "objective": _one_of("--objective", objective, get_args(Objective)),
        "schedule": _one_of("--schedule", schedule, get_args(ScheduleKind)),
        "recompute": recompute,
        "state": _one_of("--state", state, get_args(StateHome)),
    }
    return {key: value for key, value in asked.items() if value is not None}


def preview(
    config: JobConfig, checked: Checked, output: Output, scope: SearchScope | None = None
) -> None:
    """Show what a launch of ``config`` would start with, by what its checks have found.

    Raises:
        SpottrainError: It cannot be launched.
    """
    _show(_of_job(config, checked, scope or SearchScope()), output)


def _of_job(config: JobConfig, checked: Checked, scope: SearchScope) -> dict[str, Any]:
    """Return the preview of a job.

    Args:
        checked: What its checks have found.
        scope: Which clouds to search beside the job's own.

    Raises:
        SpottrainError: It cannot be launched.
    """
    facts = checked.facts
    if (first := weights.check_first(config)) is not None:
        for line in weights.describe(first):
            say(line)
    profile = _profile(config, facts)
    document = previews.preview_job(config, facts, profile, scope, checked.data_bytes)
    forecast = None
    if config.cloud is None or checked.offers is not None:
        known = profile if config.cloud is None else None  # as a launch knows it
        forecast = predict(config, facts, offers=checked.offers, profile=known)
    document["forecast"] = forecast and asdict(forecast)
    document["exceeds"] = exceeded(config, document, time.time())
    return document


def _profile(config: JobConfig, facts: ModelFacts) -> Profile:
    """Return the profile to plan with: a measured one, or if this machine cannot measure for
    the job's, an estimated one."""
    if config.cloud is not None and config.profile is None:
        on_cpus = config.device == "cpu"
        profile = previews.profile_on_known_device(facts, config.job_spec(""), on_cpus)
        if profile is not None:
            return profile
        if not on_cpus and not preflight.has_known_gpu(config):
            return estimates.estimate(config, facts)
    if config.profile is None:
        say(f"measuring {config.entrypoint} on this machine, unless it was before")
    return inspect.calibrate(config)


def _show(
    document: dict[str, Any], output: Output, explain: bool = False, every: bool = False
) -> None:
    """Show a preview.

    Raises:
        BudgetError: It would not keep a limit.
        CapacityError: There is no plan.
    """
    if output is Output.JSON:
        show_json(document)
    else:
        show(*(f"exceeds  {line}" for line in document.get("exceeds", ())))
        for warning in document.get("warnings", ()):
            say(warning)
        if "computes_on" in document:
            show(f"computes on {document['computes_on']}")
        if "offers" in document:
            show(*ranking_parts(document, explain, every))
        show(*preview_parts(document, explain))
    if document["plan"] is None:
        raise CapacityError(f"{document['name']}: no plan: {document['why_not']}")
    if (forecast := document.get("forecast")) and forecast["possible"] is False:
        raise BudgetError(forecast["reason"])
    if exceeds := document.get("exceeds"):
        raise BudgetError(exceeds[0])


def _precision(precision: str | None) -> Precision | None:
    _one_of("--precision", precision, get_args(Precision))
    return cast("Precision | None", precision)


def _one_of(option: str, value: str | None, known: tuple[str, ...]) -> str | None:
    if value is not None and value not in known:
        raise ConfigError(f"{option} must be one of {', '.join(known)}: got {value}")
    return value

"""The job file, validated completely before anything starts.

YAML or TOML, with one model for both. Unknown keys are refused with the nearest one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    AwareDatetime,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from spottrain.cloud.local.market import ZoneSpec
from spottrain.errors import ConfigError
from spottrain.gpus.builds import automatic_precision
from spottrain.gpus.find import own_gpus
from spottrain.machine import memory_bytes
from spottrain.pricing.prices.catalogue import GpuType
from spottrain.storage.store import is_url, local_folder
from spottrain.varuna_manager.config.base import (
    BELOW_BASE,
    Entrypoint,
    JobName,
    LocalPath,
    Section,
    StorePlace,
    below,
)
from spottrain.varuna_manager.config.clouds import (
    AnyCloud,
    AwsConfig,
    AzureConfig,
    GcpConfig,
    check_cloud,
    check_named,
)
from spottrain.varuna_manager.config.data import Data, absolute_data, check_data
from spottrain.varuna_manager.config.files import (
    at_line,
    is_text,
    read_job_file,
    validate,
)
from spottrain.varuna_manager.config.init_from import InitFrom
from spottrain.varuna_manager.config.kubernetes import KubernetesConfig, check_kubernetes
from spottrain.varuna_manager.config.local import LocalConfig
from spottrain.varuna_manager.config.manager_vm import ManagerVmConfig
from spottrain.varuna_manager.config.notify import NotifyConfig
from spottrain.varuna_manager.config.overrides import NO_OVERRIDES, Overrides, overridden
from spottrain.varuna_manager.config.sections import (
    BudgetConfig,
    ManagerConfig,
    MorphingConfig,
    NonFiniteConfig,
    ResourcesConfig,
    RuntimeConfig,
)
from spottrain.varuna_manager.config.slurm import SlurmConfig, check_slurm
from spottrain.varuna_manager.config.ssh import (
    SshConfig,
    Variable,
    VariableValue,
    check_ssh,
)
from spottrain.varuna_manager.config.track import TrackConfig
from spottrain.varuna_manager.config.yaml_core import NO_LINES, Lines
from spottrain.wire.messages import (
    DeviceChoice,
    EvaluationSpec,
    JobSpec,
)
from spottrain.wire.model import GpuFacts, LoaderSpec, Precision, Reduction, WireType
from spottrain.wire.numerics import Numerics
from spottrain.wire.plan import Semantics

MAX_MEASURED_MICROBATCH = 16
"""Largest micro-batch size that is measured when the job file names none."""
MAX_DEFAULT_MICROBATCH = 4
"""Largest micro-batch size that is chosen when the job file names none."""

MAX_TENSOR_SIZE = 8
"""Most slots of a VM that plans may let divide matrices where VMs' slots are not known."""


def _local_path(text: str) -> str:
    if not text or "://" in text:
        raise ValueError("must be a path on a file system")
    return text


MAX_HOURS = 876_600.0
"""A hundred years."""
LAST_DEADLINE = datetime(9000, 1, 1, tzinfo=UTC)
"""Forecasts beyond it can still be formatted."""


class SloConfig(Section):
    """Service-level objectives; give at most one of `deadline` and `max_hours`."""

    deadline: AwareDatetime | None = None
    """Time with a time zone, such as 2030-01-31T18:00:00+00:00."""
    max_hours: Annotated[float, Field(gt=0, le=MAX_HOURS)] | None = None
    """Deadline in hours after the launch."""
    min_examples_per_s: PositiveFloat | None = None
    """Minimum examples per second of the job, including interruptions."""

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if self.deadline is not None and self.max_hours is not None:
            raise ValueError("give deadline or max_hours, not both")
        if self.deadline is not None and self.deadline >= LAST_DEADLINE:
            raise ValueError(
                f"deadline must be before the year {LAST_DEADLINE.year}: got "
                f"{self.deadline.isoformat()}"
            )
        return self

    def deadline_s(self, launched_at_s: float) -> float | None:
        """Return the deadline in seconds since the epoch, if there is one."""
        if self.max_hours is not None:
            return launched_at_s + timedelta(hours=self.max_hours).total_seconds()
        return None if self.deadline is None else self.deadline.timestamp()


class CheckpointConfig(Section):
    """Where and how often checkpoints are saved."""

    path: StorePlace | None = None
    """s3://bucket/prefix, gs://bucket/prefix, az://container/prefix, or a folder that
    all VMs can access, relative to the job file. By default in the job's state
    folder."""
    every_steps: PositiveInt | Literal["auto"] = "auto"
    """Number of mini-batches between checkpoints; `auto`: as their measured cost and the
    losses that would undo progress ask for. See docs/checkpoints.md."""
    keep: PositiveInt = 2
    """Number of newest complete checkpoints to keep."""


class EvaluationConfig(Section):
    """Evaluation of the held-out sets that the `TrainingJob` names. See
    docs/training.md."""

    every_steps: NonNegativeInt = 0
    """Number of mini-batches between evaluations; 0: only before the first and after
    the last one."""
    metric: Annotated[str, Field(pattern=r"^([^/]+/[^/]+)?$")] = ""
    """What decides which weights are the best, as `set/metric`, such as
    `heldout/loss`; by default the loss on the first set. The best checkpoint is kept
    beside the newest ones."""
    goal: Literal["min", "max"] = "min"
    """Whether the least or the largest value is the best."""
    patience: NonNegativeInt = 0
    """Stop training after this number of evaluations in a row without improvement; 0:
    never."""
    min_delta: NonNegativeFloat = 0.0
    """Smallest change of the metric that counts as an improvement."""

    @model_validator(mode="after")
    def _evaluates(self) -> Self:
        if self.patience and not self.every_steps:
            raise ValueError("patience needs every_steps: how often to evaluate")
        return self


class LoaderConfig(Section):
    """Processes that read the dataset while the model computes. See docs/data.md."""

    workers: Annotated[int, Field(ge=0, le=64)] | Literal["auto"] = "auto"
    """Loader processes of each worker; 0: the worker reads examples itself, between
    computations. `auto`: none until reading takes noticeable time, then as many as it
    takes, at most 4."""
    ahead: Annotated[int, Field(ge=1, le=1024)] = 4
    """Number of micro-batches that may be ready, or being read, before they are
    needed. Their memory is that of the VM, and plans count it."""

    @model_validator(mode="after")
    def _ahead_of_all(self) -> Self:
        if self.workers != "auto" and self.workers > self.ahead:
            raise ValueError(
                f"ahead must be at least workers, one micro-batch for each: got "
                f"{self.ahead} and {self.workers}"
            )
        return self


AnyCluster = SlurmConfig | KubernetesConfig


class JobConfig(Section):
    """A whole job file."""

    name: JobName
    """Name of the job, unique on this machine."""
    entrypoint: Entrypoint
    """`module:function` in workdir; the function returns a `spottrain.TrainingJob`."""
    workdir: LocalPath = Field(default=".", validate_default=True)
    """Folder with your code, sent to every VM; relative to the job file."""
    minibatch_size: PositiveInt
    """Examples per optimizer step, whatever machines the job runs on."""
    microbatch_size: PositiveInt | None = None
    """Examples per micro-batch. By default the first plan chooses it for the whole job:
    the smallest size that was measured to be nearly as fast as the best one; with
    `reduction: fast`, types of devices may then compute multiples of it at once."""
    steps: PositiveInt
    """Number of optimizer steps of the whole job."""
    seed: NonNegativeInt = 0
    """Random seed of initial weights, data order and dropout."""
    reduction: Reduction = "fast"
    """`exact`: weights are the same bit for bit, whatever the plans and interruptions;
    `fast`: they differ by rounding, and dropout by the size of micro-batches."""
    semantics: Semantics = "synchronous"
    """`stale_by_one`: each mini-batch's gradient is taken at the weights of one mini-batch
    before, so that pipelines need not drain (PipeDream-2BW): faster with few micro-batches,
    and it learns less from each mini-batch. See docs/training.md."""
    lr_schedule_is: Literal["factor"] | None = None
    """`factor`: `lr_schedule` is meant as it is, though its factor never exceeds 0.05, or
    exceeds 20."""
    init_from: InitFrom | None = None
    """Weights to begin with: a job, a checkpoint, or a file or folder of weights; the
    optimizer starts fresh. See docs/export.md."""
    profile: Annotated[str, AfterValidator(_local_path), BELOW_BASE] | None = None
    """A profile to use instead of measuring, see docs/calibration.md; relative to the
    job file."""
    setup: str = ""
    """Shell commands to run once on each VM, in its copy of workdir, before training; a
    failure ends the job. Not for the local provider."""
    setup_limit_s: PositiveFloat = 600.0
    """Time limit of `setup` on a VM."""
    env: dict[Variable, VariableValue] = Field(default_factory=dict)
    """Environment variables for your code. Numbers are taken as they are written (`3.10`, `007`;
    in TOML as Python writes them), true and false become those words."""
    secrets: tuple[Variable, ...] = ()
    """Names of further environment variables; their values are taken from your
    environment at launch and resume and are never stored."""
    data: Data = Field(default_factory=dict)
    """Datasets by name, for `spottrain.data_path(name)`; see docs/data.md."""
    data_limit_s: PositiveFloat = 3600.0
    """Time limit for a VM to fetch the data."""
    resources: ResourcesConfig = ResourcesConfig()
    budget: BudgetConfig = BudgetConfig()
    slo: SloConfig = SloConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    loader: LoaderConfig = LoaderConfig()
    on_nonfinite: NonFiniteConfig = NonFiniteConfig()
    morphing: MorphingConfig = MorphingConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    track: TrackConfig = TrackConfig()
    notify: NotifyConfig = NotifyConfig()
    manager: ManagerConfig = ManagerConfig()
    manager_vm: ManagerVmConfig = ManagerVmConfig()
    local: LocalConfig = LocalConfig()
    ssh: SshConfig = SshConfig()
    slurm: SlurmConfig = SlurmConfig()
    kubernetes: KubernetesConfig = KubernetesConfig()
    aws: AwsConfig = AwsConfig()
    azure: AzureConfig = AzureConfig()
    gcp: GcpConfig = GcpConfig()

    @model_validator(mode="after")
    def _divides(self) -> Self:
        m = self.microbatch_size
        if m is not None and self.minibatch_size % m:
            raise ValueError(
                f"minibatch_size must be a multiple of microbatch_size: got "
                f"{self.minibatch_size} and {m}"
            )
        return self

    @model_validator(mode="after")
    def _rounds_nothing_more(self) -> Self:
        if self.reduction == "exact" and self.runtime.wire not in ("own", "auto"):
            raise ValueError(
                f"runtime.wire must be own or auto with reduction exact: got "
                f"{self.runtime.wire}; a plan's cuts would change the weights"
            )
        return self

    @model_validator(mode="after")
    def _can_be_stale(self) -> Self:
        if self.semantics == "synchronous":
            return self
        if self.runtime.precision == "fp16":
            raise ValueError(
                "semantics must be synchronous with runtime.precision fp16: got "
                "stale_by_one; its loss scale would follow overflows too late, use bf16"
            )
        if self.morphing.schedule in ("interleaved", "gpipe"):
            raise ValueError(
                "morphing.schedule must be auto, varuna or 1f1b with semantics "
                f"stale_by_one: got {self.morphing.schedule}, which drains; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _can_divide(self) -> Self:
        size, keys = self.runtime.tensor_parallel, self._undivided_with()
        if size not in ("auto", 1) and keys:
            raise ValueError(
                f"runtime.tensor_parallel must be 1 with {keys[0]}: got {size}; leave one of both "
                "out"
            )
        return self

    @model_validator(mode="after")
    def _can_divide_sequence(self) -> Self:
        if self.runtime.sequence_parallel and self.runtime.tensor_parallel == 1:
            raise ValueError(
                "runtime.sequence_parallel must be false with runtime.tensor_parallel: 1: got true; "
                "set tensor_parallel to 2 or more, or to auto"
            )
        return self

    def _undivided_with(self) -> list[str]:
        """Return what is asked for that ranks which divide matrices cannot do."""
        impossible = {
            f"semantics: {self.semantics}": self.semantics != "synchronous",
            "morphing.schedule: interleaved": self.morphing.schedule == "interleaved",
            "morphing.peer_copies: 1": self.morphing.peer_copies > 0,
        }
        return [key for key, is_set in impossible.items() if is_set]

    @model_validator(mode="after")
    def _provided(self) -> Self:
        check_data(self.data, self.resources.providers)
        if self.resources.provider == "ssh":
            check_ssh(self.ssh, self.checkpoint.path, self.morphing.objective)
        elif self.cluster is not None:
            weighs = self.morphing.objective == "examples_per_dollar"
            has_budget = (self.budget.max_usd or self.budget.max_usd_per_hour) is not None
            needs_price, path = weighs or has_budget, self.checkpoint.path
            if isinstance(self.cluster, SlurmConfig):
                check_slurm(self.cluster, path, needs_price=needs_price)
            else:
                check_kubernetes(self.cluster, path, needs_price=needs_price)
        elif self.clouds:
            check_named(self.clouds, self.checkpoint.path)
            for cloud in self.clouds:
                check_cloud(cloud, self.resources.span, self.resources.device, self.precision)
        elif self.setup:
            raise ValueError("setup cannot be used with the local provider; remove it")
        return self

    @model_validator(mode="after")
    def _has_slots(self) -> Self:
        size = self.runtime.tensor_parallel
        if size == "auto" or size == 1:
            return self
        most = self._most_slots(default=size)
        if size > most:
            raise ValueError(
                f"runtime.tensor_parallel must be at most {most}, the slots of the largest VM: got "
                f"{size}; set it to less, or take VMs with more GPUs"
            )
        return self

    def _most_slots(self, default: int) -> int:
        """Return the slots of the largest VM, as far as that is known."""
        rented = [kind.gpus for cloud in self._named_clouds() for kind in cloud.machines()]
        return max([*rented, *(zone.slots for zone in self.zones)], default=default)

    @property
    def tensor_sizes(self) -> tuple[int, ...]:
        """How many slots of a VM may divide matrices, where plans may choose."""
        if self.runtime.tensor_parallel != "auto" or self._undivided_with():
            return ()
        most = self._most_slots(default=MAX_TENSOR_SIZE)
        return tuple(2**n for n in range(1, most.bit_length()))

    def settled(self, gpus: Sequence[GpuFacts], memory_bytes: int) -> JobConfig:
        """Return this with what it leaves to its machines: the precision, and the VMs of the
        local provider (``ZoneConfig.on``).

        Args:
            gpus: Of this machine.
            memory_bytes: Its memory.
        """
        update: dict[str, Any] = {}
        capabilities = self._gpu_capabilities()
        if self.resources.provider == "local":
            used = () if self.resources.device == "cpu" else tuple(gpus)
            update["local"] = self.local.on(used, memory_bytes)
            capabilities = tuple(gpu.compute_capability for gpu in used)
        precision = self._precision_on(capabilities)
        update["runtime"] = self.runtime.model_copy(update={"precision": precision})
        return self.model_copy(update=update)

    @property
    def zones(self) -> tuple[ZoneSpec, ...]:
        """The machines that the job file itself describes, by type."""
        (first, *_) = self.resources.providers
        if first == "local":
            return self.local.specs
        if self.cluster is not None:
            return self.cluster.specs(self.resources.max_vms)
        return self.ssh.specs if first == "ssh" else ()

    @property
    def precision(self) -> Precision:
        """Type of matrix multiplications."""
        return self._precision_on(self._gpu_capabilities())

    def _precision_on(self, capabilities: Collection[int]) -> Precision:
        asked = self.runtime.precision
        return automatic_precision(capabilities, self.semantics) if asked == "auto" else asked

    @property
    def gpu_types(self) -> tuple[GpuType | None, ...]:
        """The kinds of GPUs that the job file names; None: of hosts whose kind it does not say."""
        if self.resources.device == "cpu":
            return ()
        if self.resources.provider == "ssh":
            return tuple(host.gpu_type for host in self.ssh.hosts)
        if self.cluster is not None and self.cluster.gpu_type is not None:
            return (self.cluster.gpu_type,)
        machines = (kind for cloud in self._named_clouds() for kind in cloud.machines())
        return tuple(kind.gpu for kind in machines if kind.device == "gpu")

    def _gpu_capabilities(self) -> tuple[int, ...]:
        """Return the compute capabilities of the GPUs that the job file names."""
        return tuple(0 if gpu is None else gpu.compute_capability for gpu in self.gpu_types)

    @property
    def tensor_parallel(self) -> int:
        """How many slots divide matrices, where that is not left to plans."""
        size = self.runtime.tensor_parallel
        return 1 if size == "auto" else size

    @property
    def numerics(self) -> Numerics:
        """What it asks for of what else its first plan settles."""
        return Numerics(
            microbatch_size=self.microbatch_size,
            tensor_parallel=None if self.tensor_sizes else self.tensor_parallel,
            state=self.runtime.asked_state,
        )

    @property
    def wire(self) -> WireType:
        """The type in which activations and their gradients travel.

        Of its own accord a job rounds only what its matrix multiplications round anyway, and
        to bf16 alone, which does not overflow where fp32 would not.
        """
        if self.runtime.wire != "auto":
            return self.runtime.wire
        narrows = self.reduction == "fast" and self.precision != "fp32"
        return "bf16" if narrows else "own"

    @property
    def clouds(self) -> tuple[AnyCloud, ...]:
        """The clouds that the job rents from, in the order of the job file."""
        precision = self.precision
        return tuple(cloud.fast_in(precision) for cloud in self._named_clouds())

    @property
    def slow_types(self) -> dict[str, str]:
        """The instance types named in the job file that are not rented, and why."""
        precision = self.precision
        slow = (cloud.slow_in(precision) for cloud in self._named_clouds())
        return {name: why for one in slow for name, why in one.items()}

    def _named_clouds(self) -> Iterator[AnyCloud]:
        known: dict[str, AnyCloud]
        known = {"aws": self.aws, "azure": self.azure, "gcp": self.gcp}
        return (known[name] for name in self.resources.providers if name in known)

    @property
    def cluster(self) -> AnyCluster | None:
        """The cluster in whose queue the job waits for machines, if it does."""
        known: dict[str, AnyCluster] = {"slurm": self.slurm, "kubernetes": self.kubernetes}
        return known.get(self.resources.providers[0])

    @property
    def cloud(self) -> AnyCloud | None:
        """The first of ``clouds``, if there is one."""
        return next(iter(self.clouds), None)

    @property
    def chosen_microbatch_size(self) -> int:
        """The micro-batch size given, or the default for this mini-batch."""
        if self.microbatch_size is not None:
            return self.microbatch_size
        return max(m for m in range(1, MAX_DEFAULT_MICROBATCH + 1) if self.minibatch_size % m == 0)

    @property
    def checkpoint_every_steps(self) -> int:
        """Mini-batches between checkpoints; 0: as often as costs least."""
        every = self.checkpoint.every_steps
        return 0 if every == "auto" else every

    @property
    def microbatch_sizes(self) -> tuple[int, ...]:
        """The micro-batch sizes to measure: the one given, or all candidates."""
        if self.microbatch_size is not None:
            return (self.microbatch_size,)
        powers = (2**n for n in range(MAX_MEASURED_MICROBATCH.bit_length()))
        fitting = {m for m in powers if self.minibatch_size % m == 0}
        return tuple(sorted(fitting | {self.chosen_microbatch_size}))

    @property
    def device(self) -> DeviceChoice:
        """What workers compute on: VMs of a cloud are rented for their GPUs, unless CPUs
        are asked for."""
        asked = self.resources.device
        return "gpu" if asked == "auto" and self.clouds else asked

    def job_spec(self, checkpoint_path: str, uid: str = "") -> JobSpec:
        """Return the job's specification for VMs.

        Args:
            checkpoint_path: Where its checkpoints are.
            uid: Of the job; empty: it marks no checkpoints.
        """
        return JobSpec(
            name=self.name,
            entrypoint=self.entrypoint,
            seed=self.seed,
            steps=self.steps,
            minibatch_size=self.minibatch_size,
            microbatch_size=self.chosen_microbatch_size,
            reduction=self.reduction,
            checkpoint_path=checkpoint_path,
            checkpoint_every_steps=self.checkpoint_every_steps,
            checkpoint_keep=self.checkpoint.keep,
            lease_s=self.manager.lease_s,
            heartbeat_s=self.manager.heartbeat_s,
            device=self.device,
            precision=self.precision,
            network=self.runtime.network,
            wire=self.wire,
            evaluation=EvaluationSpec(**self.evaluation.model_dump()),
            loader=self.loader_spec,
            semantics=self.semantics,
            sequence_parallel=self.runtime.sequence_parallel,
            selective_recompute=self.selective_recompute,
            uid=uid,
            secrets=self.secrets,
        )

    @property
    def selective_recompute(self) -> bool:
        """Whether blocks recompute selectively."""
        return self.morphing.recompute == "selective"

    @property
    def loader_spec(self) -> LoaderSpec:
        """The loader processes of each worker."""
        workers = None if self.loader.workers == "auto" else self.loader.workers
        return LoaderSpec(workers=workers, ahead=self.loader.ahead)


def load_config(
    path: Path,
    now: datetime | None = None,
    change: Callable[[Any], Any] = lambda data: data,
    overrides: Overrides = NO_OVERRIDES,
) -> JobConfig:
    """Return the job file at ``path``, with its paths made absolute, and settled for this
    machine (``JobConfig.settled``).

    Args:
        path: YAML (.yaml, .yml) or TOML (.toml).
        now: A deadline must be later; by default the present.
        change: Returns the file's plain data as they are to be read.
        overrides: Values that replace the file's, before ``change``; checked as those.

    Raises:
        ConfigError: The file is missing, unreadable or wrong.
    """
    data, lines = overridden(*read_job_file(path), overrides, path.name)
    return config_of(change(data), path.name, path.resolve().parent, lines, now)


def config_of(
    data: Any, source: str, base: Path, lines: Lines = NO_LINES, now: datetime | None = None
) -> JobConfig:
    """Return what plain data say as a job file would, with paths made absolute, and settled
    for this machine (``JobConfig.settled``).

    Args:
        data: The keys and values.
        source: Where they are from, for errors.
        base: Folder that paths are relative to.
        lines: Of the data.
        now: A deadline must be later; by default the present.

    Raises:
        ConfigError: Something is wrong.
    """
    if not is_text(str(base)):
        raise ConfigError(
            f"{source}: the folder's name must be UTF-8: got {str(base)!a}; rename it"
        )
    config = validate(JobConfig, data, source, lines, base)
    deadline = config.slo.deadline
    if deadline is not None and deadline <= (now or datetime.now(UTC)):
        raise ConfigError(
            f"{source}: slo.deadline: is in the past: got {deadline.isoformat()}; "
            f"give a later time{at_line(('slo', 'deadline'), lines)}"
        )
    if not Path(config.workdir).is_dir():
        raise ConfigError(
            f"{source}: workdir: is not a folder: got {config.workdir}; correct it"
            f"{at_line(('workdir',), lines)}"
        )
    update: dict[str, Any] = {
        "data": absolute_data(config.data, base, config.resources.providers),
    }
    if config.init_from is not None:
        update["init_from"] = config.init_from.absolute(base)
    local = local_folder(config.checkpoint.path or "")
    if config.checkpoint.path is not None and local is not None:
        folder = below(base, local)
        place = folder.as_uri() if is_url(config.checkpoint.path) else str(folder)
        update["checkpoint"] = config.checkpoint.model_copy(update={"path": place})
    config = config.model_copy(update=update)
    looks = config.resources.provider == "local" and config.resources.device != "cpu"
    return config.settled(own_gpus() if looks else (), memory_bytes())


def parse_config(data: Any, source: str) -> JobConfig:
    """Return a job's configuration from parsed data; see ``files.validate``."""
    return validate(JobConfig, data, source)


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a job file, for editors."""
    return JobConfig.model_json_schema()

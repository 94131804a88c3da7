"""The model as inspected and measured, its weights, and what its workers do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from spottrain.codec import SCHEMA_VERSION
from spottrain.errors import WireError

Reduction = Literal["fast", "exact"]
Precision = Literal["fp32", "bf16", "fp16"]
"""Type of the matrix multiplications; parameters and optimizer state stay as built."""
StateHome = Literal["host", "device"]
"""Memory of committed state: the VM's, which outlives a worker, or its GPU's."""
WireType = Literal["own", "bf16", "fp16"]
"""Type in which activations and their gradients travel between stages; ``own``: that in
which they are computed."""
Network = Literal["auto", "nccl", "gloo"]
"""Library of the gradients' all-reduce. ``nccl`` sums on GPUs, ``gloo`` in the VMs' memory;
``auto``: as the plan says, and if it says no more, NCCL where replicas have own GPUs."""
ExportFormat = Literal["safetensors", "torch", "hf"]
"""Form of exported weights; ``hf``: that of ``from_pretrained``."""
_CHOSEN_LOADERS = 4
"""Loader processes of a worker, at most, for which the job file names no number."""
LAYOUT_FILE = ".spottrain-layout"
"""In the user's workdir on VMs: the model's layout as inspect found it out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """A GPU of a machine, as its driver describes it (NVML)."""

    index: int
    """As nvidia-smi counts; CUDA may count differently."""
    uuid: str
    """``GPU-...``: the same in every process."""
    name: str
    memory_bytes: int
    compute_capability: int
    """Ten times major plus minor: 86 for sm_86."""
    driver: str
    """Version, such as 580.95.05."""
    cuda: str
    """Newest CUDA that the driver runs, such as 13.0."""
    is_partitioned: bool = False
    """MIG is on."""
    uncorrected_ecc_errors: int | None = None
    """Since the driver was loaded; ``None``: its memory has no ECC, or it is off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUse:
    """What a GPU does at the moment, as its driver says; ``None``: it does not say."""

    index: int
    """As in ``GpuFacts``."""
    utilisation: float | None
    """Share of the last second or less in which a kernel ran; says nothing of how much of the
    GPU that one used (``nvmlUtilization_t``)."""
    memory_used_bytes: int
    """By all processes, and what the driver keeps."""
    power_w: float | None
    temperature_c: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionFacts:
    """Facts about one section that are known without running it."""

    index: int
    param_bytes: int
    """Parameters, a tied one counted in every section that uses it."""
    optimizer_bytes: int
    """Optimizer state of those parameters, and what else of them is committed with it."""
    activation_bytes_per_example: int
    """The one activation that leaves this section for the next (0 for the last)."""
    gradient_bytes: int | None = None
    """Gradients of the parameters that are trained; ``None``: as many as parameters."""
    integer_bytes: int | None = None
    """Their sums in exact mode, 8 bytes an element; ``None``: twice the gradients, which are
    of fp32."""
    lowered_bytes: int | None = None
    """Of ``param_bytes`` those of matrices that autocast converts before anything else is
    done with them: a GPU's copies of them have its type. ``None``: unknown, as in facts
    written before it was kept."""
    flops_per_example: int | None = None
    """Matrix multiplications of one forward over one example, see
    ``morphing.plan.flops``; ``None``: unknown, as in facts written before it was kept."""
    saved_bytes_per_example: int | None = None
    """Tensors that autograd keeps from a forward over one example for its backward, without
    parameters, in the types in which the model is built; ``None``: unknown."""
    divided_share: float = 0.0
    """Of the elements of its matrices, those that ranks divide in tensor parallelism."""
    divided_bytes: int = 0
    """Of ``param_bytes`` those that ranks divide, biases included."""
    divided_sums: int = 0
    """Sums of activations over these ranks in a backward; a forward has as many, less one whose
    output is gathered instead."""
    divided_gathers: float = 0.0
    """What a forward gathers from these ranks, over an activation that leaves a section: of logits
    the vocabulary over the hidden size."""

    @property
    def trained_bytes(self) -> int:
        """Of ``param_bytes`` those that are trained."""
        unknown = self.gradient_bytes is None
        return self.param_bytes if unknown else self.gradient_bytes or 0

    @property
    def summed_bytes(self) -> int:
        """Of the sums of gradients in exact mode."""
        return 2 * self.trained_bytes if self.integer_bytes is None else self.integer_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedParameter:
    """One parameter that several sections use."""

    name: str
    sections: tuple[int, ...]
    """Ascending; the first one owns it in norms and exports."""
    param_bytes: int = 0
    """Of one copy; 0: unknown, as in facts written before it was kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRates:
    """What a job's schedule makes of the learning rate of its first group of parameters."""

    base: float
    """As the optimizer was built with."""
    schedule: str
    """Name of the function ``lr_schedule``; empty: there is none."""
    first_factor: float = 1.0
    """On ``base``, in the first mini-batch."""
    highest_factor: float = 1.0
    """In any mini-batch of the job."""
    last_factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts about the user's model, from the tracer."""

    fingerprint: str
    """Changes when parameters, shapes, optimizer or sections change."""
    num_parameters: int
    """Distinct parameters' elements, a tied one counted once."""
    blocks: str
    """Names of the lists of blocks that were cut, or ``"CutPoint"``."""
    sections: tuple[SectionFacts, ...]
    tied: tuple[TiedParameter, ...]
    dataset_len: int
    heldout_len: int
    """Examples of all held-out sets."""
    heldout_sets: tuple[str, ...] = ()
    """Their names."""
    metrics: tuple[str, ...] = ()
    """What the loss measures besides the loss in training, sorted."""
    evaluated: tuple[str, ...] = ()
    """What it measures besides the loss in evaluations, each as ``set/metric``, sorted."""
    uncut: str = ""
    """Why the model is one section, which plans can only replicate; empty: it is cut."""
    normalises_batches: str = ""
    """A module whose results depend on the size of micro-batches, as BatchNorm's do; empty:
    there is none."""
    helper_bytes: int = 0
    """Parameters of other models that the loss uses, such as a teacher's; every worker
    holds them."""
    unsendable: str = ""
    """Why batches cannot go from one process to another; empty: they can."""
    unmovable: str = ""
    """A class in batches whose tensors cannot go to a GPU; empty: there is none."""
    optimizer: str = ""
    """Its class and the settings of its first group of parameters; empty: nothing is trained."""
    learning_rates: LearningRates | None = None
    """None: the optimizer has none."""
    carried: str = ""
    """Names of what calls of the user's code change in Python objects and results depend
    on; empty: nothing that was found."""
    changing: str = ""
    """Names of what each call changes, where a model is too large to find out whether
    results depend on it."""
    tensor_sizes: tuple[int, ...] = ()
    """Numbers of ranks that can divide its matrices, of those that were tried; ascending."""
    callbacks: tuple[str, ...] = ()
    """Names of the functions that are called while training goes on."""
    callback_limit_s: float = 600.0
    """A call of one that takes longer is ended."""
    schema_version: int = SCHEMA_VERSION

    def with_delayed(self) -> ModelFacts:
        """Return the facts of a job whose gradients are stale by one mini-batch: trained
        parameters are committed as they were before, too, as a moment of an optimizer is."""
        sections = tuple(
            replace(
                section,
                optimizer_bytes=section.optimizer_bytes + section.trained_bytes,
            )
            for section in self.sections
        )
        return replace(self, sections=sections)

    def stored_bytes(self, checkpoints: int) -> int:
        """Return the bytes of a job's checkpoints; frozen parameters count once."""
        total, frozen = 0, 0
        for section in self.sections:
            trained = section.trained_bytes
            frozen += section.param_bytes - trained
            total += trained + section.optimizer_bytes
        return checkpoints * total + (frozen if checkpoints else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Detail:
    """Something by name, in a text for people that can be compared."""

    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeDetails:
    """What a checkpoint depends on in the user's code, and what else can be told of it."""

    fingerprint: str
    """As in ``ModelFacts``."""
    sections: tuple[tuple[str, ...], ...]
    """Names of each section's parameters."""
    parameters: tuple[Detail, ...]
    """Shape and type, by name."""
    optimizer_state: tuple[Detail, ...]
    """Shape and type of what is kept, by parameter and key."""
    optimizer: str
    """Its class."""
    optimizer_settings: tuple[Detail, ...]
    """Values of its first group in the first section, by name."""
    batch: tuple[str, ...]
    """The tensors of one example."""
    dataset_len: int
    heldout_sets: tuple[str, ...]
    metrics: tuple[str, ...]
    learning_rate: float | None
    """Of the first group, in the mini-batch that was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedWeights:
    """What an export has written."""

    files: tuple[str, ...]
    """Relative to the export's folder."""
    left_out: tuple[str, ...]
    """Frozen parameters that it does not hold."""
    base: str
    """What transformers calls the weights that the model began with; empty: unknown."""
    load: tuple[str, ...]
    """Lines of Python that load it, ``{}`` for the folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstWeights:
    """Weights that a job begins with, checked or written as the checkpoint of step 0."""

    checkpoint: str
    """Its name; empty: they were only checked."""
    sha256: str
    """Of the values, see ``JobSpec.init_from``; empty with ``checkpoint``."""
    num_taken: int
    """Parameters that have a given value."""
    remarks: tuple[str, ...]
    """Lines for the user: what was converted, what was left as the model makes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionProfile:
    """Measurements of one section at one micro-batch size: medians."""

    index: int
    forward_s: float
    backward_s: float
    recompute_s: float
    saved_bytes: int
    """Tensors autograd keeps between forward and backward of one micro-batch, without
    what came in and what goes out."""
    output_bytes: int
    """The activation sent to the next section for one micro-batch."""
    output_element_bytes: int = 0
    """Of each of its elements; 0: unknown, as in profiles written before it was kept."""
    forward_spread: float = 0.0
    """Standard deviation as a share of the median, robust to outliers; so are the others."""
    backward_spread: float = 0.0
    recompute_spread: float = 0.0
    batch_bytes: int = 0
    """The micro-batch itself, as the user's data come, which every stage holds."""
    forward_bytes: int = 0
    """Peak of a forward that keeps nothing for the backward, beyond the micro-batch and
    the section's input; so are the next two."""
    recompute_bytes: int = 0
    """Peak of a forward that keeps what the backward needs."""
    backward_bytes: int = 0
    """Peak of the backward, beyond also what the forward has left and the gradient of
    the output."""
    update_bytes: int = 0
    """Peak of the optimizer's first step, its new state included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOverheads:
    """Overhead of a task beyond its sections' own time, on any stage.

    Kinds of tasks differ: forwards alone fetch examples, where no loaders do.
    """

    forward_s: float
    recompute_s: float
    backward_s: float
    posting_s: float = 0.0
    """Added for the message of a task that sends one."""
    receiving_s: float = 0.0
    """Added for the message of a task that receives one."""
    deviation_s: float = 0.0
    """Standard deviation of the most variable of the four, robust to outliers."""
    fetch_s: float = 0.0
    """Time in which a slot's loader processes together make a micro-batch, beside its
    tasks; 0: forwards make it, or need none."""

    def stall_s(self, busy_s: float) -> float:
        """Return how long a forward waits for the examples of its micro-batch.

        Args:
            busy_s: All tasks of a micro-batch on that stage.
        """
        return max(0.0, self.fetch_s - busy_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchProfile:
    """All sections at one micro-batch size."""

    microbatch_size: int
    sections: tuple[SectionProfile, ...]
    overheads: TaskOverheads | None = None
    """``None``: ``Profile.task_overhead_s`` holds for every task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupProfile:
    """All sections as ``size`` ranks of one VM run them that divide their matrices."""

    size: int
    microbatches: tuple[MicrobatchProfile, ...]
    """As those of one rank alone, without overheads; fewer, or none, where there was no memory
    for more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSpec:
    """Processes that make micro-batches before a worker needs them."""

    workers: int | None = None
    """Of each worker; 0: the worker makes them itself. ``None``: as many as it takes
    until it waits for no examples, ``most`` at most."""
    ahead: int = 4
    """Micro-batches that may be made before they are needed."""

    @property
    def most(self) -> int:
        """Processes that a worker has at most."""
        return min(_CHOSEN_LOADERS, self.ahead) if self.workers is None else self.workers


AUTO_LOADER = LoaderSpec()
"""What a job file asks for that says nothing of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProfile:
    """Messages from one device to another: ``latency_s + bytes / bandwidth``."""

    latency_s: float
    bandwidth_bytes_per_s: float
    jitter: float = 0.0
    """Standard deviation of that time as a share of it, robust to outliers."""
    on_devices: bool = False
    """Whether they went from GPU to GPU (NCCL), not through VMs' memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingProfile:
    """All-reduces over rings of one size: ``latency_s + bytes / bandwidth``."""

    ranks: int
    rings: int
    """Number of such rings that were busy at once, over the same VMs."""
    between_vms: bool
    latency_s: float
    """Of the whole all-reduce, without its bytes."""
    bandwidth_bytes_per_s: float
    """Bytes of the tensor over the time that they add."""
    on_device: bool = False
    """Whether GPUs' tensors were summed on the GPUs (NCCL), not VMs' in their memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Primitives that depend on neither P, D nor the number of GPUs (Varuna, 4.3)."""

    fingerprint: str
    """Of the model, as in ``ModelFacts``."""
    device: str
    """Device that was measured, such as the name of the GPU."""
    software: str
    """Versions that the times depend on."""
    microbatches: tuple[MicrobatchProfile, ...]
    """By ascending micro-batch size."""
    optimizer_s_per_byte: float
    """Time of the optimizer step over the bytes of the parameters it updates."""
    within_vm: LinkProfile
    between_vms: LinkProfile
    rings: tuple[RingProfile, ...] = ()
    """Empty: all-reduces are computed from the links."""
    groups: tuple[GroupProfile, ...] = ()
    """By ascending size; those that are missing were not measured."""
    task_overhead_s: float = 0.0
    """Overhead of a task beyond its sections' own time, fetching examples and posting
    messages included, where ``MicrobatchProfile.overheads`` does not give it by
    kind."""
    upload_bytes_per_s: float = 0.0
    """From page-locked memory of a VM to its GPU; 0: not measured, as for the next four;
    only workers on GPUs have a bus, a CPU's optimizer beside the device's, a context."""
    download_bytes_per_s: float = 0.0
    """The other way."""
    host_optimizer_s_per_byte: float = 0.0
    """As ``optimizer_s_per_byte``, on the CPU threads of a worker that drives a GPU."""
    quantise_s_per_byte: float = 0.0
    """Time of quantising the gradients of a virtual node over their bytes."""
    context_bytes: int = 0
    """Device memory that is taken before the first tensor."""
    loader: LoaderSpec = AUTO_LOADER
    """The loader processes that workers were to have when it was measured."""
    precision: Precision = "fp32"
    """Of the matrix multiplications that were measured."""
    selective_recompute: bool = False
    """As in ``JobSpec``, when it was measured."""
    sequence_parallel: bool = False
    """The same."""
    origin: Literal["measured", "derived", "written", "estimated"] = "measured"
    """``derived``: from a measured one by a declared ratio; ``written``: by hand;
    ``estimated``: from the model's facts and the roofline of a GPU."""
    sources: tuple[str, ...] = ()
    """Sources of the numbers of a profile that was not measured."""
    schema_version: int = SCHEMA_VERSION

    @property
    def microbatch_sizes(self) -> tuple[int, ...]:
        """The micro-batch sizes that it knows, ascending."""
        return tuple(one.microbatch_size for one in self.microbatches)

    def sections_at(self, microbatch_size: int) -> tuple[SectionProfile, ...]:
        """Return all sections at a micro-batch size.

        Raises:
            WireError: The profile does not know that size.
        """
        return self._at(microbatch_size).sections

    def overheads_at(self, microbatch_size: int) -> TaskOverheads:
        """Return what tasks take beyond their sections at a micro-batch size.

        Raises:
            WireError: The profile does not know that size.
        """
        any_s = self.task_overhead_s
        return self._at(microbatch_size).overheads or TaskOverheads(
            forward_s=any_s, recompute_s=any_s, backward_s=any_s
        )

    def loaders_at(self, microbatch_size: int) -> int:
        """Return how many loader processes a worker has at most at a micro-batch size.

        Raises:
            WireError: The profile does not know that size.
        """
        takes_time = self.overheads_at(microbatch_size).fetch_s > 0
        return self.loader.most if takes_time or self.loader.workers is not None else 0

    def _at(self, microbatch_size: int) -> MicrobatchProfile:
        for one in self.microbatches:
            if one.microbatch_size == microbatch_size:
                return one
        raise WireError(
            f"the profile has micro-batches of {self.microbatch_sizes}: got "
            f"{microbatch_size}; calibrate again"
        )


Doing = Literal["start", "compute", "data", "evaluate", "update", "save", "wait"]
"""What a worker does: ``data`` are examples that it makes or fetches, ``wait`` that
others have to come."""
ProcessState = Literal["idle", "busy", "blocked", "stopped", "gone"]
"""What a process did for a moment: it slept, computed, waited for a disk or a driver in the
kernel, was stopped by a signal, or had ended."""
ALL_RANKS = -1
"""In place of a rank: every one, as in a gather."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """What a worker does, as its VM's agent sees it."""

    slot: int
    tasks: int
    """That it has ever begun: it grows as long as the worker goes on."""
    doing: Doing
    waits_for: int | None
    """The rank that it waits for, or ``ALL_RANKS``; None: it waits for no rank."""
    still_s: float
    """Since it began the newest task."""
    process: ProcessState

"""Measures sections one at a time, as workers run them (Varuna, table 2: F_i, B_i).

Each section is a stage of its own over memory of its own, filled like a worker's; its
input is what the section before really sends. On the CPU repetitions go round all sections,
so that a slow moment of the machine affects all of them equally. On a GPU, whose memory
training may need all of, one section is there at a time.
"""

from __future__ import annotations

import functools
import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from spottrain.manifest import CheckpointError, read_manifest
from spottrain.pipeline.base import fixed_point
from spottrain.pipeline.base.faults import FaultScript
from spottrain.pipeline.base.heap import tune_for_activations
from spottrain.pipeline.base.tracking import batch_bytes, section_bytes, update_bytes
from spottrain.pipeline.calibrate.statistics import is_steady, spread
from spottrain.pipeline.devices.port import Device, Transfer
from spottrain.pipeline.model.data import MicrobatchSource
from spottrain.pipeline.model.entrypoint import user_code
from spottrain.pipeline.model.job import Batch, NamedParameters, TrainingJob
from spottrain.pipeline.model.loaded import LoadedJob
from spottrain.pipeline.model.loss import LossSums
from spottrain.pipeline.model.optimizer import build_optimizer, use_fused_kernels
from spottrain.pipeline.model.order import random_seed
from spottrain.pipeline.model.sections import Attached
from spottrain.pipeline.model.stage import (
    AUTOCAST_TYPES,
    Activations,
    Gradients,
    StageModel,
    StageOutput,
    go_backward,
)
from spottrain.pipeline.model.tensor_parallel import ALONE, Shards
from spottrain.pipeline.state.agreement import MinibatchDecision
from spottrain.pipeline.state.arena import SectionArena, payload_bytes
from spottrain.pipeline.state.checkpoint import load_section
from spottrain.pipeline.state.handover import UnreadableCheckpointError
from spottrain.pipeline.state.slot import SlotMemory
from spottrain.pipeline.state.update import Updater, contributions
from spottrain.pipeline.train.executor import on_device, saving_nothing
from spottrain.pipeline.weights.first import values_of_sections
from spottrain.storage.open import open_store
from spottrain.storage.store import StorageError
from spottrain.wire.model import SectionProfile, StateHome

Tensors = Mapping[str, torch.Tensor]

_MIN_ROUNDS, _MAX_ROUNDS = 3, 60
_SECTIONS_TOGETHER = 8
"""Sections whose graphs of one micro-batch are held together."""
_OPTIMIZER_STEPS = 8
_SAMPLE_BYTES = 64 << 20
"""Of parameters whose update is measured: more than what caches hold."""
_TRANSFER_BYTES = 64 << 20


class PrivateMemory:
    """A ``MemoryHolder`` whose pieces end with this process."""

    def open(self, name: str, num_bytes: int) -> int:
        """Return a file descriptor of new memory."""
        fd = os.memfd_create(name)
        os.ftruncate(fd, num_bytes)
        return fd

    def names(self) -> frozenset[str]:
        """Return none: there is no predecessor."""
        return frozenset()

    def release(self, name: str) -> None:
        """Do nothing: memory is freed when it is mapped no more."""


@dataclass(frozen=True, slots=True)
class MeasuredSections:
    """Measurements of one rank's sections at one micro-batch size."""

    sections: list[SectionProfile]
    reaching_s: float
    """From the call of the user's code to the stage's first section."""
    round_s: float
    """One repetition of everything."""


class SectionBench:
    """The sections of one rank, ready to be run.

    Args:
        loaded: The job.
        sections: Those of this rank.
        checkpoint: Where parameters are read from; empty: they are made.
        device: What computes.
        prepared: Called with each section that is ready.
        shards: What this rank has of matrices that several divide: all of them do the same, in
            the same order.

    Raises:
        UserCodeError: The user's code raised, or the checkpoint is of another model.
        UnreadableCheckpointError: The checkpoint cannot be read.
    """

    def __init__(
        self,
        loaded: LoadedJob,
        sections: Sequence[int],
        checkpoint: str,
        device: Device,
        prepared: Callable[[int], None] = lambda section: None,
        shards: Shards = ALONE,
    ) -> None:
        self._loaded, self._shards = loaded, shards
        self.sections = sections
        self.device = device
        self._values = dict[int, Mapping[str, torch.Tensor]]()
        """Of parameters, on their way to a GPU; of a checkpoint they are in the page cache."""
        self._memory: SlotMemory | None = None
        """Of all sections, on the CPU."""
        if device.is_host:
            self._memory = self._new_memory()
            self._memory.hold(sections)
        self._runs: list[_SectionRun] = []
        update_bytes = dict[object, int]()
        read = self._read(checkpoint) if checkpoint else values_of_sections(loaded, sections)
        for section, values in read:
            if self._memory is None:
                self._values[section] = dict(values)
            else:
                _copy_parameters(values, self._memory.arenas[section])
            fetch = functools.partial(self._fetch, section)
            run = _SectionRun(loaded, section, device, fetch, shards)
            kind = tuple((spec.shape, spec.dtype, spec.trainable) for spec in loaded.specs[section])
            if kind not in update_bytes:
                update_bytes[kind] = run.first_update_bytes(self._may_live_on_device(section))
            run.update_bytes = update_bytes[kind]
            run.leave()
            self._runs.append(run)
            prepared(section)
        tune_for_activations(0)

    def _new_memory(self) -> SlotMemory:
        return SlotMemory(PrivateMemory(), self._loaded.job, self._loaded.specs, self.device)

    def _read(self, name: str) -> Iterator[tuple[int, Mapping[str, torch.Tensor]]]:
        store = open_store(self._loaded.spec.checkpoint_path)
        try:
            manifest = read_manifest(store, name)
            for k in self.sections:
                yield k, load_section(store, manifest, k)
        except (CheckpointError, StorageError) as error:
            raise UnreadableCheckpointError.of(name, error) from error

    def _fetch(self, section: int) -> tuple[Tensors, Tensors]:
        """Return a section's parameters and gradients in memory that a stage computes with."""
        if self._memory is not None:
            arena = self._memory.arenas[section]
            return arena.parameters, arena.gradients
        lowered = None
        if not self._may_live_on_device(section):
            lowered = AUTOCAST_TYPES[self._loaded.spec.precision]
        parameters, gradients = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        for spec in self._loaded.specs[section]:
            name, dtype = spec.name, spec.dtype
            if spec.trainable:
                gradients[name] = self._room(spec.shape, dtype)
            if lowered and name in self._loaded.layout.matrices and dtype is torch.float32:
                dtype = lowered
            target = parameters[name] = self._room(spec.shape, dtype)
            if target.numel():
                source = self.device.allocate_host(spec.shape, dtype)
                upload = self.device.upload(source.copy_(self._values[section][name]), target)
                self.device.wait(upload)
        return parameters, gradients

    def _room(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        memory = self.device.allocate(math.prod(shape) * dtype.itemsize)
        return memory.view(dtype).view(tuple(shape))

    def _may_live_on_device(self, section: int) -> bool:
        """Return whether a plan could keep a section's state, and its undo copy, there."""
        room = self.device.memory_bytes()
        return room is None or 2 * payload_bytes(self._loaded.specs[section]) <= room

    @contextmanager
    def training(self) -> Iterator[SlotMemory]:
        """Hold all sections inside, as a worker does that trains them."""
        if self._memory is not None:
            yield self._memory
            return
        memory = self._new_memory()
        memory.move_home("device")
        memory.hold(self.sections)
        for section, values in self._values.items():
            _copy_parameters(values, memory.arenas[section])
        yield memory

    @property
    def training_bytes(self) -> int:
        """What ``training`` takes beside what is there already."""
        if self._memory is not None:
            return 0
        return sum(payload_bytes(self._loaded.specs[k]) for k in self.sections)

    def batch(self, microbatch_size: int) -> Batch:
        """Return the first micro-batch of the job."""
        with user_code("dataset"):
            batch = MicrobatchSource(
                self._loaded.job,
                self._loaded.spec.seed,
                self._loaded.spec.minibatch_size,
                microbatch_size,
            ).training(0, range(1))
        return on_device(batch, self.device)

    def warm_up(self, batch: Batch, activations: Activations) -> Activations:
        """Run every section once, from what the section before them sent.

        Returns:
            What the last of them sends on; nothing from the model's last section.
        """
        for run in self._runs:
            with run.present():
                run.receive(activations)
                activations = run.warm_up(batch)
        self._tune()
        return activations

    def warm_up_each(self, batch: Batch, inputs: Mapping[int, Activations]) -> None:
        """Run every section once, from its own input in host memory."""
        for run in self._runs:
            with run.present():
                run.take(inputs[run.section])
                run.warm_up(batch)
        self._tune()

    def run_once(self, batch: Batch) -> None:
        """Run every section forward and backward, with as much memory as measuring takes."""
        for run in self._runs:
            with run.present():
                _repeat([run], batch)

    def _tune(self) -> None:
        largest = (run.largest_saved_bytes for run in self._runs)
        tune_for_activations(max(largest, default=0))

    def inputs(self, sections: Container[int]) -> dict[int, Activations]:
        """Return what came into some of its sections in the last warm-up, in host memory."""
        return {run.section: run.input for run in self._runs if run.section in sections}

    def measure(self, microbatch_size: int, budget_s: float) -> MeasuredSections:
        """Repeat until the medians are steady, or ``budget_s`` is over."""
        batch = self.batch(microbatch_size)
        for run in self._runs:
            run.begin()
        if self.device.is_host:
            self._repeat_all(self._runs, batch, budget_s)
        else:
            for run in self._runs:
                with run.present():
                    self._repeat_all([run], batch, budget_s / len(self._runs))
        reaching_s = [s for run in self._runs for s in run.reaching_s]
        return MeasuredSections(
            sections=[run.profile() for run in self._runs],
            reaching_s=statistics.median(reaching_s) if reaching_s else 0.0,
            round_s=sum(run.round_s for run in self._runs),
        )

    def _repeat_all(self, runs: Sequence[_SectionRun], batch: Batch, budget_s: float) -> None:
        end_s = time.perf_counter() + budget_s
        rounds = 0
        while runs and rounds < _MAX_ROUNDS:
            for first in range(0, len(runs), _SECTIONS_TOGETHER):
                _repeat(runs[first : first + _SECTIONS_TOGETHER], batch)
            rounds += 1
            late = rounds >= _MIN_ROUNDS and time.perf_counter() > end_s
            if self._any(late or all(run.is_steady for run in runs)):
                break

    def _any(self, ends: bool) -> bool:
        """Return whether this rank ends, or any that divides matrices with it: then all do."""
        ending = torch.tensor([float(ends)], device=self.device.torch_device)
        self._shards.sum(ending)
        return bool(ending)

    @property
    def sample(self) -> list[int]:
        """Sections whose update stands for that of all: typical ones, not many at a time."""
        num_bytes = {k: self._loaded.layout.param_bytes(k) for k in self.sections}
        if not num_bytes:
            return []
        memory = self.device.memory_bytes()
        enough = _SAMPLE_BYTES if memory is None else min(_SAMPLE_BYTES, memory // 16)
        middle = statistics.median_low(num_bytes.values())
        taken, total = [], 0
        for section in sorted(self.sections, key=lambda k: abs(num_bytes[k] - middle)):
            if total < enough:
                taken.append(section)
                total += num_bytes[section]
        return sorted(taken)

    def update_s(self, home: StateHome) -> tuple[float, int]:
        """Return the time of the update of some sections in a mini-batch, and the bytes of
        their parameters; zeros where it is not known: the device has no memory for one.

        Gradients are zeroed, their norm is taken, the optimizer's step is done with its
        undo copies. Invalidates the parameters: later measurements are of no use.

        Args:
            home: Where state is kept meanwhile.
        """
        sections = self.sample
        if home == "device" and not all(map(self._may_live_on_device, sections)):
            sections = []
        if not sections:
            return 0.0, 0
        try:
            seconds = self._time_update(home, sections)
        except torch.OutOfMemoryError:
            return 0.0, 0
        finally:
            forget(self.device)
        return seconds, sum(map(self._loaded.layout.param_bytes, sections))

    def _time_update(self, home: StateHome, sections: Sequence[int]) -> float:
        memory = self._memory
        if memory is None:
            memory = self._new_memory()
            memory.move_home(home)
            memory.hold(sections)
        updater = memory.updater(sections, FaultScript())
        arenas = [memory.arenas[k] for k in sections]
        times: list[float] = []
        for step in range(1 + _OPTIMIZER_STEPS):
            decision = MinibatchDecision(0, step, 1.0, 1.0, 1.0, overflow=False, stop=False)
            self._timed(times, functools.partial(self._update, updater, decision, arenas))
        if memory is not self._memory:
            memory.keep_only(())
        return statistics.median(times[1:])

    def quantise_s(self) -> tuple[float, int]:
        """Return the time in which gradients of some sections become integers in one virtual
        node, and the bytes of these gradients."""
        sample = self.sample
        runs = [run for run in self._runs if run.section in sample]
        times: list[float] = []
        with ExitStack() as stack:
            for run in runs:
                stack.enter_context(run.present())
            for _ in range(1 + _OPTIMIZER_STEPS):
                self._timed(times, functools.partial(self._quantise, runs))
        num_bytes = sum(map(self._loaded.layout.gradient_bytes, sample))
        return statistics.median(times[1:]), num_bytes

    def _quantise(self, runs: Sequence[_SectionRun]) -> None:
        for run in runs:
            run.quantise()
        self.device.synchronise()

    def transfer_bytes_per_s(self) -> tuple[float, float]:
        """Return how fast tensors come up to the device, and down from it."""
        memory = self.device.memory_bytes()
        num_bytes = _TRANSFER_BYTES if memory is None else min(_TRANSFER_BYTES, memory // 8)
        host = self.device.allocate_host((num_bytes,), torch.uint8)
        there = self.device.allocate(num_bytes)

        def repeat(copy: Callable[[], Transfer]) -> float:
            times: list[float] = []
            for _ in range(1 + _OPTIMIZER_STEPS):
                self._timed(times, lambda: self.device.finish(copy()))
            return num_bytes / statistics.median(times[1:])

        return (
            repeat(lambda: self.device.upload(host, there)),
            repeat(lambda: self.device.download(there, host)),
        )

    def _update(
        self, updater: Updater, decision: MinibatchDecision, arenas: Sequence[SectionArena]
    ) -> None:
        for arena in arenas:
            for gradients in arena.gradient_runs:
                gradients.zero_()
        contributions(arenas, self._loaded.layout.tied, {}, {})
        updater.apply(decision, [arena.section for arena in arenas])
        self.device.synchronise()

    def _timed(self, times: list[float], call: Callable[[], object]) -> None:
        began_s = self.device.clock()
        call()
        times.append(self.device.clock() - began_s)


def forget(device: Device) -> None:
    """Give memory back that nothing uses any more: models hold cycles."""
    gc.collect()
    device.free_cached()


def _copy_parameters(values: Tensors, arena: SectionArena) -> None:
    with torch.no_grad():
        for name, parameter in arena.parameters.items():
            parameter.copy_(values[name])


class _SectionRun:
    """One section at one micro-batch size after the other."""

    def __init__(
        self,
        loaded: LoadedJob,
        section: int,
        device: Device,
        fetch: Callable[[], tuple[Tensors, Tensors]],
        shards: Shards,
    ) -> None:
        self.section = section
        self._device = device
        self._job, self._seed = loaded.job, loaded.spec.seed
        self._num_sections = loaded.layout.num_sections
        self._entered: Any = None

        def fetch_parts() -> tuple[Tensors, Tensors]:
            parameters, gradients = fetch()
            return shards.own_parts(parameters), shards.own_parts(gradients)

        self._fetch = fetch_parts
        parameters, gradients = fetch_parts()
        self._stage = StageModel(
            loaded.job,
            loaded.layout,
            range(section, section + 1),
            {section: parameters},
            device.torch_device,
            loaded.spec.precision,
            shards=shards,
            selective=loaded.spec.selective_recompute,
        )
        self._named = self._stage.parameters_of(section)
        self._running = loaded.layout.running
        self._set_gradients(gradients)
        self.input: Activations = []
        """In host memory, where the device is another one."""
        self.update_bytes = 0
        self.largest_saved_bytes = 0
        self.begin()

    def _set_gradients(self, gradients: Tensors) -> None:
        for name, parameter in self._named:
            parameter.grad = gradients.get(name)
        self._trained = [p for _, p in self._named if p.grad is not None]

    def leave(self) -> None:
        """Give a GPU's memory to others; on the CPU sections stay."""
        if not self._device.is_host:
            for _, parameter in self._named:
                parameter.grad = None
                parameter.data = parameter.data.new_empty(0)
            self._trained = []
            self.__dict__.pop("_integers", None)

    @contextmanager
    def present(self) -> Iterator[None]:
        """Have parameters and gradients in memory inside."""
        if not self._device.is_host:
            parameters, gradients = self._fetch()
            for name, parameter in self._named:
                parameter.data = parameters[name]
            self._set_gradients(gradients)
            del parameters, gradients
        try:
            yield
        finally:
            self.leave()

    def first_update_bytes(self, on_device: bool) -> int:
        """Return the bytes of an optimizer's first step, taken by copies."""
        named = [one for one in self._named if one[0] not in self._running]
        try:
            return _first_update_bytes(self._job, named, "cpu" if not on_device else None)
        except torch.OutOfMemoryError:
            return _first_update_bytes(self._job, named, "cpu")

    def begin(self) -> None:
        """Take times anew."""
        self._times: dict[str, list[float]] = {w: [] for w in ("f", "r", "b")}
        self._pending: list[tuple[list[float], Any, Any]] = []
        """Where a time belongs, and its beginning and end on the device."""
        self.reaching_s: list[float] = []

    def receive(self, activations: Activations) -> None:
        """Keep what comes into the section, which is on the device."""
        self.input = activations
        if not self._device.is_host:
            self.input = [self._device.finish(self._device.download(a)) for a in activations]

    def take(self, activations: Activations) -> None:
        """Keep what comes into the section, which is in host memory."""
        room = self._device.allocate_host
        self.input = [room(a.shape, a.dtype).copy_(a) for a in activations]

    def warm_up(self, batch: Batch) -> Activations:
        """Run once, counting bytes; return what is sent to the next section."""
        self._batch_bytes = batch_bytes(batch)
        received = self._received()
        run = functools.partial(self._stage.forward, batch, received, self._entered_section)
        with user_code("model"):
            self._bytes, sent = section_bytes(run, saving_nothing)
        self.largest_saved_bytes = self._bytes.largest_saved_bytes
        return sent

    def forward(self, batch: Batch) -> None:
        """Take the time of a forward once more."""
        self._run(batch, saving_nothing(), "f")

    def recompute(self, batch: Batch) -> StageOutput:
        """Take the time of a recompute once more; return what has the graph."""
        return self._run(batch, nullcontext(), "r")

    def backward(self, out: StageOutput) -> None:
        """Take the time of a backward once more."""
        ends = [out.loss] if isinstance(out, LossSums) else out
        gradients: Gradients = [torch.ones_like(end) for end in ends if end.requires_grad]
        ends = [end for end in ends if end.requires_grad]  # else all so far is frozen
        began = self._device.mark()
        with user_code("backward"):
            go_backward(ends, gradients)
        self._pending.append((self._times["b"], began, self._device.mark()))

    def quantise(self) -> None:
        """Add the gradients that the last backward has left to integers, and their
        largest values to others."""
        for parameter in self._trained:
            gradient = parameter.grad
            assert gradient is not None
            add = fixed_point.adder(gradient.device, gradient.dtype)
            add(self._integers[: gradient.numel()], gradient, 0, self._highest)

    @functools.cached_property
    def _highest(self) -> torch.Tensor:
        return torch.zeros((), dtype=torch.float64, device=self._device.torch_device)

    @functools.cached_property
    def _integers(self) -> torch.Tensor:
        largest = max(parameter.numel() for parameter in self._trained)
        where = self._device.torch_device
        return torch.zeros(largest, dtype=torch.int64, device=where)

    def settle(self) -> None:
        """Read all times that were taken, once the device has come so far."""
        for times, began, ended in self._pending:
            times.append(self._device.elapsed_s([(began, ended)]))
        self._pending.clear()

    @property
    def is_steady(self) -> bool:
        """True if more repetitions would change nothing."""
        return is_steady(list(map(sum, zip(*self._times.values(), strict=True))))

    @property
    def round_s(self) -> float:
        """One forward, recompute and backward."""
        return sum(statistics.median(times) for times in self._times.values())

    def profile(self) -> SectionProfile:
        """Return the medians, and how far the times lie around them."""
        median = {w: statistics.median(times) for w, times in self._times.items()}
        around = {w: spread(times) for w, times in self._times.items()}
        return SectionProfile(
            index=self.section,
            forward_s=median["f"],
            backward_s=median["b"],
            recompute_s=median["r"],
            saved_bytes=self._bytes.saved_bytes,
            output_bytes=self._bytes.output_bytes,
            output_element_bytes=self._bytes.output_element_bytes,
            forward_spread=around["f"],
            backward_spread=around["b"],
            recompute_spread=around["r"],
            batch_bytes=self._batch_bytes,
            forward_bytes=self._bytes.forward_bytes,
            recompute_bytes=self._bytes.recompute_bytes,
            backward_bytes=self._bytes.backward_bytes,
            update_bytes=self.update_bytes,
        )

    def _received(self) -> Activations:
        received = [one.detach() for one in self.input]
        if not self._device.is_host:
            received = [self._device.wait(self._device.upload(one)) for one in received]
        self._stage.require_gradients(received)
        return received

    def _entered_section(self, section: int) -> int:
        """Note when the user's code has reached the section, in the first wave that does."""
        seed = random_seed(self._seed, 0, 0, section)
        if section % self._num_sections == self.section and self._entered is None:
            self._entered = self._device.mark()
        return seed

    def _run(self, batch: Batch, how: AbstractContextManager[None], kind: str) -> StageOutput:
        received = self._received()
        began, self._entered = self._device.mark(), None
        with user_code("model"), how:
            out = self._stage.forward(batch, received, self._entered_section)
        ended = self._device.mark()
        self._pending.append((self.reaching_s, began, self._entered))
        self._pending.append((self._times[kind], self._entered, ended))
        return out


def _repeat(runs: Sequence[_SectionRun], batch: Batch) -> None:
    """Take every time once more, in the order in which a stage works.

    So a section finds as much of its weights in the processor's caches as in training:
    one that goes backward right after its forward is faster.
    """
    for run in runs:
        run.forward(batch)
    outs = [run.recompute(batch) for run in runs]
    for run in reversed(runs):
        run.backward(outs.pop())
    for run in runs:
        run.settle()


def _first_update_bytes(job: TrainingJob, named: NamedParameters, where: str | None) -> int:
    copies = [
        (
            name,
            Attached.of(parameter).parameter(
                parameter.detach().to(where, copy=True), parameter.requires_grad
            ),
        )
        for name, parameter in named
    ]
    optimizer = build_optimizer(job.optimizer, copies)
    if optimizer is None:
        return 0
    use_fused_kernels(optimizer)
    for _, parameter in copies:
        parameter.grad = torch.zeros_like(parameter)
    with user_code("step of the optimizer"):
        return update_bytes(optimizer.step)

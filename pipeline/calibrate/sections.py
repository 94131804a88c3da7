"""Measures sections one at a time, as workers run them (Varuna, table 2: F_i, B_i).

Each section is a stage of its own over memory of its own, filled like a worker's; its
input is what the section before really sends. Repetitions go round all sections, so
that a slow moment of the machine affects all of them equally.
"""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from spottrain.manifest import CheckpointError, read_manifest
from spottrain.pipeline.base import fixed_point
from spottrain.pipeline.base.faults import FaultScript
from spottrain.pipeline.base.heap import tune_for_activations
from spottrain.pipeline.base.tracking import batch_bytes, section_bytes, update_bytes
from spottrain.pipeline.calibrate.statistics import is_steady, spread
from spottrain.pipeline.devices.port import Device, Transfer
from spottrain.pipeline.model.data import MicrobatchSource, random_seed
from spottrain.pipeline.model.entrypoint import user_code
from spottrain.pipeline.model.job import Batch, NamedParameters, TrainingJob
from spottrain.pipeline.model.loaded import LoadedJob
from spottrain.pipeline.model.optimizer import build_optimizer, use_fused_kernels
from spottrain.pipeline.model.sections import Attached, parameter_slots
from spottrain.pipeline.model.skeleton import materialise
from spottrain.pipeline.model.stage import StageModel, StageOutput
from spottrain.pipeline.state.agreement import MinibatchDecision
from spottrain.pipeline.state.arena import SectionArena
from spottrain.pipeline.state.checkpoint import load_section
from spottrain.pipeline.state.handover import UnreadableCheckpointError, fill
from spottrain.pipeline.state.slot import SlotMemory
from spottrain.pipeline.state.update import Updater, contribution
from spottrain.pipeline.train.executor import on_device, saving_nothing
from spottrain.pipeline.train.working import WorkingSection
from spottrain.storage.open import open_store
from spottrain.storage.store import StorageError
from spottrain.wire.model import SectionProfile, StateHome

T = TypeVar("T")
Activation = torch.Tensor | None

_MIN_ROUNDS, _MAX_ROUNDS = 3, 60
_SECTIONS_TOGETHER = 8
"""Sections whose graphs of one micro-batch are held together."""
_OPTIMIZER_STEPS = 8
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
        checkpoint: Where parameters are read from; empty: the whole model is built.
        device: What computes.

    Raises:
        UserCodeError: The user's code raised, or the checkpoint is of another model.
        UnreadableCheckpointError: The checkpoint cannot be read.
    """

    def __init__(self, loaded: LoadedJob, sections: range, checkpoint: str, device: Device) -> None:
        self._loaded = loaded
        self.sections = sections
        self.device = device
        self.memory = SlotMemory(PrivateMemory(), loaded.job, loaded.specs, device)
        self.memory.hold(sections)
        if checkpoint:
            self._fill_from_checkpoint(checkpoint)
        elif sections:
            self._fill_from_model(sections)
        self._runs = [_SectionRun(loaded, self.memory.arenas[k], device) for k in sections]
        tune_for_activations(0)

    def _fill_from_checkpoint(self, name: str) -> None:
        store = open_store(self._loaded.spec.checkpoint_path)
        try:
            manifest = read_manifest(store, name)
            for k in self.sections:
                tensors = load_section(store, manifest, k)
                fill(self.memory.arenas[k], tensors, manifest.step)
        except (CheckpointError, StorageError) as error:
            raise UnreadableCheckpointError.of(name, error) from error

    def _fill_from_model(self, sections: Iterable[int]) -> None:
        slots = parameter_slots(materialise(self._loaded.job, self._loaded.spec.seed))
        with torch.no_grad():
            for k in sections:
                for name, tensor in self.memory.arenas[k].parameters.items():
                    tensor.copy_(getattr(*slots[name][0]))

    def batch(self, microbatch_size: int) -> Batch:
        """Return the first micro-batch of the job."""
        with user_code("dataset"):
            batch = MicrobatchSource(
                self._loaded.job,
                self._loaded.spec.seed,
                self._loaded.spec.minibatch_size,
                microbatch_size,
            ).training(0, 0)
        return on_device(batch, self.device)

    def warm_up(self, batch: Batch, activation: Activation) -> Activation:
        """Run every section once, from what the section before them sent.

        Returns:
            What the last of them sends on; ``None`` from the model's last section.
        """
        for run in self._runs:
            activation = run.warm_up(batch, activation)
        largest = (run.largest_saved_bytes for run in self._runs)
        tune_for_activations(max(largest, default=0))
        return activation

    def measure(self, microbatch_size: int, budget_s: float) -> MeasuredSections:
        """Repeat until the medians are steady, or ``budget_s`` is over."""
        batch = self.batch(microbatch_size)
        end_s = time.perf_counter() + budget_s
        rounds = 0
        while self._runs and rounds < _MAX_ROUNDS:
            for first in range(0, len(self._runs), _SECTIONS_TOGETHER):
                _repeat(self._runs[first : first + _SECTIONS_TOGETHER], batch)
            rounds += 1
            if all(run.is_steady for run in self._runs):
                break
            if rounds >= _MIN_ROUNDS and time.perf_counter() > end_s:
                break
        reaching_s = [s for run in self._runs for s in run.reaching_s]
        return MeasuredSections(
            sections=[run.profile() for run in self._runs],
            reaching_s=statistics.median(reaching_s) if reaching_s else 0.0,
            round_s=sum(run.round_s for run in self._runs),
        )

    def update_s(self, home: StateHome) -> float:
        """Return the time of the update of all sections in a mini-batch.

        Gradients are zeroed, their norm is taken, the optimizer's step is done with its
        undo copies. Invalidates the parameters: later measurements are of no use.

        Args:
            home: Where state is kept meanwhile.
        """
        self.memory.move_home(home)
        if not self._runs:
            return 0.0
        updater = self.memory.updater([r.section for r in self._runs], FaultScript())
        times: list[float] = []
        for step in range(1 + _OPTIMIZER_STEPS):
            decision = MinibatchDecision(0, step, 1.0, 1.0, 1.0, overflow=False, stop=False)
            _timed(times, functools.partial(self._update, updater, decision))
        return statistics.median(times[1:])

    def quantise_s(self) -> float:
        """Return the time in which a virtual node's gradients become integers."""
        times: list[float] = []
        for _ in range(1 + _OPTIMIZER_STEPS):
            _timed(times, self._quantise)
        return statistics.median(times[1:])

    def _quantise(self) -> None:
        for run in self._runs:
            run.quantise()
        self.device.synchronise()

    def transfer_bytes_per_s(self) -> tuple[float, float]:
        """Return how fast tensors come up to the device, and down from it."""
        host = self.device.allocate_host((_TRANSFER_BYTES,), torch.uint8)
        there = self.device.allocate(_TRANSFER_BYTES)

        def repeat(copy: Callable[[], Transfer]) -> float:
            times: list[float] = []
            for _ in range(1 + _OPTIMIZER_STEPS):
                _timed(times, lambda: self.device.finish(copy()))
            return _TRANSFER_BYTES / statistics.median(times[1:])

        return (
            repeat(lambda: self.device.upload(host, there)),
            repeat(lambda: self.device.download(there, host)),
        )

    def _update(self, updater: Updater, decision: MinibatchDecision) -> None:
        for run in self._runs:
            arena = self.memory.arenas[run.section]
            for gradients in arena.gradient_runs:
                gradients.zero_()
            contribution(arena, self._loaded.layout.tied, (0.0, 0.0))
        updater.apply(decision, [run.section for run in self._runs])
        self.device.synchronise()


class _SectionRun:
    """One section at one micro-batch size after the other."""

    def __init__(self, loaded: LoadedJob, arena: SectionArena, device: Device) -> None:
        self.section = section = arena.section
        self._device = device
        self._seed = loaded.spec.seed
        working = WorkingSection(arena, device, sums_gradients=True)
        working.refresh()
        working.wait()
        self._stage = StageModel(
            loaded.job,
            loaded.layout,
            range(section, section + 1),
            {section: working.parameters},
            device.torch_device,
            loaded.spec.precision,
        )
        named = self._stage.parameters_of(section)
        self._update_bytes = _first_update_bytes(loaded.job, named)
        for name, parameter in named:
            parameter.grad = working.gradients.get(name)
        self._trained = [p for _, p in named if p.grad is not None]
        self.largest_saved_bytes = 0

    def warm_up(self, batch: Batch, activation: Activation) -> Activation:
        """Run once, counting bytes; return what is sent to the next section."""
        self._input = activation
        self._times: dict[str, list[float]] = {w: [] for w in ("f", "r", "b")}
        self._pending: list[tuple[list[float], Any, Any]] = []
        """Where a time belongs, and its beginning and end on the device."""
        self.reaching_s: list[float] = []
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
        end = out if isinstance(out, torch.Tensor) else out[0]
        gradient = torch.ones_like(end)
        began = self._device.mark()
        if end.requires_grad:  # else all so far is frozen
            with user_code("backward"):
                torch.autograd.backward(end, gradient)
        self._pending.append((self._times["b"], began, self._device.mark()))

    def quantise(self) -> None:
        """Add the gradients that the last backward has left to integers, and their
        largest values to others."""
        for parameter in self._trained:
            gradient = parameter.grad
            assert gradient is not None
            fixed_point.peak(gradient)
            total = self._integers[: gradient.numel()]
            fixed_point.add_quantised(total, gradient, 0)

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
            update_bytes=self._update_bytes,
        )

    def _received(self) -> Activation:
        return None if self._input is None else self._input.detach().requires_grad_()

    def _entered_section(self, section: int) -> int:
        """Note when the user's code has reached the section."""
        seed = random_seed(self._seed, 0, 0, section)
        if section == self.section:
            self._entered = self._device.mark()
        return seed

    def _run(self, batch: Batch, how: AbstractContextManager[None], kind: str) -> StageOutput:
        received = self._received()
        began = self._device.mark()
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


def _first_update_bytes(job: TrainingJob, named: NamedParameters) -> int:
    """Return the bytes of an optimizer's first step, taken by copies."""
    copies = [
        (
            name,
            Attached.of(parameter).parameter(parameter.detach().clone(), parameter.requires_grad),
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


def _timed(times: list[float], call: Callable[[], T]) -> T:
    began = time.perf_counter()
    result = call()
    times.append(time.perf_counter() - began)
    return result

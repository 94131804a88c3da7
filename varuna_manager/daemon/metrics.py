"""The manager's metrics in Prometheus' text format, made from the job's state when asked.

Names, units and types follow https://prometheus.io/docs/practices/naming/.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
    StateSetMetricFamily,
)
from prometheus_client.registry import Collector

from spottrain.units import HOUR_S
from spottrain.varuna_manager.core.model.records import COUNTERS
from spottrain.varuna_manager.core.model.state import (
    JobPhase,
    State,
    rate_usd_per_hour,
    spent_usd,
)
from spottrain.varuna_manager.jobs.folder import GpuUses

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_WRITE_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


class JobMetrics(Collector):
    """The metrics of one job.

    Args:
        state: Returns its state.
        now_s: Returns seconds since the epoch, by the manager's clock.
        gpus: Returns what the GPUs of VMs do, by VM.
    """

    def __init__(
        self,
        state: Callable[[], State],
        now_s: Callable[[], float],
        gpus: Callable[[], GpuUses] = dict,
    ) -> None:
        self._state = state
        self._gpus = gpus
        self._now_s = now_s
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.journal_write = Histogram(
            "spottrain_journal_write_seconds",
            "Time to write events and measurements durably to the journal.",
            registry=self._registry,
            buckets=_WRITE_S,
        )

    def text(self) -> bytes:
        """Return all metrics as text."""
        return generate_latest(self._registry)

    def describe(self) -> Iterator[Metric]:
        """Nothing: what there is depends on the job."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the state as it is now."""
        state = self._state()
        if state.settings is None:
            return
        yield from _job(state)
        yield from _progress(state)
        yield from _money(state, self._now_s())
        yield _vms(state)
        yield _interruptions(state)
        yield from _changes(state)
        yield from _gpu_uses(self._gpus())


def _gauge(name: str, text: str, value: float | None) -> Iterator[Metric]:
    """Yield a gauge, unless its value is unknown."""
    if value is not None and math.isfinite(value):
        yield GaugeMetricFamily(f"spottrain_{name}", text, value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"spottrain_{name}", text, value)


def _job(state: State) -> Iterator[Metric]:
    job = {"job": state.job.spec.name, "uid": state.job.uid}
    version = {"version": state.manager_version}
    yield InfoMetricFamily("spottrain_job", "The job and its manager.", job | version)
    phases = {phase.value: phase is state.phase for phase in JobPhase}
    yield StateSetMetricFamily("spottrain_job_phase", "Phase of the job.", phases)


def _progress(state: State) -> Iterator[Metric]:
    progress, spec, generation = (
        state.history.progress,
        state.job.spec,
        state.training.generation,
    )
    yield from _gauge("step", "Mini-batches in the history that continues.", progress.step)
    yield from _gauge("steps", "Mini-batches that the job is to train.", spec.steps)
    done = progress.highest_step
    yield _counter("minibatches", "Mini-batches committed, each counted once.", done)
    examples = done * spec.minibatch_size
    yield _counter("examples", "Examples trained on, each counted once.", examples)
    again = progress.minibatches_recomputed
    yield _counter("minibatches_recomputed", "Mini-batches computed again.", again)
    step_s = generation.measured_step_s if generation is not None else None
    speed = spec.minibatch_size / step_s if step_s else 0.0
    yield from _gauge("examples_per_second", "Throughput; 0: nothing trains.", speed)
    yield from _gauge("loss", "Loss of the newest mini-batch known.", progress.loss_last)
    saved = state.newest_checkpoint
    step = None if saved is None else saved.step
    yield from _gauge("checkpoint_step", "Step of the newest checkpoint.", step)
    text = "When a checkpoint was last saved, in seconds since the epoch."
    yield from _gauge("checkpoint_timestamp_seconds", text, state.preparation.checkpoint_saved_at_s)


def _money(state: State, now_s: float) -> Iterator[Metric]:
    job, decision = state.job, state.deadline.decision
    spent = spent_usd(state, now_s)
    yield _counter("spent_dollars", "Money spent, in US dollars.", spent)
    rate = rate_usd_per_hour(state) / HOUR_S
    text = "What the fleet costs, in US dollars a second."
    yield from _gauge("spend_rate_dollars_per_second", text, rate)
    yield from _gauge("budget_dollars", "Cap on the money spent.", job.budget.max_usd)
    hours, cap_hours = (
        state.history.ledger.gpu_hours(max(now_s, state.now_s)),
        job.budget.max_gpu_hours,
    )
    yield _counter("spent_gpu_seconds", "Time of all GPUs (slots).", hours.usd * HOUR_S)
    cap_s = None if cap_hours is None else cap_hours * HOUR_S
    yield from _gauge("budget_gpu_seconds", "Cap on the time of all GPUs.", cap_s)
    hourly = job.budget.max_usd_per_hour
    cap = None if hourly is None else hourly / HOUR_S
    text = "Cap on what the fleet costs, in US dollars a second."
    yield from _gauge("spend_rate_cap_dollars_per_second", text, cap)
    text = "Deadline, in seconds since the epoch."
    yield from _gauge("deadline_timestamp_seconds", text, job.deadline_s)
    slack_s = None if decision is None else decision.slack_s
    text = "Time to spare before on-demand VMs must take over to keep the deadline."
    yield from _gauge("deadline_slack_seconds", text, slack_s)


def _vms(state: State) -> Metric:
    labels = ("phase", "cloud", "instance_type", "market")
    metric = GaugeMetricFamily("spottrain_vms", "VMs that are billed.", labels=labels)
    counts = Counter(
        (
            vm.phase.value,
            vm.offer.cloud,
            vm.offer.instance_type,
            "spot" if vm.offer.spot else "on_demand",
        )
        for vm in state.fleet.vms.values()
    )
    for key, count in sorted(counts.items()):
        metric.add_metric(key, count)
    return metric


def _interruptions(state: State) -> Metric:
    tally, text = state.history.tally, "Preemptions and other interruptions, by kind."
    metric = CounterMetricFamily("spottrain_interruptions", text, labels=("kind",))
    for kind, counter in COUNTERS.items():
        metric.add_metric((kind,), getattr(tally, counter))
    return metric


def _changes(state: State) -> Iterator[Metric]:
    tally = state.history.tally
    yield _counter("vms_launched", "VMs ever rented.", tally.vms_launched)
    yield _counter("morphs", "Planned changes of the plan.", tally.morphs)
    text = "Generations that broke and were recovered from."
    yield _counter("recoveries", text, tally.recoveries)


_GPU_GAUGES = {
    "utilisation": ("utilisation_ratio", "Share of the last second in which a kernel ran."),
    "memory_used_bytes": ("memory_used_bytes", "Memory in use."),
    "power_w": ("power_watts", "Power drawn."),
    "temperature_c": ("temperature_celsius", "Temperature."),
}
"""Fields of ``GpuUse``: what their metrics are called, and their help."""


def _gpu_uses(uses: GpuUses) -> Iterator[Metric]:
    for field, (name, text) in _GPU_GAUGES.items():
        metric = GaugeMetricFamily(f"spottrain_gpu_{name}", text, labels=("vm", "gpu"))
        for vm_id, gpus in uses.items():
            for use in gpus:
                if (value := getattr(use, field)) is not None:
                    metric.add_metric((vm_id, str(use.index)), value)
        if metric.samples:
            yield metric

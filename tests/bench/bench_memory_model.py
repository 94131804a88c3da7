"""The planner's memory model against what workers track, and the tracker against others.

Every row is a plan that real workers train by; its shares are tracked peaks over what the
model allows, of the workers of each stage. The tracker is compared with what torch's own
allocator reports, operation by operation, and with the growth of workers' resident memory
over that of their supervisor, which also holds what is no tensor.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import torch
from tests.bench.processes import status_bytes
from tests.integration.fleet import HERE, Fleet, Zygote
from tests.integration.memory_runs import Rank, Run, measure_profile, track
from torch.autograd.profiler import profile as profiler

from spottrain.pipeline.base.tracking import LiveBytes
from spottrain.pipeline.model.data import MicrobatchSource
from spottrain.pipeline.model.entrypoint import load_job
from spottrain.pipeline.model.skeleton import materialise
from spottrain.wire import messages

GPT = "byte_gpt:training_job"
PERCEPTRON = "memory_jobs:perceptron_job"
LANGUAGE = "memory_jobs:language_job"
INTERVAL_S = 0.002
MB = 1e6


def runs_of(entrypoint: str) -> list[Run]:
    """Return the plans to be tried with one model."""

    def run(depth: int, width: int, **changes: object) -> Run:
        return Run(entrypoint=entrypoint, depth=depth, width=width, **changes)  # type: ignore[arg-type]

    return [
        run(1, 1, microbatch_size=4),
        run(4, 1, microbatch_size=1),
        run(2, 2, microbatch_size=4),
        run(3, 1, recompute=False),
        run(2, 2, reduction="exact"),
        run(1, 3, reduction="exact", recompute=False),
        run(3, 1, schedule="1f1b", microbatch_size=4),
        run(4, 1, schedule="1f1b", recompute=False),
        run(4, 1, schedule="1f1b", recompute=False, in_flight_bound=2),
        run(2, 3, schedule="1f1b", reduction="exact", recompute=False),
        run(4, 1, schedule="gpipe"),
        run(3, 1, schedule="gpipe", recompute=False),
        run(2, 2, schedule="interleaved", chunks=2),
        run(4, 1, schedule="interleaved", chunks=2, recompute=False),
        run(2, 1, schedule="interleaved", chunks=4, reduction="exact"),
        run(1, 1, segments=3, microbatch_size=4),
        run(2, 1, segments=2, schedule="1f1b", microbatch_size=4),
        run(2, 2, segments=4, reduction="exact"),
        run(3, 1, segments=3, schedule="gpipe"),
        run(2, 1, segments=2, schedule="interleaved", chunks=2),
        run(2, 2, checkpoint_every_steps=1),
    ]


def print_model(zygote: Zygote) -> list[Rank]:
    """Print the shares of all runs, and how they spread."""
    print(f"{'tracked peak / model, by stage':<52}", "  replicas' least and most")
    ranks = []
    for entrypoint in (GPT, PERCEPTRON, LANGUAGE):
        with tempfile.TemporaryDirectory() as folder:
            known = measure_profile(zygote, Path(folder), entrypoint, (1, 2, 4))
        for run in runs_of(entrypoint):
            with tempfile.TemporaryDirectory() as folder:
                found = track(zygote, Path(folder), run, known)
            print(f"{run!s:<52}", shares_by_stage(found, run.depth), flush=True)
            ranks += found
    return ranks


def shares_by_stage(ranks: list[Rank], depth: int) -> str:
    """Return the least and the highest share of each stage's workers."""
    texts = []
    for stage in range(depth):
        shares = [rank.share for rank in ranks if rank.stage == stage]
        spread = f"-{max(shares):.3f}" if max(shares) - min(shares) > 5e-4 else ""
        texts.append(f"{min(shares):.3f}{spread}")
    return "  ".join(texts)


def print_summary(ranks: list[Rank]) -> None:
    """Print how many workers are within 10 %."""
    shares = sorted(rank.share for rank in ranks)
    within = sum(0.9 <= share <= 1.1 for share in shares)
    print(
        f"{len(shares)} workers: {within} within 10 %, median "
        f"{statistics.median(shares):.3f}, least {shares[0]:.3f}, most {shares[-1]:.3f}"
    )


def print_allocator() -> None:
    """Print what one mini-batch takes by the tracker and by torch's allocator."""
    job = load_job(GPT, HERE.parents[1] / "examples")
    batch = MicrobatchSource(job, 1, 4, 4).training(0, range(1))
    model = materialise(job, seed=0)
    optimizer = job.optimizer(list(model.named_parameters()))

    def step() -> None:
        job.loss(model, batch)[0].backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    live = LiveBytes()
    step()
    with live:
        step()
    now = peak = 0
    with profiler(profile_memory=True, use_kineto=True) as found:
        step()
    for event in found.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    print(
        f"one step of the byte GPT: tracker {live.peak_bytes / MB:.3f} MB, torch's "
        f"allocator {peak / MB:.3f} MB, ratio {live.peak_bytes / peak:.4f}"
    )


class Watch:
    """Samples how far every worker's resident memory exceeds its supervisor's."""

    def __init__(self) -> None:
        self.growth: dict[str, int] = {}
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __call__(self, fleet: Fleet) -> None:
        """Begin."""
        self._thread = threading.Thread(target=self._run, args=(fleet,))
        self._thread.start()

    def stop(self) -> None:
        """End."""
        self._over.set()
        assert self._thread is not None
        self._thread.join()

    def _run(self, fleet: Fleet) -> None:
        bases = {
            name: status_bytes(machine.pid, "RssAnon", "RssShmem")
            for name, machine in fleet.machines.items()
        }
        while not self._over.wait(INTERVAL_S):
            started = [
                (name, report.pid)
                for name, report in tuple(fleet.history)
                if isinstance(report, messages.GenerationStarted)
            ]
            for name, pid in started:
                try:
                    now = status_bytes(pid, "RssAnon", "RssShmem") - bases[name]
                except (FileNotFoundError, ProcessLookupError, KeyError):
                    continue
                self.growth[name] = max(self.growth.get(name, 0), now)


def print_resident(zygote: Zygote) -> None:
    """Print how far workers' memory grew, over what they tracked.

    In the first mini-batch large blocks are mapped apart and vanish when freed; later the
    C library keeps blocks as large as activations in reserve (``pipeline.heap``).
    """
    with tempfile.TemporaryDirectory() as folder:
        known = measure_profile(zygote, Path(folder), PERCEPTRON, (1,))
    size = 16
    for steps in (1, 6):
        run = Run(
            entrypoint=PERCEPTRON,
            depth=2,
            width=1,
            microbatch_size=size,
            nodes=4,
            steps=steps,
        )
        # The model is not asked here: any profile will do.
        same = replace(known.microbatches[0], microbatch_size=size)
        watch = Watch()
        with tempfile.TemporaryDirectory() as folder:
            profile = replace(known, microbatches=(same,))
            ranks = track(zygote, Path(folder), run, profile, watch)
        watch.stop()
        for rank, growth in zip(ranks, watch.growth.values(), strict=True):
            print(
                f"{run}, stage {rank.stage}, {steps} mini-batches: grew by {growth / MB:.1f} MB, tracked "
                f"{rank.tracked_bytes / MB:.1f} MB, ratio "
                f"{growth / rank.tracked_bytes:.3f}"
            )


def main() -> None:
    torch.set_num_threads(1)
    began = time.monotonic()
    zygote = Zygote()
    try:
        print_summary(print_model(zygote))
        print_resident(zygote)
    finally:
        zygote.close()
    print_allocator()
    print(f"took {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()

"""Our loop against one written by hand, on one device: tokens per second and memory.

Variants take turns; the first mini-batch of each turn does not count. What calibration
predicts, and what the planner says of memory, is set beside what was measured.

    python -m tests.gpu.speed gpt2_124m --microbatch 16 --minibatch 512
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from tests.builders import slots_of
from tests.gpu import runs
from tests.gpu.devices import device_name, is_gpu, print_result
from tests.gpu.jobs import SIZES, Gpt
from tests.integration.fleet import Fleet, FleetError, Heard, Zygote

from spottrain.morphing.memory.ranks import rank_bytes
from spottrain.morphing.simulate.compute import Compute
from spottrain.morphing.simulate.simulator import expect_step
from spottrain.pipeline.model.inspect import model_facts
from spottrain.pipeline.model.loaded import load
from spottrain.wire import messages
from spottrain.wire.messages import JobSpec
from spottrain.wire.model import Profile, Reduction, StateHome
from spottrain.wire.plan import Plan

_PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Dense bf16 of the SXM cards (NVIDIA data sheets)."""
PLAIN, DETERMINISTIC, RECOMPUTE = "plain", "plain deterministic", "fast recompute"
OURS: dict[str, tuple[Reduction, StateHome]] = {
    "fast device": ("fast", "device"),
    "fast host": ("fast", "host"),
    "exact device": ("exact", "device"),
    "exact host": ("exact", "host"),
    RECOMPUTE: ("fast", "device"),
}
EVERY = (PLAIN, DETERMINISTIC, *OURS)


class Plain:
    """The loop written by hand, in a process of its own."""

    def __init__(self, job: str, microbatch: int, minibatch: int) -> None:
        command = [sys.executable, "-m", "tests.gpu.plain_loop", job]
        self._process = subprocess.Popen(
            [*command, str(microbatch), str(minibatch)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        )

    def turn(self, steps: int, how: str = "") -> dict[str, Any]:
        """Run one mini-batch that does not count, then those that do."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{steps + 1} {how}\n")
        process.stdin.flush()
        if not (line := process.stdout.readline()):
            raise RuntimeError("the plain loop ended: see its error above")
        found: dict[str, Any] = json.loads(line)
        return {**found, "step_s": found["step_s"][1:]}

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


class Ours:
    """spottrain: one supervisor, one worker; a turn is a generation."""

    def __init__(self, spec: JobSpec, fleet: Fleet, checkpoint: str, vms: str) -> None:
        self._spec, self._fleet, self._checkpoint = spec, fleet, checkpoint
        self._vms = vms

    def plan(self, variant: str) -> Plan:
        """Return the plan of a variant."""
        recompute = variant == RECOMPUTE
        return runs.plan_for(
            self._spec,
            (len(self._vms), 1),
            self._vms,
            SIZES[self._spec.entrypoint.partition(":")[2]].blocks,
            state=OURS[variant][1],
            schedule="gpipe" if recompute else "varuna",
            recompute=recompute,
        )

    def turn(self, steps: int, variant: str) -> dict[str, Any]:
        """Run a generation, and stop it after the mini-batches that count."""
        self._fleet.run(self.plan(variant), self._checkpoint)
        times: list[float] = []
        newest: list[messages.MinibatchCommitted] = []

        def take(vm: str, report: Heard) -> bool:
            _refuse_failure(report)
            if isinstance(report, messages.MinibatchCommitted) and vm == self._vms[0]:
                times.append(time.perf_counter())
                newest[:] = [report]
            return True  # a report at a time has its own deadline

        while len(times) <= steps + 1:
            self._fleet.wait_for("a report", take)
        self._fleet.stop()
        generation = self._fleet.generation
        self._fleet.wait_for(
            "GenerationStopped",
            lambda _, r: (
                True
                if isinstance(r, messages.GenerationStopped) and r.generation == generation
                else None
            ),
        )
        return {
            "step_s": [b - a for a, b in itertools.pairwise(times)][-steps:],
            "loss": newest[0].loss,
            "peak_bytes": newest[0].peak_bytes,
            "busy_s": newest[0].busy_s,
        }

    def calibrate(self) -> Profile:
        """Let the slot measure a profile."""
        self._fleet.generation = min(-1, self._fleet.generation - 1)
        store = self._fleet.open_store("a") if len(self._vms) > 1 else ("", 0)
        command = messages.Calibrate(
            generation=self._fleet.generation,
            participants=slots_of(self._vms),
            store_host=store[0],
            store_port=store[1],
            microbatch_sizes=(self._spec.microbatch_size,),
            checkpoint=self._checkpoint,
        )
        for vm in self._vms:
            self._fleet.machines[vm].send(command)

        def profile(_: str, report: Heard) -> Profile | None:
            _refuse_failure(report)
            return report.profile if isinstance(report, messages.Calibrated) else None

        found = self._fleet.wait_for("the profile", profile)
        self._fleet.generation = 0
        return found


def _refuse_failure(report: Heard) -> None:
    failures = (
        messages.WorkerDied | messages.GenerationBroken | messages.UserCodeFailed | messages.VmUnfit
    )
    if isinstance(report, failures):
        raise FleetError(f"a run failed: {report}")


# --- Measuring --------------------------------------------------------------------------


class Bench:
    """All variants of one model.

    Args:
        job: Its entrypoint.
        microbatch: Examples per micro-batch.
        minibatch: Examples per mini-batch.
        folder: For checkpoints and logs.
        predicts: Whether to calibrate, and to ask the simulator and the memory model.
        stages: Of the pipeline; its workers share the GPU.
    """

    def __init__(
        self,
        job: str,
        microbatch: int,
        minibatch: int,
        folder: Path,
        *,
        predicts: bool,
        stages: int = 1,
    ) -> None:
        self.predicts = predicts
        self._vms = runs.VMS[:stages]
        self.job, self.microbatch, self.minibatch = job, microbatch, minibatch
        self._folder = folder
        self.log = folder / "log"
        """Of the workers."""
        self._zygote = Zygote()

    def spec(self, reduction: Reduction) -> JobSpec:
        """Return the spec of a kind of job."""
        return runs.job_spec(
            self._folder,
            self.job,
            steps=1_000_000,
            minibatch_size=self.minibatch,
            microbatch_size=self.microbatch,
            checkpoint_every_steps=1_000_000,
            reduction=reduction,
            precision="bf16",
        )

    @contextmanager
    def plain(self) -> Iterator[Plain]:
        """Start the loop written by hand."""
        loop = Plain(self.job, self.microbatch, self.minibatch)
        try:
            yield loop
        finally:
            loop.close()

    @contextmanager
    def ours(self, reduction: Reduction) -> Iterator[Ours]:
        """Start a fleet of one worker, which makes the first weights."""
        spec = self.spec(reduction)
        threads = max(1, (len(os.sched_getaffinity(0)) - 4) // len(self._vms))
        with runs.start(spec, self._vms, self._folder, self._zygote, threads=threads) as fleet:
            yield Ours(spec, fleet, fleet.initialise(), self._vms)

    def close(self) -> None:
        """End the process that has loaded the job."""
        self._zygote.close()

    def predictions(self, ours: Ours, reduction: Reduction) -> dict[str, Any]:
        """Calibrate; return what that predicts for state on the device."""
        began = time.monotonic()
        profile = ours.calibrate()
        took_s = time.monotonic() - began
        loaded = load(self.spec(reduction), runs.WORKDIR)
        facts = model_facts(loaded.job, loaded.layout)
        plan = ours.plan(f"{reduction} device")
        compute = Compute(on_gpu=is_gpu(device_name()), precision="bf16")
        terms = facts, profile, plan, reduction, compute
        memory = rank_bytes(*terms)[0]
        expected = expect_step(plan, profile, facts, reduction=reduction, compute=compute)
        return {
            "calibration_s": took_s,
            "predicted_step_s": expected.step_s,
            # What torch's allocator does not count is not compared with it.
            "model_peak_bytes": memory.total_bytes - memory.library_bytes,
        }


Found = dict[str, dict[str, Any]]


def measure(
    bench: Bench, variants: Sequence[str], turns: int, steps: int, *, together: bool
) -> dict[str, Any]:
    """Return what came out of each variant, medians and ratios.

    Args:
        bench: The model.
        variants: Of ``EVERY``.
        turns: Of each.
        steps: Mini-batches that count, of each turn.
        together: All processes live at once, and take turns; else one after the other.
    """
    found: Found = {}
    result: dict[str, Any] = {
        "job": bench.job,
        "microbatch": bench.microbatch,
        "minibatch": bench.minibatch,
        "variants": found,
    }
    groups = [PLAIN, "fast", "exact"]
    members = {g: [v for v in variants if v.startswith(g)] for g in groups}
    try:
        if together:
            with ExitStack() as stack:
                run = {g: start(bench, g, stack, result) for g in groups if members[g]}
                for turn in range(turns):
                    order = list(reversed(variants)) if turn % 2 else variants
                    for variant in order:
                        group = variant.partition(" ")[0]
                        add(found, variant, run[group](steps, variant))
                        summarise(result)
                        print_result(result)  # of a bench that ends too late
        else:
            for group in (g for g in groups if members[g]):
                with ExitStack() as stack:
                    turn_of = start(bench, group, stack, result)
                    for variant in members[group]:
                        for _ in range(turns):
                            add(found, variant, turn_of(steps, variant))
                            summarise(result)
                            print_result(result)
    except (RuntimeError, FleetError, OSError) as error:
        result["error"] = str(error)[-800:]
        result["log"] = runs.tail(bench.log)
    return result


Turn = Callable[[int, str], dict[str, Any]]


def start(bench: Bench, group: str, stack: ExitStack, result: dict[str, Any]) -> Turn:
    """Start the processes of a group of variants; calibrate in fast mode."""
    if group == PLAIN:
        plain = stack.enter_context(bench.plain())
        return lambda steps, variant: plain.turn(
            steps, "deterministic" if variant == DETERMINISTIC else ""
        )
    reduction: Reduction = "fast" if group == "fast" else "exact"
    ours = stack.enter_context(bench.ours(reduction))
    if reduction == "fast" and bench.predicts:
        result["predictions"] = bench.predictions(ours, reduction)
        print_result(result)
    return ours.turn


def add(found: Found, variant: str, turn: dict[str, Any]) -> None:
    """Add what came out of a turn."""
    one = found.setdefault(variant, {"step_s": []})
    one["step_s"] += turn["step_s"]
    one["loss"] = turn["loss"]
    # A process's peak never falls: the first turn is before those that take more.
    one.setdefault("peak_bytes", turn["peak_bytes"])


def summarise(result: dict[str, Any]) -> None:
    """Add rates, ratios to the plain loop, and errors of predictions."""
    size, found = SIZES[result["job"]], result["variants"]
    flops_per_token = 6 * _parameters(result["job"])
    tokens = result["minibatch"] * size.sequence
    peak_flops = _peak_flops()
    for one in found.values():
        one["median_s"] = statistics.median(one["step_s"])
        one["tokens_per_s"] = tokens / one["median_s"]
        if peak_flops:
            one["mfu"] = one["tokens_per_s"] * flops_per_token / peak_flops
    if PLAIN in found:
        for one in found.values():
            one["of_plain"] = found[PLAIN]["median_s"] / one["median_s"]
    fast = found.get("fast device")
    if fast and RECOMPUTE in found:
        result["recompute"] = found[RECOMPUTE]["median_s"] / fast["median_s"]
    if fast and (predicted := result.get("predictions")):
        predicted["step_error"] = predicted["predicted_step_s"] / fast["median_s"] - 1
        predicted["memory_error"] = predicted["model_peak_bytes"] / fast["peak_bytes"] - 1


def _parameters(job: str) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in Gpt(SIZES[job]).parameters())


def _peak_flops() -> float:
    """Return the device's peak, 0 if it is none of those known."""
    name = device_name()
    if not is_gpu(name):
        return 0.0
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(name.partition(":")[2])
    model = str(pynvml.nvmlDeviceGetName(handle))
    return next((peak for key, peak in _PEAK_FLOPS.items() if key in model), 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", choices=SIZES)
    parser.add_argument("--microbatch", type=int, required=True)
    parser.add_argument("--minibatch", type=int, required=True)
    parser.add_argument("--variants", default=",".join(EVERY))
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="that count, in a turn")
    parser.add_argument("--predict", action="store_true", help="calibrate before")
    parser.add_argument("--stages", type=int, default=1, help="that share the GPU")
    parser.add_argument("--apart", action="store_true", help="one after the other")
    chosen = parser.parse_args()
    variants = chosen.variants.replace("_", " ").split(",")
    sizes, turns = (chosen.microbatch, chosen.minibatch), (chosen.turns, chosen.steps)
    with tempfile.TemporaryDirectory() as folder:
        how = {"predicts": chosen.predict, "stages": chosen.stages}
        bench = Bench(chosen.job, *sizes, Path(folder), **how)
        result = measure(bench, variants, *turns, together=not chosen.apart)
        bench.close()
    print_result(result)


if __name__ == "__main__":
    main()

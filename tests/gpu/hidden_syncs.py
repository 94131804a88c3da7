"""Where the host waits for values of the device's while a mini-batch is trained.

One worker trains in this process. On a GPU torch warns of every operation that holds the
host (``torch.cuda.set_sync_debug_mode``); the stand-in notes them itself.

    python -m tests.gpu.hidden_syncs
"""

from __future__ import annotations

import os
import socket
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import torch
from tests.builders import a_run
from tests.fakes.deferred import DeferredDevice
from tests.gpu import runs
from tests.gpu.devices import device_name, print_result
from tests.gpu.forked import start_store
from tests.unit.pipeline.memory import LocalHolder

from spottrain.pipeline.base.faults import FaultScript
from spottrain.pipeline.devices.open import open_device
from spottrain.pipeline.devices.port import Device
from spottrain.pipeline.loader.prefetch import Prefetcher
from spottrain.pipeline.model.loaded import load
from spottrain.pipeline.process.tasks import initialise
from spottrain.pipeline.state.context import StopRequest, WorkerContext
from spottrain.pipeline.state.slot import SlotMemory
from spottrain.pipeline.train.generation import run_generation
from spottrain.storage.open import open_store
from spottrain.wire import messages
from spottrain.wire.model import LoaderSpec, Precision, Reduction, StateHome

STEPS = 4
NO_LOADERS = LoaderSpec(workers=0)
ROOT = Path(__file__).resolve().parents[2]
Newest = Callable[[], list[str]]
"""Returns the places where the host has waited since the call before."""


class Watcher:
    """The supervisor's side of a worker: notes the places of each mini-batch."""

    def __init__(self, newest: Newest) -> None:
        self._newest = newest
        self.places: list[list[str]] = []

    def report(self, report: messages.SupervisorReport) -> None:
        if isinstance(report, messages.GenerationStarted):
            self._newest()
        if isinstance(report, messages.MinibatchCommitted):
            self.places.append(self._newest())

    def stop_request(self) -> int:
        return StopRequest.NONE

    def ending(self, reason: str) -> None:
        raise AssertionError(reason)

    def open_loader(self, number: int) -> socket.socket:
        raise AssertionError(number)

    def newest_share(self) -> messages.ShareMinibatch | None:
        return None

    def newest_trace(self) -> messages.TraceMinibatches | None:
        return None


@contextmanager
def watching(device: Device) -> Iterator[Newest]:
    """Note where the host waits for the device."""
    if isinstance(device, DeferredDevice):
        reads = device.host_reads

        def newest() -> list[str]:
            places = list(reads)
            reads.clear()
            return places

        yield newest
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")

        def warned() -> list[str]:
            places = [
                f"{_shortened(one.filename)}:{one.lineno}"
                for one in caught
                if "synchronizing CUDA operation" in str(one.message)
            ]
            caught.clear()
            return places

        try:
            yield warned
        finally:
            torch.cuda.set_sync_debug_mode("default")


def _shortened(filename: str) -> Path:
    """Return a path below the root of the repository, links followed; or as it is."""
    path = Path(filename).resolve()
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def places_of_minibatches(
    folder: Path,
    store: tuple[str, int],
    device: Device,
    entrypoint: str,
    reduction: Reduction,
    state: StateHome,
    precision: Precision,
) -> list[list[str]]:
    """Train on one slot, in this process; return the places of each mini-batch."""
    spec = runs.job_spec(
        folder,
        entrypoint,
        steps=STEPS,
        reduction=reduction,
        precision=precision,
        checkpoint_every_steps=100,
    )
    loaded = load(spec, runs.WORKDIR)
    saved = initialise(loaded, messages.Initialise())
    assert isinstance(saved, messages.CheckpointSaved)
    holder, scales = LocalHolder(), precision == "fp16"
    with watching(device) as newest:
        watcher = Watcher(newest)
        context = WorkerContext(
            loaded=loaded,
            vm_id="a",
            slot=0,
            device=device,
            memory=SlotMemory(holder, loaded.job, loaded.specs, device, scales_loss=scales),
            checkpoints=open_store(spec.checkpoint_path),
            supervisor=watcher,
            faults=FaultScript(),
            batches=Prefetcher(loaded.job, 0, NO_LOADERS, watcher.open_loader),
        )
        plan = runs.plan_for(spec, (1, 1), "a", state=state)
        run_generation(context, a_run(plan, store=store, checkpoint=saved.name), os.getpid())
        context.memory.keep_only(())
    holder.close()
    return watcher.places


def main() -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    result: dict[str, object] = {}
    reductions: tuple[Reduction, ...] = ("fast", "exact")
    states: tuple[StateHome, ...] = ("host", "device")
    variants = list(product(reductions, states))
    stores = [start_store() for _ in variants]  # before there are threads
    device = open_device(device_name(), deterministic=True)
    for (reduction, state), (store, port) in zip(variants, stores, strict=True):
        with tempfile.TemporaryDirectory() as folder:
            how = (reduction, state, "bf16")
            where = Path(folder), ("127.0.0.1", port), device
            try:
                found = places_of_minibatches(*where, "tiny_fused", *how)  # type: ignore[arg-type]
                result[f"{reduction} {state}"] = [dict(Counter(one)) for one in found]
            except RuntimeError as error:
                result[f"{reduction} {state}"] = {"error": str(error)[:500]}
        store.close()
    print_result(result)


if __name__ == "__main__":
    main()

"""Real supervisors, spoken to as their agents would, on this machine."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from spottrain import wire
from spottrain.manifest import newest_valid, read_manifest
from spottrain.pipeline.checkpoint import load_section
from spottrain.wire import JobSpec, Plan, Slot

HERE = Path(__file__).parent
R = TypeVar("R")
DEADLINE_S = 60.0
GRACE_S = 3.0
"""How long survivors may take to notice that a generation is broken."""


@dataclass(frozen=True)
class MachineGone:
    """All processes of a machine have ended."""


Heard = wire.Report | MachineGone


class FleetError(AssertionError):
    """What a test waited for did not come."""


class Machine:
    """One VM: a supervisor with its workers, in a process group of its own."""

    def __init__(
        self,
        name: str,
        spec: JobSpec,
        workdir: Path,
        reports: queue.SimpleQueue[tuple[str, Heard]],
        environment: Mapping[str, str],
        log: Path,
        num_slots: int = 1,
    ) -> None:
        self.name = name
        with open(log, "ab") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "spottrain.pipeline.supervisor"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            )
        greeting = {
            "spec": json.loads(wire.encode(spec)),
            "workdir": str(workdir),
            "num_slots": num_slots,
            "private_address": "127.0.0.1",
            "vm_id": name,
        }
        self._say(json.dumps(greeting))
        self._reports = reports
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def send(self, command: wire.Command) -> None:
        self._say(wire.encode(command))

    def signal(self, number: signal.Signals) -> None:
        os.killpg(self.process.pid, number)

    def close(self) -> None:
        if self.process.poll() is None:
            self.signal(signal.SIGKILL)
        self.process.wait()
        self._reader.join()
        assert self.process.stdin and self.process.stdout
        self.process.stdout.close()
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass

    def _say(self, line: str) -> None:
        assert self.process.stdin
        try:
            self.process.stdin.write(f"{line}\n".encode())
            self.process.stdin.flush()
        except BrokenPipeError:
            return

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self._reports.put((self.name, wire.decode(wire.Report, line)))
        self._reports.put((self.name, MachineGone()))


class Fleet:
    """Several machines, and all that they have reported."""

    def __init__(
        self,
        spec: JobSpec,
        names: Sequence[str],
        log: Path,
        environment: Mapping[str, str] = {},
        workdir: Path = HERE,
    ) -> None:
        self.spec = spec
        self.queue: queue.SimpleQueue[tuple[str, Heard]] = queue.SimpleQueue()
        self.history: list[tuple[str, Heard]] = []
        self.generation = 0
        self.machines: dict[str, Machine] = {}
        self._add = lambda name: Machine(
            name, spec, workdir, self.queue, environment, log
        )
        for name in names:
            self.add(name)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *exc: object) -> None:
        for machine in self.machines.values():
            machine.close()

    def add(self, name: str) -> None:
        self.machines[name] = self._add(name)

    def wait_for(
        self, what: str, found: Callable[[str, Heard], R | None]
    ) -> R:
        """Take reports in until ``found`` returns something."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                left = max(0.0, deadline - time.monotonic())
                name, report = self.queue.get(timeout=left)
            except queue.Empty:
                raise FleetError(f"{what} did not come: {self.tail()}") from None
            self.history.append((name, report))
            if (result := found(name, report)) is not None:
                return result

    def ready(self) -> None:
        waiting = set(self.machines)

        def check(name: str, report: Heard) -> bool | None:
            if isinstance(report, wire.UserCodeFailed):
                raise FleetError(f"{report.message}\n{report.traceback}")
            if isinstance(report, wire.SupervisorReady):
                waiting.discard(name)
            return None if waiting else True

        self.wait_for("SupervisorReady", check)

    def initialise(self) -> str:
        next(iter(self.machines.values())).send(wire.Initialise())
        return self.wait_for(
            "CheckpointSaved",
            lambda _, r: r.name if isinstance(r, wire.CheckpointSaved) else None,
        )

    def open_store(self, name: str) -> tuple[str, int]:
        self.machines[name].send(wire.OpenStore(generation=self.generation))
        return self.wait_for(
            "StoreOpened",
            lambda _, r: (r.host, r.port)
            if isinstance(r, wire.StoreOpened) and r.generation == self.generation
            else None,
        )

    def run(
        self,
        plan: Plan,
        checkpoint: str,
        donors: Sequence[Slot] = (),
        evaluate: bool = False,
    ) -> None:
        self.generation += 1
        host, port = self.open_store(plan.slots[0].vm_id)
        participants = (*plan.slots, *donors)
        command = wire.RunGeneration(
            generation=self.generation,
            plan=plan,
            participants=participants,
            store_host=host,
            store_port=port,
            checkpoint=checkpoint,
            evaluate_first=evaluate,
        )
        for name in dict.fromkeys(slot.vm_id for slot in participants):
            self.machines[name].send(command)


    def train(
        self, choose: Callable[[Sequence[str]], Plan], checkpoint: str
    ) -> dict[str, bytes]:
        """Train to the end as a manager would; return the final tensors, by name.

        Args:
            choose: Makes a plan for the machines that are left.
            checkpoint: The newest complete one.
        """
        known: set[str] = set()
        while True:
            plan = choose(tuple(self.machines))
            planned = {slot.vm_id for slot in plan.slots}
            donors = [
                Slot(vm_id=name, index=0)
                for name in self.machines
                if name in known and name not in planned
            ]
            self.run(plan, checkpoint, donors)
            known |= planned
            ended = self._wait_for_end(planned | {donor.vm_id for donor in donors})
            saved = [r for _, r in self.history if isinstance(r, wire.CheckpointSaved)]
            checkpoint = max(saved, key=lambda r: r.step).name
            if ended:
                return read_weights(Path(self.spec.checkpoint_path))

    def _wait_for_end(self, running: set[str]) -> bool:
        """Wait until nobody runs the generation any more; return whether it is done."""
        done = broken = False
        deadline = time.monotonic() + DEADLINE_S
        while running:
            patience = GRACE_S if broken else deadline - time.monotonic()
            try:
                name, report = self.queue.get(timeout=max(0.0, patience))
            except queue.Empty:
                if not broken:
                    raise FleetError(f"{running} still run: {self.tail()}") from None
                for survivor in running:
                    self.machines[survivor].send(
                        wire.AbandonGeneration(generation=self.generation)
                    )
                broken = False
                continue
            self.history.append((name, report))
            match report:
                case wire.UserCodeFailed():
                    raise FleetError(f"{report.message}\n{report.traceback}")
                case MachineGone():
                    broken = True
                    running.discard(name)
                    self.machines.pop(name).close()
                case wire.GenerationStopped(generation=self.generation):
                    done |= report.done
                    running.discard(name)
                case (
                    wire.GenerationBroken(generation=self.generation)
                    | wire.WorkerDied(generation=self.generation)
                ):
                    broken = True
                    running.discard(name)
                case _:
                    pass
        return done

    def tail(self) -> str:
        """Return the last reports, a line each."""
        return "\n".join(map(str, self.history[-12:]))


def read_weights(root: Path) -> dict[str, bytes]:
    """Return all tensors of the newest checkpoint as bytes."""
    entry = newest_valid(root)
    assert entry is not None
    manifest = read_manifest(root, entry.name)
    return {
        f"{section}/{name}": tensor.numpy().tobytes()
        for section in range(manifest.num_sections)
        for name, tensor in load_section(root, manifest, section).items()
    }


def make_plan(
    spec: JobSpec,
    depth: int,
    width: int,
    names: Sequence[str],
    num_sections: int,
    **changes: Any,
) -> Plan:
    """Cut evenly: stages over sections, replicas over virtual nodes."""
    nodes = spec.minibatch_size // spec.microbatch_size
    values: dict[str, Any] = {
        "pipeline_depth": depth,
        "data_parallel_width": width,
        "microbatch_size": spec.microbatch_size,
        "minibatch_size": spec.minibatch_size,
        "schedule": "varuna",
        "recompute": True,
        "stage_bounds": tuple(num_sections * p // depth for p in range(depth + 1)),
        "replica_bounds": tuple(nodes * d // width for d in range(width + 1)),
        "slots": tuple(Slot(vm_id=name, index=0) for name in names[: depth * width]),
        "predicted_step_s": 0.1,
    }
    return Plan(**{**values, **changes})

"""Real supervisors, spoken to as their agents would, on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from tests.builders import a_plan, a_run
from tests.checkpoints import newest_valid
from tests.integration.hosts import Host, Zygote

from spottrain.codec import decode, encode
from spottrain.manifest import read_manifest
from spottrain.pipeline.state.checkpoint import load_section
from spottrain.storage.open import open_store
from spottrain.wire import messages
from spottrain.wire.messages import JobSpec
from spottrain.wire.numerics import Numerics
from spottrain.wire.plan import Plan, Slot

__all__ = [
    "Fleet",
    "FleetError",
    "Heard",
    "Host",
    "Machine",
    "MachineGone",
    "Zygote",
    "make_plan",
    "read_weights",
]

HERE = Path(__file__).parent
R = TypeVar("R")
DEADLINE_S = 600.0
GRACE_S = 3.0
"""How long survivors may take to notice that a generation is broken."""


@dataclass(frozen=True)
class MachineGone:
    """All processes of a machine have ended."""


Heard = messages.SupervisorReport | MachineGone


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
        zygote: Zygote,
        host: Host,
    ) -> None:
        self.name, self.num_slots = name, host.num_slots
        self._reports = reports
        greeting = {
            "spec": json.loads(encode(spec)),
            "workdir": str(workdir),
            "num_slots": host.num_slots,
            "devices": [host.device] * host.num_slots,
            "memory_shares": [host.memory_share] * host.num_slots,
            "threads": host.threads,
            "private_address": host.address,
            "vm_id": name,
        }
        stdin, commands = os.pipe()
        reports_in, stdout = os.pipe()
        with open(log, "ab") as stderr:
            fds = (stdin, stdout, stderr.fileno())
            self.pid = zygote.start(
                json.dumps(greeting),
                {**environment, "GLOO_SOCKET_IFNAME": host.interface},
                fds,
                host.namespace,
            )
        os.close(stdin)
        os.close(stdout)
        self._commands = os.fdopen(commands, "wb", buffering=0)
        self._stdout = os.fdopen(reports_in, "rb")
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def send(self, command: messages.Command) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._commands.write(f"{encode(command)}\n".encode())

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def kill_leader(self) -> None:
        """Kill the supervisor alone."""
        os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        self.signal(signal.SIGKILL)
        self._reader.join()
        self._commands.close()
        self._stdout.close()

    def _read(self) -> None:
        for line in self._stdout:
            self._reports.put((self.name, decode(messages.SupervisorReport, line)))
        self._reports.put((self.name, MachineGone()))


class Fleet:
    """Several machines, and all that they have reported."""

    def __init__(
        self,
        spec: JobSpec,
        names: Sequence[str],
        log: Path,
        zygote: Zygote,
        environment: Mapping[str, str] | None = None,
        workdir: Path = HERE,
        hosts: Mapping[str, Host] | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self.spec = spec
        self._deadline_s = deadline_s
        self.queue: queue.SimpleQueue[tuple[str, Heard]] = queue.SimpleQueue()
        self.history: list[tuple[str, Heard]] = []
        self.generation = 0
        self.num_sections = 0
        self.machines: dict[str, Machine] = {}
        self._add: Callable[[str], Machine] = lambda name: Machine(
            *(name, spec, workdir, self.queue, environment or {}, log, zygote),
            host=(hosts or {}).get(name, Host()),
        )
        for name in names:
            self.add(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for machine in self.machines.values():
            machine.close()

    def add(self, name: str) -> None:
        self.machines[name] = self._add(name)

    def wait_for(self, what: str, found: Callable[[str, Heard], R | None]) -> R:
        """Take reports in until ``found`` returns something."""
        deadline = time.monotonic() + self._deadline_s
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
            if isinstance(report, messages.UserCodeFailed):
                raise FleetError(f"{report.message}\n{report.traceback}")
            if isinstance(report, messages.VmUnfit):
                raise FleetError(report.reason)
            if isinstance(report, messages.SupervisorReady):
                waiting.discard(name)
            return None if waiting else True

        self.wait_for("SupervisorReady", check)

    def initialise(self, names: str = "", number: int = -1) -> str:
        """Have machines write the first weights, the first one alone where none is named."""
        if names:
            self.generation = number
            host, port = self.open_store(names[0])
            command = messages.Initialise(
                generation=number,
                participants=tuple(Slot(vm_id=name, index=0) for name in names),
                store_host=host,
                store_port=port,
            )
            for name in names:
                self.machines[name].send(command)
        else:
            next(iter(self.machines.values())).send(messages.Initialise())
        return self.wait_for(
            "CheckpointSaved",
            lambda _, r: r.name if isinstance(r, messages.CheckpointSaved) else None,
        )

    def open_store(self, name: str) -> tuple[str, int]:
        self.machines[name].send(messages.OpenStore(generation=self.generation))
        return self.wait_for(
            "StoreOpened",
            lambda _, r: (
                (r.host, r.port)
                if isinstance(r, messages.StoreOpened) and r.generation == self.generation
                else None
            ),
        )

    def run(
        self,
        plan: Plan,
        checkpoint: str,
        donors: Sequence[Slot] = (),
        evaluate: bool = False,
        save_only: bool = False,
        code: str = "",
        numerics: Numerics | None = None,
    ) -> None:
        self.generation += 1
        self.num_sections = plan.num_sections
        participants = (*plan.slots, *donors)
        command = a_run(
            plan,
            generation=self.generation,
            participants=participants,
            store=self.open_store(plan.slots[0].vm_id),
            checkpoint=checkpoint,
            evaluate_first=evaluate,
            save_only=save_only,
            code=code,
            numerics=numerics,
        )
        for name in dict.fromkeys(slot.vm_id for slot in participants):
            self.machines[name].send(command)

    def train(self, choose: Callable[[Sequence[str]], Plan], checkpoint: str) -> dict[str, bytes]:
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
            ended = self.wait_for_end(planned | {donor.vm_id for donor in donors})
            checkpoint = self.newest_checkpoint()
            if ended:
                return read_weights(Path(self.spec.checkpoint_path))

    def newest_checkpoint(self) -> str:
        """Return the newest checkpoint that was reported."""
        saved = [r for _, r in self.history if isinstance(r, messages.CheckpointSaved)]
        return max(saved, key=lambda r: r.step).name

    def wait_for_end(self, running: set[str]) -> bool:
        """Wait until nobody runs the generation any more; return whether it is done."""
        done = broken = False
        running -= {name for name, r in self.history if self._is_end(r)}
        deadline = time.monotonic() + self._deadline_s
        while running:
            patience = GRACE_S if broken else deadline - time.monotonic()
            try:
                name, report = self.queue.get(timeout=max(0.0, patience))
            except queue.Empty:
                if not broken:
                    raise FleetError(f"{running} still run: {self.tail()}") from None
                for survivor in running:
                    self.machines[survivor].send(
                        messages.AbandonGeneration(generation=self.generation)
                    )
                broken = False
                continue
            self.history.append((name, report))
            match report:
                case messages.UserCodeFailed():
                    raise FleetError(f"{report.message}\n{report.traceback}")
                case messages.VmUnfit():
                    raise FleetError(report.reason)
                case MachineGone():
                    broken = True
                    running.discard(name)
                    self.machines.pop(name).close()
                case messages.GenerationStopped(generation=self.generation):
                    done |= report.done
                    running.discard(name)
                case (
                    messages.GenerationBroken(generation=self.generation)
                    | messages.WorkerDied(generation=self.generation)
                ):
                    broken = True
                    running.discard(name)
                case _:
                    pass
        return done

    def _is_end(self, report: Heard) -> bool:
        ends = messages.GenerationStopped | messages.GenerationBroken | messages.WorkerDied
        return isinstance(report, ends) and report.generation == self.generation

    def stop(self, checkpoint: bool = False) -> None:
        """Ask for a planned stop, as a manager would before a morph."""
        command = messages.StopGeneration(generation=self.generation, checkpoint=checkpoint)
        for machine in self.machines.values():
            machine.send(command)

    def wait_for_step(self, step: int) -> None:
        """Wait until somebody has applied ``step`` mini-batches."""
        self.wait_for(
            f"step {step}",
            lambda _, r: (
                True if isinstance(r, messages.MinibatchCommitted) and r.step >= step else None
            ),
        )

    def pids(self) -> dict[tuple[str, int], set[int]]:
        """Return the pids that each slot has had."""
        found: dict[tuple[str, int], set[int]] = {}
        for name, r in self.history:
            if isinstance(r, messages.GenerationStarted):
                found.setdefault((name, r.slot), set()).add(r.pid)
        return found

    def committed_twice(self) -> list[int]:
        """Return the mini-batches that were computed again after their commit.

        Committed is what a live rank of every section has reported.
        """
        reported: dict[tuple[int, int], set[int]] = {}
        again = []
        committed = 0
        for _, r in self.history:
            if not isinstance(r, messages.MinibatchCommitted):
                continue
            sections = reported.setdefault((r.generation, r.step), set())
            sections.update(r.sections)
            if len(sections) == self.num_sections:
                sections.add(-1)
                if r.step <= committed:
                    again.append(r.step)
                committed = max(committed, r.step)
        return again

    def tail(self) -> str:
        """Return the last reports, a line each."""
        return "\n".join(map(str, self.history[-12:]))


def read_weights(root: Path) -> dict[str, bytes]:
    """Return all tensors of the newest checkpoint as bytes."""
    store = open_store(root)
    entry = newest_valid(store)
    assert entry is not None
    manifest = read_manifest(store, entry.name)
    return {
        f"{section}/{name}": tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        for section in range(manifest.num_sections)
        for name, tensor in load_section(store, manifest, section).items()
    }


def make_plan(
    spec: JobSpec,
    depth: int,
    width: int,
    names: Sequence[str],
    num_sections: int,
    **changes: Any,
) -> Plan:
    """Return an even plan of a job, on VMs of these names; changes as in ``a_plan``."""
    size = changes.pop("microbatch_size", spec.microbatch_size)
    return a_plan(
        depth,
        width,
        num_sections=num_sections,
        virtual_nodes=spec.minibatch_size // size,
        microbatch_size=size,
        slots=tuple(Slot(vm_id=name, index=0) for name in names[: depth * width]),
        step_s=0.1,
        **changes,
    )

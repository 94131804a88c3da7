"""Speaks as the supervisor does, without torch: weights are a number in the job's store.

For plans of one rank. A step takes STEP_S; ``progress`` in the checkpoint store stands
for weights that are handed over from VM to VM. With a file ``may-end`` there the next
step is the job's last: tests end jobs when they have seen what they wait for.
"""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Iterator
from pathlib import Path

from spottrain import machine, manifest
from spottrain.codec import decode, encode, from_data
from spottrain.storage.open import open_store
from spottrain.wire import messages
from spottrain.wire.model import (
    GpuFacts,
    LinkProfile,
    MicrobatchProfile,
    Profile,
    SectionProfile,
)

STEP_S = 0.01
FINGERPRINT = "stub"
MAY_END = "may-end"


def say(report: messages.Report) -> None:
    sys.stdout.write(encode(report) + "\n")
    sys.stdout.flush()


def lines() -> Iterator[str | None]:
    """Yield lines of stdin, and None whenever there was none for STEP_S."""
    rest = b""
    while True:
        if not select.select([0], [], [], STEP_S)[0]:
            yield None
            continue
        data = os.read(0, 65536)
        if not data:
            return
        *whole, rest = (rest + data).split(b"\n")
        yield from (line.decode() for line in whole)


class Stub:
    def __init__(self, greeting: str) -> None:
        data = json.loads(greeting)
        self.vm_id = data["vm_id"]
        self.num_slots = data["num_slots"]
        self.spec: messages.JobSpec = from_data(messages.JobSpec, data["spec"])
        self.gpus = tuple(from_data(GpuFacts, gpu) for gpu in data["gpus"])
        self.store = Path(self.spec.checkpoint_path)
        self.generation: int | None = None

    @property
    def step(self) -> int:
        return int((self.store / "progress").read_text())

    @step.setter
    def step(self, value: int) -> None:
        draft = self.store / f"progress.{self.vm_id}"
        draft.write_text(str(value))
        draft.replace(self.store / "progress")

    def save(self) -> None:
        name = manifest.new_name(self.step, self.generation or 0)
        folder = self.store / name
        folder.mkdir()
        file = folder / "section-0.safetensors"
        file.write_bytes(b"weights")
        record = manifest.FileRecord(
            section=0,
            file=file.name,
            num_bytes=7,
            sha256=manifest.hash_file(file),
        )
        manifest.write_manifest(
            open_store(self.store),
            manifest.Manifest(
                name=name,
                step=self.step,
                num_sections=1,
                model_fingerprint=FINGERPRINT,
                config_fingerprint="stub",
                seed=self.spec.seed,
                minibatch_size=self.spec.minibatch_size,
                files=(record,),
                uid=self.spec.uid,
            ),
        )
        say(messages.CheckpointSaved(name=name, step=self.step))

    def obey(self, command: messages.Command) -> None:
        match command:
            case messages.Initialise(participants=participants):
                if self.vm_id == participants[0].vm_id:
                    self.store.mkdir(parents=True, exist_ok=True)
                    self.step = 0
                    self.save()
            case messages.Calibrate(generation=generation, participants=participants):
                if self.vm_id == participants[0].vm_id:
                    say(messages.Calibrated(profile=PROFILE, generation=generation))
            case messages.OpenStore(generation=generation):
                say(messages.StoreOpened(generation=generation, host="127.0.0.1", port=1))
            case messages.RunGeneration() if self.slot_of(command) is not None:
                self.begin(command)
            case messages.StopGeneration(generation=generation, checkpoint=checkpoint):
                if generation == self.generation:
                    if checkpoint:
                        self.save()
                    self.stop(done=False)
            case messages.EndWorkers(slots=slots, reason=reason):
                if self.generation is not None and self.slot in slots:
                    say(
                        messages.WorkerDied(
                            generation=self.generation, slot=self.slot, reason=reason
                        )
                    )
                    self.generation = None
            case messages.AbandonGeneration(generation=generation) if generation < 0:
                pass
            case messages.AbandonGeneration() | messages.RunGeneration() | messages.Retire():
                self.generation = None

    def slot_of(self, command: messages.RunGeneration) -> int | None:
        slots = command.plan.slots
        return next((s.index for s in slots if s.vm_id == self.vm_id), None)

    def begin(self, command: messages.RunGeneration) -> None:
        if self.generation is not None and command.generation <= self.generation:
            return
        self.generation, self.slot = command.generation, self.slot_of(command) or 0
        if command.evaluate_first:
            say(messages.Evaluated(generation=command.generation, step=0, loss=9.0))
        say(
            messages.GenerationStarted(
                generation=command.generation,
                slot=self.slot,
                pid=os.getpid(),
                step=self.step,
                outcome="same",
                sections_moved=0,
                sections_loaded=0,
            )
        )

    def train(self) -> None:
        if self.generation is None:
            return
        may_end = (self.store / MAY_END).exists()
        self.step = self.spec.steps if may_end else self.step + 1
        say(
            messages.MinibatchCommitted(
                generation=self.generation,
                slot=self.slot,
                step=self.step,
                sections=(0,),
                loss=1 / self.step,
                grad_norm=1.0,
                step_s=STEP_S,
                peak_bytes=1,
            )
        )
        if self.step == self.spec.steps:
            self.save()
            say(messages.Evaluated(generation=self.generation, step=self.step, loss=0.5))
            self.stop(done=True)

    def stop(self, *, done: bool) -> None:
        assert self.generation is not None
        say(
            messages.GenerationStopped(
                generation=self.generation, slot=self.slot, step=self.step, done=done
            )
        )
        self.generation = None


PROFILE = Profile(
    fingerprint=FINGERPRINT,
    device="stub",
    software="software",
    microbatches=(
        MicrobatchProfile(
            microbatch_size=1,
            sections=(
                SectionProfile(
                    index=0,
                    forward_s=0.01,
                    backward_s=0.01,
                    recompute_s=0.01,
                    saved_bytes=1,
                    output_bytes=1,
                ),
            ),
        ),
    ),
    optimizer_s_per_byte=1e-12,
    within_vm=LinkProfile(latency_s=1e-4, bandwidth_bytes_per_s=1e9),
    between_vms=LinkProfile(latency_s=1e-4, bandwidth_bytes_per_s=1e9),
)


def main() -> None:
    incoming = lines()
    greeting = next(line for line in incoming if line is not None)
    stub = Stub(greeting)
    say(
        messages.SupervisorReady(
            num_slots=stub.num_slots,
            torch_version="none",
            device=machine.device(stub.gpus) if stub.gpus else PROFILE.device,
            software=PROFILE.software,
            gpus=stub.gpus,
        )
    )
    for line in incoming:
        if line is None:
            stub.train()
        else:
            stub.obey(decode(messages.Command, line))


if __name__ == "__main__":
    main()

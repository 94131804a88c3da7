"""Fleets whose workers share the device of the tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tests.builders import a_spec
from tests.gpu.devices import names
from tests.integration.fleet import Fleet, Host, Zygote, make_plan

from spottrain.manifest import read_manifest
from spottrain.pipeline.state.checkpoint import load_section
from spottrain.storage.open import open_store
from spottrain.wire.messages import JobSpec
from spottrain.wire.plan import Plan

WORKDIR = Path(__file__).parent
STEPS = 6
NUM_SECTIONS = 4
"""Of the tiny models."""
VMS = "abcd"
DEADLINE_S = 240.0
"""For anything that is waited for: large models take long to be made and loaded."""
_USABLE = 0.9
"""Share of a GPU's memory for torch's allocators; contexts need the rest."""


def job_spec(folder: Path, entrypoint: str = "tiny", **changes: Any) -> JobSpec:
    """Return the spec of one of ``jobs``."""
    spec = a_spec(
        name="gpu",
        entrypoint=entrypoint if ":" in entrypoint else f"jobs:{entrypoint}",
        steps=STEPS,
        reduction="exact",
        checkpoint_path=str(folder / "checkpoints"),
        checkpoint_every_steps=2,
        checkpoint_keep=3,
        lease_s=100.0,
    )
    return replace(spec, **changes)


def start(
    spec: JobSpec,
    vms: Sequence[str],
    folder: Path,
    zygote: Zygote,
    environment: Mapping[str, str] | None = None,
    threads: int = 1,
    devices: Sequence[str] = (),
) -> Fleet:
    """Start a supervisor for each VM; the GPU's memory is shared out among them."""
    share = _USABLE / len(vms) if len(vms) > 1 else 1.0
    hosts = {
        vm: Host(device=name, memory_share=share, threads=threads)
        for vm, name in zip(vms, devices or names(len(vms)), strict=True)
    }
    fleet = Fleet(
        *(spec, vms, folder / "log", zygote, environment, WORKDIR, hosts),
        deadline_s=DEADLINE_S,
    )
    fleet.ready()
    return fleet


def plan_for(
    spec: JobSpec,
    shape: tuple[int, int],
    vms: Sequence[str],
    num_sections: int = NUM_SECTIONS,
    **changes: Any,
) -> Plan:
    """Return the plan of a shape."""
    return make_plan(spec, *shape, vms, num_sections, **changes)


def tail(log: Path, lines: int = 30) -> str:
    """Return the end of the workers' log."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return "\n".join(text.splitlines()[-lines:])


def weights_of(spec: JobSpec, checkpoint: str) -> dict[str, bytes]:
    """Return the tensors of a checkpoint as bytes, by name."""
    store = open_store(spec.checkpoint_path)
    manifest = read_manifest(store, checkpoint)
    return {
        f"{section}/{name}": tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        for section in range(manifest.num_sections)
        for name, tensor in load_section(store, manifest, section).items()
    }

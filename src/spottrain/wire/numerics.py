"""What the bits of a job in exact mode depend on."""

from __future__ import annotations

from dataclasses import dataclass

from spottrain.wire.model import StateHome
from spottrain.wire.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """What the bits of a job in exact mode depend on, beside settings that every job file has.

    Its first plan and its first VM settle it, for the job's life. ``None``: it is open.
    """

    microbatch_size: int | None = None
    """Examples whose gradients are summed in one piece."""
    tensor_parallel: int | None = None
    """Ranks that divide the matrices of each stage, and sum parts of its results."""
    state: StateHome | None = None
    """Where the optimizer of workers on GPUs computes: a CPU and a GPU round differently."""
    kernels: str | None = None
    """Model of GPU or CPU, and build of torch, whose kernels compute."""

    def conflict_with(self, settled: Numerics) -> str:
        """Return the first thing that is settled otherwise there, as a job file says it; empty:
        nothing is."""
        names = {
            "microbatch_size": "microbatch_size: {}",
            "tensor_parallel": "runtime.tensor_parallel: {}",
            "state": "runtime.state: {}",
            "kernels": "VMs that compute on {}",
        }
        for name, words in names.items():
            own, other = getattr(self, name), getattr(settled, name)
            if own != other and None not in (own, other):
                return words.format(other)
        return ""

    def completed_by(self, settled: Numerics) -> Numerics:
        """Return this, with what is settled in place of what is open."""
        return Numerics(
            microbatch_size=self.microbatch_size or settled.microbatch_size,
            tensor_parallel=self.tensor_parallel or settled.tensor_parallel,
            state=self.state or settled.state,
            kernels=self.kernels or settled.kernels,
        )


def numerics_of(plan: Plan, kernels: str | None = None) -> Numerics:
    """Return what a plan settles in exact mode."""
    return Numerics(
        microbatch_size=plan.microbatch_size,
        tensor_parallel=plan.devices_per_stage_replica,
        state=plan.state,
        kernels=kernels,
    )

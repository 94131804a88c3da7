"""How long workers may take to leave a broken generation, as they and the manager agree."""

from __future__ import annotations

LEAVE_S = 2.5
"""From a broken connection to the end of all that waits for it in a worker, which ends itself
then."""
NCCL_LEAVE_S = 10.0
"""The same where a communicator of NCCL is aborted: that frees memory of the GPU, which waits
for all that is queued there (nccl, issues 549 and 1777). One idle rank took 1.0 s on an H100
(docs/gpu.md); a machine may have eight."""
MARGIN_S = 0.5
"""That the manager waits for longer, before it has workers give up."""
_EVACUATION_S, _BYTES_PER_S = 15.0, 1e9
"""A GPU's memory came down at 1.4 GB/s at the slowest (docs/gpu.md)."""


def evacuation_s(num_bytes: int) -> float:
    """Return how long a worker may take to bring so much state to its VM's memory."""
    return _EVACUATION_S + num_bytes / _BYTES_PER_S

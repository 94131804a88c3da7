"""The job that nothing happens to: what every other one must end like."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.integration.jobs import Answer, Job, is_port_open, losses, weights
from tests.once import alone, shared_folder


@dataclass(frozen=True)
class Undisturbed:
    """What came of a job that nothing happened to."""

    answer: Answer
    processes_left: int
    port_left: bool
    checkpoints: Path

    @property
    def losses(self) -> list[tuple[int, float]]:
        """(step, loss) of every mini-batch."""
        return losses(self.checkpoints.parent / "metrics.jsonl")

    @property
    def weights(self) -> dict[str, str]:
        """What every other job with the same seed must end with."""
        return weights(self.checkpoints)


def undisturbed(factory: pytest.TempPathFactory) -> Undisturbed:
    """Return the undisturbed job, which runs once for all tests."""
    folder = shared_folder(factory)
    record = folder / "undisturbed.json"
    with alone(folder / "undisturbed.lock"):
        if not record.exists():
            record.write_text(json.dumps(_run_undisturbed(folder)))
    data = json.loads(record.read_text())
    return Undisturbed(
        answer=Answer(**data["answer"]),
        processes_left=data["processes_left"],
        port_left=data["port_left"],
        checkpoints=Path(data["checkpoints"]),
    )


def _run_undisturbed(folder: Path) -> dict[str, Any]:
    resources = {"max_vms": 2}
    with Job(folder, "undisturbed", resources=resources, profile=None) as job:
        answer = job.launch("-o", "json")
        port = (job.dir.path / "port").read_text()
        return {
            "answer": asdict(answer),
            "processes_left": len(job.left_over()),
            "port_left": is_port_open(f"https://127.0.0.1:{port}"),
            "checkpoints": str(job.checkpoint_root),
        }

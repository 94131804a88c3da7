"""What a supervisor is told first, as the first line of its stdin."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spottrain import wire
from spottrain.wire import JobSpec


@dataclass(frozen=True, slots=True)
class Greeting:
    """What the agent says first."""

    spec: JobSpec
    workdir: Path
    num_slots: int
    private_address: str
    vm_id: str

    @classmethod
    def parse(cls, line: str) -> Greeting:
        """Read the first line of stdin."""
        data: dict[str, Any] = json.loads(line)
        return cls(
            spec=wire.from_data(JobSpec, data["spec"]),
            workdir=Path(data["workdir"]),
            num_slots=data["num_slots"],
            private_address=data["private_address"],
            vm_id=data["vm_id"],
        )


def first_line() -> str:
    """Read up to the first newline, leaving what follows in the pipe."""
    line = bytearray()
    while (byte := os.read(sys.stdin.fileno(), 1)) not in (b"", b"\n"):
        line += byte
    return line.decode()

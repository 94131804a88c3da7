"""What goes wrong with a fake cloud, by script; shared by the fakes of our own making."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Fault:
    """Something that goes wrong with the next calls of one operation."""

    operation: str
    """``*``: of any."""
    kind: str
    """``error`` (with code and status), ``drop`` (no answer, nothing done), ``lost``
    (done, no answer), ``hang`` (no answer for ``seconds``, nothing done), ``slow``
    (done and answered after ``seconds``), or ``kill`` and ``late kill``: whoever asks dies
    before or after it is done."""
    times: int = 1
    code: str = ""
    status: int = 400
    seconds: float = 0.0
    headers: dict[str, str] = field(default_factory=dict)
    victim: str = ""
    """A file with the pid of whoever asks, as JSON."""

    def kill(self) -> None:
        """Let whoever asks die."""
        os.kill(json.loads(Path(self.victim).read_text())["pid"], signal.SIGKILL)


class Script:
    """Faults, a line that can be cut, a clock, and lists that lag behind."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.forget_script()

    def forget_script(self) -> None:
        """Let everything go well from now on."""
        self.faults: list[Fault] = []
        self.hide_s = self.linger_s = self.offset_s = self.skew_s = 0.0
        self.log: list[dict[str, Any]] = []
        self.drift: list[str] = []
        self.cut_after: int | None = None
        self.cut_carried_out = self.broken = False
        self.passed = 0
        self.credentials_good = True

    # --- knobs ------------------------------------------------------------------------

    def fail(self, **fault: Any) -> None:
        """Script a fault."""
        self.faults.append(Fault(**fault))

    def lag(self, hide_s: float, linger_s: float) -> None:
        """List VMs late, and list them as running for long after their end."""
        self.hide_s, self.linger_s = hide_s, linger_s

    def pass_time(self, seconds: float) -> None:
        """Let lists catch up sooner."""
        self.offset_s += seconds

    def skew(self, seconds: float) -> None:
        """Set the cloud's clock ahead of ours, as far as credentials go."""
        self.skew_s = seconds

    def expire(self, expired: bool) -> None:
        """Expire the credentials, or renew them."""
        self.credentials_good = not expired

    def cut(self, after: int, carried_out: bool) -> None:
        """Let so many changing requests pass, then nothing; see contract.Wire."""
        self.cut_after, self.cut_carried_out = after, carried_out
        self.passed = 0

    def heal(self) -> int:
        """Let everything pass again."""
        self.cut_after, self.broken = None, False
        return self.passed

    def requests(self) -> list[dict[str, Any]]:
        """Return every request so far."""
        return self.log

    def drifts(self) -> list[str]:
        """Return what did not fit the model."""
        return self.drift

    # --- for the server ---------------------------------------------------------------

    def now(self) -> float:
        """The time as lists see it."""
        return time.time() + self.offset_s

    def line(self, *, changing: bool) -> tuple[bool, bool]:
        """Return whether a request is carried out, and whether it is answered."""
        passes = self.cut_after is None or not changing or self.passed < self.cut_after
        if passes and not self.broken:
            self.passed += changing
            return True, True
        first, self.broken = not self.broken, True
        return first and self.cut_carried_out, False

    def fault(self, operation: str) -> Fault | None:
        """Return what goes wrong with a request, once for each time it was scripted."""
        for fault in self.faults:
            if fault.operation in (operation, "*") and fault.times > 0:
                fault.times -= 1
                return fault
        return None

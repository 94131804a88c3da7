"""What fake clouds have in common: what goes wrong by script, machines, rates."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fakes.machines import Machines
from tests.fakes.throttling import Throttle


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
    after: int = 0
    """Calls of the operation that pass before that."""
    code: str = ""
    status: int = 400
    seconds: float = 0.0
    headers: dict[str, str] = field(default_factory=dict)
    victim: str = ""
    """A file with the pid of whoever asks, as JSON."""

    def kill(self) -> None:
        """Let whoever asks die."""
        os.kill(json.loads(Path(self.victim).read_text())["pid"], signal.SIGKILL)


@dataclass(frozen=True)
class Outcome:
    """What becomes of a request."""

    is_carried_out: bool
    is_answered: bool
    fault: Fault | None

    @property
    def error(self) -> Fault | None:
        """The fault that is its answer, if one is."""
        return self.fault if self.fault is not None and self.fault.kind == "error" else None

    def finish(self) -> None:
        """Let happen what does once it is carried out."""
        if self.fault is not None and self.fault.kind == "late kill":
            self.fault.kill()


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

    def recover(self) -> None:
        """Let everything that was scripted to go wrong be over."""
        self.faults.clear()

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

    def meet(self, operation: str, *, changing: bool) -> Outcome:
        """Return what becomes of a request, after what happens before that."""
        with self.lock:
            carried_out, answered = self.line(changing=changing)
            fault = self.fault(operation) if carried_out else None
        if fault is None or fault.kind == "error":
            return Outcome(carried_out, answered, fault)
        if fault.kind in ("hang", "slow"):
            time.sleep(fault.seconds)
        if fault.kind == "kill":
            fault.kill()
        done = fault.kind in ("lost", "slow", "late kill")
        return Outcome(done, fault.kind == "slow", fault)

    def fault(self, operation: str) -> Fault | None:
        """Return what goes wrong with a request, once for each time it was scripted."""
        for fault in self.faults:
            if fault.operation not in (operation, "*") or fault.times < 1:
                continue
            if fault.after > 0:
                fault.after -= 1
                continue
            fault.times -= 1
            return fault
        return None


class CloudScript(Script):
    """The script of a cloud that rents machines, and throttles.

    Args:
        throttle: Makes what throttles by the documented rates.
    """

    def __init__(self, throttle: Callable[[], Throttle]) -> None:
        self._make_throttle = throttle
        self.machines: Machines | None = None
        super().__init__()

    def forget_script(self) -> None:
        """Let everything go well from now on, with no machine that is real."""
        super().forget_script()
        self.throttle = self._make_throttle()
        self.due_tags: set[str] = set()
        if self.machines is not None:
            self.machines.kill_all()
            self.machines = None

    def throttle_calls(self) -> None:
        """Throttle by the documented rates from now on."""
        self.throttle.is_on = True

    def demand_tag(self, name: str) -> None:
        """Let a policy of the organisation forbid VMs without a tag."""
        self.due_tags.add(name)

    def rent_machines(self, folder: str, port: int, metadata_url: str = "") -> None:
        """Let every VM from now on be a machine that can be logged in to."""
        self.machines = Machines(Path(folder), port, metadata_url)

    def switched_on(self) -> list[str]:
        """Name the machines that are on."""
        return [] if self.machines is None else self.machines.names()

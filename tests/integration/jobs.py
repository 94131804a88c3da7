"""Jobs driven as a user would drive them: by the ``spottrain`` command, at real times."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

from tests.integration import forks
from tests.local_cloud import inject
from tests.view import View

from spottrain.cloud.local.market import MarketEvent
from spottrain.cloud.local.provider import LocalProvider
from spottrain.cloud.port.provider import Vm
from spottrain.manifest import CheckpointEntry, list_checkpoints
from spottrain.storage.open import open_store
from spottrain.varuna_manager.core.model.events import Event, ReportReceived
from spottrain.varuna_manager.core.model.records import GenerationPhase
from spottrain.varuna_manager.core.model.state import State
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.follow import Follower, read_state
from spottrain.varuna_manager.jobs.journal import Journal
from spottrain.varuna_manager.launch.machines import open_provider

T = TypeVar("T")

HERE = Path(__file__).parent
SPOTTRAIN = (sys.executable, "-m", "spottrain.varuna_manager.cli.main")
DEADLINE_S = 1200.0
"""How long a test waits for anything."""
POLL_S = 0.05
STEPS = 120
_MARK = "SPOTTRAIN_TEST_JOB"
"""Environment variable that every process of a job inherits."""
_BECOME_FOREGROUND = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)
"""Makes its standard input its controlling terminal, then becomes a command."""


class TooLateError(AssertionError):
    """What a test waited for did not come."""


@dataclass(frozen=True)
class Answer:
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str

    @property
    def report(self) -> dict[str, Any]:
        """What ``-o json`` printed: one document and nothing else."""
        document: dict[str, Any] = json.loads(self.out)
        return document

    @property
    def error(self) -> str:
        """The one line that begins with ``error:``."""
        (line,) = (x for x in self.err.splitlines() if x.startswith("error: "))
        return line


class Terminal:
    """A command at a terminal of its own."""

    def __init__(self, argv: tuple[str, ...], environment: Mapping[str, str]) -> None:
        self._screen, theirs = os.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _BECOME_FOREGROUND, *argv],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**environment, "TERM": "xterm", "COLUMNS": "160"},
            start_new_session=True,
        )
        os.close(theirs)
        os.set_blocking(self._screen, False)
        self.text = ""

    def press(self, key: str) -> None:
        """Type a key."""
        os.write(self._screen, key.encode())

    def read(self) -> str:
        """Return all that was ever on the screen."""
        with contextlib.suppress(BlockingIOError, OSError):
            while data := os.read(self._screen, 1 << 16):
                self.text += data.decode(errors="replace")
        return self.text

    def close(self) -> None:
        """Close the terminal's window: the kernel tells its processes with SIGHUP."""
        os.close(self._screen)

    def wait(self) -> int:
        """Return the exit code of the command, once it has ended."""
        until("the command ends", lambda: self.read() and self._has_ended())
        self.read()
        return self.process.wait()

    def _has_ended(self) -> bool:
        return self.process.poll() is not None


_INSPECTED = tempfile.TemporaryDirectory(prefix="spottrain-inspected-")
INSPECTED = "SPOTTRAIN_TEST_INSPECTED"
"""Names a folder for what all processes of a test run find out about the same code."""


def share_inspections(home: Path) -> None:
    """Let state folders share what was found out about the same code.

    Args:
        home: SPOTTRAIN_HOME.
    """
    kept = home / "cache" / "inspect"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.symlink_to(os.environ.get(INSPECTED, _INSPECTED.name))


class Job:
    """One job, in a state folder that jobs may share.

    Args:
        folder: Of the test; job file and workdir go into a new folder in it.
        name: Of the job.
        settings: What its job file says beside the usual. ``profile: None`` lets the job
            measure; else its plans depend on no measured time.
    """

    def __init__(self, folder: Path, name: str, **settings: Any) -> None:
        self.folder = folder / name
        (self.folder / "workdir").mkdir(parents=True)
        shutil.copy(HERE / "tiny_job.py", self.folder / "workdir")
        share_inspections(folder / "home")
        self.name = name
        self.dir = JobDir(folder / "home" / "jobs" / name)
        self.file = self.folder / "job.yaml"
        self.settings = {
            "name": name,
            "entrypoint": "tiny_job:paced_job",
            "workdir": "workdir",
            "minibatch_size": 8,
            "microbatch_size": 2,
            "steps": STEPS,
            "seed": 1,
            "reduction": "exact",
            "checkpoint": {"every_steps": 10},
            "morphing": {"debounce_s": 0.5},
            "profile": str(HERE / "tiny_profile.json"),
            **settings,
        }
        self.save()
        self._pace = self.folder / "pace"
        self.pace(0.0)
        self._mark = f"{name}-{uuid.uuid4().hex}"
        self.environment = {
            **os.environ,
            "SPOTTRAIN_HOME": str(folder / "home"),
            "OMP_NUM_THREADS": "1",
            "PACE_FILE": str(self._pace),
            _MARK: self._mark,
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill_everything()

    def save(self) -> None:
        """Write the job file anew."""
        self.file.write_text(json.dumps(self.settings))

    # --- what a user does ---------------------------------------------------------

    def run(self, *arguments: str) -> Answer:
        """Run a command to its end."""
        if self.environment.get("PYTHONPATH") == os.environ.get("PYTHONPATH"):
            return Answer(*forks.run(arguments, self.environment, DEADLINE_S))
        done = subprocess.run(  # it is to run other code than is imported here
            [*SPOTTRAIN, *arguments],
            check=False,
            capture_output=True,
            text=True,
            env=self.environment,
            timeout=DEADLINE_S,
        )
        return Answer(done.returncode, done.stdout, done.stderr)

    def launch(self, *options: str) -> Answer:
        """Run ``spottrain launch`` to its end."""
        return self.run("launch", str(self.file), *options)

    def resume(self, *options: str) -> Answer:
        """Run ``spottrain resume`` to its end."""
        return self.run("resume", self.name, *options)

    def at_terminal(self, *arguments: str) -> Terminal:
        """Run a command at a terminal of its own."""
        return Terminal((*SPOTTRAIN, *arguments), self.environment)

    def pace(self, loss_s: float) -> None:
        """Let every loss that is computed from now on take that long, or be NaN."""
        self.paced_s = loss_s
        draft = self._pace.with_suffix(".draft")
        draft.write_text(str(loss_s))
        draft.replace(self._pace)

    def until_paced(self, loss_s: float) -> None:
        """Let losses take that long from now on, and wait until one does."""
        self.pace(loss_s)
        now = self._pace.with_suffix(".now")
        until("a loss", lambda: now.exists() and now.read_text() == str(loss_s))

    def let_one_sleep(self) -> None:
        """Let one worker of ``sleeping_job`` sleep for ever; returns when it does."""
        order = self._pace.with_suffix(".sleep")
        order.touch()
        until("a worker sleeps", lambda: not order.exists())

    # --- what the world does --------------------------------------------------------

    @property
    def cloud(self) -> LocalProvider:
        """The local cloud that the job rents from."""
        provider = open_provider(self.dir)
        assert isinstance(provider, LocalProvider)
        return provider

    def market(self, kind: Any, **what: Any) -> tuple[str, ...]:
        """Let the market do something now; return the VMs hit."""
        return inject(self.cloud, MarketEvent(at_s=0.0, kind=kind, **what))

    def vms(self) -> tuple[Vm, ...]:
        """Return all VMs that the job ever had."""
        return tuple(self.cloud.list_vms(self.name))

    def manager_pid(self) -> int:
        """Return the pid of the running manager."""
        address = until("the manager says where it is", self.dir.manager)
        return address.pid

    def kill_manager(self) -> None:
        """Kill the manager as a crash would; returns when it is gone."""
        os.kill(self.manager_pid(), signal.SIGKILL)
        until("the manager is gone", lambda: not self.dir.is_managed())

    def kill_everything(self) -> None:
        """Kill every process that the job ever started; returns when all are gone."""

        def none_left() -> bool:
            for pid in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not self.processes()

        until("all processes are gone", none_left)

    # --- what can be seen -------------------------------------------------------------

    def processes(self) -> list[int]:
        """Return the pids of all living processes that the job ever started."""
        mark = f"{_MARK}={self._mark}".encode()
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal():
                with contextlib.suppress(OSError):
                    if mark in (folder / "environ").read_bytes().split(b"\0"):
                        found.append(int(folder.name))
        return found

    def left_over(self) -> list[int]:
        """Return the pids of processes that stay: killed ones take a moment to go."""
        deadline_s = time.monotonic() + DEADLINE_S
        while (pids := self.processes()) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        return pids

    def checkpoints(self) -> list[CheckpointEntry]:
        """Return the complete checkpoints, newest first."""
        return list_checkpoints(open_store(self.checkpoint_root))

    @property
    def checkpoint_root(self) -> Path | str:
        """Where the job's checkpoints are: a folder or a URL."""
        path: str | None = self.settings["checkpoint"].get("path")
        return self.dir.checkpoints if path is None else path

    def events(self) -> list[Event]:
        """Return every event of the journal."""
        journal = Journal(self.dir.journal, read_only=True)
        try:
            return [event for _, event in journal.read()]
        finally:
            journal.close()

    def losses(self) -> list[tuple[int, float]]:
        """Return (step, loss) of every mini-batch in ``metrics.jsonl``."""
        return losses(self.dir.path / "metrics.jsonl")

    def state(self) -> State:
        """Return what the manager knows now."""
        return read_state(self.dir)

    def reports(self, kind: type[T]) -> list[tuple[str, T]]:
        """Return all reports of one kind, with the VM that each came from."""
        return [
            (event.vm_id, event.report)
            for event in self.events()
            if isinstance(event, ReportReceived) and isinstance(event.report, kind)
        ]

    def until(self, what: str, found: Callable[[State], T | None]) -> T:
        """Follow the journal until ``found`` returns something true of a state."""
        until("the job is there", self.dir.journal.exists)
        follower = Follower(self.dir)

        def look() -> T | None:
            for _ in follower.advance():
                if hit := found(follower.state):
                    return hit
            return None

        try:
            return until(what, look, lambda: self.tail(follower.state))
        finally:
            follower.close()

    def until_trains(self, step: int = 1) -> State:
        """Wait until a generation trains and has come to ``step``."""
        return self.until(
            f"mini-batch {step}",
            lambda state: state if trains(state) >= step else None,
        )

    def tail(self, state: State) -> str:
        """Return what may say why something does not come."""
        log = self.dir.log.read_text().splitlines() if self.dir.log.exists() else []
        return "\n".join([state.activity, *log[-15:]])


def trains(state: State) -> int:
    """Return the mini-batches committed if a generation trains now, else 0."""
    generation = View(state).current_generation
    if generation is None or generation.phase is not GenerationPhase.RUNNING:
        return 0
    return View(state).step if generation.committed else 0


def trained_on(state: State) -> set[str]:
    """Return the VMs on which a generation trains now, if one does."""
    generation = View(state).current_generation
    if generation is None or not trains(state):
        return set()
    return {slot.vm_id for slot in generation.plan.slots}


def until(what: str, look: Callable[[], T | None], why: Callable[[], str] = str) -> T:
    """Look until there is something; return it."""
    deadline = time.monotonic() + DEADLINE_S
    while not (found := look()):
        if time.monotonic() > deadline:
            raise TooLateError(f"{what}: not in {DEADLINE_S:g} s\n{why()}")
        time.sleep(POLL_S)
    return found


def losses(lines: Path) -> list[tuple[int, float]]:
    """Return (step, loss) of every mini-batch in a file of measurements."""
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    return [(r["step"], r["loss"]) for r in rows if r["kind"] == "minibatch"]


def is_port_open(url: str) -> bool:
    """Return whether somebody listens there."""
    address = urlsplit(url)
    with socket.socket() as probe:
        return probe.connect_ex((address.hostname or "", address.port or 0)) == 0


def weights(root: Path | str) -> dict[str, str]:
    """Return the hash of every section in the newest checkpoint."""
    store = open_store(root)
    newest = list_checkpoints(store)[0]
    return {
        entry.name.rpartition("/")[2]: hashlib.sha256(store.get(entry.name)).hexdigest()
        for entry in store.list(newest.name)
        if entry.name.endswith(".safetensors")
    }

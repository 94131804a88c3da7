"""The batch program: serves the manager's requests on a node while its batch job runs.
Standard library only.

``python -P -m spottrain.cloud.slurm.on_node ARGUMENTS``, these as JSON: see ``Node``.

The manager and the node share a folder, which Slurm's users have on all nodes: usually in
their home. Of each batch job it holds

    <job id>/node.json            the node's address and the VM's token, once the program runs
    <job id>/<name>.requests      of one process of the manager, as ``serve`` reads them
    <job id>/<name>.answers       to that process
    <job id>/*.log                the VM's logs, once it is over
    manager.address               where agents call

Everything else of the VM lies in a folder of the node's own. The program ends, and the batch
job with it, once the agent has ended or is never started.

Notices: a step of the job's own waits for SIGTERM, which Slurm sends to all steps as soon as
the job is selected for preemption; only at its new end time, GraceTime later, does it reach
the batch script and what that has started (slurm.conf, GraceTime). SIGUSR1 comes before the
job's time limit (sbatch, ``--signal=B:USR1@seconds``).
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from spottrain.cloud.notices.file import VARIABLE
from spottrain.cloud.ssh.on_vm.host_agent import HostAgent, serve
from spottrain.cloud.ssh.on_vm.tail import Tail
from spottrain.files import PRIVATE, write_whole
from spottrain.network import address_towards

_NOTICED = 75
"""Exit code of the step that waits for SIGTERM."""
_SENTINEL = (
    f"import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit({_NOTICED})); "
    "[signal.pause() for _ in iter(int, 1)]"
)
_LOOK_S = 0.1
"""Time between two looks for a new process of the manager, and for notices."""


class Node:
    """The node's side of one batch job.

    Args:
        given: ``folder``, shared, of the job of spottrain's; ``scratch``, of the node's own,
            by default that for temporary files; ``manager``, an address of the manager's
            machine; ``claim``, as ``HostAgent.claim`` takes it, but for the VM's id; its
            ``token``; and ``unstarted_s``, how long the agent may take to be started.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        self._job_id = os.environ["SLURM_JOB_ID"]
        self._folder = Path(given["folder"])
        self._shared = self._folder / self._job_id
        scratch = Path(os.path.expandvars(given["scratch"]) or tempfile.gettempdir())
        self._root = scratch / f"spottrain-{os.getuid()}" / self._job_id
        self._vm_id = f"slurm.{self._job_id}"
        self._claim = {
            **given["claim"],
            "vm_id": self._vm_id,
            "expires_at": time.time() + given["unstarted_s"],
        }
        self._about = {"address": address_towards(given["manager"]), "token": given["token"]}
        self._agent = HostAgent(self._root)
        self._served: dict[str, Tail] = {}
        self._is_noticed = self._is_ended = False

    def run(self) -> None:
        """Serve until the VM is over, then leave nothing on the node."""
        own = self._root / self._vm_id
        for folder in (self._root.parent, self._root, own):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._agent.claim(self._claim)
        (own / "manager.address").symlink_to(self._folder / "manager.address")
        os.environ[VARIABLE] = str(own / "notice.json")
        signal.signal(signal.SIGTERM, self._end)
        signal.signal(signal.SIGUSR1, self._notice)
        threading.Thread(target=self._await_preemption, daemon=True).start()
        self._shared.mkdir(mode=0o700)
        _write_json(self._shared / "node.json", self._about)
        while not self._is_ended and self._agent.status()["state"] in ("claimed", "running"):
            self._serve_new()
            if self._is_noticed:
                self._is_noticed = False
                _write_json(Path(os.environ[VARIABLE]), {"end_s": self._ask_end_s()})
            time.sleep(_LOOK_S)
        for name, text in self._agent.end(self._vm_id).items():
            (self._shared / name).write_text(text, errors="backslashreplace")

    def _end(self, *_: object) -> None:
        self._is_ended = True

    def _notice(self, *_: object) -> None:
        self._is_noticed = True

    def _serve_new(self) -> None:
        """Serve the newest process of the manager; earlier ones have ended."""
        for requests in sorted(self._shared.glob("*.requests")):
            if requests.name not in self._served:
                for tail in self._served.values():
                    tail.close_soon()
                tail = self._served[requests.name] = Tail(requests)
                answers = open(requests.with_suffix(".answers"), "ab")  # noqa: SIM115
                stream = io.BufferedReader(tail)
                arguments = (stream, answers, self._root)
                threading.Thread(target=serve, args=arguments, daemon=True).start()

    def _await_preemption(self) -> None:
        """Wait for SIGTERM in a step of its own, which takes none of the job's resources.

        Where steps cannot be started the notice is that before the time limit only.
        """
        argv = ["srun", "--overlap", "--ntasks=1", "--nodes=1", "--mem=0", "--gres=none"]
        asked = [*argv, sys.executable, "-c", _SENTINEL]
        step = subprocess.run(asked, stdin=subprocess.DEVNULL, check=False)
        if step.returncode == _NOTICED:
            self._notice()

    def _ask_end_s(self) -> float:
        """Return when this job will end, in seconds since the epoch; 0: it is not known."""
        asked = ["scontrol", "--oneliner", "show", "job", self._job_id]
        seconds = {**os.environ, "SLURM_TIME_FORMAT": "%s"}
        try:
            said = subprocess.run(asked, env=seconds, stdout=subprocess.PIPE, check=True)
            return float(said.stdout.decode().partition(" EndTime=")[2].split()[0])
        except (OSError, ValueError, IndexError, subprocess.CalledProcessError) as error:
            sys.stderr.write(f"when this job ends is not known: {error}\n")
            return 0.0


def _write_json(path: Path, value: Any) -> None:
    write_whole(path, json.dumps(value), mode=PRIVATE)


if __name__ == "__main__":
    Node(json.loads(sys.argv[1])).run()
    os._exit(0)  # threads wait for the manager, and for a step that ends with the job

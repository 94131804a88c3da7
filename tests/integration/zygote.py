"""A process that has loaded the job once and forks warm supervisors, for many cases.

Importing torch takes seconds, forking milliseconds; what a fork runs is the supervisor's
own code. Requests come over the socket that is stdin: JSON, with three file descriptors
(the supervisor's stdin, stdout, stderr); the answer is its pid.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import signal
import socket
import sys
from pathlib import Path

import torch

from spottrain.codec import decode
from spottrain.pipeline.model.data import dataset_lengths
from spottrain.pipeline.model.loaded import LoadedJob, load
from spottrain.pipeline.process.greeting import Greeting
from spottrain.pipeline.process.supervisor import Supervisor
from spottrain.redaction import hide
from spottrain.wire import messages

_CLONE_NEWNET = 0x40000000


def main() -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["SPOTTRAIN_STEPS"] = "6"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    requests = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    cache: dict[tuple[str, str], LoadedJob] = {}
    while True:
        data, fds, _, _ = socket.recv_fds(requests, 1 << 16, 3)
        if not data:
            return
        request = json.loads(data)
        greeting: Greeting = decode(Greeting, request["greeting"])
        spec = greeting.spec
        key = spec.entrypoint, spec.semantics
        if key not in cache:
            cache[key] = load(spec, Path(greeting.workdir))
        found = cache[key]
        loaded = LoadedJob(spec, found.job, found.layout, found.fingerprint, found.specs)
        if (pid := os.fork()) == 0:
            requests.close()
            serve(greeting, loaded, fds, request["environment"], request["namespace"])
        for fd in fds:
            os.close(fd)
        requests.sendall(str(pid).encode())


def enter_network(namespace: str) -> None:
    """Go into a network namespace, given by its path; needs root."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(namespace) as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


def serve(
    greeting: Greeting,
    loaded: LoadedJob,
    fds: list[int],
    environment: dict[str, str],
    namespace: str,
) -> None:
    """Become a supervisor, as its ``main`` would after loading."""
    try:
        if namespace:
            enter_network(namespace)
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.environ.update(environment)
        hide(greeting.spec.secrets)
        loaded = dataclasses.replace(loaded, datasets=dataset_lengths(loaded.job))
        reports = os.dup(fds[1])
        for target, fd in ((0, fds[0]), (1, fds[2]), (2, fds[2])):
            os.dup2(fd, target)
        for fd in fds:
            os.close(fd)
        supervisor = Supervisor(greeting, reports, loaded)
        ready = messages.SupervisorReady(num_slots=greeting.num_slots, torch_version="warm")
        supervisor.report(ready)
        supervisor.run()
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()

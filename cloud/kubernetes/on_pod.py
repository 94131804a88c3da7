"""The program of a pod: serves the manager's requests while the pod runs.
Standard library only.

The pod's arguments carry it, with the host agent, so that an image needs nothing of ours. It
listens on the pod's loopback only, to which port-forward leads. A connection of the manager
begins with a line that says what it is for:

    agent         requests, as ``host_agent.serve`` reads them
    call          waits for a call of the pod's agent, then carries it to the manager
    notice END    the pod will end at END, in seconds since the epoch; 0: unknown. Answered

Connections for calls are opened by the manager, which nobody can reach from a cluster. An
idle one hears ``.`` every few seconds, and ``+`` once a call is on it. The agent calls the
next port.

The program ends, and its pod with it, once the agent has ended or is never started. SIGTERM
is the notice: kubelets send it at the begin of the grace period, whatever ends the pod
(kubernetes.io, "Pod Lifecycle", Termination of Pods).
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from spottrain.cloud.ssh.on_vm.host_agent import HostAgent, serve

FOLDER_VARIABLE = "SPOTTRAIN_FOLDER"
"""Names a folder of the pod's own."""
BEAT_S = 10.0
"""Time between two signs of life on an idle connection."""
IDLE, CALLED = b".", b"+"
_CHUNK_BYTES = 64 * 1024
_LOOK_S = 0.2
_CALL_S = 20.0
"""How long a call of the agent may wait for a connection of the manager."""


class PodProgram:
    """The pod's side.

    Args:
        given: ``vm_id``; ``port``, on loopback, and the next one is for the agent's calls;
            ``grace_s``, from SIGTERM to the pod's end; ``claim``, as ``HostAgent.claim``
            takes it; and ``unstarted_s``, how long the agent may take to be started.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        self._vm_id: str = given["vm_id"]
        self._grace_s: float = given["grace_s"]
        self._claim = {
            **given["claim"],
            "vm_id": self._vm_id,
            "expires_at": time.time() + given["unstarted_s"],
        }
        self._root = Path(os.environ[FOLDER_VARIABLE]) / "vm"
        self._notice = Path(os.environ["SPOTTRAIN_NOTICE"])
        self._agent = HostAgent(self._root)
        self._manager = socket.create_server(("127.0.0.1", given["port"]))
        self._calls = socket.create_server(("127.0.0.1", given["port"] + 1))
        self._idle: queue.Queue[socket.socket] = queue.Queue()
        self._is_terminated = False
        self._is_answered = threading.Event()
        """Set while no manager asks anything."""

    def run(self) -> None:
        """Serve until the VM is over, then leave its last words to the pod's log."""
        signal.signal(signal.SIGTERM, self._terminate)
        (self._root / self._vm_id).mkdir(mode=0o700, parents=True, exist_ok=True)
        self._agent.claim(self._claim)
        for listener, take in ((self._manager, self._take), (self._calls, self._call)):
            threading.Thread(target=_accept, args=(listener, take), daemon=True).start()
        threading.Thread(target=self._keep_alive, daemon=True).start()
        while (state := self._agent.status()["state"]) in ("claimed", "running"):
            if self._is_terminated:
                if state == "claimed":
                    break  # it has nothing to give away
                self._is_terminated = False
                self._tell(time.time() + self._grace_s)
            time.sleep(_LOOK_S)
        if state == "free":  # a manager has ended it, and has yet to read the answer
            self._is_answered.wait(_CALL_S)
        for name, text in self._agent.end(self._vm_id).items():
            sys.stdout.write(f"--- {name}\n{text}")
        sys.stdout.flush()

    def _terminate(self, *_: object) -> None:
        self._is_terminated = True

    def _tell(self, end_s: float) -> None:
        draft = self._notice.with_suffix(".draft")
        draft.write_text(json.dumps({"end_s": end_s}))
        draft.replace(self._notice)

    def _take(self, connection: socket.socket) -> None:
        """Do what a connection of the manager is for."""
        stream = connection.makefile("rb")
        kind, *arguments = stream.readline().decode().split() or ["nothing"]
        if kind == "agent":
            self._is_answered.clear()
            with contextlib.suppress(OSError):  # the manager is gone
                serve(stream, connection.makefile("wb"), self._root)
            self._is_answered.set()
        elif kind == "call" and _send(connection, IDLE):
            self._idle.put(connection)
            return
        elif kind == "notice":
            self._tell(float(arguments[0]))
            _send(connection, IDLE)
        connection.close()

    def _call(self, caller: socket.socket) -> None:
        """Have a call of the agent carried to the manager."""
        end_s = time.monotonic() + _CALL_S
        with contextlib.suppress(queue.Empty):
            while (left_s := end_s - time.monotonic()) > 0:
                manager = self._idle.get(timeout=left_s)
                if _is_open(manager) and _send(manager, CALLED):
                    pump(caller, manager)
                    return
        caller.close()  # the agent tries again

    def _keep_alive(self) -> None:
        """Show idle connections that we are there: balancers end those without a word."""
        while True:
            for _ in range(self._idle.qsize()):
                with contextlib.suppress(queue.Empty):
                    connection = self._idle.get_nowait()
                    if _is_open(connection) and _send(connection, IDLE):
                        self._idle.put(connection)
                    else:
                        connection.close()
            time.sleep(BEAT_S)


def pump(one: socket.socket, other: socket.socket) -> None:
    """Copy in both directions until one side ends, then close both."""
    back = threading.Thread(target=_copy, args=(other, one), daemon=True)
    back.start()
    _copy(one, other)
    back.join()
    one.close()
    other.close()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(_CHUNK_BYTES):
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def _accept(listener: socket.socket, take: Any) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=take, args=(connection,), daemon=True).start()


def _is_open(connection: socket.socket) -> bool:
    """Return whether the other side of an idle connection has not closed it."""
    try:
        return bool(connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except BlockingIOError:
        return True
    except OSError:
        return False


def _send(connection: socket.socket, sign: bytes) -> bool:
    try:
        connection.sendall(sign)
    except OSError:
        return False
    return True


def main(given: dict[str, Any]) -> None:
    """Run the program; the threads that wait for the manager end with it."""
    PodProgram(given).run()
    os._exit(0)

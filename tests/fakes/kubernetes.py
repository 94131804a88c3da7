"""A Kubernetes cluster on this machine: an API server on loopback, pods as processes.

Strict: what it is sent must fit the published schemas of two versions (kubernetes-validate),
and the rules of ``kubernetes_rules``. Nothing happens by time: nodes, quotas, evictions and
the like are what a test says.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from tests.fakes.http_server import running
from tests.fakes.kubernetes_rules import RefusedError, admit, blocked_by, selected

from spottrain.varuna_manager.jobs.identity import ensure_identity

NAMESPACE = "training"
GPU = "nvidia.com/gpu"
USER = "system:serviceaccount:training:me"
IMAGE = "registry.example/torch:2"
_MARK = "SPOTTRAIN_FAKE_POD"
_KUBECTL = """
import json, os, sys
there = sys.argv.index("--")
assert sys.argv[1:there - 1] == ["-n", "training", "exec", "-i"], sys.argv
pod = "{pods}/" + sys.argv[there - 1]
os.chdir(pod + "/own")
os.execvpe(sys.argv[there + 1], sys.argv[there + 1:], json.load(open(pod + "/environment")))
"""
_SHOWN = 2
"""How often a pod that has been deleted and has ended is still listed: kubelets take a moment
to confirm."""
_loopbacks = (
    f"127.{a}.{b}.{c}" for a in itertools.count(10) for b in range(1, 255) for c in range(1, 255)
)


@dataclass(eq=False)
class FakePod:
    """A pod: what the API server has of it, and its processes."""

    object: dict[str, Any]
    folder: Path
    address: str
    process: subprocess.Popen[bytes] | None = None
    shown: int = 0

    @property
    def name(self) -> str:
        return str(self.object["metadata"]["name"])

    @property
    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.object["status"]
        return found

    @property
    def is_over(self) -> bool:
        return self.status["phase"] in ("Succeeded", "Failed")

    def conditioned(self, kind: str, status: str, reason: str, message: str = "") -> None:
        """Set a condition."""
        others = [one for one in self.status.get("conditions", ()) if one["type"] != kind]
        condition = {"type": kind, "status": status, "reason": reason, "message": message}
        condition["lastTransitionTime"] = _now()
        self.status["conditions"] = [*others, condition]

    def processes(self) -> list[int]:
        """Return the processes that run in it."""
        mark = f"{_MARK}={self.object['metadata']['uid']}".encode()
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal():
                with contextlib.suppress(OSError):
                    if mark in (folder / "environ").read_bytes().split(b"\0"):
                        found.append(int(folder.name))
        return found

    def kill(self) -> None:
        """End all that runs in it; nothing more can be run."""
        (self.folder / "environment").unlink(missing_ok=True)
        while pids := self.processes():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if self.process is not None:
                self.process.wait()


@dataclass
class FakeCluster:
    """The cluster, as its owner sees it; ``url`` and ``kubeconfig`` are for users.

    It begins with three nodes of one GPU each.
    """

    folder: Path
    url: str = ""
    nodes: dict[str, dict[str, Any]] = field(default_factory=dict)
    pods: dict[str, FakePod] = field(default_factory=dict)
    images: set[str] = field(default_factory=lambda: {IMAGE})
    claims: set[str] = field(default_factory=set)
    quota: int | None = None
    """Pods that have not ended that the namespace may have."""
    forbidden: set[tuple[str, str]] = field(default_factory=set)
    """What the user may not do, as (verb, resource)."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    requests: list[str] = field(default_factory=list)
    token: str = ""
    _passing: int | None = None
    _carried_out: bool = False
    _passed: int = 0

    def __post_init__(self) -> None:
        self.identity = ensure_identity(self.folder, ("127.0.0.1",))
        for number in (1, 2, 3):
            self.add_node(f"n{number}")

    @property
    def kubeconfig(self) -> Path:
        return self.folder / "kubeconfig"

    # --- what its owner does ------------------------------------------------------------

    def add_node(self, name: str, gpus: int = 1, **labels: str) -> None:
        """Add a node; what waits may begin on it."""
        with self.lock:
            self.nodes[name] = {
                "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **labels}},
                "spec": {"providerID": f"gce://project/zone/{name}", "taints": []},
                "status": {"allocatable": {GPU: str(gpus), "cpu": "64", "memory": "256Gi"}},
            }
            self._schedule()

    def taint(self, node: str, key: str, effect: str = "NoSchedule") -> None:
        """Taint a node; pods stay."""
        with self.lock:
            self.nodes[node]["spec"]["taints"].append({"key": key, "effect": effect})

    def programs(self) -> Path:
        """Return a folder with a ``kubectl`` that knows ``exec``: it becomes a process in a pod."""
        folder = self.folder / "programs"
        folder.mkdir(exist_ok=True)
        program = folder / "kubectl"
        program.write_text(f"#!{sys.executable}\n{_KUBECTL.format(pods=self.folder / 'pods')}")
        program.chmod(0o700)
        return folder

    def renew_token(self) -> None:
        """Let the token expire, and write another one into the kubeconfig."""
        self.token = secrets.token_hex(8)
        user = {"name": "me", "user": {"token": self.token}}
        authority = base64.b64encode(self.identity.ca_pem.encode()).decode()
        server = {"server": self.url, "certificate-authority-data": authority}
        cluster = {"name": "c", "cluster": server}
        context = {"name": "x", "context": {"cluster": "c", "user": "me"}}
        self.kubeconfig.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [cluster],
                    "users": [user],
                    "contexts": [context],
                    "current-context": "x",
                }
            )
        )

    def evict(self, name: str, reason: str = "EvictionByEvictionAPI") -> None:
        """Have a pod end within its grace period, for a reason of ``DisruptionTarget``."""
        with self.lock:
            pod = self.pods[name]
            pod.conditioned("DisruptionTarget", "True", reason)
            self._delete(pod, pod.object["spec"]["terminationGracePeriodSeconds"])

    def fail(self, name: str, reason: str, message: str = "") -> None:
        """Have a kubelet end a pod at once, for a reason of ``PodStatus``."""
        pod = self.pods[name]
        with self.lock:
            pod.status.update(phase="Failed", reason=reason, message=message)
        pod.kill()

    def run_out_of_memory(self, name: str) -> None:
        """Have the kernel end a pod for its use of memory."""
        pod = self.pods[name]
        with self.lock:
            _end(pod, 137, "OOMKilled")
        pod.kill()

    def lose_node(self, node: str) -> None:
        """End a node as a power cut would; the cluster does not know yet."""
        for pod in self._on(node):
            with self.lock:
                pod.process, lost = None, pod.process
            pod.kill()
            if lost is not None:
                lost.wait()

    def give_up_on(self, node: str) -> None:
        """Let the cluster notice that a node is lost: its pods are to leave it."""
        self.taint(node, "node.kubernetes.io/unreachable", "NoExecute")
        with self.lock:
            for pod in self._on(node):
                pod.conditioned("DisruptionTarget", "True", "DeletionByTaintManager")
                self._mark_deleted(pod, pod.object["spec"]["terminationGracePeriodSeconds"])

    def remove_node(self, node: str) -> None:
        """Remove a node that is gone: the garbage collector removes its pods."""
        with self.lock:
            for pod in self._on(node):
                del self.pods[pod.name]
            del self.nodes[node]

    def is_used(self, node: str) -> bool:
        """Return whether pods run on a node."""
        return any(not pod.is_over for pod in self._on(node))

    def _on(self, node: str) -> list[FakePod]:
        with self.lock:
            return [p for p in self.pods.values() if p.object["spec"].get("nodeName") == node]

    # --- the wire -----------------------------------------------------------------------

    def cut(self, after: int, *, carried_out: bool) -> None:
        """See ``tests.contract.account.Wire``."""
        self._passing, self._carried_out, self._passed = after, carried_out, 0

    def heal(self) -> int:
        """See ``tests.contract.account.Wire``."""
        self._passing = None
        return self._passed

    def breaks(self) -> tuple[bool, bool]:
        """Return whether a changing request is carried out, and answered."""
        with self.lock:
            if self._passing is None or self._passed < self._passing:
                self._passed += 1
                return True, True
            done, self._carried_out = self._carried_out, False
            return done, False

    # --- what users ask -----------------------------------------------------------------

    def create(self, namespace: str, body: Any, *, dry_run: bool) -> dict[str, Any]:
        if namespace != NAMESPACE:
            raise RefusedError(404, "NotFound", f'namespaces "{namespace}" not found')
        pod = admit(body)
        name = pod["metadata"]["name"]
        with self.lock:
            # Admission, with its quotas, comes before storage.
            used = sum(not pod.is_over for pod in self.pods.values())
            if self.quota is not None and used >= self.quota:
                raise RefusedError(
                    403,
                    "Forbidden",
                    f'pods "{name}" is forbidden: exceeded quota: few, requested: pods=1, used: '
                    f"pods={used}, limited: pods={self.quota}",
                )
            if name in self.pods:
                raise RefusedError(409, "AlreadyExists", f'pods "{name}" already exists')
            pod["metadata"] |= {
                "namespace": namespace,
                "uid": str(uuid.uuid4()),
                "creationTimestamp": _now(),
            }
            pod["status"] = {"phase": "Pending", "qosClass": "Guaranteed"}
            if not dry_run:
                folder = self.folder / "pods" / name
                self.pods[name] = FakePod(pod, folder, next(_loopbacks))
                self._schedule()
            return pod

    def list(self, selector: str) -> list[dict[str, Any]]:
        with self.lock:
            for pod in [pod for pod in self.pods.values() if _is_confirmed(pod)]:
                pod.shown += 1
                if pod.shown > _SHOWN:
                    del self.pods[pod.name]
            found = [pod.object for pod in self.pods.values()]
            labelled = [pod for pod in found if selected(selector, pod["metadata"]["labels"])]
            copied: list[dict[str, Any]] = json.loads(json.dumps(labelled))
            return copied

    def delete(self, name: str, grace_s: int | None) -> dict[str, Any]:
        with self.lock:
            pod = self._found(name)
            if grace_s is None:
                grace_s = pod.object["spec"]["terminationGracePeriodSeconds"]
            self._delete(pod, grace_s)
            return pod.object

    def forward(self, name: str, port: int) -> socket.socket:
        """Return a connection to a port on a pod's loopback, as its kubelet makes one.

        Raises:
            RefusedError: the pod does not run.
            OSError: nobody listens there.
        """
        pod = self._found(name)
        if pod.status["phase"] != "Running":
            raise RefusedError(500, "InternalError", f"pod {name} is not running")
        return socket.create_connection((pod.address, port))

    def _found(self, name: str) -> FakePod:
        with self.lock:
            if name not in self.pods:
                raise RefusedError(404, "NotFound", f'pods "{name}" not found')
            return self.pods[name]

    # --- scheduler and kubelets ---------------------------------------------------------

    def _schedule(self) -> None:
        for pod in self.pods.values():
            spec = pod.object["spec"]
            if "nodeName" in spec:
                continue
            reasons = []
            for name, node in self.nodes.items():
                there = [p.object for p in self._on(name) if not p.is_over]
                reason = blocked_by(pod.object, node, there, self.claims)
                if not reason:
                    spec["nodeName"] = name
                    pod.conditioned("PodScheduled", "True", "")
                    self._start(pod)
                    break
                reasons.append(reason)
            else:
                counts = ", ".join(f"{reasons.count(r)} {r}" for r in sorted(set(reasons)))
                message = f"0/{len(self.nodes)} nodes are available: {counts}."
                pod.conditioned("PodScheduled", "False", "Unschedulable", message)

    def _start(self, pod: FakePod) -> None:
        (container,) = pod.object["spec"]["containers"]
        pod.status.update(startTime=_now(), hostIP="127.0.0.1")
        if container["image"] not in self.images:
            message = f'Back-off pulling image "{container["image"]}"'
            _contain(pod, {"waiting": {"reason": "ImagePullBackOff", "message": message}})
            return
        own = pod.folder / "own"
        own.mkdir(parents=True)
        mounts = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
        emptied = {
            mounts[volume["name"]]
            for volume in pod.object["spec"]["volumes"]
            if "emptyDir" in volume
        }
        environment = {one["name"]: one["value"] for one in container["env"]}
        for name, value in environment.items():
            for mount in emptied:
                if value == mount or value.startswith(f"{mount}/"):
                    environment[name] = value.replace(mount, str(own), 1)
        given = {
            "PATH": os.environ["PATH"],
            "HOME": str(own),
            "PYTHONPATH": str(Path(__file__).parent / "pod"),
            "POD_LOOPBACK": pod.address,
            _MARK: pod.object["metadata"]["uid"],
            **environment,
        }
        if pod.object["spec"].get("serviceAccountName"):
            given["KUBECONFIG"] = str(self.kubeconfig)  # for the token that is mounted there
        (pod.folder / "environment").write_text(json.dumps(given))
        with (pod.folder / "log").open("wb") as log:
            pod.process = subprocess.Popen(
                container["command"],
                env=given,
                cwd=own,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        pod.status.update(phase="Running", podIP=pod.address)
        _contain(pod, {"running": {"startedAt": _now()}})
        threading.Thread(target=self._watch, args=(pod, pod.process), daemon=True).start()

    def _watch(self, pod: FakePod, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        with self.lock:
            if pod.process is not process:
                return  # its node is lost, and tells nobody
        pod.kill()
        with self.lock:
            if "running" in pod.status["containerStatuses"][0]["state"]:
                last = (pod.folder / "log").read_text(errors="replace")[-1000:]
                told = code if code >= 0 else 128 - code
                _end(pod, told, "Error" if code else "Completed", last if code else "")
            self._schedule()

    def _delete(self, pod: FakePod, grace_s: int) -> None:
        self._mark_deleted(pod, grace_s)
        if "nodeName" not in pod.object["spec"] or grace_s == 0:
            del self.pods[pod.name]
        elif pod.process is not None and pod.process.poll() is None:
            pod.process.send_signal(signal.SIGTERM)
            timer = threading.Timer(grace_s, self._kill_late, (pod, grace_s))
            timer.daemon = True
            timer.start()

    def _kill_late(self, pod: FakePod, grace_s: int) -> None:
        if pod.object["metadata"]["deletionGracePeriodSeconds"] == grace_s:
            pod.kill()

    def _mark_deleted(self, pod: FakePod, grace_s: int) -> None:
        metadata = pod.object["metadata"]
        if grace_s < metadata.get("deletionGracePeriodSeconds", float("inf")):
            metadata["deletionTimestamp"] = _now(grace_s)
            metadata["deletionGracePeriodSeconds"] = grace_s

    def close(self) -> None:
        """End all pods."""
        with self.lock:
            pods = tuple(self.pods.values())
        for pod in pods:
            pod.kill()


def _is_confirmed(pod: FakePod) -> bool:
    """Return whether a kubelet has ended a pod that is deleted, or none ever began it."""
    never = pod.process is None and pod.status["phase"] == "Pending"
    return "deletionTimestamp" in pod.object["metadata"] and (pod.is_over or never)


def _contain(pod: FakePod, state: Mapping[str, Any]) -> None:
    (container,) = pod.object["spec"]["containers"]
    image = container["image"]
    pod.status["containerStatuses"] = [
        {
            "name": container["name"],
            "image": image,
            "imageID": image,
            "ready": "running" in state,
            "restartCount": 0,
            "state": dict(state),
        }
    ]


def _end(pod: FakePod, code: int, reason: str, message: str = "") -> None:
    pod.status.setdefault("phase", "")
    if not pod.is_over:
        pod.status["phase"] = "Failed" if code else "Succeeded"
    ended = {"exitCode": code, "reason": reason, "message": message, "finishedAt": _now()}
    _contain(pod, {"terminated": ended})


def _now(after_s: float = 0.0) -> str:
    at = datetime.now(UTC) + timedelta(seconds=after_s)
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


@contextlib.contextmanager
def a_cluster(folder: Path) -> Iterator[FakeCluster]:
    """Run a cluster in a folder of its own."""
    from tests.fakes.kubernetes_http import server_of

    folder.mkdir(parents=True, exist_ok=True)
    cluster = FakeCluster(folder)
    with running(server_of(cluster)) as server:
        cluster.url = f"https://127.0.0.1:{server.server_port}"
        cluster.renew_token()
        try:
            yield cluster
        finally:
            cluster.close()

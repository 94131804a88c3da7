"""Kubernetes as a provider: a VM is a pod that runs an agent.

From outside of the cluster the manager reaches pods by port-forward (``link``); within, pods
call a relay on its address. What is rented stands in the annotations of the pods, so nothing
about it is kept on disk. Pods are listed, not watched: a list is never out of date for longer
than the manager looks away, and there is no watch that expires.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import replace
from functools import partial
from pathlib import Path

from spottrain.cloud.clusters import LOOK_S, OVER, ClusterProvider, names_of
from spottrain.cloud.kubernetes import pods
from spottrain.cloud.kubernetes.clients import Clients, is_inside
from spottrain.cloud.kubernetes.link import PodLink
from spottrain.cloud.kubernetes.settings import INSTANCE_TYPE, KubernetesSettings
from spottrain.cloud.lag.ended import EndedVms, as_terminated
from spottrain.cloud.parallel import run_parallel
from spottrain.cloud.port import provider as port
from spottrain.cloud.port import tags
from spottrain.cloud.port.errors import AuthError, CloudError, QuotaExceededError
from spottrain.cloud.ssh.hosts.bootstrap import Connection
from spottrain.cloud.ssh.on_vm.relay import Relay
from spottrain.cloud.ssh.transport.hosts import Payload, UnreachableHostError, address_of

logger = logging.getLogger(__name__)

CLOUD = "kubernetes"
"""Name of cloud and region in offers; the zone is the namespace."""
_LOGS_S = 10.0
"""Time limit for fetching the logs of VMs that are terminated."""
_THREADS = 32
_REACH_S = 60.0
"""How long a pod that runs may take until its program answers."""
_NODES_S = 5.0
"""How old what is known of nodes may be."""
NodePrice = Callable[[pods.ClusterNode, int], float | None]
"""(node, GPUs or cores) -> USD per hour of so many of it; None: unknown."""
NEEDED = (
    ("create", "pods"),
    ("list", "pods"),
    ("delete", "pods"),
    ("get", "pods/portforward"),
    ("create", "pods/portforward"),
)
"""Permissions, as (verb, resource). Port-forward is a GET of a WebSocket, for which newer
API servers want ``create`` as well (AuthorizePodWebsocketUpgradeCreatePermission, 1.35)."""


class KubernetesProvider(ClusterProvider[pods.Pod]):
    """A Kubernetes cluster, as one job sees it.

    Args:
        state_dir, uid, settings, payload: As of ``ClusterProvider``.
        price_of: The price of a node, for pods whose settings have none.
    """

    name = CLOUD
    unit, place, instance_type = "pod", "namespace", INSTANCE_TYPE
    end_s = 60.0
    """How long nodes may take to confirm that pods have ended."""

    def __init__(
        self,
        state_dir: Path,
        uid: str,
        settings: KubernetesSettings,
        payload: Payload,
        price_of: NodePrice = lambda node, slots: None,
    ) -> None:
        super().__init__(state_dir, uid, settings, payload.on_rented())
        self._settings = settings
        self._price_of = price_of
        self._clients = Clients(settings)
        self._links: dict[str, PodLink] = {}
        self._threads = ThreadPoolExecutor(_THREADS, CLOUD)
        self._manager: tuple[str, int] | None = None
        self._relay: tuple[tuple[str, int], str] | None = None
        self._own_address = settings.address
        self._owner: str | None = None
        self._tending: dict[str, Future[None]] = {}
        self._announced: set[str] = set()
        """The VMs whose agents know where to call."""
        self._told: set[str] = set()
        """The VMs whose nodes will be taken away, and which know."""
        self._nodes: tuple[float, dict[str, pods.ClusterNode] | None] = 0.0, {}
        """By name, and when they were asked for; None: we may not."""
        self._ended = EndedVms(lambda _: (), self._gone, time.monotonic)

    # --- The cloud port ------------------------------------------------------------

    def offers(self) -> Sequence[port.Offer]:
        """Return one offer; how many pods find nodes is no bound: the others wait."""
        usd_per_hour = self._settings.usd_per_hour
        if not usd_per_hour and (nodes := self._nodes_now()):
            prices = (self._price_of(node, self._settings.slots) for node in nodes.values())
            usd_per_hour = max((usd for usd in prices if usd is not None), default=0.0)
        return (self._offer(self._settings.namespace, time.time(), usd_per_hour),)

    def list_vms(self, job: str) -> Sequence[port.Vm]:
        """Return a job's VMs, and what waits for a node to become one.

        Those whose nodes will be taken away are told, once.
        """
        ours = [self._judged(pod) for pod in self._left(job)]
        queued = [pod for pod in ours if pod.state is port.VmState.QUEUED]
        vms = self._ended.add(job, [self._vm(pod) for pod in ours if pod not in queued])
        self._forget(vms)
        if self._manager is not None:
            self._tend([pod for pod in ours if pod.state is port.VmState.RUNNING])
        return (*vms, *map(self._vm, queued))

    def terminate(self, vm_ids: Collection[str]) -> None:
        """Fetch the logs of VMs, and delete their pods; see ``CloudProvider.terminate``."""
        names = names_of(vm_ids, CLOUD)
        self._cancelled |= {f"kubernetes.{name}" for name in names}
        wait_for([self._threads.submit(self._fetch_logs, name) for name in names], _LOGS_S)
        run_parallel(partial(self._clients.delete, grace_s=pods.NOW_S), names)

    # --- What else a manager needs --------------------------------------------------

    def serve(self, manager_url: str) -> None:
        """Carry agents' calls to the manager from now on; see ``CloudProvider``."""
        self._manager = address_of(manager_url)
        self._announced.clear()
        if is_inside() and not self._own_address:
            self._own_address = _own_address()
        if self._own_address and (self._relay is None or self._relay[0] != self._manager):
            try:
                relay = Relay(self._own_address, self._manager[1])
            except (ValueError, OSError) as error:
                raise CloudError(
                    f"kubernetes: {error}; name this machine's address for pods with "
                    "kubernetes.address"
                ) from error
            self._relay = self._manager, f"{self._own_address}:{relay.port}"

    def unreachable_vms(self) -> Collection[str]:
        """Return the VMs whose link is down; see ``CloudProvider``."""
        with self._lock:
            return [vm_id for vm_id, link in self._links.items() if link.may_cause_silence]

    def check(self) -> Sequence[port.Finding]:
        """Check permissions, and whether the cluster would take the job's pods."""
        found = [
            port.run_check(f"{verb} {resource}", partial(self._allowed, verb, resource))
            for verb, resource in NEEDED
        ]
        found.append(port.run_check("list nodes", self._may_read_nodes))
        if all(one.ok for one in found):
            found.append(port.run_check("pods", self._would_take))
        return tuple(found)

    def principal(self) -> str:
        """Return the name by which the API server knows us."""
        if self._owner is None:
            self._owner = self._clients.user()
        return self._owner

    def list_all(self) -> Sequence[port.Vm]:
        """Return the VMs of all jobs in the namespace, and what waits to become one."""
        return tuple(map(self._vm, self._list(None)))

    def close(self) -> None:
        """Close all connections; VMs keep running."""
        super().close()
        with self._lock:
            links = tuple(self._links.values())
        for link in links:
            link.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --- Pods -------------------------------------------------------------------------

    def _list(self, uid: str | None) -> list[pods.Pod]:
        """Return the pods of a job; None: of all jobs."""
        return pods.parse_pods(self._clients.pods(pods.selector(uid)), time.time())

    def _ours(self) -> list[pods.Pod]:
        return self._list(self._uid)

    def _left(self, job: str) -> list[pods.Pod]:
        return [pod for pod in self._ours() if pod.tags[tags.JOB] == job]

    def _remove(self, left: Sequence[pods.Pod], since_s: float) -> None:
        """Delete pods, also those that have ended; those of lost nodes confirm no end."""
        is_late = since_s > self.end_s
        for pod in left:
            if is_late or not (pod.is_deleted and pod.state in OVER):
                self._clients.delete(pod.name, 0 if is_late else pods.NOW_S)

    def _names(self, request: port.LaunchRequest) -> list[str]:
        return [pods.name_of(self._uid, request.token, n) for n in range(request.count)]

    def _of_launch(self, request: port.LaunchRequest) -> list[pods.Pod]:
        names = self._names(request)
        return [pod for pod in self._ours() if pod.name in names]

    def _submit(self, request: port.LaunchRequest) -> None:
        """Create the pods of a launch that never were, as far as quotas allow.

        Raises:
            QuotaExceededError: the namespace may have none of them.
        """
        names = self._names(request)
        known = self._submitted.union(pod.name for pod in self._ours())
        for name in names:
            if name in known:
                continue
            owner, unstarted_s = self.principal(), self._unstarted_s
            pod = pods.manifest(self._settings, name, request, self._uid, owner, unstarted_s)
            try:
                self._clients.create(pod)
            except QuotaExceededError as error:
                if known.isdisjoint(names) and name == names[0]:
                    raise
                logger.info("%s", error)
                return
            self._submitted.add(name)

    def _gone(self, job: str, missing: Sequence[port.Vm]) -> Sequence[port.Vm]:
        """Return VMs whose pods are no longer there, as terminated."""
        now_s = time.time()
        lost = "its pod was deleted, or its node is gone"
        return [
            replace(
                as_terminated(vm, now_s),
                why=vm.why or ("" if vm.vm_id in self._cancelled else lost),
            )
            for vm in missing
        ]

    def _forget(self, vms: Sequence[port.Vm]) -> None:
        """Close the links to VMs that have ended."""
        alive = {vm.vm_id for vm in vms if vm.state.is_alive}
        with self._lock:
            over = [self._links.pop(vm_id) for vm_id in self._links.keys() - alive]
        for link in over:
            link.close()

    # --- Nodes ------------------------------------------------------------------------

    def _nodes_now(self) -> dict[str, pods.ClusterNode]:
        """Return the nodes that pods may be on, by name; none if we may not read them."""
        asked_s, nodes = self._nodes
        if nodes is not None and time.monotonic() - asked_s > _NODES_S:
            wanted = ",".join(f"{k}={v}" for k, v in self._settings.node_selector.items())
            try:
                nodes = {node.name: node for node in pods.parse_nodes(self._clients.nodes(wanted))}
            except AuthError:
                nodes = None
            except CloudError as error:
                logger.info("nodes are not known anew: %s", error)
            self._nodes = time.monotonic(), nodes
        return nodes or {}

    def _judged(self, pod: pods.Pod) -> pods.Pod:
        """Return a pod; as ending, if it is to end and its node does not answer."""
        if pod.is_deleted and pod.state is port.VmState.RUNNING:
            node = self._nodes_now().get(pod.node)
            if node is not None and node.is_lost:
                return replace(pod, state=port.VmState.STOPPING, why="its node does not answer")
        return pod

    def _tend(self, running: Sequence[pods.Pod]) -> None:
        """Carry the calls of VMs of an earlier process; tell those whose nodes will go."""
        nodes = self._nodes_now()
        for pod in running:
            vm_id = pod.vm_id
            is_new = vm_id not in self._announced and vm_id not in self._starts
            leaves = vm_id not in self._told and pod.node in nodes and nodes[pod.node].leaves
            before = self._tending.get(vm_id)
            if (is_new or leaves) and (before is None or before.done()):
                self._tending[vm_id] = self._threads.submit(
                    self._tell, pod, is_new=is_new, leaves=leaves
                )

    def _tell(self, pod: pods.Pod, *, is_new: bool, leaves: bool) -> None:
        """Tell a VM what it does not know yet; the next list tries again."""
        link = self._link_to(pod)
        try:
            if is_new and self._manager is not None:
                self._tell_address(link, self._manager)
            if leaves:
                link.notice()
                self._told.add(pod.vm_id)
                logger.info("%s: its node %s will be taken away", pod.name, pod.node)
        except CloudError as error:
            logger.debug("%s", error)
        finally:
            if pod.vm_id not in self._starts:
                link.hang_up()

    # --- Agents -----------------------------------------------------------------------

    def _link_to(self, pod: pods.Pod) -> PodLink:
        with self._lock:
            if pod.vm_id not in self._links:
                dial = partial(self._clients.forward, pod.name, pods.port_of(pod.name))
                self._links[pod.vm_id] = PodLink(self._host(pod, pod.name), dial)
            return self._links[pod.vm_id]

    def _connect(self, one: pods.Pod) -> PodLink:
        """Return the link to a pod once its program answers."""
        give_up_s = time.monotonic() + _REACH_S
        while True:
            link = self._link_to(one)
            try:
                link.session()
                return link
            except UnreachableHostError:
                if time.monotonic() > give_up_s or self._closed.is_set():
                    raise
            self._closed.wait(LOOK_S)
            one = self._running(one.vm_id)

    def _hang_up(self, connection: Connection) -> None:
        assert isinstance(connection, PodLink)
        connection.hang_up()

    def _announce(self, connection: Connection, manager_url: str) -> None:
        assert isinstance(connection, PodLink)
        self._manager = self._manager or address_of(manager_url)
        self._tell_address(connection, self._manager)

    def _tell_address(self, link: PodLink, manager: tuple[str, int]) -> None:
        """Give a VM's agent the address for its calls."""
        if self._relay is not None:
            address = self._relay[1]
        else:
            link.carry(manager)
            address = f"127.0.0.1:{pods.port_of(link.host.name) + 1}"
        vm_id = f"kubernetes.{link.host.name}"
        link.session().call("set_manager_address", vm_id=vm_id, address=address)
        self._announced.add(vm_id)

    def _fetch_logs(self, name: str) -> None:
        """Save the logs of a VM, if it was ever reached."""
        with self._lock:
            link = self._links.get(f"kubernetes.{name}")
        if link is None:
            return
        try:
            logs = link.session().call("end", _LOGS_S, vm_id=f"kubernetes.{name}")
            self._memory.keep_logs(f"kubernetes.{name}", logs)
        except (CloudError, OSError) as error:
            logger.info("%s: logs are lost: %s", name, error)
        finally:
            link.close()

    # --- Checks -----------------------------------------------------------------------

    def _allowed(self, verb: str, resource: str) -> str:
        if not self._clients.may(verb, resource):
            raise AuthError(
                f"not allowed in namespace {self._settings.namespace}; "
                "docs/clouds/kubernetes.md, Permissions, has a role for it"
            )
        return "allowed"

    def _may_read_nodes(self) -> str:
        if self._clients.may("list", "nodes"):
            return "allowed: taints are notices, and types of nodes are prices"
        return "not allowed: taints are no notices, and prices must be given"

    def _would_take(self) -> str:
        """Ask the API server whether it would create a pod, with all its policies."""
        request = port.LaunchRequest(
            token="check",
            job="check",
            intent="",
            offer=self._offer(self._settings.namespace, 0.0, 0.0),
            count=1,
            lease_s=0.0,
        )
        name = pods.name_of(self._uid, f"check {time.time_ns()}", 0)
        pod = pods.manifest(self._settings, name, request, self._uid, "", 0.0)
        self._clients.create(pod, dry_run=True)
        return f"namespace {self._settings.namespace} takes them"


def _own_address() -> str:
    """Return this pod's address."""
    return socket.gethostbyname(socket.gethostname())

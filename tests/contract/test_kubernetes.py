"""What Kubernetes does beyond the contract of all providers: queues, ends, notices, errors."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from kubernetes.config import incluster_config
from tests.contract.kubernetes_account import Here, here
from tests.fakes.kubernetes import GPU, USER, FakePod
from tests.fakes.kubernetes_rules import check_schema
from tests.integration.ssh_hosts import unanswered

from spottrain.cloud.kubernetes.pods import ClusterNode, port_of
from spottrain.cloud.kubernetes.provider import KubernetesProvider
from spottrain.cloud.notices.file import VARIABLE, FileSource
from spottrain.cloud.port.errors import (
    AuthError,
    LoginExpiredError,
    MisconfiguredError,
    QueuedError,
    QuotaExceededError,
    VmNotFoundError,
)
from spottrain.cloud.port.provider import Vm, VmState

T = TypeVar("T")
ONE_GPU = {"cpu": "1", "memory": "1Gi", GPU: "1"}


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    for found in here(tmp_path, monkeypatch):
        found.cluster.quota = None
        yield found
        for pod in found.cluster.pods.values():
            check_schema(pod.object, strict=False)  # what we tell is what Kubernetes would


def until(seen: Callable[[], T | None]) -> T:
    """Return what is seen once it is anything."""
    while not (found := seen()):
        time.sleep(0.05)
    return found


def impatient(there: Here, **changed: object) -> KubernetesProvider:
    """Return a client that says at once what waits."""
    provider = there.connect(**changed)
    provider.start_s = 0.5
    return provider


def one_vm(there: Here, provider: KubernetesProvider) -> tuple[Vm, FakePod]:
    """Launch a VM; return it, and its pod."""
    (vm,) = provider.launch(there.account.launch_request(provider.offers()[0])).vms
    return vm, there.cluster.pods[vm.vm_id.removeprefix("kubernetes.")]


def the_end_of(provider: KubernetesProvider) -> Vm:
    """Return the only VM once it has ended."""
    return until(lambda: next((v for v in provider.list_vms("job") if v.ended_at_s), None))


# --- queues and refusals ----------------------------------------------------------------


def test_what_finds_no_node_waits_and_starts_by_itself(there: Here) -> None:
    provider = impatient(there, requests=ONE_GPU)
    request = there.account.launch_request(provider.offers()[0], 4)
    with pytest.raises(QueuedError, match=f"1 pod in the queue: 0/3.*3 Insufficient {GPU}"):
        provider.launch(request)
    (waiting,) = [vm for vm in provider.list_vms("job") if vm.state is VmState.QUEUED]
    assert (waiting.intent, waiting.launched_at_s) == (request.intent, 0.0)
    assert "Insufficient" in waiting.why
    there.cluster.add_node("n4")
    assert len(until(lambda: provider.launch(request).vms)) == 4


def test_what_waits_can_be_withdrawn(there: Here) -> None:
    provider = impatient(there, node_selector={"nobody": "has-it"})
    with pytest.raises(QueuedError, match="selector"):
        provider.launch(there.account.launch_request(provider.offers()[0]))
    provider.terminate([vm.vm_id for vm in provider.list_vms("job")])
    assert provider.list_vms("job") == (), "it never was a VM"


def test_tolerations_lead_to_tainted_nodes(there: Here) -> None:
    for node in there.cluster.nodes:
        there.cluster.taint(node, "spot")
    with pytest.raises(QueuedError, match="untolerated taint"):
        one_vm(there, impatient(there))
    tolerated = ({"key": "spot", "operator": "Exists"},)
    assert one_vm(there, there.connect(tolerations=tolerated))


def test_a_quota_is_a_refusal_that_says_so(there: Here) -> None:
    there.cluster.quota = 0
    provider = there.connect()
    with pytest.raises(QuotaExceededError, match="exceeded quota: few"):
        provider.launch(there.account.launch_request(provider.offers()[0]))
    assert provider.list_vms("job") == ()


def test_a_full_quota_does_not_hide_what_an_earlier_process_launched(there: Here) -> None:
    there.cluster.quota = 1
    request = there.account.launch_request(there.connect().offers()[0])
    first, second = (there.connect().launch(request) for _ in range(2))
    assert second == first


def test_an_image_that_cannot_be_pulled_is_said_and_nothing_stays(there: Here) -> None:
    provider = there.connect(image="registry.example/none:1")
    with pytest.raises(MisconfiguredError, match="ImagePullBackOff: Back-off pulling"):
        provider.launch(there.account.launch_request(provider.offers()[0], 2))
    provider.release("job")
    assert there.cluster.pods == {}


def test_an_image_without_python_ends_and_says_how(there: Here) -> None:
    provider = there.connect(python="false")
    vm, _ = one_vm(there, provider)
    assert the_end_of(provider).why.startswith("its program ended with 1")
    with pytest.raises(VmNotFoundError, match="its program ended with 1"):
        provider.start_agent(vm.vm_id, unanswered())


# --- ends, each told as what it is ------------------------------------------------------


@pytest.mark.parametrize(
    ("befall", "why"),
    [
        (
            lambda c, name: c.evict(name, "PreemptionByScheduler"),
            "preempted for a pod of higher priority",
        ),
        (lambda c, name: c.evict(name), "evicted: its node is being drained"),
        (
            lambda c, name: c.fail(name, "Evicted", "The node was low on resource: memory."),
            "evicted by its node: The node was low on resource: memory.",
        ),
        (lambda c, name: c.fail(name, "DeadlineExceeded"), "ended at its deadline"),
        (lambda c, name: c.fail(name, "Terminated"), "its node was shut down"),
        (
            lambda c, name: c.run_out_of_memory(name),
            "killed: it used more memory than its limit",
        ),
        (
            lambda c, name: c.remove_node(c.pods[name].object["spec"]["nodeName"]),
            "its pod was deleted, or its node is gone",
        ),
    ],
)
def test_ends_are_told_as_what_they_were(
    there: Here, befall: Callable[[object, str], None], why: str
) -> None:
    provider = there.connect()
    vm, pod = one_vm(there, provider)
    assert [one.vm_id for one in provider.list_vms("job")] == [vm.vm_id]
    befall(there.cluster, pod.name)
    assert the_end_of(provider).why == why


def test_why_a_vm_ended_that_we_ended_is_no_question(there: Here) -> None:
    provider = there.connect()
    vm, _ = one_vm(there, provider)
    provider.list_vms("job")
    provider.terminate([vm.vm_id])
    assert the_end_of(provider).why == ""


def test_a_pod_on_a_node_that_does_not_answer_is_given_up_although_it_still_runs(
    there: Here,
) -> None:
    provider = there.connect()
    _, pod = one_vm(there, provider)
    there.cluster.give_up_on(pod.object["spec"]["nodeName"])
    (vm,) = provider.list_vms("job")
    assert (vm.state, vm.why) == (VmState.STOPPING, "its node does not answer")


def test_a_release_does_not_wait_for_nodes_that_are_lost(there: Here) -> None:
    provider = there.connect()
    _, pod = one_vm(there, provider)
    there.cluster.lose_node(pod.object["spec"]["nodeName"])
    provider.end_s = 1.0
    provider.release("job")
    assert there.cluster.pods == {}


def test_a_pod_that_is_to_end_runs_on_through_its_grace_period(there: Here) -> None:
    provider = there.connect()
    vm, pod = one_vm(there, provider)
    provider.start_agent(vm.vm_id, unanswered())
    there.cluster.evict(pod.name)
    assert [one.state for one in provider.list_vms("job")] == [VmState.RUNNING]
    assert the_notice_of(pod) == pytest.approx(300, abs=60)


# --- notices ----------------------------------------------------------------------------


def the_notice_of(pod: FakePod) -> float:
    """Return how long a pod's agent is told that is left, once it is told."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(pod.folder / "own" / "notice.json"))
        return until(lambda: FileSource().ask().notice).lead_s


def test_a_taint_of_a_node_that_will_go_is_a_notice(there: Here) -> None:
    provider = there.connect()
    _, pod = one_vm(there, provider)
    there.cluster.taint(pod.object["spec"]["nodeName"], "ToBeDeletedByClusterAutoscaler")
    with a_manager() as url:
        provider.serve(url)
        file = pod.folder / "own" / "notice.json"
        until(lambda: provider.list_vms("job") and file.exists())
        assert the_notice_of(pod) == 0


# --- calls of agents --------------------------------------------------------------------


class a_manager:  # noqa: N801 - used as a function
    """A manager that answers every call with its first bytes; yields its URL."""

    def __enter__(self) -> str:
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, daemon=True).start()
        return f"https://127.0.0.1:{self._listener.getsockname()[1]}"

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.sendall(b"heard " + connection.recv(100))
            connection.close()


def a_call(pod: FakePod) -> bytes:
    """Return what a manager answers to a call from within a pod; empty: nothing."""
    with (
        contextlib.suppress(ConnectionError),
        socket.create_connection((pod.address, port_of(pod.name) + 1)) as call,
    ):
        call.sendall(b"hello")
        found = bytearray()
        while data := call.recv(100):
            found += data
        return bytes(found)
    return b""


def test_calls_of_agents_reach_a_manager_outside_of_the_cluster(there: Here) -> None:
    provider = there.connect()
    vm, pod = one_vm(there, provider)
    with a_manager() as url:
        provider.serve(url)
        provider.start_agent(vm.vm_id, unanswered())
        for _ in range(3):
            assert until(lambda: a_call(pod)) == b"heard hello"
    provider.close()


def test_a_manager_that_takes_over_hears_the_vms_that_run(there: Here) -> None:
    _, pod = one_vm(there, there.connect())
    second = there.connect()
    with a_manager() as url:
        second.serve(url)
        second.list_vms("job")
        assert until(lambda: a_call(pod)) == b"heard hello"


def test_vms_are_out_of_reach_while_no_port_can_be_forwarded(there: Here) -> None:
    provider = there.connect()
    vm, pod = one_vm(there, provider)
    there.cluster.forbidden.add(("get", "pods/portforward"))
    with a_manager() as url:
        provider.serve(url)
        provider.list_vms("job")
        assert until(provider.unreachable_vms) == [vm.vm_id]
        there.cluster.forbidden.clear()
        until(lambda: not provider.unreachable_vms())
        assert a_call(pod) == b"heard hello"


def test_pods_call_a_manager_directly_whose_address_they_reach(there: Here) -> None:
    provider = there.connect(address="127.0.0.1")
    vm, pod = one_vm(there, provider)
    with a_manager() as url:
        provider.serve(url)
        provider.start_agent(vm.vm_id, unanswered())
        address = (pod.folder / "own" / "vm" / vm.vm_id / "manager.address").read_text()
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port))) as call:
            call.sendall(b"hello")
            assert call.recv(100) == b"heard hello"


# --- the account ------------------------------------------------------------------------


def test_a_token_that_expired_is_read_anew(there: Here) -> None:
    provider = there.connect()
    assert provider.list_vms("job") == ()
    there.cluster.renew_token()
    assert provider.list_vms("job") == ()


def test_a_login_that_nobody_renewed_is_asked_for(there: Here) -> None:
    provider = there.connect()
    there.cluster.token = "another"
    with pytest.raises(LoginExpiredError, match="log in to the cluster anew"):
        provider.list_vms("job")


def test_within_the_cluster_the_pods_service_account_is_the_login(
    there: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, authority = tmp_path / "token", tmp_path / "ca.crt"
    authority.write_text(there.cluster.identity.ca_pem)
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(authority))
    monkeypatch.setenv("KUBECONFIG", "")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", there.cluster.url.rpartition(":")[2])
    provider = there.connect()
    for _ in range(2):
        there.cluster.renew_token()  # a kubelet writes it anew before it expires
        token.write_text(there.cluster.token)
        assert provider.list_vms("job") == ()


def test_a_cluster_that_takes_the_jobs_pods_says_so(there: Here) -> None:
    found = there.connect().check()
    assert [one.message for one in found if not one.ok] == []
    assert there.cluster.pods == {}
    assert found[-1].message == "namespace training takes them"


@pytest.mark.parametrize("right", [("create", "pods"), ("get", "pods/portforward")])
def test_a_missing_permission_is_found_before_anything_is_launched(
    there: Here, right: tuple[str, str]
) -> None:
    there.cluster.forbidden.add(right)
    wrong = [one for one in there.connect().check() if not one.ok]
    assert [one.what for one in wrong] == [" ".join(right)]
    assert "docs/clouds/kubernetes.md" in wrong[0].message


def test_what_may_not_be_done_names_the_permission(there: Here) -> None:
    there.cluster.forbidden.add(("create", "pods"))
    with pytest.raises(AuthError, match='cannot create resource "pods"'):
        one_vm(there, there.connect())


def test_everything_of_this_namespace_can_be_found_with_its_owner(there: Here) -> None:
    provider = there.connect()
    vm, _ = one_vm(there, provider)
    (found,) = there.connect().list_all()
    assert (found.vm_id, found.job, found.uid, found.owner) == (vm.vm_id, "job", "uid", USER)


def test_another_jobs_pods_outlive_a_release(there: Here) -> None:
    provider = there.connect()
    one_vm(there, provider)
    provider.release("another")
    assert len(there.cluster.pods) == 1


def test_the_price_of_a_pod_is_that_of_its_share_of_the_dearest_node(there: Here) -> None:
    prices = {"a": 1.0, "b": 3.0}

    def price_of(node: ClusterNode, slots: int) -> float | None:
        return prices.get(node.instance_type, 0.0) * slots if node.is_spot else None

    spot = {"cloud.google.com/gke-spot": "true"}
    for name, kind in (("x", "a"), ("y", "b")):
        labels = {"node.kubernetes.io/instance-type": kind, **spot}
        there.cluster.add_node(name, 1, **labels)
    provider = there.connect(usd_per_hour=0.0)
    provider._price_of = price_of
    (offer,) = provider.offers()
    assert offer.usd_per_hour == 3.0
    there.cluster.forbidden.add(("list", "nodes"))
    (offer,) = there.connect(usd_per_hour=0.0).offers()
    assert offer.usd_per_hour == 0.0, "it is not known"

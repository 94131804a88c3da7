from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import ssl
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from spottrain.codec import decode, encode
from spottrain.varuna_manager.agent.client import (
    ManagerClient,
    NoManagerError,
    RefusedError,
    VmFencedError,
)
from spottrain.varuna_manager.core.model.settings import Limit, PoolGrant
from spottrain.varuna_manager.daemon import server
from spottrain.varuna_manager.daemon.server import PORTS, listen
from spottrain.varuna_manager.jobs.identity import client_context, ensure_identity
from spottrain.varuna_manager.jobs.traces import TraceSet
from spottrain.version import software_version
from spottrain.wire import messages

Manager = Any
"""The class behind the ``manager`` fixture (conftest files cannot be imported)."""

READY = messages.SupervisorReady(num_slots=1, torch_version="2")
RETIRE = messages.Retire()


def beat(client: ManagerClient, sequence: int, received: int) -> tuple[messages.Command, ...]:
    message = messages.Heartbeat(vm_id="vm-1", sequence=sequence, received=received)
    text = client.call("POST", "/v1/heartbeat", encode(message))
    answer: messages.HeartbeatAnswer = decode(messages.HeartbeatAnswer, text)
    return answer.commands


def registration(**changes: Any) -> str:
    fields: dict[str, Any] = {
        "vm_id": "vm-1",
        "software_version": software_version(),
        "num_slots": 2,
        "private_address": "127.0.0.1",
    }
    return encode(messages.Registration(**fields | changes))


def test_registration_reaches_the_manager(manager: Manager) -> None:
    manager.client(manager.admit("vm-1")).call("POST", "/v1/register", registration())
    assert [r.num_slots for r in manager.handler.registrations] == [2]


def test_an_agent_of_another_version_is_to_wait_for_its_replacement(
    manager: Manager,
) -> None:
    client = manager.client(manager.admit("vm-1"))
    with pytest.raises(NoManagerError, match=r"503: agent runs spottrain 0\.0\.1"):
        client.call("POST", "/v1/register", registration(software_version="0.0.1"))
    unknown = json.dumps({"software_version": "9", "news": True})
    with pytest.raises(NoManagerError, match="agent of its own version"):
        client.call("POST", "/v1/register", unknown)
    assert manager.handler.registrations == []
    assert manager.handler.refused == [("vm-1", "0.0.1"), ("vm-1", "9")]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/register"),
        ("POST", "/v1/heartbeat"),
        ("POST", "/v1/reports"),
        ("GET", "/v1/job"),
        ("GET", "/v1/workdir"),
        ("POST", "/v1/admin/stop"),
        ("POST", "/v1/admin/limits"),
        ("POST", "/v1/admin/profile"),
        ("POST", "/v1/admin/grant"),
        ("POST", "/v1/logs"),
        ("POST", "/v1/traces"),
        ("GET", "/metrics"),
        ("GET", "/healthz"),
    ],
)
def test_nothing_is_answered_without_the_right_token(
    manager: Manager, method: str, path: str
) -> None:
    manager.admit("vm-1")
    with pytest.raises(VmFencedError):
        manager.client("guess").call(method, path, "{}")


def test_metrics_and_health_are_read_with_a_token_that_allows_nothing_else(
    manager: Manager,
) -> None:
    client = manager.client(manager.identity.metrics_token())
    assert client.call("GET", "/metrics") == b"a_metric 1\n"
    assert client.call("GET", "/healthz") == b"ok\n"
    manager.handler.troubles.append("the disk is full")
    with pytest.raises(NoManagerError, match="503"):
        client.call("GET", "/healthz")
    with pytest.raises(VmFencedError):
        client.call("POST", "/v1/admin/stop", '{"checkpoint":true,"now":false}')
    with pytest.raises(VmFencedError):
        manager.client(manager.admit("vm-1")).call("GET", "/metrics")


def test_a_vm_cannot_speak_for_another(manager: Manager) -> None:
    manager.admit("vm-2")
    client = manager.client(manager.admit("vm-1"))
    batch = messages.ReportBatch(vm_id="vm-2", first=0, reports=(READY,))
    with pytest.raises(VmFencedError, match="another VM"):
        client.call("POST", "/v1/reports", encode(batch))
    assert manager.handler.reports == []


def test_a_grant_reaches_the_manager_as_the_pool_has_made_it(
    manager: Manager, tmp_path: Path
) -> None:
    grant = PoolGrant(pool="lab", serial=3, vms=(("local/cpu", 2),), until_s=9.5, max_microusd=70)
    manager.client(manager.identity.admin_token()).call("POST", "/v1/admin/grant", encode(grant))
    assert manager.handler.grants == [grant]


def test_a_vms_token_is_refused_by_admin_requests(manager: Manager) -> None:
    client = manager.client(manager.admit("vm-1"))
    with pytest.raises(VmFencedError):
        client.call("POST", "/v1/admin/stop", '{"checkpoint":true,"now":false}')
    assert manager.handler.stops == []


def test_admin_asks_the_manager_to_stop(manager: Manager) -> None:
    client = manager.client(manager.identity.admin_token())
    body = '{"checkpoint":true,"now":false,"by":"ctrl-c"}'
    client.call("POST", "/v1/admin/stop", body)
    assert manager.handler.stops == [("ctrl-c", True, False)]


def test_admin_changes_limits_and_is_told_when_that_is_refused(
    manager: Manager,
) -> None:
    client = manager.client(manager.identity.admin_token())
    limits = '[{"name":"max_usd","value":60},{"name":"deadline_s","value":null}]'
    client.call("POST", "/v1/admin/limits", f'{{"limits":{limits},"sure":true,"by":"me"}}')
    told = (Limit(name="max_usd", value=60.0), Limit(name="deadline_s", value=None))
    assert manager.handler.limits == [("me", told)]
    with pytest.raises(VmFencedError, match="--yes"):
        client.call("POST", "/v1/admin/limits", f'{{"limits":{limits},"sure":false}}')
    unknown = limits.replace("max_usd", "steps")
    with pytest.raises(RefusedError, match="must be one of 'max_usd'"):
        client.call("POST", "/v1/admin/limits", f'{{"limits":{unknown},"sure":true}}')


def trace(number: int) -> messages.TraceWritten:
    return messages.TraceWritten(
        number=number, rank=0, first_step=5, last_step=8, path="/tmp/trace"
    )


def test_a_trace_is_posted_from_a_file_by_the_vm_that_has_it(
    manager: Manager, tmp_path: Path
) -> None:
    file = tmp_path / "trace.json.gz"
    file.write_bytes(bytes(range(256)) * 1000)
    client = manager.client(manager.admit("vm-1"))
    for number, content in ((4, file), (4, b""), (5, file)):
        query = urlencode({"trace": encode(trace(number))})
        if number == 5:
            with pytest.raises(RefusedError):
                client.call("POST", f"/v1/traces?{query}", content)
        else:
            client.call("POST", f"/v1/traces?{query}", content)
    assert manager.handler.traces == [
        ("vm-1", trace(4), file.read_bytes(), 0),
        ("vm-1", trace(4), b"", 0),
    ]


def test_admin_asks_for_traces_and_is_told_where_nothing_trains(
    manager: Manager,
) -> None:
    client = manager.client(manager.identity.admin_token())
    begun = client.call("POST", "/v1/admin/profile", '{"minibatches":3}')
    assert decode(TraceSet, begun).missing == (0,)
    with pytest.raises(VmFencedError, match="nothing trains"):
        client.call("POST", "/v1/admin/profile", '{"minibatches":10}')


@pytest.mark.parametrize("body", ["{", "[]", '{"vm_id":"vm-1"}', '{"x":1}', "\udc80", "[" * 50_000])
@pytest.mark.parametrize("path", ["heartbeat", "register"])
def test_malformed_message_is_refused_in_one_line(manager: Manager, path: str, body: str) -> None:
    client = manager.client(manager.admit("vm-1"))
    with pytest.raises(RefusedError, match="message"):
        client.call("POST", f"/v1/{path}", body.encode("utf-8", "replace").decode())


def test_limits_that_are_no_numbers_are_refused(manager: Manager) -> None:
    client = manager.client(manager.identity.admin_token())
    limits = '{"limits":[{"name":"max_usd","value":1e999}],"sure":true}'
    with pytest.raises(RefusedError, match="must be finite"):
        client.call("POST", "/v1/admin/limits", limits)


def test_requests_that_stay_half_sent_are_closed_and_long_answers_are_not(
    manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "REQUEST_S", 2.0)
    manager.use(replace(manager.channel.spec, heartbeat_s=3.0))
    token = manager.admit("vm-1")
    port, context = (
        int(manager.url.rpartition(":")[2]),
        client_context(manager.identity.ca_pem),
    )
    head = f"POST /v1/reports HTTP/1.1\r\nAuthorization: Bearer {token}\r\n"
    halves = ("", head, f"{head}Content-Length: 9\r\n\r\nhalf")
    with contextlib.ExitStack() as stack:
        plain = [socket.create_connection(("127.0.0.1", port), timeout=600) for _ in halves]
        slow = [
            stack.enter_context(context.wrap_socket(one, server_hostname="127.0.0.1"))
            for one in plain
        ]
        for connection, half in zip(slow, halves, strict=True):
            connection.sendall(half.encode())

        assert beat(manager.client(token), 0, 0) == ()

        for connection in slow:
            with contextlib.suppress(OSError):  # as TLS sees the end of TCP
                assert connection.recv(1) == b""


@pytest.mark.nightly
def test_a_connection_that_never_begins_tls_is_closed(manager: Manager) -> None:
    """By asyncio, after its ``ssl_handshake_timeout`` of a minute."""
    port = int(manager.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=600) as silent:
        assert silent.recv(1) == b""


@pytest.mark.parametrize(
    ("path", "length"),
    [
        ("reports", str(2**40)),
        ("heartbeat", str(2**20)),
        ("register", str(2**20)),
    ],
)
def test_a_body_of_unknown_or_excessive_size_is_not_read(
    manager: Manager, path: str, length: str
) -> None:
    token = manager.admit("vm-1")
    connection = http.client.HTTPSConnection(
        "127.0.0.1",
        int(manager.url.rpartition(":")[2]),
        context=client_context(manager.identity.ca_pem),
        timeout=600,
    )
    headers = {"Authorization": f"Bearer {token}", "Content-Length": length}
    connection.request("POST", f"/v1/{path}", b"", headers)
    assert connection.getresponse().status == 413
    connection.close()


def test_job_and_workdir_are_handed_out(manager: Manager) -> None:
    client = manager.client(manager.admit("vm-1"))
    spec = decode(messages.JobSpec, client.call("GET", "/v1/job"))
    assert spec.name == "job"
    packed = (manager.job_dir / "workdir.tar.gz").read_bytes()
    assert client.call("GET", "/v1/workdir") == packed


def test_reports_are_taken_once_however_often_they_are_sent(manager: Manager) -> None:
    client = manager.client(manager.admit("vm-1"))
    for _ in range(2):
        batch = messages.ReportBatch(vm_id="vm-1", first=0, reports=(READY,))
        answer = client.call("POST", "/v1/reports", encode(batch))
        assert decode(messages.ReportAnswer, answer) == messages.ReportAnswer(received=1)
    assert manager.handler.reports == [READY]


def test_text_of_a_vm_can_be_stored_and_shown_whatever_is_in_it(
    manager: Manager,
) -> None:
    client = manager.client(manager.admit("vm-1"))
    report = messages.VmFailed(reason="cannot read \udcff.txt\x1b[2J\nand ends")
    batch = messages.ReportBatch(vm_id="vm-1", first=0, reports=(report,))
    client.call("POST", "/v1/reports", encode(batch))
    (received,) = manager.handler.reports
    assert received.reason == "cannot read \\udcff.txt\nand ends"


def test_heartbeat_waits_for_a_command_and_is_answered_at_once(
    manager: Manager,
) -> None:
    client = manager.client(manager.admit("vm-1"))
    assert beat(client, 0, 0) == ()
    answers: list[tuple[messages.Command, ...]] = []
    poll = threading.Thread(target=lambda: answers.append(beat(client, 1, 0)))
    poll.start()
    manager.send("vm-1", RETIRE)
    poll.join()
    assert answers == [(RETIRE,)]


def test_commands_are_sent_again_until_the_agent_says_it_has_them(
    manager: Manager,
) -> None:
    client = manager.client(manager.admit("vm-1"))
    calibrate = messages.Calibrate()
    manager.send("vm-1", calibrate)
    manager.send("vm-1", RETIRE)
    assert beat(client, 0, 0) == (calibrate, RETIRE)
    assert beat(client, 1, 1) == (RETIRE,)
    assert beat(client, 2, 2) == ()


def test_a_restarted_manager_takes_over_the_agents_count(
    manager: Manager,
) -> None:
    client = manager.client(manager.admit("vm-1"))
    manager.send("vm-1", RETIRE)
    assert beat(client, 7, 41) == (RETIRE,)
    assert beat(client, 8, 42) == ()


def test_stale_heartbeat_is_refused(manager: Manager) -> None:
    client = manager.client(manager.admit("vm-1"))
    beat(client, 5, 0)
    with pytest.raises(VmFencedError, match="stale"):
        beat(client, 4, 0)


def test_a_fenced_vm_is_refused_even_in_the_middle_of_a_poll(manager: Manager) -> None:
    client = manager.client(manager.admit("vm-1"))
    beat(client, 0, 0)
    refused: list[str] = []

    def poll() -> None:
        try:
            beat(client, 1, 0)
        except VmFencedError as error:
            refused.append(str(error))

    thread = threading.Thread(target=poll)
    thread.start()
    manager.on_loop(lambda: manager.sessions.revoke("vm-1"))
    thread.join()
    assert len(refused) == 1
    with pytest.raises(VmFencedError):
        beat(client, 2, 0)


def test_a_vm_fenced_while_its_request_arrives_is_refused(manager: Manager) -> None:
    token = manager.admit("vm-1")
    body = encode(messages.Heartbeat(vm_id="vm-1", sequence=0, received=0))
    statuses: list[int] = []

    async def receive() -> dict[str, Any]:
        manager.sessions.revoke("vm-1")
        return {"type": "http.request", "body": body.encode(), "more_body": False}

    async def send(event: Any) -> None:
        if event["type"] == "http.response.start":
            statuses.append(event["status"])

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/heartbeat",
        "query_string": b"",
        "headers": [
            (b"authorization", f"Bearer {token}".encode()),
            (b"content-length", str(len(body)).encode()),
        ],
    }
    asyncio.run(manager.channel.app()(scope, receive, send))
    assert statuses == [403]


def test_a_client_that_trusts_another_authority_sees_no_manager(
    manager: Manager, tmp_path: Path
) -> None:
    token = manager.admit("vm-1")
    other = ensure_identity(tmp_path, ("127.0.0.1",))
    with pytest.raises(NoManagerError, match="CERTIFICATE_VERIFY_FAILED"):
        ManagerClient(manager.url, other.ca_pem, token).call("GET", "/v1/job")


def test_plain_http_is_not_served(manager: Manager) -> None:
    port = int(manager.url.rpartition(":")[2])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("GET", "/v1/job")
    with pytest.raises((http.client.HTTPException, OSError)):
        connection.getresponse()
    connection.close()


def test_port_is_chosen_once_outside_the_ephemeral_range(tmp_path: Path) -> None:
    first = listen(tmp_path, "127.0.0.1")
    port = first.getsockname()[1]
    assert port in PORTS
    first.close()
    again = listen(tmp_path, "127.0.0.1")
    assert again.getsockname()[1] == port
    other = listen(tmp_path, "127.0.0.1")
    assert other.getsockname()[1] != port
    again.close()
    other.close()


def test_closing_the_server_leaves_the_port_free(manager: Manager, tmp_path: Path) -> None:
    port = int(manager.url.rpartition(":")[2])
    client = manager.client(manager.admit("vm-1"))
    beat(client, 0, 0)
    manager.stop()
    with pytest.raises(NoManagerError):
        beat(client, 1, 0)
    again = listen(manager.job_dir, "127.0.0.1")
    assert again.getsockname()[1] == port
    again.close()


def test_a_manager_that_comes_back_is_found_by_the_same_client(
    manager: Manager,
) -> None:
    client = manager.client(manager.admit("vm-1"))
    beat(client, 0, 0)
    manager.stop()
    manager.start()
    assert beat(client, 1, 0) == ()


def test_certificates_are_verified_by_default_python_clients(manager: Manager) -> None:
    context = ssl.create_default_context(cadata=manager.identity.ca_pem)
    connection = http.client.HTTPSConnection(
        "127.0.0.1", int(manager.url.rpartition(":")[2]), context=context, timeout=60
    )
    connection.request("GET", "/v1/job")
    assert connection.getresponse().status == 403
    connection.close()

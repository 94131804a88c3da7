"""Notices of all rented clouds, from fake services."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.fakes.metadata import FakeMetadata, running
from tests.unit.cloud.metadata_vms import Vms

from spottrain.cloud.notices import hear
from spottrain.cloud.notices.hear import AtRisk, NoticeWithdrawn, PreemptionAnnounced
from spottrain.cloud.notices.source import PreemptionNotice, VmOutlook
from spottrain.cloud.port.errors import CloudError

MAIN = {"aws": "action", "azure": "events", "gcp": "preempted"}
"""The question by whose answer a VM knows of its end."""
SHARE = 0.01
"""Of a core, what listening may take."""


@pytest.fixture(scope="module", params=["aws", "azure", "gcp"])
def service(request: pytest.FixtureRequest) -> Iterator[tuple[str, FakeMetadata]]:
    with running(request.param) as fake:
        yield request.param, fake


@pytest.fixture
def vms(service: tuple[str, FakeMetadata], monkeypatch: pytest.MonkeyPatch) -> Iterator[Vms]:
    cloud, fake = service
    fake.ask("reset")
    yield Vms(cloud, fake, monkeypatch)
    monkeypatch.undo()


def test_a_notice_is_reported_once_with_the_seconds_left(vms: Vms) -> None:
    with vms.listening() as one, vms.listening() as other:
        vms.fake.ask("preempt", vm=one.name, lead_s=29.5)
        assert vms.told_s - 5 < one.lead_s() <= vms.told_s + 0.5
        vms.wait_for_answers(other.name)
    assert one.heard.empty()
    assert other.heard.empty()


def test_a_notice_before_listening_began_is_reported(vms: Vms) -> None:
    vms.fake.ask("preempt", vm="early", lead_s=29.5)
    with vms.listening("early") as one:
        assert vms.told_s - 5 < one.lead_s() <= vms.told_s + 0.5
        vms.wait_for_answers("early")
    assert one.heard.empty()


def test_a_withdrawn_notice_and_a_second_one_are_reported(vms: Vms) -> None:
    with vms.listening() as one:
        vms.fake.ask("preempt", vm=one.name, lead_s=29.5)
        assert isinstance(one.next(), PreemptionAnnounced)
        vms.fake.ask("withdraw", vm=one.name)
        assert one.next() == NoticeWithdrawn()
        vms.fake.ask("preempt", vm=one.name, lead_s=20.5)
        assert one.lead_s() > 15


def test_a_wrong_clock_does_not_change_the_lead_time(vms: Vms) -> None:
    vms.fake.ask("skew", seconds=-3600)
    with vms.listening() as one:
        vms.fake.ask("preempt", vm=one.name, lead_s=29.5)
        assert vms.told_s - 5 < one.lead_s() <= vms.told_s + 0.5


FAULTS: list[dict[str, Any]] = [
    {"kind": "error", "status": 500, "times": 2},
    {"kind": "error", "status": 503, "times": 2},
    {"kind": "error", "status": 403, "times": 2},
    {"kind": "error", "status": 302, "headers": {"Location": "/"}, "times": 2},
    {"kind": "error", "status": 200, "code": "junk", "times": 2},
    {"kind": "error", "status": 200, "code": '{"Events": 1}', "times": 2},
    {"kind": "drop", "times": 2},
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f['kind']}-{f.get('status')}")
def test_listening_survives_faults_of_the_service(vms: Vms, fault: dict[str, Any]) -> None:
    vms.fake.ask("fail", operation=MAIN[vms.cloud], **fault)
    with vms.listening() as one:
        vms.fake.ask("preempt", vm=one.name, lead_s=29.5)
        assert isinstance(one.next(), PreemptionAnnounced)
        done = vms.operations(one.name)
    assert done.count(MAIN[vms.cloud]) >= 3
    assert one.heard.empty()


def test_a_failure_after_a_notice_does_not_withdraw_it(vms: Vms) -> None:
    with vms.listening() as one:
        vms.fake.ask("preempt", vm=one.name, lead_s=29.5)
        assert isinstance(one.next(), PreemptionAnnounced)
        vms.fake.ask("fail", operation="*", kind="error", status=500, times=2)
        vms.wait_for_answers(one.name)
    assert one.heard.empty()


class Impatient(threading.Event):
    """Waits for nothing, and notes how long it was to wait."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.waited_s: list[float] = []
        self._times = times

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.waited_s.append(timeout)
        if len(self.waited_s) == self._times:
            self.set()
        return self.is_set()


@pytest.mark.parametrize(
    ("said", "waited_s"),
    [("7", 7.0), ("0", 0.1), ("86400", 60.0), ("soon", 0.1), ("-1", 0.1), ("", 0.1)],
)
def test_retry_after_is_respected(vms: Vms, said: str, waited_s: float) -> None:
    fault = {"kind": "error", "status": 429, "headers": {"Retry-After": said}}
    vms.fake.ask("fail", operation=MAIN[vms.cloud], **fault)
    stop = Impatient(1)
    hear.listen(vms.source("vm"), lambda _: pytest.fail("heard"), stop)
    assert stop.waited_s == [waited_s]


def test_requests_to_an_absent_service_back_off(vms: Vms, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hear.URL_VARIABLE, "http://127.0.0.1:1")
    source, stop = hear.open_source({"kind": vms.cloud}), Impatient(9)
    hear.listen(source, lambda _: pytest.fail("nobody said anything"), stop)
    assert stop.waited_s == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]


def test_listening_uses_less_than_one_percent_of_a_core(vms: Vms) -> None:
    source, spent_s = vms.source("cost_optimal"), []
    source.ask()
    for _ in range(40):
        if vms.cloud == "gcp":
            vms.fake.ask("nudge", vm="cost_optimal")  # ends the long poll
        began_s = time.thread_time()  # without the waiting
        source.ask()
        spent_s.append(time.thread_time() - began_s)
    every_s = hear.open_source({"kind": vms.cloud}).every_s
    assert every_s >= 1.0
    assert statistics.median(spent_s) < SHARE * every_s


def test_every_request_is_valid(vms: Vms) -> None:
    with vms.listening() as one:
        vms.fake.ask("preempt", vm=one.name, lead_s=29.5)
        assert isinstance(one.next(), PreemptionAnnounced)
        hear.acknowledge(one.source)
    assert vms.fake.ask("drifts") == []


def variants(request: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each way to spoil one thing in a request."""
    path, query = request["target"]
    skip = {"Host", "Accept-Encoding", "Content-Length", "Connection"}
    headers = {k: v for k, v in request["headers"].items() if k not in skip}
    sent = {"path": path, "query": query, "headers": headers, "body": request["body"]}
    for part in ("headers", "query"):
        for name, value in sent[part].items():
            less = {k: v for k, v in sent[part].items() if k != name}
            yield f"no {name}", {**sent, part: less}
            yield f"{name} wrong", {**sent, part: {**less, name: f"{value}x"}}
            if part == "query" or "token" in name:
                yield f"{name} misspelt", {**sent, part: {**less, f"{name}x": value}}
    yield "by a proxy", {**sent, "headers": {**headers, "X-Forwarded-For": "1.2.3.4"}}
    yield "another path", {**sent, "path": f"{path}x"}
    yield "a parameter more", {**sent, "query": {**query, "x": "1"}}
    if sent["body"]:
        yield "body cut", {**sent, "body": sent["body"][:-3]}
        yield "body misspelt", {**sent, "body": sent["body"].replace("Start", "start")}
        yield "event misspelt", {**sent, "body": sent["body"].replace("-", "+", 1)}
        yield "no body", {**sent, "body": ""}


def test_a_request_with_anything_missing_or_wrong_is_refused(vms: Vms) -> None:
    source, name = vms.source("vm"), "vm"
    vms.fake.ask("preempt", vm=name, lead_s=29.5)
    source.ask()
    if vms.cloud == "gcp":
        vms.fake.ask("nudge", vm=name)
        source.ask()
    source.acknowledge()
    seen = {one["operation"]: one for one in vms.fake.ask("requests")}
    assert MAIN[vms.cloud] in seen
    for operation, request in seen.items():
        for what, sent in variants(request):
            answer = vms.fake.send(
                name,
                request["method"],
                sent["path"],
                params=sent["query"],
                headers=sent["headers"],
                content=sent["body"].encode(),
            )
            assert answer.status_code >= 400, f"{operation}: {what}"


def test_changes_are_differences_of_two_states() -> None:
    early, late = PreemptionNotice("a", 30.0), PreemptionNotice("b", 9.0)
    for before, now, told in (
        (VmOutlook(), VmOutlook(), ()),
        (VmOutlook(), VmOutlook(early), (PreemptionAnnounced(30.0),)),
        (VmOutlook(early), VmOutlook(PreemptionNotice("a", 20.0)), ()),
        (VmOutlook(early), VmOutlook(late), (PreemptionAnnounced(9.0),)),
        (VmOutlook(early), VmOutlook(), (NoticeWithdrawn(),)),
        (VmOutlook(), VmOutlook(at_risk=True), (AtRisk(),)),
        (
            VmOutlook(at_risk=True),
            VmOutlook(early, at_risk=True),
            (PreemptionAnnounced(30.0),),
        ),
        (VmOutlook(early, at_risk=True), VmOutlook(), (NoticeWithdrawn(),)),
    ):
        assert hear.changes_between(before, now) == told


@pytest.mark.parametrize("url", ["https://x", "x", "http://", "http://x:y", "file:///x"])
def test_an_invalid_url_is_refused(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv(hear.URL_VARIABLE, url)
    with pytest.raises(CloudError, match="metadata service"):
        hear.open_source({"kind": "aws"})

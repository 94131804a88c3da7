from __future__ import annotations

import contextlib
import json
from email.utils import formatdate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.cloud.metadata_vms import Vms

from spottrain.cloud.notices import hear
from spottrain.cloud.notices.azure import ending_events
from spottrain.cloud.notices.hear import PreemptionAnnounced
from spottrain.cloud.notices.source import NoAnswerError

CLOUD = "azure"


@pytest.mark.parametrize("kind", ["Reboot", "Redeploy", "Terminate"])
def test_events_that_end_all_processes_are_notices_too(vms: Vms, kind: str) -> None:
    event_id = vms.fake.ask("preempt", vm="vm", lead_s=900, kind=kind)
    source = vms.source("vm")
    notice = source.ask().notice
    assert notice is not None
    assert 890 < notice.lead_s <= 900
    hear.acknowledge(source)
    assert vms.fake.ask("acknowledged") == [event_id]


def test_a_freeze_and_the_end_of_another_vm_are_no_notices(vms: Vms) -> None:
    vms.fake.ask("preempt", vm="vm", lead_s=900, kind="Freeze")
    vms.fake.ask("preempt", vm="another", lead_s=30)
    assert vms.source("vm").ask().notice is None


def test_the_earliest_of_several_events_counts(vms: Vms) -> None:
    for lead_s in (50, 25, 90):
        vms.fake.ask("preempt", vm="vm", lead_s=lead_s)
    notice = vms.source("vm").ask().notice
    assert notice is not None
    assert 20 < notice.lead_s <= 25


def test_an_event_that_has_begun_leaves_no_time(vms: Vms) -> None:
    with vms.listening() as one:
        event_id = vms.fake.ask("preempt", vm=one.name, lead_s=29.5)
        assert one.lead_s() > 20
        vms.fake.ask("begin", event_id=event_id)
        assert one.next() == PreemptionAnnounced(0.0)


def test_events_of_this_vm_are_acknowledged_once(vms: Vms) -> None:
    mine = [vms.fake.ask("preempt", vm="vm", lead_s=s) for s in (20, 30)]
    begun = vms.fake.ask("preempt", vm="vm", lead_s=10)
    vms.fake.ask("begin", event_id=begun)
    vms.fake.ask("preempt", vm="another", lead_s=20)
    source = vms.source("vm")
    source.ask()
    hear.acknowledge(source)
    assert vms.fake.ask("acknowledged") == mine
    source.ask()
    hear.acknowledge(source)
    assert vms.fake.ask("acknowledged") == mine


def test_without_a_notice_nothing_is_acknowledged(vms: Vms) -> None:
    source = vms.source("vm")
    hear.acknowledge(source)
    source.ask()
    hear.acknowledge(source)
    assert vms.operations("vm") == ["name", "events"]


def test_a_failed_acknowledgement_blocks_nothing(vms: Vms) -> None:
    vms.fake.ask("preempt", vm="vm", lead_s=20)
    source = vms.source("vm")
    source.ask()
    vms.fake.ask("fail", operation="start", kind="drop")
    hear.acknowledge(source)
    assert vms.fake.ask("acknowledged") == []


def event(vm: str, lead_s: int, kind: str) -> dict[str, Any]:
    at = formatdate(10**9 + lead_s, usegmt=True)
    what = {"EventId": f"{vm}{lead_s}", "EventType": kind, "Resources": [vm]}
    return {**what, "NotBefore": at if lead_s else ""}


EVENTS = st.lists(
    st.builds(
        event,
        st.sampled_from(["a", "A", "b"]),
        st.integers(-99, 9999),
        st.sampled_from(["Preempt", "Reboot", "Freeze"]),
    )
)


ODD: list[Any] = [
    {},
    None,
    5,
    [],
    "Preempt",
    {"EventType": "Preempt"},
    {"EventType": [], "Resources": ["a"]},
    {"EventType": "Preempt", "Resources": 5},
    {"EventType": "Preempt", "Resources": [None, {}]},
    {"EventType": "Preempt", "Resources": ["b"], "NotBefore": "soon"},
]


@pytest.mark.parametrize("odd", ODD)
def test_an_odd_event_hides_no_other(odd: Any) -> None:
    text = json.dumps({"Events": [odd, event("a", 30, "Preempt"), odd]})
    assert [one.lead_s for one in ending_events(text, "a", 1e9)] == [30.0]


@pytest.mark.parametrize("at", ["soon", 5, None, ["x"]])
def test_an_event_whose_time_cannot_be_read_leaves_none(at: Any) -> None:
    odd = {**event("a", 30, "Preempt"), "NotBefore": at}
    (ending,) = ending_events(json.dumps({"Events": [odd]}), "a", 1e9)
    assert (ending.event_id, ending.lead_s) == ("a30", 0.0)


@given(EVENTS)
def test_events_of_this_vm_are_found_among_any_others(
    events: list[dict[str, Any]],
) -> None:
    found = ending_events(json.dumps({"Events": events}), "a", 1e9)
    mine = [one for one in events if one["Resources"] in (["a"], ["A"])]
    mine = [one for one in mine if one["EventType"] != "Freeze"]
    assert [one.event_id for one in found] == [one["EventId"] for one in mine]
    assert all(one.lead_s >= 0 for one in found)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text() | st.just("Preempt"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["EventType", "Resources", "NotBefore", "EventId"]), inner
        )
    ),
    max_leaves=9,
)


@given(st.one_of(st.text(), JSON.map(lambda x: json.dumps({"Events": x}))))
def test_any_other_document_is_no_answer_or_no_event(text: str) -> None:
    with contextlib.suppress(NoAnswerError):
        assert all(one.lead_s >= 0 for one in ending_events(text, "a", 0.0))

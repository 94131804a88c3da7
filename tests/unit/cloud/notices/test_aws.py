from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.cloud.metadata_vms import Vms

from spottrain.cloud.notices.aws import read_action
from spottrain.cloud.notices.hear import AtRisk, PreemptionAnnounced
from spottrain.cloud.notices.source import NoAnswerError

CLOUD = "aws"


def test_a_token_serves_until_it_expires(vms: Vms) -> None:
    source = vms.source("vm")
    for _ in range(3):
        source.ask()
    assert vms.operations("vm").count("token") == 1
    vms.fake.ask("expire_tokens")
    source.ask()
    assert vms.operations("vm").count("token") == 2


def test_a_rebalance_recommendation_is_reported_once_and_is_no_notice(vms: Vms) -> None:
    with vms.listening() as one:
        vms.fake.ask("recommend", vm=one.name)
        assert one.next() == AtRisk()
        vms.fake.ask("preempt", vm=one.name, lead_s=120.0)
        assert 115 < one.lead_s() <= 120
    assert one.heard.empty()


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate"])
def test_every_instance_action_is_a_notice(vms: Vms, action: str) -> None:
    with vms.listening() as one:
        vms.fake.ask("preempt", vm=one.name, lead_s=-5.0, action=action)
        assert one.next() == PreemptionAnnounced(0.0)


def test_a_token_that_cannot_be_sent_back_is_not_used(vms: Vms) -> None:
    fault = {"kind": "error", "status": 200, "code": "a\r\nb"}
    vms.fake.ask("fail", operation="token", **fault)
    source = vms.source("vm")
    with pytest.raises(NoAnswerError, match="token"):
        source.ask()
    assert source.ask().notice is None


@given(at=st.integers(0, 4 * 10**9), now_s=st.floats(0, 4e9))
def test_the_time_left_is_never_below_zero(at: int, now_s: float) -> None:
    text = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
    told = json.dumps({"action": "terminate", "time": text})
    notice = read_action(told, now_s)
    assert notice.lead_s == max(0.0, at - now_s)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@given(st.one_of(st.text(), JSON.map(json.dumps)))
def test_an_invalid_document_is_no_answer(text: str) -> None:
    with pytest.raises(NoAnswerError, match="instance-action"):
        read_action(text, 0.0)

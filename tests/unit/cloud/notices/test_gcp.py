from __future__ import annotations

import pytest
from tests.unit.cloud.metadata_vms import Vms

from spottrain.cloud.notices.gcp import LEAD_S
from spottrain.cloud.notices.hear import NoticeWithdrawn, PreemptionAnnounced
from spottrain.cloud.notices.source import NoAnswerError

CLOUD = "gcp"


def test_a_long_poll_waits_for_the_notice(vms: Vms) -> None:
    with vms.listening() as one:
        assert vms.fake.ask("wait_for_question", vm=one.name)
        assert vms.operations(one.name) == ["preempted"] * 2
        vms.fake.ask("preempt", vm=one.name)
        assert one.next() == PreemptionAnnounced(LEAD_S)


def test_a_change_between_two_requests_is_detected(vms: Vms) -> None:
    source = vms.source("vm")
    assert source.ask().notice is None
    vms.fake.ask("preempt", vm="vm")
    assert source.ask().notice is not None


def test_after_an_error_the_state_is_unknown(vms: Vms) -> None:
    source = vms.source("vm")
    source.ask()
    vms.fake.ask("fail", operation="preempted", kind="drop")
    with pytest.raises(NoAnswerError):
        source.ask()
    assert source.ask().notice is None  # at once, though nothing has changed


def test_an_unchanged_answer_is_not_reported(vms: Vms) -> None:
    with vms.listening() as one:
        assert vms.fake.ask("wait_for_question", vm=one.name)
        vms.fake.ask("nudge", vm=one.name)
        vms.fake.ask("preempt", vm=one.name)
        assert one.next() == PreemptionAnnounced(LEAD_S)
        vms.fake.ask("withdraw", vm=one.name)
        assert one.next() == NoticeWithdrawn()
    assert one.heard.empty()


@pytest.mark.parametrize("flavor", [{}, {"Metadata-Flavor": "Other"}])
def test_a_server_without_googles_header_is_rejected(vms: Vms, flavor: dict[str, str]) -> None:
    fault = {"kind": "error", "status": 200, "code": "TRUE", "headers": flavor}
    vms.fake.ask("fail", operation="preempted", **fault)
    with pytest.raises(NoAnswerError, match="Google"):
        vms.source("vm").ask()

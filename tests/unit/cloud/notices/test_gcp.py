from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.fakes.metadata import FakeMetadata, running
from tests.unit.cloud.metadata_vms import Vms

from spottrain.cloud.notices.gcp import LEAD_S
from spottrain.cloud.notices.hear import NoticeWithdrawn, PreemptionAnnounced
from spottrain.cloud.notices.source import NoAnswerError


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeMetadata]:
    with running("gcp") as service:
        yield service


@pytest.fixture
def vms(fake: FakeMetadata, monkeypatch: pytest.MonkeyPatch) -> Vms:
    fake.ask("reset")
    return Vms("gcp", fake, monkeypatch)


def test_one_question_stays_open_until_the_notice_comes(vms: Vms) -> None:
    with vms.listening() as one:
        assert vms.fake.ask("wait_for_question", vm=one.name)
        assert vms.operations(one.name) == ["preempted"] * 2
        vms.fake.ask("preempt", vm=one.name)
        assert one.next() == PreemptionAnnounced(LEAD_S)


def test_a_change_between_two_questions_is_heard(vms: Vms) -> None:
    source = vms.source("vm")
    assert source.ask().notice is None
    vms.fake.ask("preempt", vm="vm")
    assert source.ask().notice is not None


def test_after_an_error_nothing_is_taken_for_known(vms: Vms) -> None:
    source = vms.source("vm")
    source.ask()
    vms.fake.ask("fail", operation="preempted", kind="drop")
    with pytest.raises(NoAnswerError):
        source.ask()
    assert source.ask().notice is None  # at once, though nothing has changed


def test_an_answer_without_news_is_not_told(vms: Vms) -> None:
    with vms.listening() as one:
        assert vms.fake.ask("wait_for_question", vm=one.name)
        vms.fake.ask("nudge", vm=one.name)
        vms.fake.ask("preempt", vm=one.name)
        assert one.next() == PreemptionAnnounced(LEAD_S)
        vms.fake.ask("withdraw", vm=one.name)
        assert one.next() == NoticeWithdrawn()
    assert one.heard.empty()


@pytest.mark.parametrize("flavor", [{}, {"Metadata-Flavor": "Other"}])
def test_another_server_than_googles_is_not_believed(
    vms: Vms, flavor: dict[str, str]
) -> None:
    fault = {"kind": "error", "status": 200, "code": "TRUE", "headers": flavor}
    vms.fake.ask("fail", operation="preempted", **fault)
    with pytest.raises(NoAnswerError, match="Google"):
        vms.source("vm").ask()

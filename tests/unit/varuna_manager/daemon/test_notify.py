"""Notices, sent to a real server and by real commands."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.http_server import running
from tests.unit.varuna_manager.story import Story

from spottrain.errors import ConfigError
from spottrain.varuna_manager.config.notify import NotifyConfig, check_notify
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.state import State
from spottrain.varuna_manager.daemon.notify import TRIES, Notifier
from spottrain.varuna_manager.jobs.folder import JobDir

# What apprise imports.
pytestmark = pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning")


class Receiver(ThreadingHTTPServer):
    """Takes notices; answers with ``statuses`` first."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.statuses: list[int] = []
        self.received: list[dict[str, Any]] = []
        self.url = f"http://127.0.0.1:{self.server_port}/secret-path"


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        length = int(self.headers["content-length"])
        self.server.received.append(json.loads(self.rfile.read(length)))
        statuses = self.server.statuses
        self.send_response(statuses.pop(0) if statuses else 200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with running(Receiver()) as server:
        yield server


@pytest.fixture
def job(tmp_path: Path) -> JobDir:
    (tmp_path / "job").mkdir()
    return JobDir(tmp_path / "job")


def stopped(*, ended: bool = True) -> State:
    story = Story().training("a", "b")
    if ended:
        story.tell(e.StopRequested, by="me", now=True)
        story.tell(e.VmsReturned, vm_ids=("a", "b"))
    return story.state


def tell(job: JobDir, notify: NotifyConfig, *states: State) -> None:
    notifier = Notifier(job, notify, pause_s=0.0)
    for state in states:
        notifier.look(state, state.now_s)
    notifier.finish(60.0)


def test_a_webhook_gets_each_notice_once_also_across_restarts(
    job: JobDir, receiver: Receiver
) -> None:
    notify = NotifyConfig(webhook=receiver.url)
    tell(job, notify, stopped(ended=False), stopped(), stopped())
    tell(job, notify, stopped())
    (document,) = receiver.received
    assert document["notice"] == "end"
    assert document["text"].startswith("job: stopped: ")
    assert document["step"] == 3


def test_apprise_sends_each_notice_and_only_what_failed_again(
    job: JobDir,
    receiver: Receiver,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    good = f"json://127.0.0.1:{receiver.server_port}/good"
    monkeypatch.setenv("HOOK", f"json://127.0.0.1:{receiver.server_port}/secret-path")
    receiver.statuses = [200, *[500] * TRIES]
    notify = NotifyConfig(apprise=(good, "$HOOK"))
    tell(job, notify, stopped(ended=False), stopped())
    assert len(receiver.received) == 1 + TRIES
    assert receiver.received[0]["message"].startswith("job: stopped: ")
    assert receiver.received[0]["title"] == "spottrain: end"
    assert "notice of end not sent: apprise $HOOK was not taken" in caplog.text
    assert "secret-path" not in caplog.text


def test_it_is_tried_again_with_the_same_id(job: JobDir, receiver: Receiver) -> None:
    receiver.statuses = [503, 429]
    tell(job, NotifyConfig(webhook=receiver.url), stopped(ended=False), stopped())
    assert len(receiver.received) == 3
    assert len({document["id"] for document in receiver.received}) == 1


@pytest.mark.parametrize(("status", "tries"), [(500, TRIES), (404, 1), (302, 1)])
def test_a_refusal_is_logged_without_the_url(
    job: JobDir,
    receiver: Receiver,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    tries: int,
) -> None:
    monkeypatch.setenv("HOOK", receiver.url)
    receiver.statuses = [status] * TRIES
    tell(job, NotifyConfig(webhook="$HOOK"), stopped(ended=False), stopped())
    assert len(receiver.received) == tries
    assert f"notice of end not sent: webhook answered {status}" in caplog.text
    assert "secret-path" not in caplog.text


def test_a_command_gets_the_notice_on_stdin(job: JobDir, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code = (
        "import json, os, sys; "
        "print(json.load(sys.stdin)['text'], os.environ['SPOTTRAIN_NOTICE'], "
        f"file=open({str(out)!r}, 'a'))"
    )
    notify = NotifyConfig(command=(sys.executable, "-c", code))
    tell(job, notify, stopped(ended=False), stopped())
    (line,) = out.read_text().splitlines()
    assert line.startswith("job: stopped: ")
    assert line.endswith(" end")


def test_a_command_that_fails_is_tried_again_and_logged(
    job: JobDir, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    code = f"print(1, file=open({str(out)!r}, 'a')); raise SystemExit(7)"
    notify = NotifyConfig(command=(sys.executable, "-c", code))
    tell(job, notify, stopped(ended=False), stopped())
    assert out.read_text().split() == ["1"] * TRIES
    assert "ended with 7" in caplog.text


def test_what_happened_before_anybody_was_to_be_told_is_not(
    job: JobDir, receiver: Receiver
) -> None:
    tell(job, NotifyConfig(webhook=receiver.url), stopped())
    assert receiver.received == []


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"command": ("no-such-program",)}, "there is no program no-such-program"),
        ({"webhook": "http://example.com/x"}, "got http://example.com/x"),
        ({"webhook": "ftp://127.0.0.1/x"}, "must be a URL of https"),
        ({"webhook": "https://[x"}, "must be a URL of https"),
        ({"webhook": "$UNSET_HOOK"}, "UNSET_HOOK is not set"),
        ({"webhook": "$BAD_HOOK"}, r"got the value of \$BAD_HOOK$"),
        ({"apprise": ("nobody://secret",)}, "got nobody://…$"),
        ({"apprise": ("$UNSET_HOOK",)}, "UNSET_HOOK is not set"),
    ],
)
def test_what_cannot_be_sent_is_refused_at_launch(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], line: str
) -> None:
    monkeypatch.setenv("BAD_HOOK", "http://example.com/secret")
    with pytest.raises(ConfigError, match=line):
        check_notify(NotifyConfig(**settings), (), on_vm=False)


def test_on_a_managers_vm_commands_and_unknown_secrets_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOOK", "https://example.com/x")
    hook = NotifyConfig(webhook="$HOOK")
    check_notify(hook, ("HOOK",), on_vm=True)
    with pytest.raises(ConfigError, match="add HOOK to secrets"):
        check_notify(hook, (), on_vm=True)
    monkeypatch.setenv("ME", "mailto://me:secret@example.org")
    people = NotifyConfig(apprise=("$ME",))
    check_notify(people, ("ME",), on_vm=True)
    with pytest.raises(ConfigError, match=r"notify\.apprise: .*add ME to secrets"):
        check_notify(people, (), on_vm=True)
    with pytest.raises(ConfigError, match=r"use notify\.webhook"):
        check_notify(NotifyConfig(command=("sh",)), (), on_vm=True)


def test_a_program_is_relative_to_the_job_file(tmp_path: Path) -> None:
    def command(*given: str) -> tuple[str, ...]:
        text = json.dumps({"command": given})
        return NotifyConfig.model_validate_json(text, context=tmp_path).command

    assert command("./tell", "./x") == (str(tmp_path / "tell"), "./x")
    assert command("tell") == ("tell",)

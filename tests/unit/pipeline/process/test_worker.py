from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator

import pytest
from tests.builders import a_plan, a_run

from spottrain.codec import decode, encode
from spottrain.errors import UserCodeError
from spottrain.pipeline.model.entrypoint import user_code
from spottrain.pipeline.process.worker import (
    MAX_MESSAGE_BYTES,
    SupervisorLink,
    reason_of,
    user_code_failed,
)
from spottrain.pipeline.state.context import StopRequest
from spottrain.wire import messages
from spottrain.wire.plan import Slot

SLOT = Slot(vm_id="a", index=0)
PLAN = a_plan(slots=(SLOT,))


def run(generation: int) -> messages.RunGeneration:
    return a_run(PLAN, generation=generation)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, SupervisorLink]]:
    supervisor, worker = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with supervisor, worker:
        yield supervisor, SupervisorLink(worker, frozenset())


def say(supervisor: socket.socket, command: messages.Command) -> None:
    supervisor.sendall(encode(command).encode())


def said(supervisor: socket.socket) -> str:
    """Return the next report, its pieces put together."""
    text = ""
    while True:
        message = json.loads(supervisor.recv(MAX_MESSAGE_BYTES))
        if "report" in message:
            return text + str(message["report"])
        text += message["piece"]


def test_a_stop_request_that_arrives_while_a_worker_starts_is_kept(
    ends: tuple[socket.socket, SupervisorLink],
) -> None:
    supervisor, link = ends
    say(supervisor, run(3))
    say(supervisor, messages.StopGeneration(generation=3, checkpoint=True))
    memory = os.memfd_create("control")
    socket.send_fds(supervisor, [b"fd"], [memory])
    os.close(memory)

    os.close(link.open("control", 8))

    assert link.next_command().generation == 3
    assert link.stop_request() == StopRequest.STOP_AND_CHECKPOINT


def test_the_strongest_stop_request_for_the_running_generation_counts(
    ends: tuple[socket.socket, SupervisorLink],
) -> None:
    supervisor, link = ends
    for generation in (1, 2):
        say(supervisor, run(generation))
    assert link.next_command().generation == 1
    say(supervisor, messages.StopGeneration(generation=1, checkpoint=True))
    say(supervisor, messages.StopGeneration(generation=1, checkpoint=False))
    assert link.stop_request() == StopRequest.STOP_AND_CHECKPOINT

    assert link.next_command().generation == 2
    assert link.stop_request() == StopRequest.NONE


def test_the_newest_traces_asked_of_the_generation_that_runs_count(
    ends: tuple[socket.socket, SupervisorLink],
) -> None:
    supervisor, link = ends
    say(supervisor, run(3))
    for generation, number in ((3, 2), (3, 1), (2, 9)):
        asked = messages.TraceMinibatches(generation=generation, number=number, minibatches=3)
        say(supervisor, asked)
    link.next_command()
    link.stop_request()
    newest = link.newest_trace()
    assert newest is not None
    assert newest.number == 2


def test_the_newest_share_of_the_generation_that_runs_counts(
    ends: tuple[socket.socket, SupervisorLink],
) -> None:
    supervisor, link = ends
    say(supervisor, run(3))
    for generation, number in ((3, 2), (3, 1), (2, 9), (4, 1)):
        share = messages.ShareMinibatch(
            generation=generation, number=number, replica_bounds=(0, number, 10)
        )
        say(supervisor, share)
    assert link.next_command().generation == 3
    assert link.newest_share() is None  # nothing is taken in while it is not asked for
    assert link.stop_request() == StopRequest.NONE
    newest = link.newest_share()
    assert newest is not None
    assert (newest.number, newest.replica_bounds) == (2, (0, 2, 10))


@pytest.mark.parametrize("letter", ["x", "\N{CJK UNIFIED IDEOGRAPH-6F22}", "\N{BUG}"])
def test_an_error_of_the_user_however_long_reaches_the_supervisor_cut_short(
    ends: tuple[socket.socket, SupervisorLink], letter: str
) -> None:
    supervisor, link = ends
    with pytest.raises(UserCodeError) as caught, user_code("loss"):
        raise ValueError(letter * 10**6)

    link.report(user_code_failed(caught.value))

    text = said(supervisor)
    assert len(text) < 2 * MAX_MESSAGE_BYTES
    report = decode(messages.Report, text)
    assert isinstance(report, messages.UserCodeFailed)
    assert report.message.startswith("loss raised ValueError: " + letter)
    assert letter in report.traceback


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            RuntimeError(
                "[/src/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
                "[127.0.0.1]:4. This is typically caused by a remote worker crashing."
            ),
            "Connection closed by peer [127.0.0.1]:4.",
        ),
        (ValueError("first\nsecond"), "ValueError: first"),
        (RuntimeError(), "RuntimeError: "),
    ],
)
def test_the_reason_of_a_break_is_one_line_without_advice(error: Exception, reason: str) -> None:
    assert reason_of(error) == reason

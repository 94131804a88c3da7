"""A loader process: makes the micro-batches that its worker asks for, one by one.

Requests and answers are packets of JSON; with an answer comes the file descriptor of
the memory that the batch is in. A worker may take a request back that it does not need
any more. The process ends with the socket.
"""

from __future__ import annotations

import json
import os
import select
import socket
from collections.abc import Callable
from functools import cache

from spottrain.errors import UserCodeError
from spottrain.pipeline.base.output import label_output
from spottrain.pipeline.loader.encoding import UnsendableError, write_batch
from spottrain.pipeline.model.data import Microbatch, make_batch
from spottrain.pipeline.model.job import TrainingJob
from spottrain.redaction import redacted

MAX_PACKET_BYTES = 1 << 17
_MAX_REASON_CHARACTERS, _MAX_TRACEBACK_CHARACTERS = 1_000, 8_000
"""A character may take 12 bytes in JSON."""


def serve_batches(connection: socket.socket, load: Callable[[], TrainingJob], seed: int) -> None:
    """Answer requests until the worker closes its end.

    Args:
        connection: A connected ``SOCK_SEQPACKET`` socket.
        load: Returns the user's job; called with the first request.
        seed: The job's.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a context of its own would take memory
    job = cache(load)
    wanted: dict[int, tuple[Microbatch, str]] = {}
    try:
        while True:
            while not wanted or select.select([connection], [], [], 0)[0]:
                packet = connection.recv(MAX_PACKET_BYTES)
                if not packet:
                    return
                request = json.loads(packet)
                if "drop" in request:
                    wanted.pop(request["drop"], None)
                else:
                    name = Microbatch(*request["name"])
                    wanted[request["make"]] = name, request["for"]
            number = next(iter(wanted))
            name, label = wanted.pop(number)
            label_output(label)
            _answer(connection, number, job, seed, name)
    except (BrokenPipeError, ConnectionResetError):
        return  # the worker is gone


def _answer(
    connection: socket.socket,
    number: int,
    load: Callable[[], TrainingJob],
    seed: int,
    wanted: Microbatch,
) -> None:
    answer: dict[str, object] = {"made": number}
    fds: list[int] = []
    try:
        fds.append(write_batch(make_batch(load(), seed, wanted)))
    except UserCodeError as error:
        answer["error"] = redacted(str(error))[:_MAX_REASON_CHARACTERS]
        answer["traceback"] = redacted(error.traceback)[-_MAX_TRACEBACK_CHARACTERS:]
        answer["unsendable"] = isinstance(error, UnsendableError)
    socket.send_fds(connection, [json.dumps(answer).encode()], fds)
    for fd in fds:
        os.close(fd)

"""A fake metadata service's process: prints its port, ends when its standard input does.

``python -m tests.fakes.metadata_server aws|azure|gcp``. The first part of each path names
the VM that asks.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from email.utils import formatdate
from urllib.parse import parse_qsl, urlsplit

from tests.fakes import http_server
from tests.fakes.metadata_aws import AwsWorld
from tests.fakes.metadata_azure import AzureWorld
from tests.fakes.metadata_gcp import GcpWorld
from tests.fakes.metadata_world import Request, World

WORLDS: dict[str, Callable[[], World]] = {
    "aws": AwsWorld,
    "azure": AzureWorld,
    "gcp": GcpWorld,
}


class Handler(http_server.Handler):
    """One connection."""

    world: World

    def _answer(self) -> None:
        if (body := self.body()) is None:
            return
        parts = urlsplit(self.path)
        if parts.path == "/fake":
            command = json.loads(body)
            told = getattr(self.world, command["call"])(**command["arguments"])
            self.send(200, json.dumps(told).encode(), {})
            return
        _, vm, *rest = parts.path.split("/")
        path, query = "/" + "/".join(rest), dict(parse_qsl(parts.query, True))
        request = Request(vm, self.command, path, query, self.headers, body)
        reply = self.world.answer(request)
        if reply is None:
            self.break_off()
        else:
            self.send(reply.status, reply.body.encode(), reply.headers)

    do_GET = do_POST = do_PUT = _answer  # noqa: N815 - http.server's names

    def date_time_string(self, timestamp: float | None = None) -> str:
        """Return the date of an answer, by the service's clock."""
        return formatdate(self.world.now(), usegmt=True)


def main() -> None:
    """Serve until standard input ends."""
    handler = type("Bound", (Handler,), {"world": WORLDS[sys.argv[1]]()})
    http_server.serve(http_server.Server(("127.0.0.1", 0), handler))
    os._exit(0)


if __name__ == "__main__":
    main()

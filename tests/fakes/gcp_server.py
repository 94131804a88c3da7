"""The fake GCP's process: prints its port, ends when its standard input does."""

from __future__ import annotations

import json
import os

from tests.fakes import http_server
from tests.fakes.gcp_layer import Layer
from tests.fakes.gcp_world import World


class Handler(http_server.Handler):
    """One connection."""

    layer: Layer
    world: World

    def date_time_string(self, timestamp: float | None = None) -> str:
        """Tell the cloud's time."""
        now_s = self.world.now() + self.world.skew_s
        return super().date_time_string(timestamp or now_s)

    def _answer(self) -> None:
        if (body := self.body()) is None:
            return
        answer = self.layer.answer(self.command, self.path, self.headers, body)
        if answer is None:
            self.break_off()
            return
        kind = {"Content-Type": "application/json; charset=UTF-8"}
        self.send(answer.status, json.dumps(answer.told).encode(), answer.headers | kind)

    do_GET = do_POST = do_PATCH = do_DELETE = _answer  # noqa: N815 - http.server's names


def main() -> None:
    """Serve until standard input ends."""
    world = World()
    handler = type("Bound", (Handler,), {"layer": Layer(world), "world": world})
    http_server.serve(http_server.Server(("127.0.0.1", 0), handler))
    world.reset()  # its machines are processes
    os._exit(0)


if __name__ == "__main__":
    main()

"""Compute Engine's metadata server, as far as preemptions go."""

from __future__ import annotations

import re
import secrets

from tests.fakes.metadata_world import (
    RefusedError,
    Reply,
    Request,
    World,
    needs_header,
)

_QUERY = {
    "wait_for_change": re.compile("true"),
    "last_etag": re.compile("[0-9a-f]{16}"),
    "timeout_sec": re.compile("[1-9][0-9]{0,3}"),
}

_OPERATIONS = {("GET", "/computeMetadata/v1/instance/preempted"): "preempted"}


class GcpWorld(World):
    """The server."""

    def __init__(self) -> None:
        super().__init__(_OPERATIONS)
        self.reset()

    def reset(self) -> None:
        """Know no VM and no preemption."""
        with self.changed:
            self.forget_script()
            self.preempted: dict[str, bool] = {}
            self.etags: dict[str, str] = {}
            self.waiting: set[str] = set()
            self.changed.notify_all()

    def preempt(self, vm: str, lead_s: float = 30.0) -> None:
        """Give notice that a VM is switched off; in how long the server never tells."""
        self._set(vm, preempted=True)

    def withdraw(self, vm: str) -> None:
        """Take a notice back."""
        self._set(vm, preempted=False)

    def nudge(self, vm: str) -> None:
        """Answer an open question though nothing has changed."""
        self._set(vm, preempted=self.preempted.get(vm, False))

    def wait_for_question(self, vm: str) -> bool:
        """Return once a VM has a question open that waits for a change."""
        with self.changed:
            return self.changed.wait_for(lambda: vm in self.waiting, 10.0)

    def _set(self, vm: str, *, preempted: bool) -> None:
        with self.changed:
            self.preempted[vm] = preempted
            self.etags[vm] = secrets.token_hex(8)
            self.changed.notify_all()

    def carry_out(self, operation: str, request: Request) -> Reply:
        """See ``World``."""
        needs_header(request, "Metadata-Flavor", "Google", 403)
        if request.body:
            raise RefusedError(400, "a body")
        query = request.query
        fits = all(
            name in _QUERY and _QUERY[name].fullmatch(value) for name, value in query.items()
        )
        if not fits or (query and query.keys() != _QUERY.keys()):
            raise RefusedError(400, f"query is {query}")
        with self.changed:
            if query:
                self._wait(request.vm, query["last_etag"], int(query["timeout_sec"]))
            word = "TRUE" if self.preempted.get(request.vm) else "FALSE"
            etag = self._etag(request.vm)
        return Reply(200, word, {"Metadata-Flavor": "Google", "ETag": etag})

    def _etag(self, vm: str) -> str:
        return self.etags.setdefault(vm, secrets.token_hex(8))

    def _wait(self, vm: str, etag: str, timeout_s: int) -> None:
        self.waiting.add(vm)
        self.changed.notify_all()
        self.changed.wait_for(lambda: self._etag(vm) != etag, timeout_s)
        self.waiting.discard(vm)

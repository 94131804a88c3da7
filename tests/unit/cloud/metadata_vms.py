"""VMs that listen to a fake metadata service, as their agents do."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.fakes.metadata import FakeMetadata

from spottrain.cloud.notices import gcp, hear
from spottrain.cloud.notices.source import NoticeSource

TIMEOUT_S = 600.0
_numbers = itertools.count()


class Ears:
    """One VM's."""

    def __init__(self, name: str, source: NoticeSource) -> None:
        self.name = name
        self.source = source
        self.heard: queue.Queue[hear.NoticeChange] = queue.Queue()

    def next(self) -> hear.NoticeChange:
        """Return what is heard next."""
        return self.heard.get(timeout=TIMEOUT_S)

    def lead_s(self) -> float:
        """Return the time left by the notice that is heard next."""
        said = self.next()
        assert isinstance(said, hear.PreemptionAnnounced)
        return said.lead_s


class Vms:
    """VMs of one service; they ask it more often than real ones do."""

    def __init__(self, cloud: str, fake: FakeMetadata, patch: pytest.MonkeyPatch) -> None:
        self.cloud = cloud
        self.fake = fake
        self._patch = patch
        self.told_s = gcp.LEAD_S if cloud == "gcp" else 29.5
        """Seconds left that a notice of 29.5 s tells; GCP's metadata has no such field."""

    def source(self, name: str) -> NoticeSource:
        """Return what a VM asks."""
        self._patch.setenv(hear.URL_VARIABLE, self.fake.url_of(name))
        made = hear.open_source({"kind": self.cloud})
        made.every_s = 0.02
        return made

    @contextmanager
    def listening(self, name: str = "") -> Iterator[Ears]:
        """Let a VM listen."""
        name = name or f"vm-{next(_numbers)}"
        ears = Ears(name, self.source(name))
        stop = threading.Event()
        thread = threading.Thread(target=hear.listen, args=(ears.source, ears.heard.put, stop))
        thread.start()
        try:
            yield ears
        finally:
            stop.set()
            if self.cloud == "gcp":
                self.fake.ask("nudge", vm=ears.name)  # ends the long poll
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()

    def wait_for_answers(self, name: str) -> None:
        """Return when a VM has been answered twice more, whatever the answer."""
        for _ in range(2):
            more = 4  # requests; there are up to three in one question
            if self.cloud == "gcp":
                assert self.fake.ask("wait_for_question", vm=name)
                more = 1
            seen = len(self.operations(name))
            if self.cloud == "gcp":
                self.fake.ask("nudge", vm=name)
            assert self.fake.ask("wait_for_requests", vm=name, count=seen + more)

    def operations(self, name: str) -> list[str]:
        """Return what a VM has asked for."""
        log: list[dict[str, Any]] = self.fake.ask("requests")
        return [one["operation"] for one in log if one["vm"] == name]


__all__ = ["Ears", "Vms"]

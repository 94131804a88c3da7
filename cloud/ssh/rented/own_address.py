"""Notices that this machine has another address, and has VMs let it in from there."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from spottrain.errors import SpottrainError

logger = logging.getLogger(__name__)

CHECK_S = 30.0
"""Time between two looks at the own address while VMs cannot be reached."""
Networks = tuple[str, ...]


class OwnAddressWatch:
    """The networks from which VMs let this machine in; a laptop moves between them.

    Which those are is not known at first: VMs may be of an earlier process, elsewhere.

    Args:
        own: Returns the networks of this machine.
        admit: Has VMs let networks in.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        own: Callable[[], Networks],
        admit: Callable[[Sequence[str]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._admitted: Networks | None = None
        self._own = own
        self._admit = admit
        self._clock = clock
        self._lock = threading.Lock()
        self._next_s = float("-inf")

    def unreachable(self) -> None:
        """Look at the own address, as a VM cannot be reached; not too often."""
        if not self._lock.acquire(blocking=False):
            return  # another thread looks
        try:
            if self._clock() >= self._next_s:
                self._next_s = self._clock() + CHECK_S
                self._look()
        finally:
            self._lock.release()

    def _look(self) -> None:
        try:
            networks = self._own()
            if networks != self._admitted:
                self._admit(networks)
                if self._admitted is not None:
                    logger.warning("VMs let this machine in from %s now", networks)
                self._admitted = networks
        except SpottrainError as error:  # it may be offline
            logger.info("%s", error)

"""A provider whose SDK lives in a child process.

SDKs take seconds to import, leak memory and hang; the child keeps that away from the
manager. Calls run in parallel, each with a deadline. If the child dies or hangs, its
calls fail with ``CloudError`` (a retry with the same token is safe) and the next call
starts it again. So does the next call after a login has expired, to find a renewed one. A
child never outlives its parent.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Concatenate

from spottrain.cloud.port.errors import CloudError, LoginExpiredError
from spottrain.cloud.port.wrapper import P, R, Wrapper
from spottrain.cloud.process.calls import call_of, unpack_error

ANSWER_S = 110.0
"""How long a call may take: less than the manager's own timeout (daemon.effects)."""
SLOW_S: Mapping[str, float] = {
    "launch": 290.0,  # of Azure: 16 VMs at once, each up to a minute; of GCP: its network
    "release": 600.0,
    "list_all": 300.0,
    "check": 300.0,
}
"""Limits of calls that may take longer, by name."""
RENEW_S = 60.0
"""How old a child must be to be replaced when its login has expired: SDKs keep what they
have read; only a new process finds what a person renewed."""
_START_S = 600.0
"""One that ends as it starts says so at once: only one that hangs takes so long."""
_END_S = 5.0
_ARGV = (sys.executable, "-P", "-m", "spottrain.cloud.process.main")


class ChildProvider(Wrapper):
    """A proxy of a provider in a child process; created by ``in_child``."""

    def __init__(self, recipe: str, first: _Child) -> None:
        self.name, self._abilities = first.name, first.abilities
        self._recipe = recipe
        self._child: _Child | None = first
        self._closed = False
        self._lock = threading.Lock()

    def can(self, ability: Callable[..., object]) -> bool:
        """See ``CloudProvider``."""
        return ability.__name__ in self._abilities

    @property
    def pid(self) -> int | None:
        """Process id of the child; None while there is none."""
        child = self._child
        return child.pid if child is not None and child.alive else None

    def close(self) -> None:
        """End the child; calls in flight and all later ones fail."""
        with self._lock:
            self._closed = True
            if self._child is not None:
                self._child.end()

    def pass_on(
        self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Return the answer of the provider in the child."""
        call = call_of(method)
        limit_s = SLOW_S.get(call.name, ANSWER_S)
        packed, child = call.pack(*args, **kwargs), self._live_child()
        try:
            answer = child.ask(call.name, packed, limit_s)
        except LoginExpiredError:
            child.end_if_older(RENEW_S)
            raise
        result: R = call.unpack_result(answer)
        return result

    def _live_child(self) -> _Child:
        with self._lock:
            if self._closed:
                raise CloudError(f"{self.name}: is already closed")
            if self._child is None or not self._child.alive:
                self._child = None
                self._child = _Child(self._recipe)
            return self._child


class _Child:
    """One run of a child process.

    Args:
        recipe: The provider to create, as JSON.

    Raises:
        SpottrainError: what making it has raised, or that it gave no sign of life.
    """

    def __init__(self, recipe: str) -> None:
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Future[Any]] = {0: Future()}
        self._lock, self._sending = threading.Lock(), threading.Lock()
        self._process = subprocess.Popen(
            _ARGV, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.name = "cloud"
        self.pid = self._process.pid
        self._silent, self._began_s = False, time.monotonic()
        threading.Thread(target=self._listen, name="cloud-child", daemon=True).start()
        try:
            self._send(recipe)
            hello = self._wait(0, "start", _START_S)
        except BaseException:
            self.end()
            raise
        self.name, self.abilities = hello["name"], tuple(hello["abilities"])

    @property
    def alive(self) -> bool:
        """True while it can answer."""
        return not self._silent and self._process.poll() is None

    def ask(self, method: str, arguments: dict[str, Any], limit_s: float) -> Any:
        """Return the result as JSON.

        Raises:
            SpottrainError: the provider's error.
            CloudError: the child died or did not answer in time.
        """
        with self._lock:
            if not self.alive:
                raise self._ended_error()
            number = next(self._numbers)
            self._waiting[number] = Future()
        request = {"number": number, "method": method, "arguments": arguments}
        self._send(json.dumps(request))
        return self._wait(number, method, limit_s)

    def end_if_older(self, age_s: float) -> None:
        """Kill the process if it has lived for long enough."""
        if time.monotonic() - self._began_s >= age_s:
            self.end()

    def end(self) -> None:
        """Kill the process and wait until it has ended."""
        self._process.kill()
        self._process.wait()

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            with self._sending:
                self._process.stdin.write(line + "\n")
                self._process.stdin.flush()
        except (OSError, ValueError) as error:
            raise self._ended_error() from error

    def _wait(self, number: int, method: str, limit_s: float) -> Any:
        try:
            answer = self._waiting[number].result(limit_s)
        except FutureTimeoutError as error:
            # It hangs: killing it loses nothing.
            self.end()
            raise CloudError(
                f"{self.name}: {method}: no answer in {limit_s:g} s; will be retried"
            ) from error
        finally:
            with self._lock:
                self._waiting.pop(number, None)
        if "error" in answer:
            raise unpack_error(answer["error"])
        return answer["result"]

    def _listen(self) -> None:
        """Deliver answers until the child ends; then fail the calls that still wait."""
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            for line in stream:
                answer = json.loads(line)
                with self._lock:
                    waiting = self._waiting.get(answer["number"])
                if waiting is not None:
                    waiting.set_result(answer)
        with self._lock:
            self._silent = True
            left = [one for one in self._waiting.values() if not one.done()]
        self._process.wait()
        for one in left:
            one.set_exception(self._ended_error())
        self._close_input()

    def _close_input(self) -> None:
        assert self._process.stdin is not None
        with self._sending:
            try:
                self._process.stdin.close()
            except OSError:
                return  # nothing reads the rest any more

    def _ended_error(self) -> CloudError:
        return CloudError(f"{self.name}: its SDK process has exited; will be retried")


def in_child(factory: str, settings: Mapping[str, Any]) -> ChildProvider:
    """Return a provider that runs in a child process.

    Args:
        factory: ``module:function``, called in the child with ``settings``.
        settings: Plain JSON without secrets; SDKs find credentials by themselves.

    Raises:
        SpottrainError: the factory's error.
        CloudError: the child does not start.
    """
    recipe = json.dumps({"factory": factory, "settings": dict(settings)})
    return ChildProvider(recipe, _Child(recipe))

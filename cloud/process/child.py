"""A provider whose SDK lives in a child process, with the same protocols.

SDKs take seconds to import, leak memory and hang; none of it reaches the manager.
Calls run at the same time, each with a deadline. A child that dies or hangs fails its
calls with ``CloudError`` (asking again, with the same token, is safe) and is started
again by the next one. A child never outlives whoever started it.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Concatenate

from spottrain.cloud.port.abilities import ForwardsAbilities, P, R
from spottrain.cloud.port.errors import CloudError
from spottrain.cloud.port.provider import (
    CloudProvider,
    LaunchRequest,
    LaunchResult,
    Offer,
    Vm,
)
from spottrain.cloud.process.calls import call_of, unpack_error

ANSWER_S = 110.0
"""How long a call may take: less than the manager's own patience (errands)."""
SLOW_S: Mapping[str, float] = {"release": 600.0, "list_all": 300.0, "check": 300.0}
"""Calls that may take longer, by name."""
_START_S = 60.0
_END_S = 5.0
_ARGV = (sys.executable, "-P", "-m", "spottrain.cloud.process.main")


class ChildProvider(ForwardsAbilities):
    """A stand-in for a provider in a child process; made by ``in_child``.

    It has the port's methods, and those of each ability that the provider has.
    """

    def __init__(self, recipe: str, first: _Child, answer_s: float | None) -> None:
        self.name = first.name
        self._recipe = recipe
        self._child: _Child | None = first
        self._answer_s = answer_s
        self._closed = False
        self._lock = threading.Lock()
        self._forward_abilities(
            lambda ability: ability.__name__ in first.abilities, self._forward
        )

    def offers(self) -> Sequence[Offer]:
        """See ``CloudProvider``."""
        return self._forward(CloudProvider.offers)()

    def launch(self, request: LaunchRequest) -> LaunchResult:
        """See ``CloudProvider``."""
        return self._forward(CloudProvider.launch)(request)

    def list_vms(self, job: str) -> Sequence[Vm]:
        """See ``CloudProvider``."""
        return self._forward(CloudProvider.list_vms)(job)

    def terminate(self, vm_ids: Collection[str]) -> None:
        """See ``CloudProvider``."""
        self._forward(CloudProvider.terminate)(vm_ids)

    @property
    def pid(self) -> int | None:
        """The child's process; None while there is none."""
        child = self._child
        return child.pid if child is not None and child.alive else None

    def close(self) -> None:
        """End the child; calls under way fail, and so does every later one."""
        with self._lock:
            self._closed = True
            if self._child is not None:
                self._child.end()

    def _forward(self, method: Callable[Concatenate[Any, P], R]) -> Callable[P, R]:
        assert isinstance(method, types.FunctionType)
        call = call_of(method)
        limit_s = self._answer_s or SLOW_S.get(call.name, ANSWER_S)

        def ask(*args: P.args, **kwargs: P.kwargs) -> R:
            packed = call.pack(*args, **kwargs)
            answer = self._live_child().ask(call.name, packed, limit_s)
            result: R = call.result.validate_python(answer)
            return result

        return ask

    def _live_child(self) -> _Child:
        with self._lock:
            if self._closed:
                raise CloudError(f"{self.name}: is closed already")
            if self._child is None or not self._child.alive:
                self._child = None
                self._child = _Child(self._recipe)
            return self._child


class _Child:
    """One life of a child process.

    Args:
        recipe: Which provider to make, as JSON.

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
        self._silent = False
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
        """Whether it can still answer."""
        return not self._silent and self._process.poll() is None

    def ask(self, method: str, arguments: dict[str, Any], limit_s: float) -> Any:
        """Return the answer as JSON.

        Raises:
            SpottrainError: what the provider has raised.
            CloudError: the child died, or gave no answer in time.
        """
        with self._lock:
            if not self.alive:
                raise self._ended_error()
            number = next(self._numbers)
            self._waiting[number] = Future()
        request = {"number": number, "method": method, "arguments": arguments}
        self._send(json.dumps(request))
        return self._wait(number, method, limit_s)

    def end(self) -> None:
        """Kill the process and wait until it is gone."""
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
            # Whatever it waits for, it would wait for ever: nothing is lost with it.
            self.end()
            raise CloudError(
                f"{self.name}: {method}: no answer in {limit_s:g} s; will be asked again"
            ) from error
        finally:
            with self._lock:
                self._waiting.pop(number, None)
        if "error" in answer:
            raise unpack_error(answer["error"])
        return answer["result"]

    def _listen(self) -> None:
        """Hand answers out until the child is gone; then fail whoever still waits."""
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
                return  # what was still to be sent has nobody to read it

    def _ended_error(self) -> CloudError:
        return CloudError(
            f"{self.name}: the process of its SDK has ended; will be asked again"
        )


def in_child(
    factory: str, settings: Mapping[str, Any], *, answer_s: float | None = None
) -> ChildProvider:
    """Return a provider that lives in a child process of this one.

    Args:
        factory: ``module:function``, called in the child with ``settings``.
        settings: Plain JSON; no secrets but those that the environment holds anyway.
        answer_s: How long every call may take, instead of ``ANSWER_S`` and ``SLOW_S``.

    Raises:
        SpottrainError: what the factory raises.
        CloudError: the child does not start.
    """
    recipe = json.dumps({"factory": factory, "settings": dict(settings)})
    return ChildProvider(recipe, _Child(recipe), answer_s)

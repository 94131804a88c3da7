"""How commands reach a pool's daemon: HTTP over a socket that only its owner may open."""

from __future__ import annotations

import http
import http.client
import json
import time
from collections.abc import Iterable
from typing import Any

from spottrain.cloud import unix_http
from spottrain.errors import BudgetError, CapacityError, ConfigError, SpottrainError
from spottrain.varuna_manager.config.files import read_value
from spottrain.varuna_manager.pool.store.folder import PoolDir

ANSWER_S = 60.0
START_S = 600.0
"""One that ends as it starts says so at once: only one that hangs takes so long."""
_POLL_S = 0.05


class PoolUnreachableError(SpottrainError):
    """The daemon of a pool does not run, or does not answer."""


_REFUSALS: dict[str, type[SpottrainError]] = {
    "ConfigError": ConfigError,
    "BudgetError": BudgetError,
    "CapacityError": CapacityError,
}
"""Refusals by the name under which the daemon tells them."""


def read_changes(texts: Iterable[str]) -> dict[str, Any]:
    """Return the changes of a pool that a person wrote as ``key=value``; ``none`` removes a
    limit.

    Raises:
        ConfigError: One is not of this form.
    """
    wanted: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not value:
            raise ConfigError(f"must be KEY=VALUE, such as max_vms=8: got {text!r}")
        wanted[key] = None if value.lower() in ("none", "null") else read_value(value)
    return wanted


def ask_pool(pool: PoolDir, what: str, request: Any = None) -> Any:
    """Return the daemon's answer to a request.

    Args:
        what: Such as ``status``.
        request: JSON data.

    Raises:
        PoolUnreachableError: The daemon does not run, or does not answer.
        SpottrainError: It refuses, with the reason in one line.
    """
    body = json.dumps(request or {}).encode()
    try:
        status, said = unix_http.request(
            str(pool.socket), "POST", f"/v1/{what}", timeout_s=ANSWER_S, body=body
        )
        answer = json.loads(said)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise PoolUnreachableError(
            f"pool {pool.name}: its daemon does not answer; 'spottrain pool resume "
            f"{pool.name}' starts it again, its log is {pool.log}"
        ) from error
    if status == http.HTTPStatus.CONFLICT:
        raise _REFUSALS.get(answer["error"], SpottrainError)(answer["reason"])
    return answer


def start_daemon(pool: PoolDir) -> int:
    """Start a pool's daemon, detached; return its pid once it answers.

    Raises:
        PoolUnreachableError: It exited, or does not answer in time.
    """
    process = pool.start()
    give_up_at_s = time.monotonic() + START_S
    while time.monotonic() < give_up_at_s:
        try:
            answer = ask_pool(pool, "ping")
            if answer["pid"] == process.pid:
                return process.pid
        except PoolUnreachableError:
            pass
        if process.poll() is not None:
            raise PoolUnreachableError(
                f"pool {pool.name}: its daemon exited right after its start: "
                f"{pool.last_words()}; see {pool.log}"
            )
        time.sleep(_POLL_S)
    raise PoolUnreachableError(
        f"pool {pool.name}: its daemon does not answer in {START_S:g} s; see {pool.log}"
    )

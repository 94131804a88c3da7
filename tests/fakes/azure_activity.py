"""The fake's Activity Log: the changes of VMs, newest first, a page at a time.

Checked by hand against the reference of "Activity Logs - List", 2015-04-01: the SDK that
has models of it is none that this project needs.
"""

from __future__ import annotations

import itertools
import re
from datetime import datetime
from typing import Any
from urllib.parse import urlencode

from tests.fakes.azure_http import Call, Reply
from tests.fakes.azure_model import DriftError
from tests.fakes.azure_vms import RefusedError
from tests.fakes.azure_world import World

VERSION = "2015-04-01"
_PAGE = 200
_MOST_DAYS = 90
_FILTER = re.compile(
    r"eventTimestamp ge '(?P<since>[^']+)' and eventTimestamp le '(?P<until>[^']+)' "
    r"and resourceGroupName eq '(?P<group>[\w.()-]+)'"
)
_WRITTEN = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")
_RELIED_ON = {
    "correlationId",
    "eventDataId",
    "eventTimestamp",
    "operationName",
    "resourceId",
    "status",
}
"""Of the fields that can be asked for, those that the adapter reads."""


def values(world: World, call: Call) -> Reply:
    """Answer what has happened in a resource group."""
    if world.denied_log:
        message = "does not have authorization to perform action eventtypes/values/read"
        raise RefusedError(403, "AuthorizationFailed", message)
    wanted = _FILTER.fullmatch(call.query.get("$filter", ""))
    if wanted is None or set(call.query.get("$select", "").split(",")) != _RELIED_ON:
        raise DriftError(f"{call.operation}: {call.query}")
    since, until = _moment(wanted["since"]), _moment(wanted["until"])
    # The reference is silent on the future: the stricter reading.
    if until.timestamp() > world.now():
        raise RefusedError(400, "BadRequest", "the time range ends in the future")
    if (until - since).days >= _MOST_DAYS:
        raise RefusedError(400, "BadRequest", "the time range is too long")
    from_s, group = since.timestamp(), wanted["group"].lower()
    until_s = min(until.timestamp(), world.now() - world.log_lag_s)
    newest_first = itertools.takewhile(
        lambda event: event["at_s"] >= from_s, reversed(world.events)
    )
    told = [
        {name: event[name] for name in _RELIED_ON}
        for event in newest_first
        if event["at_s"] <= until_s and event["group"].lower() == group
    ]
    start = int(call.query.get("$skipToken", 0))
    page: dict[str, Any] = {"value": told[start : start + _PAGE]}
    if start + _PAGE < len(told):
        query = {**call.query, "$skipToken": str(start + _PAGE)}
        page["nextLink"] = f"{call.base}{call.path}?{urlencode(query)}"
    return Reply(200, page)


def _moment(text: str) -> datetime:
    if not _WRITTEN.fullmatch(text):
        raise RefusedError(400, "BadRequest", f"{text!r} is no time")
    return datetime.fromisoformat(text)

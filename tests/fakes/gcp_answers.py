"""How the fake Compute Engine refuses, filters and pages."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from tests.fakes.gcp_world import Json

_IS = re.compile(r'\(?([\w.-]+) = "([^"]*)"\)?')
_MOST = 500
_HAS = re.compile(r"([\w.-]+):\*")


class RefusedError(Exception):
    """Compute Engine says no.

    Args:
        status: HTTP's.
        reason: Google's word.
        message: One line.
    """

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.status, self.reason, self.message = status, reason, message


def absent(what: str) -> RefusedError:
    """Return the refusal of something that does not exist."""
    return RefusedError(404, "notFound", f"The resource '{what}' was not found")


def passes(item: Json, wanted: str) -> bool:
    """Return whether something passes a filter: equals, joined by OR, or is there.

    Raises:
        RefusedError: the filter cannot be read.
    """
    return any(_passes(item, term) for term in wanted.split(" OR "))


def _passes(item: Json, term: str) -> bool:
    equal, there = _IS.fullmatch(term), _HAS.fullmatch(term)
    if equal:
        return bool(_at(item, equal[1]) == equal[2])
    if there:
        return _at(item, there[1]) is not None
    raise RefusedError(400, "invalid", f"Invalid value for field 'filter': '{term}'")


def _at(item: Json, path: str) -> Any:
    value: Any = item
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def passing(found: Iterable[Json], asked: Json) -> list[Json]:
    """Return what passes a request's filter.

    Raises:
        RefusedError: an order is asked for as well. Compute Engine sorts no list that is
            filtered: https://github.com/doitintl/kubeip/issues/132 has its words.
    """
    if "orderBy" in asked:
        raise RefusedError(
            400,
            "invalid",
            f"Invalid value for field 'orderBy': '{asked['orderBy']}'. Specifying both a "
            "list filter and sort order is not currently supported.",
        )
    return [told for told in found if passes(told, asked["filter"])]


def page(found: list[Json], asked: Json) -> Json:
    """Return one page: of two things, so that paging is seen, or a quarter of many, or
    what Google gives at most.
    """
    start = int(asked.get("pageToken") or 0)
    size = min(max(2, len(found) // 4), _MOST)
    told: Json = {"items": found[start : start + size]}
    if start + size < len(found):
        told["nextPageToken"] = str(start + size)
    return told


def scopes(kind: str, collection: str, found: dict[str, list[Json]], silent: Iterable[str]) -> Json:
    """Return an aggregated list.

    Args:
        kind: ``zones`` or ``regions``.
        collection: Of what.
        found: By scope.
        silent: Scopes that do not answer.
    """
    told: Json = {}
    for scope, items in found.items():
        code = "UNREACHABLE" if scope in silent else ""
        code = code or ("" if items else "NO_RESULTS_ON_PAGE")
        warned: Json = {"warning": {"code": code}}
        told[f"{kind}/{scope}"] = warned if code else {collection: items}
    return {"items": told}

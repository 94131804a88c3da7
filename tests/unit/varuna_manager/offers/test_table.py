"""The ranked table, for people and programs."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from tests.unit.pricing.ranked import TERMS, THROUGHPUTS, TOO_SMALL, priced

from spottrain.pricing.ranking.rank import Priced, best_of_each, rank
from spottrain.varuna_manager.offers.table import ranking_parts, ranking_view

MARKET = [
    priced(zone="b", usd_per_hour=1.0, losses_per_hour=60.0),
    priced(zone="a", usd_per_hour=2.0, is_estimate=True),
    priced(zone="c", usd_per_hour=9.0),
    priced(TOO_SMALL, zone="d"),
    priced(zone="e", usd_per_hour=math.nan),
]
ASKED = replace(TERMS, morph_s=30.0)


def view(market: list[Priced], exact: int = 10) -> dict[str, Any]:
    return ranking_view(rank(market, THROUGHPUTS, ASKED, exact=exact), 120.0, ["careful"])


def text(document: dict[str, Any], explain: bool = False, every: bool = False) -> str:
    screen = Console(file=io.StringIO(), width=180)
    screen.print(*ranking_parts(document, explain, every))
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def test_programs_get_every_offer_and_why() -> None:
    document = json.loads(json.dumps(view(MARKET), allow_nan=False))
    assert [row["zone"] for row in document["offers"]] == ["a", "b", "c", "e", "d"]
    assert document["choice"] == "aws a t spot"
    assert document["warnings"] == ["careful"]
    first, last = document["offers"][0], document["offers"][-1]
    assert first["age_s"] == 120.0
    assert first["is_estimate"]
    assert first["why_not"] == ""
    assert first["examples_per_usd"] > 0
    assert last["why_not"]
    assert last["examples_per_usd"] is None


def test_the_choice_says_why() -> None:
    why = view(MARKET)["why"]
    assert why.startswith("aws a t spot trains ")
    assert "more than aws b t spot" in why
    assert "aws b t spot trains more for its rent alone, but not after boot" in why
    assert "at least" in view(MARKET, exact=1)["why"]
    alike = rank([priced(zone="a"), priced(zone="b")], THROUGHPUTS, ASKED, exact=10)
    assert "per dollar, as many as aws b t spot" in ranking_view(alike, 120.0)["why"]
    best, other = alike.rows
    bound = replace(alike, rows=(best, replace(other, is_bound=True)))
    assert "per dollar, no fewer than aws b t spot" in ranking_view(bound, 120.0)["why"]
    assert "no other offer can be used" in view(MARKET[:1])["why"]
    assert view([priced(usd_per_hour=0.0)])["why"] == "aws a t spot costs nothing"


def test_of_each_gpu_people_see_what_the_whole_job_takes() -> None:
    ranking = rank(MARKET, THROUGHPUTS, ASKED, exact=10)
    bests = best_of_each(ranking, lambda one: one.offer.zone.upper(), THROUGHPUTS, ASKED)
    document = ranking_view(ranking, 120.0, (), bests, ASKED.examples)
    assert [row["gpu"] for row in document["by_gpu"]] == ["A", "B", "C"]
    first = document["by_gpu"][0]
    worth = ranking.rows[0].worth
    assert worth is not None
    assert first["total_usd"] == pytest.approx(worth.usd)
    rate = worth.net_examples_per_s
    assert first["hours"] == pytest.approx(ASKED.examples / rate / 3600)
    busy = document["by_gpu"][1]
    assert busy["losses"] == pytest.approx(60.0 * busy["paid_vms"] * busy["hours"])
    shown = text(document)
    assert shown.splitlines()[1].startswith("A    aws a t")
    assert "for 1,000,000 examples" in shown
    assert "aws b t" in text(document, every=True)


def test_without_a_usable_offer_the_reasons_are_counted() -> None:
    nans = [priced(zone=z, usd_per_hour=math.nan) for z in "xyz"]
    why = view([*nans, MARKET[3]])["why"]
    assert why.startswith("no offer can be used: price: got nan USD per hour (3); the")
    assert view([])["why"] == "no offer can be used: there are none"


def test_people_see_estimates_bounds_and_what_is_out() -> None:
    short = text(view(MARKET, exact=2))
    assert "~" in short
    assert "<" in short
    assert "2 offers cannot be used" in short
    assert " nan" not in short
    assert " nan" in text(view(MARKET), explain=True)
    assert "1440.00" in short  # losses a day

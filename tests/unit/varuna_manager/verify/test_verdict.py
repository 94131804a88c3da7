"""A verification finds planted errors, and tells what it found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.builders import a_manifest, a_vm, an_offer

from spottrain.cloud.port.provider import Vm, VmState
from spottrain.manifest import FileRecord, write_manifest
from spottrain.storage.open import open_store
from spottrain.varuna_manager.verify.verdict import (
    Comparison,
    Speed,
    Verdict,
    check_bill,
    check_losses,
    check_weights,
    document,
    page,
    weights,
)

NAME = "step-5-g1-00000000"


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """Two checkpoints of the same bytes."""
    files = (tmp_path / "calm", tmp_path / "struck")
    for folder in files:
        (folder / NAME).mkdir(parents=True)
        (folder / NAME / "section-0.safetensors").write_bytes(bytes(range(64)))
        record = FileRecord(
            section=0, file="section-0.safetensors", num_bytes=64, sha256="as it was written"
        )
        write_manifest(open_store(folder), a_manifest(NAME, 5, (record,)))
    return files


def test_equal_bytes_are_equal_weights(places: tuple[Path, Path]) -> None:
    calm, struck = (weights(open_store(place)) for place in places)
    assert check_weights(calm, struck).passed


def test_one_wrong_bit_is_found_though_the_manifest_knows_nothing_of_it(
    places: tuple[Path, Path],
) -> None:
    file = places[1] / NAME / "section-0.safetensors"
    data = bytearray(file.read_bytes())
    data[40] ^= 1
    file.write_bytes(data)
    calm, struck = (weights(open_store(place)) for place in places)
    check = check_weights(calm, struck)
    assert not check.passed
    assert "section-0.safetensors" in check.found


def test_nothing_saved_and_a_section_that_one_lacks_are_no_equal_weights() -> None:
    assert not check_weights({}, {}).passed
    assert not check_weights({"a": "1", "b": "2"}, {"a": "1"}).passed


@pytest.mark.parametrize(
    ("calm", "struck", "passed"),
    [
        ([1.0, 0.5], [1.0, 0.5], True),
        ([1.0, 0.5], [1.0, 0.5000001], False),
        ([1.0, 0.5], [1.0], False),
        ([], [], False),
    ],
)
def test_losses_are_compared_step_by_step(
    calm: list[float], struck: list[float], passed: bool
) -> None:
    assert check_losses(calm, struck).passed is passed


def ended(seconds: float, cloud: str = "local", usd_per_hour: float = 3.6) -> Vm:
    offer = replace(an_offer(cloud=cloud), usd_per_hour=usd_per_hour)
    return replace(
        a_vm("a", offer), state=VmState.TERMINATED, launched_at_s=100.0, ended_at_s=100.0 + seconds
    )


def test_a_ledger_that_agrees_with_the_cloud_is_right() -> None:
    assert check_bill([ended(10.0), ended(20.0)], 0.03).passed


@pytest.mark.parametrize(
    ("vms", "ledger_usd"),
    [
        ([ended(10.0), ended(20.0)], 0.030002),
        ([ended(10.0)], 0.03),
        ([], 0.0),
        ([replace(ended(10.0), ended_at_s=None)], 0.01),
    ],
)
def test_a_wrong_bill_is_found(vms: list[Vm], ledger_usd: float) -> None:
    assert not check_bill(vms, ledger_usd).passed


def test_a_rented_vm_is_billed_by_its_clouds_terms() -> None:
    assert check_bill([ended(10.0, cloud="aws")], 0.06).passed, "a minute is the shortest time"
    assert not check_bill([ended(10.0, cloud="aws")], 0.01).passed


def a_verdict(*checks: Comparison) -> Verdict:
    return Verdict(
        version="0.1.0",
        at="2026-11-29T00:00:00+00:00",
        where="this machine, CPU",
        machine={"cores": "2"},
        steps=120,
        strikes=3,
        wall_s=90.0,
        usd=0.25,
        checks=checks,
        speed=Speed(plain=10.0, fast=9.0, exact=8.0),
    )


def test_the_page_says_what_was_wrong_and_the_document_holds_all_of_it() -> None:
    right, wrong = (
        Comparison("weights", True, "the same bytes"),
        Comparison("bill", False, "$1 and $2"),
    )
    assert "passed" in page(a_verdict(right))
    verdict = a_verdict(right, wrong)
    text = page(verdict)
    assert "FAILED" in text
    assert "| bill | **WRONG** $1 and $2 |" in text
    assert "(0.90 of it), exact 8.0 (0.80)" in text
    told = json.loads(json.dumps(document(verdict)))
    assert told["passed"] is False
    assert [check["passed"] for check in told["checks"]] == [True, False]
    assert told["examples_per_s"] == {"plain": 10.0, "fast": 9.0, "exact": 8.0}

"""The picture of who held what."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from spottrain.varuna_manager.reporting.html.allocations import Allocation, drawing

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(("vms", "labels"), [(4, ["0", "2"]), (3, ["0"]), (1, ["0"])])
def test_an_axis_counts_whole_vms(vms: int, labels: list[str]) -> None:
    svg = drawing([("gpu", vms)], [], 40.0)
    texts = [e.text for e in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert texts[: len(labels) + 1] == [*labels, f"{vms} gpu"]


def test_each_vm_of_a_job_is_a_box_for_as_long_as_it_is_held() -> None:
    svg = drawing(
        [("gpu", 4)],
        [
            Allocation("a", "gpu", ((0.0, 4), (10.0, 1), (40.0, 0))),
            Allocation("b<c", "gpu", ((10.0, 3), (20.0, 0))),
        ],
        40.0,
    )
    boxes = ElementTree.fromstring(svg).findall(f".//{SVG}rect")
    by_job: dict[str | None, list[float]] = {}
    for box in boxes:
        width = round(float(box.attrib["width"]) / 900 * 40, 1)
        by_job.setdefault(box.findtext(f"{SVG}title"), []).append(width)
    assert sorted(by_job["a"]) == [10, 10, 10, 40]
    assert by_job["b<c"] == [10, 10, 10]
    assert len({box.attrib["fill"] for box in boxes}) == 2

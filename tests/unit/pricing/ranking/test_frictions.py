from __future__ import annotations

import pytest

from spottrain.pricing.prices.place import Place
from spottrain.pricing.ranking.frictions import Frictions, Quote

HERE = Place("aws", "us-east-1", "us-east-1a", "p3.2xlarge")
BESIDE = HERE._replace(zone="us-east-1b")
FAR = HERE._replace(region="us-west-2", zone="us-west-2a")
OTHER = Place("azure", "us_east", "us_east", "NC6s v3")


@pytest.mark.parametrize(
    ("there", "usd"), [(HERE, 0.0), (BESIDE, 1.0), (FAR, 2.0), (OTHER, 9.0)]
)
def test_a_checkpoint_costs_more_the_further_it_goes(there: Place, usd: float) -> None:
    moved = Frictions(checkpoint_bytes=100e9).checkpoint_usd(HERE, there)
    assert moved == pytest.approx(usd)


@pytest.mark.parametrize(
    ("size_gb", "share"), [(0.098, 0.00006), (0.408, 0.00025), (150, 0.0913)]
)
def test_egress_is_what_the_dissertation_reckons_with(
    size_gb: float, share: float
) -> None:
    # Table 6.2, against 160 V100-hours of spot; datasets there have their first GB free.
    frictions = Frictions(checkpoint_bytes=(size_gb - (size_gb > 1)) * 1e9)
    moved = frictions.checkpoint_usd(HERE, OTHER)
    assert moved / (160 * 0.918) == pytest.approx(share, rel=0.03)


def test_a_dataset_is_fetched_once_into_a_cloud() -> None:
    frictions = Frictions(dataset_bytes=100e9)
    assert frictions.dataset_usd("azure", {"aws"}) == pytest.approx(9.0)
    assert frictions.dataset_usd("azure", {"aws", "azure"}) == 0.0


def test_an_interruption_wastes_its_boot_and_the_work_done_again() -> None:
    frictions = Frictions(boot_s=600, lost_s=1200)
    lossy = Quote(place=HERE, usd_per_hour=1.0, examples_per_s=1.0, losses_per_hour=1.0)
    assert frictions.throughput(lossy) == pytest.approx(3600 / 1.5)

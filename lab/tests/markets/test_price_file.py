from __future__ import annotations

from datetime import date

import pytest

from spottrain.errors import ConfigError
from spottrain.pricing.prices.place import Place
from spottrain_lab.markets.price_file import COLUMNS, parse_prices, region_of

HEADER = ",".join(COLUMNS)


def rows(*lines: str) -> str:
    return "\n".join([HEADER, *lines])


def test_the_days_are_in_order_and_all_sightings_of_a_day_are_kept() -> None:
    found = parse_prices(
        rows(
            "aws,us-east-1b,p3.2xlarge,2020-02-27T17:42:36.000Z,1.2",
            "aws,us-east-1b,p3.2xlarge,2020-02-27T03:00:00.000Z,1.1",
            "azure,us_east,NC6s v3,2020-02-26,0.6",
        )
    )
    place = Place("aws", "us-east-1", "us-east-1b", "p3.2xlarge")
    assert list(found.days) == [date(2020, 2, 26), date(2020, 2, 27)]
    assert found.days[date(2020, 2, 27)] == {place: (1.2, 1.1)}
    assert found.regions() == {"us_east": "azure", "us-east-1": "aws"}
    assert found.notices == ()


@pytest.mark.parametrize(
    ("cloud", "zone", "region"),
    [
        ("aws", "us-west-2c", "us-west-2"),
        ("gcp", "us-east1-b", "us-east1"),
        ("azure", "us_east", "us_east"),
    ],
)
def test_the_region_of_a_zone(cloud: str, zone: str, region: str) -> None:
    assert region_of(cloud, zone) == region


@pytest.mark.parametrize("price", ["0.24", "$0.24", " $0.24 "])
def test_prices_may_have_a_dollar_sign(price: str) -> None:
    found = parse_prices(rows(f"aws,us-east-1b,p3.2xlarge,2020-02-27,{price}"))
    (prices,) = found.days[date(2020, 2, 27)].values()
    assert prices == (0.24,)


def test_a_field_that_is_too_long_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"rows of CSV: field larger.*fix the file"):
        parse_prices(rows("aws,us-east-1b,p3.2xlarge,2020-02-27," + "1" * 200_000))


@pytest.mark.parametrize("price", ["", "nan", "inf", "-1", "0", "cheap", "$", "$-1"])
def test_rows_without_a_price_are_left_out_and_counted(price: str) -> None:
    found = parse_prices(
        rows(
            "aws,us-east-1b,p3.2xlarge,2020-02-27,1.2",
            f"aws,us-east-1c,p3.2xlarge,2020-02-27,{price}",
        )
    )
    assert len(found.days[date(2020, 2, 27)]) == 1
    assert found.notices == ("1 rows left out: no price above 0",)


def test_rows_of_other_instance_types_are_left_out_and_counted() -> None:
    found = parse_prices(rows("azure,us_east,NC6,2020-02-27,1", "azure,us_east,NC24r,2020-02-27,1"))
    assert found.notices == ("1 rows of NC24r left out: not among the instance types compared",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "columns: got 'none'"),
        ("a,b\n1,2", "columns: got 'a,b'; write cloud,zone"),
        (rows(), "no row has a price"),
        (rows("aws,us-east-1b,p3.2xlarge,yesterday,1"), "row 2: observed_at: got 'y"),
        (rows(",us-east-1b,p3.2xlarge,2020-02-27,1"), "row 2: no cloud or no zone"),
        (rows("aws,us-east-1b"), "no row has a price"),
    ],
)
def test_an_invalid_price_file_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_prices(text)

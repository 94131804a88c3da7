"""Pictures of prices."""

from __future__ import annotations

from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from spottrain.pricing.prices.price import Price
from spottrain.varuna_manager.reporting.sparkline import sparkline, svg, usd_at


def price(usd: float, since_s: float) -> Price:
    return Price(
        cloud="aws",
        region="r",
        zone="z",
        instance_type="t",
        spot=True,
        usd_per_hour=usd,
        since_s=since_s,
        seen_s=since_s,
        source="test",
    )


SERIES = [price(1.0, 0.0), price(3.0, 50.0), price(2.0, 80.0)]


def test_a_price_holds_until_the_next_one_begins() -> None:
    assert [usd_at(SERIES, t) for t in (-1.0, 0.0, 49.0, 50.0, 200.0)] == [
        None,
        1.0,
        1.0,
        3.0,
        2.0,
    ]


def test_a_sparkline_is_low_where_it_is_cheap_and_blank_where_nothing_is_known() -> None:
    assert sparkline(SERIES, 0.0, 100.0, width=11) == "▁▁▁▁▁███▅▅▅"
    assert sparkline(SERIES, -50.0, 50.0, width=3) == " ▁█"
    assert sparkline([], 0.0, 100.0, width=4) == "    "
    assert sparkline([price(2.0, 0.0)], 0.0, 1.0, width=2) == "▁▁"


@given(
    st.lists(st.tuples(st.floats(0.01, 100), st.floats(0, 100)), max_size=8),
    st.integers(1, 20),
)
def test_a_sparkline_has_the_width_that_is_asked_for(
    rows: list[tuple[float, float]], width: int
) -> None:
    series = [price(usd, at) for usd, at in sorted(rows, key=lambda row: row[1])]
    assert len(sparkline(series, 0.0, 100.0, width)) == width


def test_the_axis_of_prices_ends_at_a_round_number() -> None:
    text = svg({"spot": [price(0.00273, 0.0)]}, 0.0, 100.0)
    assert ">$0.003<" in text


def test_the_svg_is_well_formed_names_its_lines_and_steps() -> None:
    text = svg({"aws <z> & co": SERIES, "none": []}, 0.0, 100.0)
    root = ElementTree.fromstring(text)
    texts = [e.text for e in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "aws <z> & co" in texts
    assert "$3" in texts
    assert 'd="M60.0 193.3H420.0V20.0H636.0V106.7H780.0"' in text
    assert "1970-01-01 00:00" in texts

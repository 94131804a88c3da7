"""The nearest known name."""

from spottrain.suggest import did_you_mean


def test_the_nearest_name_is_suggested_whatever_its_case() -> None:
    regions = ["us-east-1", "us-west-2", "eu-west-1"]
    assert did_you_mean("us-est-1", regions) == "did you mean us-east-1?"
    assert did_you_mean("a10g", ["A10G", "A100-40GB"]) == "did you mean A10G?"


def test_nothing_is_suggested_where_nothing_is_near() -> None:
    assert did_you_mean("xyzzy", ["launch", "status"]) == ""
    assert did_you_mean("launhc", ["launch"], cutoff=0.95) == ""


def test_names_that_are_equally_near_are_all_named() -> None:
    assert did_you_mean("us-west-3", ["us-west-1", "us-west-2", "us-east-1"]) == (
        "did you mean us-west-1 or us-west-2?"
    )

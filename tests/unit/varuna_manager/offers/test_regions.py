"""Names of regions that a person may have misspelt."""

from spottrain.varuna_manager.config.clouds import AwsConfig
from spottrain.varuna_manager.offers.checks import unknown_regions


def test_a_region_is_warned_of_only_where_a_known_one_has_nearly_its_name() -> None:
    regions = ("us-eats-1", "us-east-1", "zz-orbit-9")
    (warning,) = unknown_regions([AwsConfig(regions=regions, gpus=("A10G",))])
    assert warning == (
        "warning: aws.regions: got us-eats-1, which is not known; did you mean us-east-1?"
    )

"""Tags of resources, and the user's own."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain.cloud.aws.settings import AwsSettings
from spottrain.cloud.gcp.requests import label
from spottrain.cloud.port import tags
from spottrain.varuna_manager.config.clouds import AwsConfig, GcpConfig

WORDS = st.text("aZ0_-. é", max_size=6) | st.just("spottrain-x") | st.just("a" * 64)


@given(uid=st.sampled_from(["", "a", "b"]), ours=st.sampled_from(["", "a", "b"]))
def test_a_resource_is_the_jobs_whose_uid_it_has(uid: str, ours: str) -> None:
    theirs = AwsSettings(instance_types=(), uid=uid, tags={"team": "x"})
    found = tags.of_job("job", theirs)
    assert found[tags.JOB] == "job"
    assert found["team"] == "x"
    mine = AwsSettings(instance_types=(), uid=ours)
    assert tags.is_ours(found, "job", mine) == (uid == ours)
    assert not tags.is_ours(found, "another", mine)


@given(st.dictionaries(WORDS, WORDS, max_size=2))
def test_labels_that_pass_are_those_that_google_takes(wanted: dict[str, str]) -> None:
    fits = all(
        re.fullmatch("[a-z][a-z0-9_-]{0,62}", name)
        and re.fullmatch("[a-z0-9_-]{0,63}", value)
        and not name.startswith("spottrain-")
        for name, value in wanted.items()
    )
    try:
        tags.check_tags("gcp", wanted)
    except ValueError:
        assert not fits
    else:
        assert fits
        assert all(not value or label(value) == value for value in wanted.values())


@pytest.mark.parametrize(
    ("cloud", "wanted", "why"),
    [
        ("aws", {"aws:team": "x"}, "kept for aws"),
        ("aws", {"Name": "x"}, "kept for aws"),
        ("aws", {"team": "x" * 257}, "allows letters"),
        ("azure", {"a/b": "x"}, "names without"),
        ("azure", {"Microsoft-x": "x"}, "kept for azure"),
        ("azure", {"Team": "x", "team": "y"}, "differ only in case"),
        ("gcp", {"Team": "x"}, "allows lower-case"),
        ("gcp", {"spottrain-uid": "x"}, "kept for gcp or spottrain"),
        ("aws", {f"t{n}": "x" for n in range(41)}, "allows 40 beside"),
    ],
)
def test_tags_that_a_cloud_refuses_are_refused_before_it_is_asked(
    cloud: str, wanted: dict[str, str], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        tags.check_tags(cloud, wanted)


def test_the_job_file_is_checked_by_its_cloud_s_rules() -> None:
    assert AwsConfig(tags={"Team": "Vision 2"}).tags == {"Team": "Vision 2"}
    with pytest.raises(ValueError, match="allows lower-case"):
        GcpConfig(tags={"Team": "Vision 2"})


@given(st.integers(1, 1000), st.integers(0, 2**52))
def test_since_when_a_vm_is_a_jobs_is_exact(hops: int, since_us: int) -> None:
    value = tags.taken(hops, since_us / 1e6)
    assert tags.taken_of({tags.TAKEN: value}) == (hops, since_us / 1e6)
    for cloud in ("aws", "azure", "gcp"):
        tags.check_tags(cloud, {"name-of-theirs": value})
    assert tags.taken_of({}) == (0, 0.0)

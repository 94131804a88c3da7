"""The chain of causes of an error."""

import json
import sqlite3

import pytest

from spottrain.cloud.process.calls import pack_error, unpack_error
from spottrain.errors import ConfigError, SpottrainError, causes


def raised(*, hides: bool = False) -> SpottrainError:
    try:
        try:
            try:
                raise sqlite3.DatabaseError("disk image\nis malformed")
            except sqlite3.DatabaseError as error:
                raise ConfigError("not readable") from (None if hides else error)
        except ConfigError as error:
            raise SpottrainError("no report") from error
    except SpottrainError as error:
        return error


def test_causes_are_told_from_the_nearest_to_the_root() -> None:
    assert list(causes(raised())) == [
        "caused by: ConfigError: not readable",
        "caused by: sqlite3.DatabaseError: disk image is malformed",
    ]


def test_a_cause_that_was_hidden_stays_hidden() -> None:
    assert list(causes(raised(hides=True))) == ["caused by: ConfigError: not readable"]


def fail_twice() -> None:
    try:
        raise OSError("first")
    except OSError:
        raise ValueError("second")  # noqa: B904 - no cause is named


def test_an_error_in_the_handling_of_another_has_that_as_its_cause() -> None:
    with pytest.raises(ValueError, match="second") as raised:
        fail_twice()
    assert list(causes(raised.value)) == ["caused by: OSError: first"]


def test_an_error_that_is_its_own_cause_has_an_end_of_causes() -> None:
    first, second = OSError("first"), ConfigError("second")
    first.__cause__, second.__cause__ = second, first
    assert list(causes(first)) == ["caused by: ConfigError: second"]
    first.__cause__ = first
    assert list(causes(first)) == []


def test_an_error_from_another_process_brings_its_causes() -> None:
    packed = json.loads(json.dumps(pack_error(raised())))
    received = unpack_error(packed)
    assert list(causes(received)) == list(causes(raised()))
    again = unpack_error(pack_error(received))
    assert list(causes(again)) == list(causes(raised()))

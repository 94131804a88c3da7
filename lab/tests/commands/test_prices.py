"""``spottrain simulate prices``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands import Run

HEADER = "cloud,zone,instance_type,observed_at,usd_per_hour"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    rows = [HEADER]
    for day in range(1, 13):
        rows += [
            f"aws,us-east-1a,p3.2xlarge,2020-01-{day:02},1.0",
            f"azure,us_east,NC6s v3,2020-01-{day:02},{0.5 if day > 3 else 2.0}",
            f"azure,us_east,NC24r,2020-01-{day:02},1.0",
        ]
    path = tmp_path / "prices.csv"
    path.write_text("\n".join(rows))
    return path


def test_a_byte_order_mark_of_a_spreadsheet_is_no_part_of_a_column(run: Run, file: Path) -> None:
    asked = ("simulate", "prices", file, "--v100-days", "2", "-o", "json")
    plain = run(*asked)
    assert plain[0] == 0
    file.write_bytes(file.read_text().encode("utf-8-sig"))
    assert run(*asked) == plain


def test_the_answer_is_the_ladder_friction_by_friction(run: Run, file: Path) -> None:
    code, out, err = run("simulate", "prices", file, "-o", "json")
    assert code == 0
    assert "12 rows of NC24r left out" in err
    document = json.loads(out)
    assert (document["region"], document["jobs"]) == ("us-east-1", 7)
    assert [ladder["assuming"] for ladder in document["ladders"]] == [
        "as in the dissertation",
        "+ boot time",
        "+ lost work",
        "+ egress of checkpoints",
        "+ egress of the dataset",
    ]
    dynamic = [ladder["models"]["A3C"][-1] for ladder in document["ladders"]]
    assert dynamic[0]["strategy"] == "+ dynamic"
    assert dynamic[0]["cost_reduction"] > dynamic[-1]["cost_reduction"] > 1
    costs = [rung["usd"] for rung in dynamic]
    assert costs == sorted(costs)
    gains = document["gain_of_moving"][0]["models"]["A3C"]
    assert len(gains) == len(document["durations_v100_days"])
    assert gains[-1] > 1


def test_without_frictions_all_steps_are_the_dissertations(run: Run, file: Path) -> None:
    none = ("boot-s", "lost-s", "move-s", "losses-per-day", "checkpoint-gb")
    options = [part for name in none for part in (f"--{name}", "0")]
    options += ["--dataset-gb", "0", "--hysteresis", "0", "--horizon-days", "99"]
    _, out, _ = run("simulate", "prices", file, *options, "-o", "json")
    first, *others = (ladder["models"] for ladder in json.loads(out)["ladders"])
    assert all(models == first for models in others)


@pytest.mark.parametrize("value", ["inf", "nan", "1e308"])
@pytest.mark.parametrize("option", ["--v100-days", "--horizon-days", "--hysteresis"])
def test_infinite_numbers_are_usage_errors(run: Run, file: Path, option: str, value: str) -> None:
    code, out, err = run("simulate", "prices", file, option, value)
    assert (code, out) == (2, "")
    assert option in err


def test_the_largest_numbers_come_to_something_finite(run: Run, file: Path) -> None:
    names = [
        *("v100-days", "boot-s", "lost-s", "move-s", "losses-per-day"),
        *("checkpoint-gb", "dataset-gb", "cloud-usd-per-gb"),
        *("hysteresis", "horizon-days"),
    ]
    options = [part for name in names for part in (f"--{name}", "1e9")]
    code, out, _ = run("simulate", "prices", file, *options, "-o", "json")
    assert code == 0
    assert all(word not in out for word in ("NaN", "Infinity", "null"))


def test_any_region_of_the_file_can_be_the_home(run: Run, file: Path) -> None:
    command = ("simulate", "prices", file, "--region", "us_east", "-o", "json")
    code, out, _ = run(*command)
    assert code == 0
    rungs = json.loads(out)["ladders"][0]["models"]["A3C"]
    assert rungs[0]["strategy"] == "1xV100"


def test_people_get_tables_and_what_was_assumed(run: Run, file: Path) -> None:
    code, out, _ = run("simulate", "prices", file, "--v100-days", "2")
    assert code == 0
    assert "jobs of 2 V100-days" in out
    assert "cost reduction, + egress of the dataset" in out
    assert "gain of moving during training" in out
    assert "boot_s 300" in out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b", "error: prices.csv: columns: got 'a,b'; write cloud,zone"),
        (HEADER, "error: prices.csv: no row has a price"),
        (f"{HEADER}\naws,us-east-1a,p3.2xlarge,2020-01-01,1", "more than 5 are needed"),
    ],
)
def test_a_file_that_cannot_be_replayed_is_one_line(
    run: Run, tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "prices.csv"
    path.write_text(text)
    code, out, err = run("simulate", "prices", path)
    assert (code, out) == (2, "")
    assert message in err


def test_a_region_or_file_that_is_not_there_is_named(run: Run, file: Path) -> None:
    code, _, err = run("simulate", "prices", file, "--region", "mars")
    assert code == 2
    assert "prices.csv: region mars " in err
    code, _, err = run("simulate", "prices", file.with_name("none.csv"))
    assert code == 2
    assert "none.csv" in err

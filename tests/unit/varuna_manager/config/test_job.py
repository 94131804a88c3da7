"""The job file: what is accepted, and messages about mistakes."""

import dataclasses
import json
import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from tests.fakes.gpus import FakeGpus, facts
from tests.fakes.nvml import pynvml

from spottrain.cloud.local.market import (
    MarketEvent,
    MarketSpec,
    ZoneSpec,
    stream,
)
from spottrain.errors import ConfigError
from spottrain.varuna_manager.config.files import key_paths
from spottrain.varuna_manager.config.job import (
    JobConfig,
    json_schema,
    load_config,
    parse_config,
)
from spottrain.varuna_manager.config.local import EventConfig, LocalConfig, ZoneConfig
from spottrain.varuna_manager.config.track import TrackConfig, check_trackers
from spottrain.wire.model import Reduction

ROOT = Path(__file__).parents[4]
MINIMAL = {
    "name": "demo",
    "entrypoint": "train:job",
    "minibatch_size": 16,
    "steps": 5,
}
BLOCK = "".join(f"{key}: {value}\n" for key, value in MINIMAL.items())


def write(folder: Path, data: dict[str, Any]) -> Path:
    path = folder / "job.yaml"
    path.write_text(json.dumps(data))
    return path


def parse(**changes: Any) -> JobConfig:
    return parse_config({**MINIMAL, **changes}, "job.yaml")


def test_four_keys_make_a_job(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, MINIMAL))
    assert config.name == "demo"
    assert config.workdir == str(tmp_path.resolve())
    assert config.reduction == "fast"
    assert config.budget.max_usd is None
    assert config.checkpoint.path is None


def test_toml_reads_like_yaml(tmp_path: Path) -> None:
    toml = tmp_path / "job.toml"
    toml.write_text(
        'name = "demo"\nentrypoint = "train:job"\nminibatch_size = 16\nsteps = 5\n'
        "[slo]\ndeadline = 2030-01-31T18:00:00+01:00\n[budget]\nmax_usd = 2\n"
    )
    data = {
        **MINIMAL,
        "slo": {"deadline": "2030-01-31T18:00:00+01:00"},
        "budget": {"max_usd": 2},
    }
    now = datetime(2029, 1, 1, tzinfo=UTC)
    assert load_config(toml, now) == load_config(write(tmp_path, data), now)


def test_a_number_needs_no_dot_to_have_an_exponent(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"{BLOCK}budget: {{max_usd: 1e3}}\n")
    assert load_config(path).budget.max_usd == 1000.0


def test_paths_are_relative_to_the_job_file(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    data = {**MINIMAL, "workdir": "code", "checkpoint": {"path": "../saved"}}
    config = load_config(write(tmp_path, data))
    assert config.workdir == str(tmp_path.resolve() / "code")
    assert config.checkpoint.path == str(tmp_path.resolve().parent / "saved")


@pytest.mark.parametrize(
    "url", ["s3://bucket/some/prefix?region=eu-west-1", "file:///srv/check%20points"]
)
def test_the_url_of_a_store_stays_as_it_is(tmp_path: Path, url: str) -> None:
    file = write(tmp_path, {**MINIMAL, "checkpoint": {"path": url}})
    assert load_config(file).checkpoint.path == url


@pytest.mark.parametrize(
    "changes",
    [{"workdir": "~nobody-here"}, {"checkpoint": {"path": "loop/x"}}, {"profile": "~nobody-here"}],
)
def test_a_path_that_leads_nowhere_is_told(tmp_path: Path, changes: dict[str, Any]) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConfigError, match="write a folder's whole path"):
        load_config(write(tmp_path, {**MINIMAL, **changes}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budgets": {}}, "budgets: unknown key; did you mean budget?"),
        ({"max_usd": 5}, "max_usd: unknown key; did you mean budget.max_usd?"),
        (
            {"local": {"events": [{"at_s": 1, "kind": "kill", "zoen": "a"}]}},
            "local.events[0].zoen: unknown key; did you mean zone?",
        ),
        ({"qqq": 1}, "qqq: unknown key; known keys are name, entrypoint"),
        ({"max_vm": 4}, "max_vm: unknown key; did you mean resources.max_vms?"),
        ({"precision": "bf16"}, "precision: unknown key; did you mean runtime.precision?"),
        (
            {"every_steps": 5},
            "did you mean checkpoint.every_steps or evaluation.every_steps?",
        ),
        ({"python": "python3"}, "python: unknown key; known keys are name, entrypoint"),
        ({"resources": {"max_usd": 5}}, "resources.max_usd: unknown key; did you mean budget.max"),
        ({"runtime": {"microbatch_size": 1}}, "unknown key; did you mean microbatch_size?"),
        ({"local": {"zone": []}}, "local.zone: unknown key; did you mean zones?"),
        (
            {"local": {"zones": [{"name": "a", "machines": 4}]}},
            "local.zones[0].machines: unknown key; known keys are name, instance_type, slots",
        ),
        ({"data": {"path": {"ulr": "x"}}}, "data.path.ulr: unknown key; did you mean url?"),
        ({"runtime": {"tensor_parallel": 0}}, "_parallel: must be 'auto' or greater than 0: got 0"),
        ({"loader": {"workers": "two"}}, "workers: must be a valid integer or 'auto': got 'two'"),
        ({"morphing": {"recompute": "yes"}}, "recompute: must be true or 'auto' or 'selective': "),
        ({"steps": "many"}, "steps: must be a valid integer: got 'many'"),
        ({"steps": 0}, "steps: must be greater than 0: got 0"),
        ({"steps": True}, "steps: must be a valid integer: got True"),
        ({"name": "Not OK"}, "name: must be at most 63 of a-z, 0-9 and -"),
        ({"entrypoint": "train"}, "entrypoint: must be module:function"),
        (
            {"reduction": "exact", "runtime": {"wire": "bf16"}},
            "runtime.wire must be own or auto with reduction exact: got bf16",
        ),
        ({"reduction": "exct"}, "reduction: must be 'fast' or 'exact': got 'exct'"),
        (
            {"microbatch_size": 3},
            "minibatch_size must be a multiple of microbatch_size: got 16 and 3",
        ),
        (
            {"slo": {"deadline": "9999-12-31T23:59:59-12:00"}},
            "deadline must be before the year 9000: got 9999-12-31T23:59:59-12:00",
        ),
        (
            {"slo": {"deadline": "2030-01-31"}},
            "slo.deadline: must be a time, such as 2030-01-31T18:00:00+00:00: got",
        ),
        (
            {"slo": {"deadline": "2030-01-31T18:00:00"}},
            "slo.deadline: must have a time zone, such as +00:00 at its end",
        ),
        (
            {"budget": {"max_usd": "60 EUR"}},
            "budget.max_usd: must be a number of US dollars, without a currency",
        ),
        (
            {"budget": {"alerts": [0.5, 1.5]}},
            "budget.alerts[1]: must be less than 1: got 1.5",
        ),
        (
            {"budget": {"zone_usd_per_gb": -1}},
            "budget.zone_usd_per_gb: must be greater than or equal to 0",
        ),
        (
            {"slo": {"max_hours": 1.0e12}},
            "slo.max_hours: must be less than or equal to 876600: got 1000000000000.0",
        ),
        (
            {"slo": {"deadline": "2030-01-31T18:00:00Z", "max_hours": 1}},
            "slo: give deadline or max_hours, not both",
        ),
        (
            {"resources": {"min_vms": 5}},
            "resources: min_vms must be at most max_vms: got 5 > 4",
        ),
        (
            {"local": {"events": [{"at_s": 1, "kind": "kill", "zone": "b"}]}},
            "local: event kill at 1.0 s names zone 'b': the zones are local-a",
        ),
        (
            {"local": {"events": [{"at_s": 1, "kind": "price"}]}},
            "local: events of kind price, and no others, have usd_per_hour",
        ),
        (
            {"checkpoint": {"path": "ftp://b"}},
            "checkpoint.path: store must be a folder",
        ),
        (
            {"checkpoint": {"path": "s3://b?key=1"}},
            "supports the options endpoint_url,",
        ),
        ({"manager": {"suspect_s": 0.5}}, "must be heartbeat_s < suspect_s"),
        ({"budget": {"max_usd": float("nan")}}, "budget.max_usd: must be a finite"),
        ({"budget": {"max_usd": 1e308}}, "budget.max_usd: must be less than"),
        ({"budget": {"max_gpu_hours": 0}}, "budget.max_gpu_hours: must be greater than 0"),
        ({"budget": {"max_gpu_hours": float("inf")}}, "budget.max_gpu_hours: must be a finite"),
        ({"env": {"A": "b\0c"}}, "env.A: must hold no NUL character"),
        ({"seed": {1, 2}}, "{1, 2} is not a text, number, list or mapping"),
    ],
)
def test_a_mistake_is_reported_in_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(**change)
    assert str(caught.value).startswith("job.yaml: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_misspelt_key_comes_before_the_one_it_leaves_missing() -> None:
    data = {key: value for key, value in MINIMAL.items() if key != "steps"}
    with pytest.raises(ConfigError, match=r"^j: stpes: unknown.*steps\? \(and 1 more"):
        parse_config({**data, "stpes": 5}, "j")


def test_a_deadline_in_the_past_is_refused(tmp_path: Path) -> None:
    data = {**MINIMAL, "slo": {"deadline": "2030-01-01T00:00:00Z"}}
    path = write(tmp_path, data)
    load_config(path, datetime(2029, 12, 31, tzinfo=UTC))
    with pytest.raises(ConfigError, match=r"slo\.deadline: is in the past"):
        load_config(path, datetime(2030, 1, 2, tzinfo=UTC))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("job.yaml", "name: [", "job.yaml: line 1: while parsing"),
        ("job.yaml", "", "must contain keys and values: got nothing"),
        ("job.yaml", "- a\n", "must contain keys and values: got a list"),
        ("job.yaml", "a: &x [*x]\n", "job.yaml: lists and mappings are nested too deeply"),
        ("job.yaml", f"seed: {'9' * 4400}\n", "line 1: Exceeds the limit (4300"),
        ("job.yaml", f"seed: 0x{'9' * 4400}\n", "job.yaml: Exceeds the limit (4300"),
        ("job.yaml", "env: " + "[" * 5000, "nested too deeply"),
        ("job.toml", "env = " + "[" * 5000, "nested too deeply"),
        ("job.toml", "name = ", "job.toml: Invalid value"),
        ("job.json", "{}", "must end in .yaml, .yml or .toml"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "time", ["2030-02-30T18:00:00+00:00", "2030-01-31T18:00:00+25:00", "2030-02-30"]
)
@pytest.mark.parametrize("name", ["job.yaml", "job.toml"])
def test_a_time_that_does_not_exist_is_shown_as_it_was_given(
    tmp_path: Path, name: str, time: str
) -> None:
    data = {**MINIMAL, "slo": {"deadline": time}}
    path = tmp_path / name
    if name == "job.yaml":
        path.write_text(json.dumps(data).replace(f'"{time}"', time))
        message = rf"slo\.deadline: must be a time.*: got '{re.escape(time)}'"
    else:
        lines = (f"{k} = {json.dumps(v)}" for k, v in MINIMAL.items())
        path.write_text("\n".join([*lines, f"slo.deadline = {time}"]))
        message = r"job.toml: "
    with pytest.raises(ConfigError, match=message):
        load_config(path)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("slo: {max_hours: 1:30}", "slo.max_hours: must be a number of hours"),
        ("slo: {max_hours: 90m}", "slo.max_hours: must be a number of hours"),
        ("setup_limit_s: 1:30", "setup_limit_s: must be a number of seconds"),
        ("manager: {lease_s: 0:10:00}", "manager.lease_s: must be a number of seconds"),
        ("slo: {min_examples_per_s: 1:30}", "slo.min_examples_per_s: must be a valid"),
        ("slo: {deadline: 12}", "slo.deadline: must be a time"),
        ("slo: {deadline: 18:00:00}", "slo.deadline: must be a time"),
        ("resources: {max_vms: 0b10}", "resources.max_vms: must be a valid integer"),
        (
            "resources: {allow_on_demand: yes}",
            "allow_on_demand: must be true: got 'yes'",
        ),
        (
            "resources: {allow_on_demand: Off}",
            "allow_on_demand: must be false: got 'Off'",
        ),
        ("workdir: nowhere", "workdir: is not a folder"),
        ("slo: {deadline: 2001-01-01T00:00:00Z}", "slo.deadline: is in the past"),
    ],
)
def test_what_is_not_what_a_key_means_is_refused_with_its_line(
    tmp_path: Path, line: str, told: str
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"{BLOCK}\n# here:\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value).startswith("job.yaml: ")
    assert "(line 7)" in str(caught.value)
    assert told in str(caught.value)


def test_a_duration_in_toml_is_no_time_of_day(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    lines = [f"{key} = {json.dumps(value)}\n" for key, value in MINIMAL.items()]
    path.write_text("".join([*lines, "slo.max_hours = 01:30:00\n"]))
    with pytest.raises(ConfigError, match=r"slo\.max_hours: must be a number of hours"):
        load_config(path)


@pytest.mark.parametrize(
    "line",
    [
        "workdir: $HOME/code",
        "profile: ${HOME}/profile.json",
        "checkpoint: {path: $HOME/ck}",
        "checkpoint: {path: 's3://${BUCKET}/ck'}",
        "init_from: $HOME/weights",
        "data: {words: {path: $HOME/words}}",
        "env: {HF_HOME: $HOME/hf}",
        "ssh: {hosts: [{address: $HOST}]}",
        "aws: {tags: {owner: $USER}}",
        "track: {mlflow: {tracking_uri: 'http://$HOST:5000'}}",
    ],
)
def test_a_variable_that_nothing_expands_is_refused_with_its_line(
    tmp_path: Path, line: str
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(BLOCK + line)
    with pytest.raises(ConfigError, match=r"variables are not exp.*\(line 5\)$"):
        load_config(path)


def test_what_a_shell_reads_and_a_webhook_may_name_variables() -> None:
    notify = {"command": ["sh", "-c", "echo $HOME"], "webhook": "$HOOK", "apprise": ["$ME"]}
    assert parse(notify=notify).notify.webhook == "$HOOK"
    assert parse(env={"PRICE": "5 $", "OTHER": "a$1"}).env["PRICE"] == "5 $"
    with pytest.raises(ConfigError, match="setup cannot be used with the local"):
        parse(setup="pip install $EXTRA")


@pytest.mark.parametrize("name", ["job.yaml", "job.toml"])
def test_a_byte_order_mark_is_no_part_of_a_job_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    is_yaml = name == "job.yaml"
    lines = (f"{k} = {json.dumps(v)}\n" for k, v in MINIMAL.items())
    text = BLOCK if is_yaml else "".join(lines)
    path.write_bytes(text.encode("utf-8-sig"))
    assert load_config(path).name == "demo"
    path.write_bytes(text.encode("utf-16"))
    with pytest.raises(ConfigError, match="is not UTF-8: got byte 0xff in line 1"):
        load_config(path)


def test_a_missing_file_and_a_missing_workdir_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such job file"):
        load_config(tmp_path / "job.yaml")
    with pytest.raises(ConfigError, match="workdir: is not a folder"):
        load_config(write(tmp_path, {**MINIMAL, "workdir": "nowhere"}))


def test_trackers_are_asked_for_and_their_files_relative_to_the_job_file(
    tmp_path: Path,
) -> None:
    uri = {"tracking_uri": "sqlite:///runs.db"}
    asked = {"tensorboard": True, "wandb": {"project": "p"}, "mlflow": uri}
    track = load_config(write(tmp_path, {**MINIMAL, "track": asked})).track
    assert track.asked == ("tensorboard", "wandb", "mlflow")
    assert track.wandb is not None
    assert track.wandb.mode == "online"
    assert track.mlflow is not None
    assert track.mlflow.tracking_uri == f"sqlite:///{tmp_path}/runs.db"
    assert parse(track={}).track.asked == ()
    with pytest.raises(ConfigError, match=r"track.wandb.projct: .*did you mean project"):
        parse(track={"wandb": {"projct": "p"}})


def test_a_tracker_whose_package_is_missing_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_trackers(TrackConfig(), (), on_vm=True)
    track = parse(track={"wandb": {"project": "p"}}).track
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for on_vm in (False, True):
        with pytest.raises(ConfigError, match=r"pip install wandb"):
            check_trackers(track, ["WANDB_API_KEY"], on_vm=on_vm)


@pytest.mark.parametrize(
    ("asked", "secrets", "why"),
    [
        ({"wandb": {"project": "p"}}, ["WANDB_API_KEY"], None),
        ({"wandb": {"project": "p"}}, ["HF_TOKEN"], "add WANDB_API_KEY to secrets"),
        ({"wandb": {"project": "p", "mode": "offline"}}, [], "set mode: online"),
        ({"mlflow": {"tracking_uri": "https://ml:5000"}}, [], None),
        ({"mlflow": {"tracking_uri": "sqlite:///ml.db"}}, [], "name a server"),
        ({"mlflow": {"tracking_uri": "runs"}}, [], "name a server, .* got runs"),
        ({"tensorboard": True}, [], "read metrics.jsonl in checkpoint.path"),
    ],
)
def test_trackers_on_a_managers_vm_write_to_what_outlives_it(
    monkeypatch: pytest.MonkeyPatch,
    asked: dict[str, Any],
    secrets: list[str],
    why: str | None,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    track = parse(track=asked).track
    check_trackers(track, secrets, on_vm=False)
    if why is None:
        check_trackers(track, secrets, on_vm=True)
        return
    with pytest.raises(ConfigError, match=f"with --manager-vm .*{why}"):
        check_trackers(track, secrets, on_vm=True)


def test_max_hours_count_from_launch() -> None:
    assert parse(slo={"max_hours": 2}).slo.deadline_s(1000.0) == 8200.0
    assert parse().slo.deadline_s(1000.0) is None
    deadline = parse(slo={"deadline": "1970-01-01T01:00:00+00:00"})
    assert deadline.slo.deadline_s(1000.0) == 3600.0


@given(st.integers(min_value=1, max_value=10_000))
def test_the_default_microbatch_divides_the_minibatch(minibatch_size: int) -> None:
    m = parse(minibatch_size=minibatch_size).chosen_microbatch_size
    assert minibatch_size % m == 0
    assert 1 <= m <= 4


@given(
    st.dictionaries(
        st.sampled_from([*MINIMAL, "budget", "local"]) | st.text(),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
            max_leaves=5,
        ),
    )
)
def test_anything_else_is_a_config_error_of_one_line(data: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(data, "job.yaml")
    assert len(str(caught.value).splitlines()) == 1


def test_a_config_survives_a_round_trip_through_json() -> None:
    config = parse(
        local={"events": [{"at_s": 1, "kind": "notice", "lead_s": 2}]},
        slo={"deadline": "2030-01-31T18:00:00Z"},
    )
    assert JobConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("config", "spec"),
    [(LocalConfig, MarketSpec), (ZoneConfig, ZoneSpec), (EventConfig, MarketEvent)],
)
def test_the_local_market_has_the_same_keys_as_the_local_cloud(
    config: type[BaseModel], spec: Any
) -> None:
    assert list(config.model_fields) == [f.name for f in dataclasses.fields(spec)]


def test_the_default_market_is_one_quiet_zone() -> None:
    market = parse().local.market()
    assert [zone.name for zone in market.zones] == ["local-a"]
    assert next(stream(market), None) is None


def test_the_schema_describes_every_key() -> None:
    schema = json_schema()
    assert json.loads(json.dumps(schema)) == schema
    for definition in schema["$defs"].values():
        for key, entry in definition["properties"].items():
            assert "description" in entry, key


def test_the_configuration_page_names_every_key() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    missing = [path for path in key_paths(JobConfig) if f"`{path}`" not in page]
    assert missing == []


def test_a_precision_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    told = r"runtime\.precision: must be 'auto', 'fp32', 'bf16' or 'fp16': got 'fp8'$"
    with pytest.raises(ConfigError, match=told):
        parse_config({**MINIMAL, "runtime": {"precision": "fp8"}}, "job.yaml")


@pytest.mark.parametrize(
    "other",
    [
        {"semantics": "stale_by_one"},
        {"morphing": {"schedule": "interleaved"}},
        {"morphing": {"peer_copies": 1}},
    ],
)
def test_matrices_cannot_be_divided_with_everything(other: dict[str, Any]) -> None:
    divided = {**MINIMAL, "runtime": {"tensor_parallel": 2}, "local": {"zones": [{"slots": 2}]}}
    assert parse_config(divided, "job.yaml").numerics.tensor_parallel == 2
    with pytest.raises(ConfigError, match=r"tensor_parallel must be 1 with .*: got 2"):
        parse_config({**divided, **other}, "job.yaml")
    left_open = parse_config({**divided, "runtime": {"tensor_parallel": "auto"}, **other}, "job")
    assert (left_open.tensor_sizes, left_open.numerics.tensor_parallel) == ((), 1)


def test_sequences_are_divided_where_matrices_are() -> None:
    def config(size: object) -> JobConfig:
        runtime = {"tensor_parallel": size, "sequence_parallel": True}
        job = {**MINIMAL, "runtime": runtime, "local": {"zones": [{"slots": 2}]}}
        return parse_config(job, "job.yaml")

    assert config(2).job_spec("").sequence_parallel
    assert config("auto").job_spec("").sequence_parallel
    with pytest.raises(
        ConfigError, match=r"sequence_parallel must be false with .*tensor_parallel: 1"
    ):
        config(1)


@pytest.mark.parametrize(("slots", "sizes"), [(1, ()), (2, (2,)), (7, (2, 4)), (8, (2, 4, 8))])
def test_plans_may_divide_matrices_by_powers_of_two_up_to_the_slots_of_a_vm(
    slots: int, sizes: tuple[int, ...]
) -> None:
    job = {**MINIMAL, "local": {"zones": [{"slots": slots}]}}
    for reduction in ("fast", "exact"):
        config = parse_config({**job, "reduction": reduction}, "job.yaml")
        assert config.tensor_sizes == sizes
        assert config.numerics.tensor_parallel == (None if sizes else 1)


@pytest.mark.parametrize(
    ("section", "most"),
    [
        ({"local": {"zones": [{"name": "a", "slots": 2}, {"name": "b"}]}}, 2),
        (
            {"resources": {"provider": "aws"}, "aws": {"instance_types": ["p4d.24xlarge"]}}
            | {"checkpoint": {"path": "s3://bucket/job"}},
            8,
        ),
    ],
)
def test_no_more_slots_divide_matrices_than_a_vm_has(section: dict[str, Any], most: int) -> None:
    with pytest.raises(ConfigError, match=f"must be at most {most}, the slots of the largest VM"):
        parse_config({**MINIMAL, "runtime": {"tensor_parallel": 16}, **section}, "job.yaml")


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"runtime": {"precision": "fp16"}}, "runtime.precision fp16"),
        ({"morphing": {"schedule": "interleaved"}}, "morphing.schedule"),
        ({"morphing": {"schedule": "gpipe"}}, "morphing.schedule"),
    ],
)
def test_gradients_cannot_be_stale_with_everything(section: dict[str, Any], named: str) -> None:
    stale = {**MINIMAL, "semantics": "stale_by_one"}
    assert parse_config(stale, "job.yaml").job_spec("").semantics == "stale_by_one"
    with pytest.raises(ConfigError, match=f"{named}.*stale_by_one"):
        parse_config({**stale, **section}, "job.yaml")


@pytest.mark.parametrize(
    ("reduction", "precision", "asked", "travels"),
    [
        ("fast", "bf16", "auto", "bf16"),
        ("exact", "bf16", "auto", "own"),
        ("fast", "fp32", "auto", "own"),
        ("fast", "fp16", "auto", "bf16"),
        ("exact", "fp16", "auto", "own"),
        ("fast", "bf16", "own", "own"),
        ("fast", "fp32", "fp16", "fp16"),
    ],
)
def test_activations_are_narrowed_with_16_bits_or_where_told(
    reduction: Reduction, precision: str, asked: str, travels: str
) -> None:
    config = parse(reduction=reduction, runtime={"precision": precision, "wire": asked})
    assert config.job_spec("").wire == travels


# --- What a job file leaves to its machines ---


def rents(section: dict[str, Any], **more: Any) -> JobConfig:
    return parse(
        resources={"provider": "aws"}, aws=section, checkpoint={"path": "s3://bucket/job"}, **more
    )


@pytest.mark.parametrize(
    ("gpus", "semantics", "precision"),
    [
        (["A100", "L4"], "synchronous", "bf16"),
        (["A100", "L4"], "stale_by_one", "bf16"),
        (["T4"], "synchronous", "fp16"),
        (["V100", "A10G"], "synchronous", "fp16"),
        (["V100", "A10G"], "stale_by_one", "fp32"),
    ],
)
def test_precision_is_the_fast_one_of_all_gpus_that_are_named(
    gpus: list[str], semantics: str, precision: str
) -> None:
    config = rents({"gpus": gpus}, semantics=semantics)
    assert config.precision == precision
    assert config.settled((), 1).runtime.precision == precision
    assert config.job_spec("").precision == precision
    assert config.slow_types == {}


def test_precision_on_cpus_and_unknown_gpus_is_fp32() -> None:
    cpus = {"provider": "aws", "device": "cpu"}
    types = {"instance_types": ["c7i.large"]}
    path = {"path": "s3://bucket/job"}
    assert parse(resources=cpus, aws=types, checkpoint=path).precision == "fp32"
    hosts = [{"address": "a"}, {"address": "b", "gpu": "L4", "type": "l4"}]
    ssh = {"provider": "ssh"}
    assert parse(resources=ssh, ssh={"hosts": hosts}, checkpoint=path).precision == "fp32"
    assert parse(resources=ssh, ssh={"hosts": hosts[1:]}, checkpoint=path).precision == "bf16"
    assert parse().precision == "fp32"


def test_precision_that_the_file_says_stays() -> None:
    config = rents({"gpus": ["A100"]}, runtime={"precision": "fp32"})
    assert config.settled((), 1).precision == "fp32"


def test_local_vms_have_whole_gpus(tmp_path: Path, machine_with: Callable[..., FakeGpus]) -> None:
    machine_with(3)
    config = load_config(write(tmp_path, MINIMAL))
    (zone,) = config.local.market().zones
    assert (zone.capacity, zone.slot_memory_bytes) == (3, 24 * 10**9)
    assert config.runtime.precision == "bf16"
    # As stored at the launch: a resume asks nobody.
    machine_with().set(error=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    assert parse_config(json.loads(config.model_dump_json()), "config.json") == config


def test_a_job_on_cpus_does_not_look_at_gpus(
    tmp_path: Path, machine_with: Callable[..., FakeGpus]
) -> None:
    machine_with(3)
    config = load_config(write(tmp_path, {**MINIMAL, "resources": {"device": "cpu"}}))
    assert [zone.capacity for zone in config.zones] == [4]
    assert config.precision == "fp32"


@pytest.mark.parametrize(
    ("zone", "gpus", "capacity", "slot_bytes"),
    [
        ({}, 0, 4, 8 * 10**9),
        ({"slots": 2}, 0, 4, 4 * 10**9),
        ({"capacity": 2}, 0, 2, 16 * 10**9),
        ({"capacity": 0}, 0, 0, 32 * 10**9),
        ({"slot_memory_bytes": 10**9}, 0, 4, 10**9),
        ({}, 8, 8, 24 * 10**9),
        ({"slots": 4}, 8, 2, 24 * 10**9),
        ({"slots": 3}, 8, 2, 24 * 10**9),
        ({"slots": 2}, 1, 1, 12 * 10**9),
        ({"slot_memory_bytes": 6 * 10**9}, 1, 4, 6 * 10**9),
        ({"slot_memory_bytes": 30 * 10**9}, 2, 2, 30 * 10**9),
        ({"capacity": 1}, 8, 1, 24 * 10**9),
    ],
)
def test_a_zone_leaves_its_size_to_the_machine(
    zone: dict[str, Any], gpus: int, capacity: int, slot_bytes: int
) -> None:
    found = ZoneConfig(**zone).on([facts(index) for index in range(gpus)], 32 * 10**9)
    assert (found.capacity, found.slot_memory_bytes) == (capacity, slot_bytes)
    assert found.on((), 1) == found

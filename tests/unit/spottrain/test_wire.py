from __future__ import annotations

import dataclasses
import itertools
import json
import math
import typing
from contextlib import suppress
from dataclasses import make_dataclass
from typing import Annotated, Any, Literal, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field
from tests.builders import model_facts, section_facts
from tests.tiers import costly

from spottrain import codec
from spottrain.codec import decode, encode, from_data
from spottrain.errors import WireError
from spottrain.wire import messages
from spottrain.wire.model import LinkProfile, ModelFacts, Profile
from spottrain.wire.plan import Plan, ScheduleKind, Slot, segments_of
from tests import builders

COMMANDS = get_args(messages.Command)
REPORTS = get_args(messages.Report)
INT = st.integers(-(2**53), 2**53)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    schedule = draw(st.sampled_from(get_args(ScheduleKind)))
    interleaved = schedule == "interleaved"
    depth, width = draw(st.integers(1 + interleaved, 4)), draw(st.integers(1, 4))
    microbatch_size = draw(st.integers(1, 4))
    chunks = draw(st.integers(2, 3)) if interleaved else 1
    runs = depth * chunks
    stages = draw(st.lists(st.integers(1, 3), min_size=runs, max_size=runs))
    replicas = draw(st.lists(st.integers(1, 3), min_size=width, max_size=width))
    if interleaved:
        replicas = [depth * groups for groups in replicas]
    recompute = draw(st.booleans())
    bounds = [0], [0]
    for cuts, sizes in zip(bounds, (stages, replicas), strict=True):
        for size in sizes:
            cuts.append(cuts[-1] + size)
    return Plan(
        pipeline_depth=depth,
        data_parallel_width=width,
        microbatch_size=microbatch_size,
        minibatch_size=microbatch_size * bounds[1][-1],
        schedule=schedule,
        recompute=recompute,
        stage_bounds=tuple(bounds[0]),
        replica_bounds=tuple(bounds[1]),
        slots=tuple(Slot(vm_id=draw(st.text()), index=index) for index in range(depth * width)),
        predicted_step_s=draw(st.floats(0, 1e6)),
        in_flight_bound=None if interleaved else draw(st.none() | st.integers(1, 8)),
        chunks=chunks,
        segments=draw(st.integers(1, 8)) if recompute else 1,
        nodes_per_microbatch=()
        if interleaved
        else draw(st.just(()) | st.tuples(*[st.integers(1, 3)] * width)),
    )


st.register_type_strategy(Plan, plans())
st.register_type_strategy(float, st.floats(allow_nan=False))
st.register_type_strategy(int, INT)


def built(cls: Any) -> st.SearchStrategy[Any]:
    """Build any message; a schema_version other than ours is refused, so none is."""
    hints = codec.hints(cls)
    return st.builds(
        cls,
        **{
            f.name: st.from_type(hints[f.name])
            for f in dataclasses.fields(cls)
            if f.name not in ("schema_version", "kind")
        },
    )


# Elsewhere hypothesis would make up a schema_version.
st.register_type_strategy(Profile, built(Profile))

MESSAGES = (
    *COMMANDS,
    *REPORTS,
    messages.JobSpec,
    ModelFacts,
    Profile,
    messages.Registration,
    messages.Heartbeat,
    messages.HeartbeatAnswer,
    messages.ReportBatch,
    messages.ReportAnswer,
)


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
def test_every_message_reads_back_as_it_was(cls: Any) -> None:
    @costly
    @given(built(cls))
    def reads_back(message: Any) -> None:
        text = encode(message)
        assert "\n" not in text
        assert decode(cls, text) == message
        assert decode(cls, text.encode()) == message

    reads_back()


@pytest.mark.parametrize("union", [messages.Command, messages.Report])
def test_the_kind_selects_the_member_of_a_union(union: Any) -> None:
    names = [codec.kind_of(cls) for cls in get_args(union)]
    assert all(names)
    assert len(names) == len(set(names))

    @given(st.one_of([built(cls) for cls in get_args(union)]))
    def reads_back(message: Any) -> None:
        assert decode(union, encode(message)) == message

    reads_back()


HEARTBEAT = {"vm_id": "vm-1", "sequence": 3, "received": 0}


@pytest.mark.parametrize(
    ("cls", "change", "message"),
    [
        (
            messages.Heartbeat,
            {"sequenc": 1},
            "message.sequenc is not a field of Heartbeat",
        ),
        (
            messages.Heartbeat,
            {"sequence": "3"},
            "message.sequence must be int: got '3'",
        ),
        (
            messages.Heartbeat,
            {"sequence": True},
            "message.sequence must be int: got True",
        ),
        (
            messages.Heartbeat,
            {"sequence": 3.0},
            "message.sequence must be int: got 3.0",
        ),
        (messages.Heartbeat, {"vm_id": None}, "message.vm_id must be str: got None"),
        (messages.Heartbeat, {"schema_version": 2}, "schema_version must be 1: got 2"),
    ],
)
def test_a_wrong_field_is_refused_and_named(cls: Any, change: dict[str, Any], message: str) -> None:
    from_data(cls, HEARTBEAT)
    with pytest.raises(WireError) as caught:
        from_data(cls, HEARTBEAT | change)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("field", HEARTBEAT)
def test_a_missing_field_is_refused_and_named(field: str) -> None:
    data = {key: value for key, value in HEARTBEAT.items() if key != field}
    with pytest.raises(WireError, match=f"{field} is missing from Heartbeat"):
        from_data(messages.Heartbeat, data)


@pytest.mark.parametrize("text", ["", "{", "\x00", b"\xff\xfe", "[1", "nul"])
def test_text_other_than_json_is_refused(text: str | bytes) -> None:
    with pytest.raises(WireError, match="message is not JSON"):
        decode(messages.Heartbeat, text)


@pytest.mark.parametrize("text", ["null", "[]", "3", '"x"', "{}"])
def test_json_that_is_no_message_is_refused(text: str) -> None:
    for cls in (messages.Heartbeat, messages.Command):
        with pytest.raises(WireError):
            decode(cls, text)


def test_a_place_deep_inside_is_named() -> None:
    data = {"commands": [{"kind": "retire"}, {"kind": "open_store", "generation": "1"}]}
    with pytest.raises(WireError, match=r"message\.commands\[1\]\.generation must be"):
        from_data(messages.HeartbeatAnswer, data)
    with pytest.raises(WireError, match=r"commands\[0\]\.kind is unknown: got 'dance'"):
        from_data(messages.HeartbeatAnswer, {"commands": [{"kind": "dance"}]})


def test_a_literal_takes_only_its_values() -> None:
    report = messages.GenerationStarted(
        generation=1,
        slot=0,
        pid=1,
        step=0,
        outcome="same",
        sections_moved=0,
        sections_loaded=0,
    )
    text = encode(report).replace('"same"', '"lost"')
    with pytest.raises(WireError, match=r"outcome must be .*: got 'lost'"):
        decode(messages.GenerationStarted, text)


def a_plan(**changes: Any) -> Plan:
    plan = Plan(
        pipeline_depth=2,
        data_parallel_width=2,
        microbatch_size=2,
        minibatch_size=10,
        schedule="varuna",
        recompute=True,
        stage_bounds=(0, 3, 4),
        replica_bounds=(0, 3, 5),
        slots=tuple(Slot(vm_id="vm", index=i) for i in range(4)),
        predicted_step_s=1.0,
    )
    return dataclasses.replace(plan, **changes)


def test_a_plan_assigns_sections_and_virtual_nodes_to_ranks() -> None:
    plan = a_plan()
    assert plan.shape == "2x2"
    assert plan.num_sections == 4
    assert [plan.stage_of(k) for k in range(4)] == [0, 0, 0, 1]
    assert [list(plan.sections_of(p)) for p in range(2)] == [[0, 1, 2], [3]]
    assert [list(plan.virtual_nodes_of(d)) for d in range(2)] == [[0, 1, 2], [3, 4]]


@pytest.mark.parametrize(
    "changes",
    [
        {"microbatch_size": 0},
        {"microbatch_size": -2, "minibatch_size": -10},
        {"minibatch_size": 11},
        {"minibatch_size": 12},
        {"stage_bounds": (0, 4)},
        {"stage_bounds": (0, 0, 4)},
        {"stage_bounds": (1, 3, 4)},
        {"replica_bounds": (0, 5, 5)},
        {"slots": tuple(Slot(vm_id="vm", index=0) for _ in range(4))},
        {"pipeline_depth": 0},
        {"devices_per_stage_replica": 2},
        {"nodes_per_microbatch": (2,)},
        {"nodes_per_microbatch": (2, 0)},
        {"devices_per_stage_replica": 0},
        {"shared_state": (1, 1, 1)},
        {"shared_state": (1, 1, 1, -1)},
        # Two slots for each stage, but in two VMs; or in one, with state of their own.
        {"devices_per_stage_replica": 2, "data_parallel_width": 1, "replica_bounds": (0, 5)}
        | {"slots": tuple(Slot(vm_id=f"vm{i // 2}", index=i % 2) for i in range(4))}
        | {"shared_state": (1, 1, 1, 1)},
        {"devices_per_stage_replica": 2, "data_parallel_width": 1, "replica_bounds": (0, 5)}
        | {"slots": tuple(Slot(vm_id="vm", index=i) for i in range(4))},
    ],
)
def test_a_plan_that_does_not_add_up_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(WireError, match="plan does not add up"):
        a_plan(**changes)
    data = json.loads(encode(a_plan()))
    changed = json.loads(json.dumps(changes, default=dataclasses.asdict))
    with pytest.raises(WireError):
        from_data(Plan, data | changed)


@st.composite
def plans_that_share(draw: st.DrawFn) -> Plan:
    depth, width = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    sizes = draw(st.lists(st.integers(0, 9), min_size=depth, max_size=8))
    vms = st.lists(st.sampled_from("abc"), min_size=depth * width, max_size=depth * width)
    return builders.a_plan(
        depth,
        width,
        num_sections=len(sizes),
        slots=tuple(Slot(vm_id=vm, index=i) for i, vm in enumerate(draw(vms))),
        shared_state=sizes,
    )


@given(plans_that_share())
def test_every_vm_that_runs_a_stage_holds_each_section_of_it_once(plan: Plan) -> None:
    for section in range(plan.num_sections):
        holders = plan.holders_of(section)
        running = {plan.slots[rank].vm_id for rank in plan.stage_ranks(plan.stage_of(section))}
        assert sorted(plan.slots[rank].vm_id for rank in holders) == sorted(running)
        assert list(holders) == sorted(holders)
        assert all(section in plan.held_by(rank) for rank in holders)


@given(plans_that_share())
def test_ranks_of_a_vm_hold_as_much_up_to_one_section_and_the_first_one_some(plan: Plan) -> None:
    for rank in range(len(plan.slots)):
        sharers = plan.sharers_of(rank)
        sizes = [[plan.shared_state[k] for k in plan.held_by(one)] for one in sharers]
        largest = max(itertools.chain(*sizes))
        assert max(map(sum, sizes)) - min(map(sum, sizes)) <= largest
        assert plan.held_by(sharers[0])


def test_without_sharing_every_rank_holds_what_it_runs() -> None:
    plan = a_plan()
    assert [plan.holders_of(k) for k in (0, 3)] == [(0, 2), (1, 3)]
    assert [plan.held_by(rank) for rank in range(4)] == [(0, 1, 2), (3,)] * 2


def test_a_replica_s_last_micro_batch_has_what_is_left_of_its_virtual_nodes() -> None:
    plan = a_plan(nodes_per_microbatch=(2, 1))
    assert plan.microbatches_of(0) == (range(2), range(2, 3))
    assert plan.microbatches_of(1) == (range(3, 4), range(4, 5))
    assert [plan.microbatch_size_of(d) for d in range(2)] == [4, 2]
    assert a_plan().microbatches_of(0) == (range(1), range(1, 2), range(2, 3))


INTERLEAVED: dict[str, Any] = {
    "schedule": "interleaved",
    "chunks": 2,
    "stage_bounds": (0, 1, 3, 4, 6),
    "minibatch_size": 12,
    "replica_bounds": (0, 4, 6),
}


def test_a_stage_of_an_interleaved_plan_has_several_runs_of_sections() -> None:
    plan = a_plan(**INTERLEAVED)
    assert plan.runs_of(0) == (range(1), range(3, 4))
    assert plan.runs_of(1) == (range(1, 3), range(4, 6))
    assert plan.sections_of(1) == (1, 2, 4, 5)
    assert [plan.stage_of(k) for k in range(6)] == [0, 1, 1, 0, 1, 1]


@pytest.mark.parametrize(
    "changes",
    [
        {"chunks": 1, "stage_bounds": (0, 3, 6)},
        {"schedule": "1f1b"},
        {"in_flight_bound": 4},
        {"replica_bounds": (0, 3, 6)},
        {"chunks": 43, "stage_bounds": tuple(range(87))},
        {"pipeline_depth": 1, "data_parallel_width": 4, "stage_bounds": (0, 3, 6)}
        | {"replica_bounds": (0, 1, 2, 4, 6)},
        {"schedule": "varuna", "chunks": 0, "stage_bounds": (0,)},
        {"nodes_per_microbatch": (2, 2)},
    ],
)
def test_an_interleaved_plan_that_cannot_run_is_refused(
    changes: dict[str, Any],
) -> None:
    with pytest.raises(WireError):
        a_plan(**INTERLEAVED | changes)


@pytest.mark.parametrize("changes", [{"segments": 0}, {"segments": 2, "recompute": False}])
def test_segments_that_cannot_be_recomputed_are_refused(
    changes: dict[str, Any],
) -> None:
    with pytest.raises(WireError):
        a_plan(**changes)


@given(st.integers(0, 9), st.integers(1, 60), st.integers(1, 70))
def test_segments_are_even_and_cover_their_run(start: int, length: int, segments: int) -> None:
    run = range(start, start + length)
    parts = segments_of(run, segments)
    assert len(parts) == min(segments, length)
    assert [k for part in parts for k in part] == list(run)
    lengths = set(map(len, parts))
    assert max(lengths) - min(lengths) <= 1


JSON = st.recursive(
    st.none() | st.booleans() | INT | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(JSON, st.sampled_from([*MESSAGES, messages.Command, messages.Report]))
def test_whatever_arrives_it_is_a_message_or_a_wire_error(data: Any, cls: Any) -> None:
    with suppress(WireError):
        from_data(cls, data)


@given(built(messages.GenerationStarted), st.data())
def test_a_damaged_field_is_never_taken_for_a_message(
    message: messages.GenerationStarted, data: st.DataObject
) -> None:
    fields = json.loads(encode(message))
    field = data.draw(st.sampled_from(sorted(fields)))
    fields[field] = data.draw(st.none() | st.lists(INT) | st.floats())
    with pytest.raises(WireError):
        from_data(messages.GenerationStarted, fields)


LINK = {"latency_s": 0.1, "bandwidth_bytes_per_s": 1e9}


def test_a_part_of_another_version_is_refused_and_named() -> None:
    file = make_dataclass("File", [("facts", ModelFacts)])

    with pytest.raises(WireError, match=r"message\.facts\.schema_version must be 1"):
        from_data(file, {"facts": {"schema_version": 2}})


def test_a_number_beyond_all_floats_is_infinite() -> None:
    link = from_data(LinkProfile, LINK | {"jitter": 10**400})
    assert link.jitter == math.inf
    link = from_data(LinkProfile, LINK | {"jitter": -(10**400)})
    assert link.jitter == -math.inf


def test_a_choice_that_is_none_names_those_there_are() -> None:
    origin = typing.get_type_hints(Profile)["origin"]

    with pytest.raises(WireError, match="origin must be one of 'measured', 'derived'"):
        from_data(make_dataclass("File", [("origin", origin)]), {"origin": "guess"})


@pytest.mark.parametrize(("trained", "stored"), [(None, 3 * 24), (4, 3 * 16 + 8)])
def test_frozen_parameters_are_stored_once(trained: int | None, stored: int) -> None:
    section = section_facts(param_bytes=12, optimizer_bytes=12, gradient_bytes=trained)
    facts = model_facts([section])
    assert facts.stored_bytes(3) == stored
    assert facts.stored_bytes(0) == 0


class _Written(BaseModel):
    """As people write it."""

    model_config = ConfigDict(frozen=True)

    often: Annotated[int, Field(gt=0)] | Literal["auto"] = "auto"
    sure: bool | Literal["auto"] = "auto"
    shares: tuple[float, ...] = ()
    name: str


@dataclasses.dataclass(frozen=True)
class _Holding:
    written: _Written


@pytest.mark.parametrize("sure", [True, False, "auto"])
def test_a_model_of_what_people_write_reads_back_as_it_was(sure: Any) -> None:
    whole = _Holding(_Written(often=3, sure=sure, shares=(0.5,), name="n"))
    assert decode(_Holding, encode(whole)) == whole
    lacking = from_data(_Holding, {"written": {"name": "n"}})
    assert lacking == _Holding(_Written(name="n"))


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"name": "n", "other": 1}, "other is not a field of _Written"),
        ({}, "name is missing"),
        ({"name": "n", "sure": "no"}, r"sure must be one of 'auto'"),
    ],
)
def test_a_model_is_read_strictly(written: dict[str, Any], message: str) -> None:
    with pytest.raises(WireError, match=message):
        from_data(_Holding, {"written": written})

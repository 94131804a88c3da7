from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st
from tests.unit.morphing.memory.test_memory import FACTS, MEASURED

from spottrain.morphing.memory.chunks import Chunk
from spottrain.morphing.memory.loads import StageLoad
from spottrain.morphing.memory.stage import MemoryModel
from spottrain.morphing.simulate.compute import trained_bytes
from spottrain.wire.model import ModelFacts, SectionProfile
from spottrain.wire.plan import segments_of

sizes = st.integers(0, 10**6)


@st.composite
def models(draw: st.DrawFn) -> tuple[ModelFacts, list[SectionProfile]]:
    """Some sections, of which some are frozen, whose peaks are no less than the tensors."""
    count = draw(st.integers(1, 9))
    trained = [draw(st.booleans()) for _ in range(count)]
    facts = tuple(
        replace(
            FACTS.sections[0],
            index=k,
            param_bytes=10,
            gradient_bytes=None if trained[k] else 0,
        )
        for k in range(count)
    )
    measured = []
    for k in range(count):
        saved, out = draw(sizes), draw(sizes) if k < count - 1 else 0
        measured.append(
            replace(
                MEASURED[0],
                index=k,
                saved_bytes=saved,
                output_bytes=out,
                forward_bytes=out + draw(sizes),
                recompute_bytes=saved + out + draw(sizes),
                backward_bytes=draw(sizes),
            )
        )
    return replace(FACTS, sections=facts), measured


def activations(
    facts: ModelFacts,
    measured: list[SectionProfile],
    run: range,
    segments: int,
    in_flight: int,
    recomputes: int,
) -> int:
    load = StageLoad(in_flight=in_flight, inputs_held=in_flight, recomputes=recomputes)
    memory = MemoryModel.of(facts, measured, (run,), segments=segments).under(load)
    return memory.stash_bytes + memory.activations_bytes


@given(models(), st.data(), st.integers(1, 12), st.integers(1, 8), st.booleans())
def test_more_in_flight_never_need_less(
    model: tuple[ModelFacts, list[SectionProfile]],
    data: st.DataObject,
    segments: int,
    in_flight: int,
    keeps: bool,
) -> None:
    facts, measured = model
    run = range(data.draw(st.integers(0, len(measured) - 1)), len(measured))
    one, more = (
        activations(facts, measured, run, segments, count, not keeps)
        for count in (in_flight, in_flight + 1)
    )
    assert one <= more


@given(models(), st.integers(1, 12))
def test_a_segment_s_tensors_are_never_more_than_the_whole_run_s(
    model: tuple[ModelFacts, list[SectionProfile]], segments: int
) -> None:
    """What segments save and what they keep: inputs are the only price.

    In a segment that begins before all that is trained they are not: its input gets a
    gradient whatever becomes of it.
    """
    facts, measured = model
    assume(trained_bytes(facts.sections[0]) > 0)
    run = range(len(measured))
    whole = Chunk.of(facts, measured, [run])
    cut = Chunk.of(facts, measured, segments_of(run, segments))
    assert cut.held <= whole.held
    inputs = sum(measured[s.start - 1].output_bytes for s in segments_of(run, segments)[1:])
    assert cut.stashed <= inputs
    largest = max(section.output_bytes for section in measured)
    assert cut.alone <= whole.alone + largest
    assert cut.backward <= whole.backward + inputs + max(whole.recompute, whole.held) + largest


def equal_sections(count: int, entry: int, saved: int) -> tuple[ModelFacts, list[SectionProfile]]:
    facts = replace(
        FACTS, sections=tuple(replace(FACTS.sections[0], index=k) for k in range(count))
    )
    section = replace(
        MEASURED[0],
        output_bytes=entry,
        saved_bytes=saved - entry,
        forward_bytes=entry,
        recompute_bytes=saved,
        backward_bytes=0,
    )
    return facts, [replace(section, index=k) for k in range(count)]


@given(st.integers(2, 8), st.integers(2, 8), st.integers(1, 1000))
def test_equal_sections_need_least_near_the_square_root(
    segments: int, length: int, entry: int
) -> None:
    """c = sqrt(l A_int / A_inp), dissertation 4.3.5."""
    count, saved = segments * length, entry * segments
    saved = -(-saved // length)
    facts, measured = equal_sections(count, entry, max(saved, entry))
    ideal = math.sqrt(count * max(saved, entry) / entry)

    def needed(parts: int) -> int:
        return activations(facts, measured, range(count), parts, 1, 0)

    best = min(range(1, count + 1), key=needed)
    nearest = min(range(1, count + 1), key=lambda parts: abs(parts - ideal))
    # An output, its gradient and a rounded length come to the formula.
    assert needed(nearest) <= needed(best) + 3 * entry + max(saved, entry)
    assert needed(best) <= needed(1)


def test_inputs_of_segments_are_kept_for_all_in_flight_and_one_graph_at_a_time() -> None:
    load = StageLoad(in_flight=3, inputs_held=4, gradients_waiting=1, recomputes=8)
    whole = MemoryModel.of(FACTS, MEASURED, (range(1, 3),)).under(load)
    cut = MemoryModel.of(FACTS, MEASURED, (range(1, 3),), segments=2).under(load)
    assert cut.stash_bytes == whole.stash_bytes + 2 * 10
    # Both inputs, then the last segment's tensors and its backward.
    assert cut.activations_bytes == 10 + 1002 + 10 + 500 + 10
    assert cut.buffers_bytes == whole.buffers_bytes


def test_frozen_segments_at_the_beginning_keep_no_inputs() -> None:
    frozen = replace(
        FACTS,
        sections=tuple(replace(s, gradient_bytes=0) for s in FACTS.sections[:2])
        + FACTS.sections[2:],
    )
    cut = Chunk.of(frozen, MEASURED, segments_of(range(4), 4))
    assert cut.stashed == 2 * 10  # of the last two
    assert Chunk.of(FACTS, MEASURED, segments_of(range(4), 4)).stashed == 3 * 10

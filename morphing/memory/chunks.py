"""Bytes of one micro-batch on its way through a run of sections, and back.

A run that is recomputed in segments keeps the input of each. Only of one segment at a
time all tensors exist (Narayanan's dissertation, 4.3.5; PTD-P, 3.5): with ``c`` segments
of ``l`` equal sections that is ``c * input + l / c * saved``, least at ``c = sqrt(l *
saved / input)``. Here every section counts as it was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spottrain.morphing.simulate.compute import trained_bytes
from spottrain.wire.model import ModelFacts, SectionProfile


@dataclass(frozen=True, slots=True)
class Chunk:
    """One run of sections, by bytes of one micro-batch."""

    input: int
    output: int
    batch: int
    gradients: int
    """Of its parameters."""
    stashed: int
    """Inputs of its segments but the first."""
    held: int
    """Tensors that a forward leaves for the backward beside these inputs, the output
    included."""
    forward: int
    """Peak of a forward that leaves nothing but inputs of segments, with these; so are
    the next two."""
    recompute: int
    """Peak of a forward that leaves ``held``."""
    backward: int
    """Peak of the backward, with the gradient of the output."""
    alone: int
    """Peak of a forward that leaves nothing at all."""

    @classmethod
    def of(
        cls,
        facts: ModelFacts,
        measured: Sequence[SectionProfile],
        runs: Sequence[range],
    ) -> Chunk:
        """Follow one micro-batch through the segments ``runs``, and back.

        Of those at the beginning of the model before all that is trained nothing is
        kept. What went backward leaves its input.
        """
        receives = runs[0].start > 0
        goes_back, kept = receives, 0
        forward = backward = alone = 0
        for run in runs:
            own = sum(trained_bytes(facts.sections[k]) for k in run)
            inner, is_last = run is not runs[0], run is runs[-1]
            goes_back = goes_back or own > 0
            # An input gets a gradient whatever becomes of it.
            one = _Segment.of(facts, measured, run, goes_back and (inner or receives))
            arrived = one.input if inner else 0
            forward = max(forward, kept + arrived + one.forward)
            alone = max(alone, arrived + one.forward)
            if goes_back or is_last:
                kept += arrived
            if goes_back and not is_last:
                again = one.output + one.recompute
                backward = max(backward, kept + max(again, one.backward))
        return cls(
            input=_ends(facts, measured, runs[0])[0],
            output=one.output,
            batch=max(measured[k].batch_bytes for run in runs for k in run),
            gradients=sum(trained_bytes(facts.sections[k]) for r in runs for k in r),
            stashed=kept,
            held=one.held,
            forward=forward,
            recompute=max(forward, kept + one.recompute),
            backward=max(backward, kept + one.backward),
            alone=alone,
        )


@dataclass(frozen=True, slots=True)
class _Segment:
    """Consecutive sections whose graph exists as a whole; fields as of ``Chunk``."""

    input: int
    output: int
    held: int
    forward: int
    recompute: int
    backward: int

    @classmethod
    def of(
        cls,
        facts: ModelFacts,
        measured: Sequence[SectionProfile],
        run: range,
        trained: bool,
    ) -> _Segment:
        """Follow one micro-batch through the sections, and back.

        Args:
            facts: Say which sections are trained.
            measured: All sections.
            run: Those of the segment.
            trained: Whether the graph begins at the input, else at the first section
                that is trained.
        """
        gradients = [trained_bytes(facts.sections[k]) for k in run]
        entry, end = _ends(facts, measured, run)
        came = held = 0
        forward = recompute = backward = 0
        for k, own in zip(run, gradients, strict=True):
            section = measured[k]
            out = end if k == run[-1] else section.output_bytes
            forward = max(forward, came + section.forward_bytes, came + out)
            trained = trained or own > 0
            if not trained:
                came = out
                continue
            recompute = max(recompute, held + section.recompute_bytes)
            # The gradients of this section's parameters are the last to be complete.
            done = held + (came or entry)
            held += section.saved_bytes + out
            passed = 0 if k == run[-1] else out
            here = held + passed + section.backward_bytes
            backward = max(backward, done, here)
            came = out
        return cls(
            input=entry,
            output=end,
            held=held,
            forward=forward,
            recompute=max(recompute, forward, held),
            backward=end + backward,
        )


def _ends(facts: ModelFacts, measured: Sequence[SectionProfile], run: range) -> tuple[int, int]:
    """Return the bytes of what comes in and of what goes out.

    The first section reads examples; a loss is not worth counting.
    """
    is_last = run.stop == len(facts.sections)
    return (
        measured[run.start - 1].output_bytes if run.start else 0,
        0 if is_last else measured[run[-1]].output_bytes,
    )

from __future__ import annotations

from pathlib import Path

import pytest

from spottrain.varuna_manager.jobs.traces import Traces, TracesRefusedError
from spottrain.wire.messages import TraceWritten


def sent(number: int, rank: int, reason: str = "") -> TraceWritten:
    return TraceWritten(
        number=number, rank=rank, first_step=7, last_step=9, path="there", reason=reason
    )


def test_traces_come_in_any_order_also_to_a_manager_started_anew(
    tmp_path: Path,
) -> None:
    begun = Traces(tmp_path / "traces").begin(3, ["a", "b", "a"], 2)
    assert begun.missing == (0, 1, 2)

    Traces(tmp_path / "traces").add("a", sent(begun.number, 2), b"two")
    traces = Traces(tmp_path / "traces")
    traces.add("b", sent(begun.number, 1, "no memory"), b"")
    traces.add("a", sent(begun.number, 2), b"two again")
    found = traces.read(begun.number)

    assert found is not None
    assert found.missing == (0,)
    assert [(t.rank, t.file, t.reason) for t in found.traces] == [
        (1, "", "no memory"),
        (2, "rank-2.json.gz", ""),
    ]
    folder = traces.folder_of(begun.number)
    assert (folder / "rank-2.json.gz").read_bytes() == b"two again"
    assert traces.begin(4, ["a"], 2).number == begun.number + 1


@pytest.mark.parametrize(
    ("vm_id", "number", "rank"), [("b", 1, 0), ("a", 2, 0), ("a", 1, 2), ("b", 1, -1)]
)
def test_a_trace_that_was_not_asked_for_is_refused(
    tmp_path: Path, vm_id: str, number: int, rank: int
) -> None:
    traces = Traces(tmp_path)
    traces.begin(3, ["a", "b"], 2)
    with pytest.raises(TracesRefusedError, match=f"rank {rank} on {vm_id} was not asked for trace"):
        traces.add(vm_id, sent(number, rank), b"x")

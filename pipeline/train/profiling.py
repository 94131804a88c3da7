"""A trace of some mini-batches of one rank, on demand.

A timeline is what the rank takes down itself (``recording``). For a profile ``torch.profiler`` records what the rank's training thread and its GPU do: operators,
kernels, collectives, and the tasks of the schedule by name ("forward 3": of micro-batch
3). It only listens: what is computed, and in which order, stays the same. A profiler that
fails costs the trace, never the training.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import shutil
import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from spottrain.pipeline.state.context import WorkerContext
from spottrain.pipeline.train.recording import Recording
from spottrain.wire import messages
from spottrain.wire.plan import Plan
from spottrain.wire.timeline import Phase

_COMPRESSION = 1
"""Of gzip: all ranks wait for the slowest, and level 9 takes several times as long."""


class RankProfiler:
    """Records profiles and timelines, one after the other, as they are asked for.

    Args:
        context: Of the worker.
        plan: Of the generation.
        rank: Of the plan.
    """

    def __init__(self, context: WorkerContext, plan: Plan, rank: int) -> None:
        self._context = context
        self._plan, self._rank = plan, rank
        self._asked: messages.TraceMinibatches | None = None
        """The one that is recorded, or was last."""
        self._first_step = 0
        self._running: profile | Recording | None = None
        self.wanted: messages.TraceMinibatches | None = None
        """The newest that all ranks know."""

    @property
    def recording(self) -> Recording | None:
        """The timeline that is recorded, if one is."""
        return self._running if isinstance(self._running, Recording) else None

    @property
    def is_busy(self) -> bool:
        """True if a trace is recorded, or will be from the next mini-batch on."""
        asked, wanted = self._asked, self.wanted
        waits = wanted is not None and (asked is None or asked.number < wanted.number)
        return waits or self._running is not None

    def phase(self, phase: Phase) -> AbstractContextManager[None]:
        """Return the context of a phase, which a timeline takes down."""
        recording = self.recording
        return nullcontext() if recording is None else recording.phase(phase)

    def follow(self, step: int) -> None:
        """Begin or end a trace, between two mini-batches.

        Args:
            step: Mini-batches applied so far.
        """
        asked, wanted = self._asked, self.wanted
        if asked is not None and step >= self._first_step + asked.minibatches:
            self.finish(step)
        if wanted is None or self._running is not None:
            return
        if asked is None or asked.number < wanted.number:
            self._begin(step, wanted)

    def finish(self, step: int) -> None:
        """End the trace that is recorded, if there is one, and report it."""
        if self._running is None:
            return
        running, self._running = self._running, None
        try:
            running.stop()
            self._report(step, path=str(_write(running)))
        except (OSError, RuntimeError) as error:
            self._report(step, reason=str(error))

    def close(self) -> None:
        """Drop a trace that an error has interrupted."""
        if self._running is not None:
            running, self._running = self._running, None
            with contextlib.suppress(RuntimeError):  # the device may be lost as well
                running.stop()

    def _begin(self, step: int, wanted: messages.TraceMinibatches) -> None:
        self._asked, self._first_step = wanted, step
        if wanted.content == "timeline":
            self._running = Recording(self._context.device, self._plan, self._rank)
            return
        activities = [ProfilerActivity.CPU]
        if self._context.device.torch_device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        running = profile(activities=activities)
        try:
            running.start()
        except RuntimeError as error:  # such as: the user's code runs one already
            self._report(step, reason=str(error))
        else:
            self._running = running

    def _report(self, step: int, *, path: str = "", reason: str = "") -> None:
        assert self._asked is not None
        self._context.supervisor.report(
            messages.TraceWritten(
                number=self._asked.number,
                rank=self._rank,
                first_step=self._first_step,
                last_step=step,
                path=path,
                reason=(reason.splitlines() or [""])[0],
            )
        )


def _write(ended: profile | Recording) -> Path:
    """Write a trace to a compressed file of its own; return the file.

    Raises:
        OSError: It cannot be written.
        RuntimeError: It is too long to be sent.
    """
    descriptor, name = tempfile.mkstemp(prefix="spottrain-trace-", suffix=".json.gz")
    os.close(descriptor)
    plain, packed = Path(name.removesuffix(".gz")), Path(name)
    try:
        if isinstance(ended, Recording):
            ended.write(plain)
        else:
            ended.export_chrome_trace(str(plain))
        with open(plain, "rb") as source, gzip.open(packed, "wb", _COMPRESSION) as to:
            shutil.copyfileobj(source, to)
        size, limit = packed.stat().st_size, messages.MAX_TRACE_BYTES
        if size > limit:
            raise RuntimeError(
                f"the trace has {size} bytes, compressed, and may have {limit}: record "
                "fewer mini-batches"
            )
    except BaseException:
        packed.unlink()
        raise
    finally:
        plain.unlink(missing_ok=True)
    return packed

"""Moments of the device and of the host on one axis."""

import time
from pathlib import Path

from tests.builders import a_plan

from spottrain.codec import decode
from spottrain.morphing.schedules.schedule import Task, Work
from spottrain.pipeline.devices.host import HostDevice
from spottrain.pipeline.train.recording import Recording
from spottrain.wire.timeline import RankTimeline

HELD_UP_S = 0.2


class HeldUp(HostDevice):
    """A device at whose first mark another process takes the host's core."""

    held_up = False

    def mark(self) -> float:
        moment = super().mark()
        if not self.held_up:
            self.held_up = True
            time.sleep(HELD_UP_S)
        return moment


def test_what_follows_on_the_host_comes_later_also_where_the_first_mark_takes_long(
    tmp_path: Path,
) -> None:
    device = HeldUp()
    recording = Recording(device, a_plan(), 0)
    began = device.mark()
    recording.task(Task(Work.FORWARD, 0), began, device.mark())
    with recording.phase("reduction"):
        pass
    recording.stop()
    recording.write(tmp_path / "timeline")
    timeline = decode(RankTimeline, (tmp_path / "timeline").read_text())
    assert device.held_up
    assert 0 <= timeline.tasks[0].end_s <= timeline.phases[0].start_s

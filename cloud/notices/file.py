"""Notices that the program which a scheduler has started leaves in a file."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from spottrain.cloud.notices.source import NoticeSource, PreemptionNotice, VmOutlook

VARIABLE = "SPOTTRAIN_NOTICE"
"""Names the file, which appears with the notice; it holds ``end_s``, seconds since the epoch."""


class FileSource(NoticeSource):
    """The notices of this batch job, or pod."""

    every_s = 0.5

    def __init__(self) -> None:
        self._file = Path(os.environ[VARIABLE])

    def ask(self) -> VmOutlook:
        """Return the newest notice; see ``NoticeSource``."""
        try:
            text = self._file.read_text()
        except FileNotFoundError:
            return VmOutlook()
        left_s = json.loads(text)["end_s"] - time.time()
        return VmOutlook(PreemptionNotice(text, max(0.0, left_s)))

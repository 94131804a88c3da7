from __future__ import annotations

from hypothesis import settings

# A loaded machine may stop for longer than any deadline of an example.
settings.register_profile("no hurry", deadline=None)
settings.load_profile("no hurry")

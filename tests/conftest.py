from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

# A loaded machine may stop for longer than any deadline of an example. Health checks fail
# a test for the time that data takes, or for its size or rejections in a first few draws,
# which is chance; an example that uses a fixture does not mind what the one before left.
settings.register_profile(
    "no hurry", deadline=None, suppress_health_check=list(HealthCheck)
)
settings.load_profile("no hurry")

# A shell that starts tests in the background lets them ignore Ctrl-C, and so all commands
# that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

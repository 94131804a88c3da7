from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

# A loaded machine may stop for longer than any deadline of an example, and an example
# that uses a fixture of its test does not mind what the one before left there.
settings.register_profile(
    "no hurry",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("no hurry")

# A shell that starts tests in the background lets them ignore Ctrl-C, and so all commands
# that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

"""Tags of all rented resources (design: section 5).

They use only characters that every cloud allows; GCP labels are the most restrictive.
"""

from __future__ import annotations

JOB = "spottrain-job"
"""Name of the job; ``gc`` finds orphans by it."""
INTENT = "spottrain-intent"
"""The launch intent that a VM fulfils."""
MANAGER = "manager"
"""Intent of the VM that a job's manager runs on; the core never launches with it."""
PRICE = "spottrain-usd-per-hour"
"""Price at launch; absent where labels cannot hold a decimal point."""
EXPIRES = "spottrain-expires"
"""Lease in whole seconds: a VM ends this long after it last heard from a manager.

A duration, not a time: a launch repeated with its token must be identical, or the
cloud refuses it.
"""

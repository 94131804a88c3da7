"""The tags that everything rented carries (design: section 5).

Characters are those that every cloud allows: GCP's labels are the narrowest.
"""

from __future__ import annotations

JOB = "spottrain-job"
"""Name of the job; ``gc`` finds orphans by it."""
INTENT = "spottrain-intent"
"""The launch intent that a VM answers to."""
MANAGER = "manager"
"""The intent of the VM that a job's manager itself runs on; no launch of a core has it."""
PRICE = "spottrain-usd-per-hour"
"""What the VM was rented at; not where a label cannot hold a decimal point."""
EXPIRES = "spottrain-expires"
"""Lease in whole seconds: a VM ends so long after it last heard from a manager.

A duration, not a moment: a launch that is repeated with its token must be word for
word the same, or the cloud refuses it.
"""

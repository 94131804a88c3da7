"""How a job's own forecasts have turned out so far, and what that says of the next.

What a tenth of the work has cost, beside what was foretold for it, says whether the job's
market is dearer than its samples; by how much the foretold whole was revised from one tenth
to the next says how wide an interval must be. Its ends are quantiles of what remained of the
errors of other jobs, over that width (locally weighted conformal prediction: Lei et al.,
"Distribution-Free Predictive Inference for Regression", 2018, section 5.2). Misses of its own
intervals, by which adaptive conformal inference (Gibbs and Candès, 2021) learns, a job sees
only one of: at its end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from spottrain.pricing.deadline import tuning
from spottrain.pricing.deadline.model import Forecast

NOTE = 0.02
"""Share of the job's work between two forecasts that are noted."""
MARK = 0.1
"""Share of it between two revisions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """Money or time: what the work so far took, and was foretold to."""

    begun: float
    """Spent, or the time, when the job began."""
    expected: float
    """Foretold for what was left at the newest note; infinite if nothing was."""
    told: float = 0.0
    """Foretold for the work since the beginning, as it came near."""
    whole: float
    """Foretold at the newest mark: what was spent then, and what was to come."""
    squares: float = 0.0
    """Sum of squared revisions of that, from mark to mark."""

    def noted(self, share: float, expected: float) -> Track:
        """Return it once a share of the work that was left is done."""
        told = self.expected * share if math.isfinite(self.expected) else 0.0
        return replace(self, told=self.told + told, expected=expected)

    def marked(self, spent: float) -> Track:
        """Return it at a mark: the whole is foretold anew."""
        whole = spent + self.expected
        if not (math.isfinite(whole) and math.isfinite(self.whole)):
            return replace(self, whole=whole)
        revised = whole - self.whole
        return replace(self, whole=whole, squares=self.squares + revised * revised)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rolling:
    """A job's own forecasts since it began, or since its limits were changed."""

    examples: float
    """Work that was left then."""
    left: float
    """At the newest note."""
    marks: int = 0
    """Tenths of the work that are done."""
    usd: Track
    time_s: Track


def note(
    rolling: Rolling | None,
    foretold: Forecast,
    examples_left: float,
    now_s: float,
    usd_spent: float,
) -> Rolling:
    """Return what is known of a job's forecasts with the one of now.

    Args:
        rolling: What was known; None at the beginning.
        foretold: Without corrections.
        examples_left: Work left.
        now_s: When it was foretold.
        usd_spent: Until then.
    """
    usd, left_s = foretold.usd.expected, foretold.finish_s.expected - now_s
    if rolling is None:
        return Rolling(
            examples=examples_left,
            left=examples_left,
            usd=Track(begun=usd_spent, expected=usd, whole=usd_spent + usd),
            time_s=Track(begun=now_s, expected=left_s, whole=now_s + left_s),
        )
    share = 1 - examples_left / rolling.left if rolling.left > 0 else 0.0
    rolling = replace(
        rolling,
        left=examples_left,
        usd=rolling.usd.noted(share, usd),
        time_s=rolling.time_s.noted(share, left_s),
    )
    done = 1 - examples_left / rolling.examples
    if done < MARK * (rolling.marks + 1):
        return rolling
    return replace(
        rolling,
        marks=math.floor(done / MARK + 1e-9),
        usd=rolling.usd.marked(usd_spent),
        time_s=rolling.time_s.marked(now_s),
    )


def is_due(rolling: Rolling | None, examples_left: float) -> bool:
    """Return whether so much was done since the last note that another is due."""
    if rolling is None:
        return True
    return examples_left <= rolling.left - NOTE * rolling.examples


def drift(rolling: Rolling | None, usd_spent: float) -> float:
    """Return by which factor what is left will cost more than it is foretold to.

    What the work so far has cost over what was foretold for it, and the nearer to 1 the less
    of the work is done.
    """
    if rolling is None:
        return 1.0
    paid, told = usd_spent - rolling.usd.begun, rolling.usd.told
    if paid <= 0 or told <= 0:
        return 1.0
    done = 1 - rolling.left / rolling.examples
    seen = min(tuning.MAX_DRIFT, max(-tuning.MAX_DRIFT, math.log(paid / told)))
    return math.exp(done / (done + tuning.DRIFT_PRIOR) * seen)


def width(rolling: Rolling | None, of: Literal["usd", "time_s"], expected: float) -> float:
    """Return by which factor an interval is wider than that of a typical job.

    From the revisions of what was foretold for the whole, as shares of it, were the whole job
    like that; they count beside ``tuning.WIDTH_WEIGHT`` typical ones.

    Args:
        rolling: What is known of the job's forecasts.
        of: Its money or its time.
        expected: Of it, for what is left.
    """
    if rolling is None or not 0 < expected < math.inf:
        return 1.0
    track = rolling.usd if of == "usd" else rolling.time_s
    whole = expected * rolling.examples / max(rolling.left, NOTE * rolling.examples)
    revised = track.squares / MARK / (whole * whole)
    weight, typical = tuning.WIDTH_WEIGHT, tuning.TYPICAL_REVISION
    square = (weight * typical**2 + revised) / (weight + rolling.marks)
    wide = math.sqrt(square) / typical
    return min(tuning.MAX_WIDTH, max(tuning.MIN_WIDTH, wide))

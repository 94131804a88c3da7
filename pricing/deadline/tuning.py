"""Constants of the deadline policy, and what they were chosen on.

All were chosen on synthetic markets of ``spottrain_lab.markets.scenarios``: seeds 20000 to 20199 and
10000 to 12999. The results in docs/deadlines.md are of other seeds, 1 to 200 and 5000 to
6999, and of recorded traces, on which nothing was tuned.
"""

from __future__ import annotations

# --- Which VMs: deadline.policy ---

SWITCH_DISCOUNT = 0.2
"""Share by which a VM elsewhere must be cheaper than one that is held."""
HOLD_PREMIUM = 0.25
"""Share by which a held VM may cost more than its examples are worth."""
MIN_TRAINING_BOOTS = 3.0
"""No VMs are rented that would train for less than so many boot times."""
NO_GAIN = 0.02
"""Share of a fleet's throughput for which no further VMs are rented."""
PATIENCE = 0.1
"""Share of the time left that slack must be for new on-demand VMs to wait, where spot VMs
may come back."""

CAUTION = 0.2
"""With less slack than this share of the time left, an example is worth what it may cost later, not
what it would if the market went on as it was: there is little time left to see which it is."""

# --- How near the deadline: deadline.policy ---

MARGIN_LOSSES = 2
"""With slack for fewer losses than these, on-demand VMs are rented."""
CONSECUTIVE_LOSSES = 3
"""Losses in a row that the fleet must survive near the deadline, since replacements may be
lost too. Two jobs, of seeds 5106 and 6330, were late by seconds without it. On seeds 10000
to 12999 it costs 0.1 to 0.4 % where deadlines are at most 1.3 times the time needed."""
LOSSES_AHEAD = 1.0
"""Near the deadline on-demand VMs are rented for so many further losses at once, so that
the fleet changes less often."""
MAX_LOSSES_PER_SLACK = 2.0
"""Multiple of the slack that the expected losses of the spot VMs may take: losses often
come together, and slack may grow again."""
FALLBACK_RELEASE = 3.0
"""A time-optimal job keeps its on-demand VMs until slack is so many times the margin."""
MAX_PAUSED_SHARE = 0.5
"""Bound on the share of time that pauses after losses are expected to take."""

# --- What attempts at spot VMs may waste: deadline.worst_case ---

WASTE = 0.01
"""Share by which a job may cost more than with on-demand VMs alone; of fleets larger than
``SMALL_FLEET`` one attempt with the whole fleet, lost as it has joined, where that is more."""
SMALL_FLEET = 3
"""Up to so many VMs the share alone bounds it, also where it pays for no attempt: jobs of less
than a few hours on them train on demand until something was saved. docs/deadlines.md has
what that costs; of larger fleets it would be up to 9 %."""

# --- What the market may do: deadline.outlook ---

SAMPLE_S = 900.0
"""Time between two samples of the market that are kept."""
MAX_SAMPLES = 192
"""Samples that are kept: two days."""
MAX_QUOTES = 16
"""Supplies that a sample keeps."""
PERSISTENCE_S = 3600.0
"""The market is expected to stay as it is for so long."""
PRESENT_WEIGHT = 4
"""The present market counts as so many samples of the time after that."""

# --- What to tell people: deadline.forecast, deadline.best_case, deadline.fallback ---

BEST_CASE_TIME = 0.9
"""The shortest a job may take, as a share of the time counted on: the policy counts on less
throughput than is measured."""
MISSES = 0.1
"""Share of the intervals that may miss."""
MEMORY_S = 1.4 * 3600
"""How long markets of spot VMs keep their state."""
REGIME_S, REGIMES_SHARE = 48 * 3600.0, 0.2
"""How long what lasts longer does, and its share of the variance: as long as the samples, since of
longer ones they tell nothing. Both memories were chosen on jobs on drawn markets, seeds 20000 to
20044, and on every second recorded trace and stretches of it."""
PRIOR_SHARE, PRIOR_MEMORIES = 0.5, 1.0
"""Share of a full fleet that spot VMs train where nothing was seen, which says nothing, and for how
many memories of samples that counts."""
COST_LOW = 0.65
"""Fixed lower end of the cost, as a multiple of the cheapest schedule's. It and ``COST_HIGH``
were chosen on recorded traces."""
COST_EXPECTED, COST_HIGH = 0.1, 0.6
"""Expected cost and its fixed upper end: shares of the way from the cheapest schedule to
on-demand VMs alone."""
FAST_COST_LOW, FAST_COST_EXPECTED = 0.87, 0.2
"""The same for a time-optimal job, from the cost of all the spot VMs there are; its fixed
upper end is that of on-demand VMs alone."""
COST_ENDS, FAST_COST_ENDS, FAST_FINISH_ENDS = (
    (-0.27, 0.32),
    (-0.33, 0.68),
    (-0.06, 0.26),
)
"""Adaptive ends of the intervals of costs and of a time-optimal job's finish: logarithms of what came
over what was expected, for a typical job. Quantiles of 5 and 95 % of the errors of jobs on
drawn markets, seeds 20000 to 20149, and on recorded traces, each job counted alike;
docs/deadlines.md has the coverage of each trace without itself, and of other seeds."""
DRIFT_PRIOR = 0.2
"""When this share of the work is done, what it cost beside what was foretold for it counts
for half."""
MAX_DRIFT = 1.5
"""Bound on the logarithm of that."""
TYPICAL_REVISION, WIDTH_WEIGHT = 0.15, 2.0
"""By which share of it the whole cost or time is revised over a job, and how many tenths of
the work that counts as, beside the job's own."""
MIN_WIDTH, MAX_WIDTH = 0.3, 3.0
"""Bounds on how much narrower or wider than a typical job's an interval is."""
LEEWAY_S = 60.0
"""Time that people have to enter a deadline that was suggested to them."""
ROUNDING = 1e-9
"""Relative difference that counts as rounding."""

"""Chooses the best plan for the available devices.

All combinations are considered: pipeline depth and width, the schedule, recompute as a
whole or in segments, a bound on micro-batches in flight. Each gets a lower bound on its time first, and only
what could still win is laid out and simulated, in the order of the bounds.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from spottrain.morphing.adapt.policy import capped_slowdown
from spottrain.morphing.memory.room import WorkerBytes
from spottrain.morphing.plan import tensor_groups
from spottrain.morphing.plan.candidates import Candidate
from spottrain.morphing.plan.inputs import PlanInputs, check_inputs
from spottrain.morphing.plan.layouts import Layouts, PlanLayout, Refusal, choose_layouts
from spottrain.morphing.plan.modes import (
    RUNNABLE,
    Draft,
    ExecutionMode,
    execution_modes,
)
from spottrain.morphing.plan.placement import Device
from spottrain.morphing.simulate.loops.play import TooSlowError
from spottrain.units import HOUR_S
from spottrain.wire.model import Network
from spottrain.wire.plan import Plan, Slot, shape_of

NOISE = 0.005
"""Plans whose predictions differ by no more are equally good: the one like the running
plan is taken, then the simplest. Predictions are less precise than that."""
MEASURED = 0.02
"""A plan of which every section is on several VMs is taken before one that loses sections
with any VM, if its prediction is worse by no more. Predictions come from medians that are
measured until their standard error is below 1 %: two may differ by twice that for no other
reason."""
DERIVED = 0.1
"""How much better a plan must be to change how many slots divide matrices, as times of groups are
derived from those of single devices, as if each of ``t`` did a part of ``1 / t``. Of a Llama's
block with a hidden size of 1024 a rank took 0.50 to 0.57 (``t`` = 2) or 0.28 to 0.36 (4) of the
CPU time of one alone, with 512 up to 0.65 or 0.42 (``tests/bench/bench_parts.py``): for ``t`` = 2,
0 to 14 % and up to 30 % more. How much less it is in larger models on GPUs was not measured."""
MILLION = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The best plan and the candidates that it was compared with."""

    plan: Plan | None
    """``None`` if no candidate can run."""
    candidates: tuple[Candidate, ...]
    """The best first, then those that cannot run, the one nearest to it first. All that
    were simulated, and the best of every depth and every execution mode."""
    why_not: str = ""
    """One line: why there is no plan."""
    cost: float = math.inf
    """Of the plan: time or money of a mini-batch, by which it was compared. Of any plan at
    least, where none was looked for that costs as much."""

    @property
    def decisive(self) -> tuple[Candidate, ...]:
        """The candidates worth keeping: the chosen one and the next two."""
        return self.candidates[:3]


def choose_plan(inputs: PlanInputs) -> Choice:
    """Compare all plans that could run and return the best by the objective.

    For each depth the sections are cut evenly by measured time, or as evenly as memory
    permits, over the devices and the replicas in proportion to their speed (Varuna,
    section 4.3). While sections change their owners, those of the present plan and of
    the new one must fit together; only where no plan is left and the present one cannot
    go on, one is chosen for which they do not. Of plans that are equally good (see ``NOISE``) the one like the
    present plan is taken, then the simplest, the shallowest, the narrowest.

    Raises:
        PlanError: One line that names what is wrong with the inputs: see
            ``inputs.check_inputs``.
    """
    check_inputs(inputs)
    if not inputs.slots:
        return Choice(plan=None, candidates=(), why_not="there are no slots")
    return _choose_size(inputs) if inputs.tensor_parallel is None else _choose_of_size(inputs)


def _choose_of_size(inputs: PlanInputs, most_cost: float = math.inf) -> Choice:
    """Choose a plan where it is settled how many slots divide the matrices of a stage.

    Args:
        most_cost: None that costs more is looked for.
    """
    if inputs.tensor_parallel == 1:
        return _choose(inputs, most_cost)
    groups, members = tensor_groups.grouped(inputs)
    if not members:
        why_not = (
            f"runtime.tensor_parallel takes {inputs.tensor_parallel} slots of one VM: got VMs of "
            f"{_most_slots(inputs)} at most; set it to less, or take VMs with more GPUs"
        )
        return Choice(plan=None, candidates=(), why_not=why_not)
    choice = _choose(groups, most_cost)
    return replace(
        choice,
        plan=choice.plan and tensor_groups.spread(choice.plan, members),
        candidates=tuple(tensor_groups.on_slots(one, inputs) for one in choice.candidates),
    )


def _most_slots(inputs: PlanInputs) -> int:
    return max(Counter(device.slot.vm_id for device in inputs.slots).values())


def _sizes(inputs: PlanInputs) -> list[int]:
    """Return how many slots may divide the matrices of a stage, the preferred number first:
    that of the present plan, else the least."""
    if inputs.tensor_parallel is not None:
        return [inputs.tensor_parallel]
    most = max(1, _most_slots(inputs))
    known = [1, *(size for size in inputs.facts.tensor_sizes if size <= most)]
    now = inputs.previous.devices_per_stage_replica if inputs.previous else 1
    return sorted(known, key=lambda size: (size != now, size))


def _choose_size(inputs: PlanInputs) -> Choice:
    """Choose how many slots divide the matrices of a stage, with the best plan for each number.

    The preferred one is left only for a plan that is better by more than ``MEASURED``, or
    ``DERIVED`` if groups of one of both sizes were not measured.
    """
    measured = {1, *(group.size for group in inputs.profile.groups)}
    chosen, *sizes = _sizes(inputs)
    best, left = _choose_of_size(replace(inputs, tensor_parallel=chosen)), list[Choice]()
    for size in sizes:
        least = 1 + (MEASURED if measured >= {chosen, size} else DERIVED)
        other = _choose_of_size(replace(inputs, tensor_parallel=size), best.cost / least)
        if other.plan is not None and other.cost * least < best.cost:
            chosen, best, other = size, other, best
        left.append(other)
    if best.plan is None:
        return best
    rows = list(best.candidates)
    for other in left:
        if math.isfinite(other.cost):
            more = other.cost / best.cost - 1
            words = f"{more:.1%} worse" if more > 0 else f"{-more:.1%} better"
            if other.plan is None:
                words = f"at {'least' if more > 0 else 'most'} {words}"
            too = "" if more > 0 else ", too little to tell"
            why_not = f"{words} than {best.plan.shape}{too}"
            rows.append(replace(other.candidates[0], why_not=why_not))
    return replace(best, candidates=tuple(rows))


def _choose(inputs: PlanInputs, most_cost: float) -> Choice:
    """Choose a plan of one device for each stage of a replica."""
    inputs, names = canonical(inputs)
    layouts = choose_layouts(inputs)
    search = Search(layouts, most_cost)
    search.run()
    if search.chosen is None and _is_broken(inputs):
        layouts.waives_handover = True
        search = Search(layouts, most_cost)
        search.run()
    choice = search.choice()
    if choice.plan is None:
        return choice
    return replace(choice, plan=rename_vms(choice.plan, names))


def canonical(inputs: PlanInputs) -> tuple[PlanInputs, dict[str, str]]:
    """Return the same inputs in a canonical order and with canonical names of VMs.

    So a choice depends only on the properties of devices. VMs are numbered: those with
    a part in the present plan come first in the order of its ranks, then large before
    small, fast before slow, more memory before less, cheap before expensive. Only VMs
    that are equal in all of that are told apart by their names.

    Returns:
        The inputs, and for each canonical name the original one.
    """
    previous = inputs.previous
    slots = () if previous is None else previous.slots
    ranks = {slot: rank for rank, slot in enumerate(slots)}
    vms: defaultdict[str, list[Device]] = defaultdict(list)
    for device in inputs.slots:
        vms[device.slot.vm_id].append(device)

    def traits(vm_id: str) -> tuple[object, ...]:
        own = sorted(
            (
                ranks.get(device.slot, len(ranks)),
                device.slot.index,
                -device.speed,
                device.kind,
                -device.memory_bytes,
                device.usd_per_hour,
                device.is_gpu,
                -device.host_memory_bytes,
                -device.locked_memory_bytes,
                -device.cores,
                device.machine,
            )
            for device in vms[vm_id]
        )
        return own[0][0], -len(own), own, vm_id

    in_order = enumerate(sorted(vms, key=traits))
    canonical_names = {vm_id: f"{i:06}" for i, vm_id in in_order}
    for slot in slots:
        canonical_names.setdefault(slot.vm_id, f"gone {len(canonical_names)}")
    devices = [
        replace(
            device,
            slot=Slot(vm_id=canonical_names[device.slot.vm_id], index=device.slot.index),
        )
        for device in inputs.slots
    ]
    if previous is not None:
        previous = rename_vms(previous, canonical_names)
    return (
        replace(
            inputs,
            slots=tuple(sorted(devices, key=lambda device: device.slot)),
            previous=previous,
        ),
        {own: vm_id for vm_id, own in canonical_names.items()},
    )


def rename_vms(plan: Plan, names: Mapping[str, str]) -> Plan:
    """Return ``plan`` with its VMs renamed."""
    slots = (Slot(vm_id=names[slot.vm_id], index=slot.index) for slot in plan.slots)
    return replace(plan, slots=tuple(slots))


def _is_broken(inputs: PlanInputs) -> bool:
    """Return whether the present plan cannot go on because slots were lost."""
    have = {device.slot for device in inputs.slots}
    return inputs.previous is not None and not have.issuperset(inputs.previous.slots)


def min_steps_s(inputs: PlanInputs) -> tuple[float, float]:
    """Return lower bounds on all plans for the inputs, without making one.

    Returns:
        Seconds of a mini-batch, and those times the devices that it takes; infinite if
        there can be no plan.

    Raises:
        PlanError: As ``choose_plan``.
    """
    check_inputs(inputs)
    step_s = slots_s = math.inf
    for size in _sizes(inputs):
        groups = replace(inputs, tensor_parallel=size)
        if size > 1:
            groups, _ = tensor_groups.grouped(groups)
        for one in Search(choose_layouts(groups)).drafts():
            step_s = min(step_s, one.min_s)
            slots_s = min(slots_s, one.min_s * one.draft.depth * one.draft.width * size)
    return step_s, slots_s


@dataclass(slots=True)
class _Scored:
    """A draft and what is known about it so far."""

    draft: Draft
    min_s: float
    """Lower bound on its step time."""
    min_cost: float
    outcome: PlanLayout | Refusal | None = None
    plan: Plan | None = None
    """With its predicted time, once it is simulated."""
    cost: float = math.inf
    survives: bool = False
    """Whether the plan may lose any one VM without a section."""
    is_slow: bool = False
    """Whether its simulation was given up."""

    @property
    def is_open(self) -> bool:
        """Whether it is neither refused nor simulated."""
        refused = isinstance(self.outcome, Refusal)
        return self.plan is None and not refused and not self.is_slow


class Search:
    """Best-first search over drafts.

    Args:
        layouts: Of the inputs.
        most_cost: No plan that costs more is looked for.
    """

    def __init__(self, layouts: Layouts, most_cost: float = math.inf) -> None:
        self.layouts = layouts
        self.most_cost = most_cost
        self.inputs = layouts.inputs
        self.best: _Scored | None = None
        """The cheapest of all that were simulated."""
        self.chosen: _Scored | None = None
        """Of those as good as the best, the preferred one."""
        self._open: list[tuple[float, int, _Scored]] = []
        self._seen: list[_Scored] = []
        self._refused: dict[tuple[int, ExecutionMode], _Scored] = {}
        self._number = 0

    def run(self) -> None:
        """Evaluate drafts until none that is left can win."""
        for scored in self.drafts():
            self._push(scored)
        while self._open:
            min_cost, _, scored = self._open[0]
            if min_cost > self._limit():
                break
            heapq.heappop(self._open)
            if scored.outcome is None:
                self._seen.append(scored)
            if self._may_be_chosen(scored):
                if scored.outcome is None and self._lay_out(scored):
                    self._push(scored)
                else:
                    self._evaluate(scored)
        # Drafts were skipped in favour of the one preferred at that time.
        for scored in list(self._seen):
            if scored.is_open and self._may_be_chosen(scored):
                self._evaluate(scored)
        if self.best is None and not self._open:
            self._retry_uneven()
        if self.chosen is not None and len(self.inputs.homes) > 1:
            self._evaluate_other_home(self.chosen.draft)

    def _push(self, scored: _Scored) -> None:
        self._number += 1
        heapq.heappush(self._open, (scored.min_cost, self._number, scored))

    def drafts(self) -> Iterator[_Scored]:
        """Yield all drafts, each with a lower bound on its cost."""
        layouts, fleet = self.layouts, self.layouts.cuts.fleet
        max_depth = min(len(self.inputs.facts.sections), len(fleet.devices))
        asked = self.inputs.pipeline_depth
        for depth in range(1, max_depth + 1) if asked is None else (asked,):
            for mode in execution_modes(self.inputs, depth):
                group = depth if mode.chunks > 1 else 1
                if layouts.cuts.virtual_nodes % group:
                    continue
                widths = fleet.widths(depth, layouts.cuts.virtual_nodes // group)
                if widths:
                    yield from self._bounded(depth, mode, widths)

    def _bounded(self, depth: int, mode: ExecutionMode, widths: list[int]) -> Iterator[_Scored]:
        steps_s = self.layouts.cuts.min_steps_s(depth, mode, widths)
        for width, min_s in zip(widths, steps_s, strict=True):
            if self._is_duplicate(width, mode):
                continue
            usd = self.layouts.cuts.fleet.min_usd_per_hour[depth * width]
            cost = self._cost(depth, width, min_s, usd)
            yield _Scored(Draft(depth, width, mode), min_s, cost)

    def _is_duplicate(self, width: int, mode: ExecutionMode) -> bool:
        """Return whether a preferred schedule gives exactly the same plan.

        One micro-batch at a time goes forward and backward, whatever the list.
        """
        known = mode.schedule not in (RUNNABLE[0], self.inputs.schedule)
        alone = self.layouts.cuts.virtual_nodes == width
        alone = alone or (mode.in_flight_bound == 1 and not mode.segments)
        return known and mode.chunks == 1 and alone

    def _cost(self, depth: int, width: int, step_s: float, usd: float) -> float:
        """Return the cost of a plan: time or money of a mini-batch."""
        cost = step_s
        if share := self.inputs.lag_share:
            copies = self.layouts.cuts.fleet.copies(depth, width)
            cost *= capped_slowdown(depth, copies, share)
        return cost * usd if self.inputs.objective == "examples_per_dollar" else cost

    def _preference(self, draft: Draft) -> tuple[bool, ExecutionMode, int, int]:
        """Return the key by which equally good plans are ordered, best first."""
        now = self.inputs.previous
        mode = draft.mode
        runs = now is not None and (
            (now.pipeline_depth, now.data_parallel_width, now.schedule)
            == (draft.depth, draft.width, mode.schedule)
            and (now.chunks, now.in_flight_bound or 0, now.state)
            == (mode.chunks, mode.in_flight_bound, mode.state)
            and (now.segments if now.recompute else 0) == mode.segments
        )
        return not runs, mode, draft.depth, draft.width

    def _limit(self) -> float:
        """Return the cost beyond which no plan can be chosen."""
        if self.best is None or self.chosen is None:
            return self.most_cost
        bound = NOISE if self.chosen.survives else MEASURED
        return self.best.cost * (1 + bound)

    def _most_cost(self, survives: bool) -> float:
        """Return the cost beyond which a plan that survives a loss, or not, is never chosen."""
        best = self.most_cost if self.best is None else self.best.cost
        if survives:
            safe = (w.cost for w in self._seen if w.plan is not None and w.survives)
            best = min(best * (1 + MEASURED), min(safe, default=math.inf))
        return best * (1 + NOISE)

    def _may_be_chosen(self, scored: _Scored) -> bool:
        """Return whether it may be better by more than noise, or as good and
        preferred."""
        chosen = self.chosen
        if scored.min_cost > self._limit():
            return False
        if chosen is None or scored.min_cost * (1 + NOISE) < chosen.cost:
            return True
        draft = scored.draft
        if not chosen.survives and self.layouts.cuts.fleet.copies(draft.depth, draft.width) > 1:
            return True
        return self._preference(draft) < self._preference(chosen.draft)

    def _lay_out(self, scored: _Scored) -> bool:
        """Lay a draft out; return whether the lower bound that its layout tells is higher than
        its own by more than noise."""
        draft, before = scored.draft, scored.min_cost
        key = draft.depth, draft.mode
        refused = self._refused.get(key)
        if refused is not None and self.layouts.cuts.is_no_easier(draft, refused.draft):
            scored.outcome = refused.outcome
            return False
        outcome = scored.outcome = self.layouts.lay_out(draft)
        if isinstance(outcome, PlanLayout):
            scored.min_s = max(scored.min_s, self.layouts.min_step_s(draft, outcome))
            cost = self._cost(draft.depth, draft.width, scored.min_s, outcome.usd_per_hour)
            scored.min_cost = max(before, cost)
        elif outcome.room is not None:
            self._refused[key] = scored
            self._make_leaner(draft, outcome.room)
        return scored.min_cost > before * (1 + NOISE)

    def _evaluate(self, scored: _Scored, *, wholly: bool = False) -> None:
        """Lay a draft out and simulate it: wholly, or as long as it may be chosen."""
        if scored.outcome is None:
            self._lay_out(scored)
        if isinstance(scored.outcome, PlanLayout):
            self._simulate(scored, scored.outcome, wholly=wholly)
            self._make_deeper(scored, scored.outcome.room)

    def _simulate(self, scored: _Scored, layout: PlanLayout, *, wholly: bool = False) -> None:
        draft = scored.draft
        scored.survives = layout.plan.copies > 1
        second_cost = self._cost(draft.depth, draft.width, 1.0, layout.usd_per_hour)
        limit_s = math.inf if wholly else self._most_cost(scored.survives) / second_cost
        try:
            plan = scored.plan = self.layouts.simulate(layout, limit_s)
        except TooSlowError:
            scored.is_slow = True
            return
        scored.cost = plan.predicted_step_s * second_cost
        if self.best is None or scored.cost < self.best.cost:
            self.best = scored
        known = [w for w in self._seen if w.plan is not None]
        safe = [w for w in known if w.survives]
        least = min(safe, key=lambda w: w.cost, default=self.best)
        if least.cost <= self.best.cost * (1 + MEASURED):
            known = safe or known
        else:
            least = self.best
        good = (w for w in known if w.cost <= least.cost * (1 + NOISE))
        self.chosen = min(good, key=lambda w: self._preference(w.draft))

    def _make_leaner(self, draft: Draft, room: WorkerBytes) -> None:
        """Where memory binds, add the same draft with less of it at once.

        With fewer micro-batches in flight, and recomputed in segments.
        """
        if draft.mode.in_flight_bound:
            return
        leaner = [self.layouts.cuts.segmented(draft, room)]
        bound = self.layouts.cuts.largest_bound(draft, room)
        if bound is not None:
            leaner.append(replace(draft.mode, in_flight_bound=bound))
        for mode in leaner:
            if mode is not None:
                for lean in self._bounded(draft.depth, mode, [draft.width]):
                    self._push(lean)

    def _make_deeper(self, scored: _Scored, room: WorkerBytes) -> None:
        """Add the same draft with more in flight, if it waits and memory is left."""
        draft = scored.draft
        if draft.mode.in_flight_bound or scored.cost <= scored.min_cost * (1 + NOISE):
            return
        for bound in sorted(self.layouts.cuts.deeper_bounds(draft, room)):
            mode = replace(draft.mode, in_flight_bound=bound)
            for deeper in self._bounded(draft.depth, mode, [draft.width]):
                self._push(deeper)

    def _evaluate_other_home(self, chosen: Draft) -> None:
        """Work out the chosen plan with state in the other home, to be shown beside it.

        The choice stands: its bound or its preference has ruled that plan out.
        """
        mode = replace(chosen.mode, on_device=not chosen.mode.on_device)
        other = replace(chosen, mode=mode)
        known = next((scored for scored in self._seen if scored.draft == other), None)
        if known is None:
            for known in self._bounded(other.depth, mode, [other.width]):
                self._seen.append(known)
        if known is not None and known.plan is None:
            self._evaluate(known, wholly=True)

    def _retry_uneven(self) -> None:
        """If nothing fits, cut as unevenly as necessary, one micro-batch in flight."""
        refused = [
            scored
            for scored in self._seen
            if isinstance(scored.outcome, Refusal) and scored.outcome.room
        ]
        for scored in refused:
            draft = scored.draft
            bound = int(self.layouts.cuts.heeds_bound(draft.mode))
            tight = replace(draft, mode=replace(draft.mode, in_flight_bound=bound))
            assert isinstance(scored.outcome, Refusal)
            assert scored.outcome.room is not None
            segmented = self.layouts.cuts.segmented(tight, scored.outcome.room)
            for mode in (tight.mode, segmented):
                if mode is not None and self._try_uneven(scored, mode):
                    return

    def _try_uneven(self, scored: _Scored, mode: ExecutionMode) -> bool:
        """Lay a refused draft out in another mode; return whether it fits."""
        draft = replace(scored.draft, mode=mode)
        outcome = self.layouts.lay_out(draft, uneven=math.inf)
        if not isinstance(outcome, PlanLayout):
            return False
        again = _Scored(draft, scored.min_s, scored.min_cost, outcome)
        self._seen.append(again)
        self._simulate(again, outcome)
        return True

    # --- The answer -------------------------------------------------------------------

    def choice(self) -> Choice:
        """Return the outcome for people and programs."""
        if self.chosen is None and math.isfinite(self.most_cost):
            return self._too_dear()
        for scored in self._seen:
            most = self._most_cost(scored.survives)
            if scored.is_slow and most > scored.min_cost:
                scored.min_s *= most / scored.min_cost
                scored.min_cost = most
        rows = [scored for scored in self._seen if self._is_informative(scored)]
        depths = {scored.draft.depth for scored in rows}
        ways = {replace(w.draft.mode, in_flight_bound=0) for w in rows}
        opened = (scored for _, _, scored in sorted(self._open))
        left = [scored for scored in (*self._seen, *opened) if scored.outcome is None]
        for scored in sorted(left, key=lambda w: w.min_cost):
            depth, mode = scored.draft.depth, scored.draft.mode
            if depth not in depths or mode not in ways:
                depths.add(depth)
                ways.add(mode)
                rows.append(scored)
        chosen = self.chosen
        rows.sort(
            key=lambda w: (
                w is not chosen,
                isinstance(w.outcome, Refusal),
                w.min_cost if w.plan is None else w.cost,
                -w.draft.depth,
            )
        )
        candidates = tuple(self._candidate(scored) for scored in rows)
        if chosen is None:
            why_not = self._why_none() or self.layouts.cuts.why_nothing_fits()
            return Choice(plan=None, candidates=candidates, why_not=why_not)
        return Choice(plan=chosen.plan, candidates=candidates, cost=chosen.cost)

    def _too_dear(self) -> Choice:
        """Return the draft that would cost least, of those that may fit."""
        known = (*self._seen, *(scored for _, _, scored in self._open))
        fits = [scored for scored in known if not isinstance(scored.outcome, Refusal)]
        if not fits:
            return Choice(plan=None, candidates=())
        least = min(fits, key=lambda scored: scored.min_cost)
        return Choice(plan=None, candidates=(self._candidate(least),), cost=least.min_cost)

    def _why_none(self) -> str:
        """Return why plans that would fit do not fit beside the running one, if any."""
        outcomes = (scored.outcome for scored in self._seen)
        refused = (o for o in outcomes if isinstance(o, Refusal) and o.in_handover)
        return next((refusal.reason for refusal in refused), "")

    def _is_informative(self, scored: _Scored) -> bool:
        """Return whether it was evaluated on its own, not by analogy."""
        if scored.plan is not None:
            return True
        refused = self._refused.get((scored.draft.depth, scored.draft.mode))
        return scored.outcome is not None and (refused is None or refused is scored)

    def _candidate(self, scored: _Scored) -> Candidate:
        draft, outcome, plan = scored.draft, scored.outcome, scored.plan
        sums_s: dict[Network, float] = {}
        step_s: float | None = scored.min_s
        usd = self.layouts.cuts.fleet.min_usd_per_hour[draft.depth * draft.width]
        needed = room = update_s = max_step_s = None
        if isinstance(outcome, Refusal):
            step_s, needed, room = None, outcome.needed, outcome.room
        elif outcome is not None and plan is not None:
            step_s, max_step_s = plan.predicted_step_s, plan.predicted_max_s
            usd = outcome.usd_per_hour
            needed, room = outcome.needed, outcome.room
            update_s = self.layouts.update_s(outcome)
            sums_s = self.layouts.sums_s(plan)
        examples_per_s = None if step_s is None else self.inputs.minibatch_size / step_s
        each = None
        if examples_per_s is not None and usd:
            each = usd / HOUR_S / examples_per_s * MILLION
        return Candidate(
            pipeline_depth=draft.depth,
            data_parallel_width=draft.width,
            microbatch_size=self.layouts.microbatch_size,
            schedule=draft.mode.schedule,
            recompute=draft.mode.segments > 0,
            segments=max(1, draft.mode.segments),
            chunks=draft.mode.chunks,
            in_flight_bound=draft.mode.in_flight_bound or None,
            unused_slots=len(self.inputs.slots) - draft.depth * draft.width,
            stage_bytes=None if needed is None else needed.device,
            device_bytes=None if room is None else room.device,
            step_s=step_s,
            max_step_s=max_step_s,
            examples_per_s=examples_per_s,
            usd_per_million_examples=each,
            why_not=self._why_not(scored),
            state=draft.mode.state,
            host_stage_bytes=None if needed is None else needed.host,
            host_bytes=None if room is None else room.host,
            update_s=update_s,
            network="auto" if plan is None else plan.network,
            nccl_s=sums_s.get("nccl"),
            gloo_s=sums_s.get("gloo"),
            shares_state=plan is not None and bool(plan.shared_state),
        )

    def _why_not(self, scored: _Scored) -> str:
        if isinstance(scored.outcome, Refusal):
            return scored.outcome.reason
        if self.chosen is None or scored is self.chosen:
            return ""
        best = self.chosen.draft
        shape = shape_of(best.depth, best.width, self.inputs.group_size)
        known = scored.plan is not None
        more = (scored.cost if known else scored.min_cost) / self.chosen.cost - 1
        worse = "slower" if self.inputs.objective == "throughput" else "more expensive"
        if more < -NOISE:
            better = "faster" if worse == "slower" else "cheaper"
            return f"{-more:.1%} {better} than {shape}, which outlives any one VM"
        if abs(more) <= NOISE:
            return f"as good as {shape} within {NOISE:.1%}, which is preferred"
        return f"{'' if known else 'at least '}{more:.1%} {worse} than {shape}"

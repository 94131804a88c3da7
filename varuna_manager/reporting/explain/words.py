"""What an event was, and what was decided because of it, in lines with their numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from spottrain.cloud.port.provider import Offer
from spottrain.morphing.plan.candidates import Candidate
from spottrain.units import counted
from spottrain.varuna_manager.core import allocation
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.records import (
    Generation,
    GenerationPhase,
    Intent,
    MorphChoice,
    Move,
    PassedOver,
    VmPhase,
)
from spottrain.varuna_manager.core.model.state import JobPhase, State, budgets
from spottrain.varuna_manager.format import clock, duration, predicted_time, step_time
from spottrain.varuna_manager.jobs.journal import Step
from spottrain.wire import messages

Asked = Sequence[Sequence[str]]
_MAX_IDS = 8


def happened(event: e.Event) -> str:
    """Return what an event was."""
    match event:
        case e.JobSubmitted(settings=job):
            return f"job submitted: {counted(job.spec.steps, 'step')}, at most {counted(job.resources.max_vms, 'VM')}"
        case e.ManagerStarted(software_version=version):
            return f"a manager of version {version} started"
        case e.StopRequested(by=by):
            return f"{by} asked the job to stop"
        case e.LimitsChanged(by=by, limits=limits):
            return f"{by} changed limits: {', '.join(one.name for one in limits)}"
        case e.GrantReceived(grant=grant):
            return f"pool {grant.pool} granted {counted(grant.total, 'VM')}"
        case e.TimerFired():
            return "a scheduled re-evaluation"
        case e.OffersSeen(offers=offers):
            if len(offers) != 1:
                return f"prices: {len(offers)} offers were seen or changed"
            left = offers[0].available
            stock = "" if left is None else f", {left} available"
            return f"seen on the market: {offer_name(offers[0])}{stock}"
        case e.OffersRanked(worths=worths):
            return (
                f"{counted(len(worths), 'offer was', 'offers were')} ranked by examples per dollar"
            )
        case e.VmsLaunched(intent=intent, vms=vms):
            where = f" in {vms[0].offer.zone}" if vms else ""
            return f"{intent}: the cloud gave {ids(vm.vm_id for vm in vms)}{where}"
        case e.LaunchRefused(intent=intent, reason=reason):
            return f"{intent}: no VM: {reason}"
        case e.VmsReturned(vm_ids=vm_ids):
            return f"the cloud has taken back {ids(vm_ids)}"
        case e.VmLost(vm_id=vm_id, reason=reason):
            return f"{vm_id} is gone: {reason}"
        case e.VmsListed(vms=vms):
            return f"the cloud listed {counted(len(vms), 'VM')}"
        case e.ProviderAnswered(vm_id=vm_id, state=state):
            return f"asked about {vm_id}, the cloud says: {state or 'unknown to it'}"
        case e.VmSilent(vm_id=vm_id):
            return f"no heartbeat came from {vm_id}"
        case e.PlanComputed(plan=plan, why_not=why_not):
            return f"the planner answered: {plan.shape if plan else why_not}"
        case e.ProgressMade(step=step, step_s=step_s):
            return f"step {step} committed, {step_time(step_s)} each"
        case e.CommandFailed(command=command, reason=reason):
            return f"{command.replace('_', ' ')} failed: {reason}"
        case e.ReportReceived(vm_id=vm_id, report=report):
            return f"{vm_id} reported: {_reported(report)}"
        case _:
            vm_id = getattr(event, "vm_id", "")
            return _spaced(type(event).__name__) + (f": {vm_id}" if vm_id else "")


def _reported(report: messages.Report) -> str:
    """Return a report, with what it says of itself."""
    match report:
        case messages.InterruptionNoticed(lead_s=lead_s):
            return f"the cloud will take it in {duration(lead_s)}"
        case messages.GenerationStopped(generation=number, step=step, done=done):
            end = ", all steps done" if done else ""
            return f"generation {number} stopped after step {step}{end}"
        case messages.GenerationStarted(generation=number, step=step):
            return f"in generation {number} at step {step}"
        case messages.CheckpointSaved(name=name):
            return f"checkpoint {name} saved"
    reason = getattr(report, "reason", "")
    kind = _spaced(type(report).__name__)
    return f"{kind}: {reason}" if reason else kind


def _spaced(name: str) -> str:
    """Return the name of a class as words."""
    return "".join(f" {one.lower()}" if one.isupper() else one for one in name).strip()


def ids(names: Iterator[str] | Sequence[str]) -> str:
    """Return names in a line, not too many."""
    found = list(names)
    more = f" and {len(found) - _MAX_IDS} more" if len(found) > _MAX_IDS else ""
    return (", ".join(found[:_MAX_IDS]) or "none") + more


def decided(step: Step, asked: Asked) -> Iterator[str]:
    """Yield what was decided because of an event, with the numbers that decided.

    Args:
        step: The event, with the states before and after it.
        asked: What was asked for, as the journal keeps it.
    """
    before, after = step.before, step.after
    for entry in asked:
        yield from _asked(entry, before, after)
    yield from _of_vms(before, after)
    yield from _of_move(before.fleet.move, after.fleet.move)
    yield from _of_generations(before, after)
    if after.deadline.decision is not None and after.deadline != before.deadline:
        decision, old = after.deadline.decision, before.deadline.decision
        if old is None or (old.mode, old.wanted) != (decision.mode, decision.wanted):
            yield f"deadline policy: {decision.mode}: {decision.reason}"
    if after.outcome is not None and after.outcome != before.outcome:
        yield f"the job ends ({after.outcome.kind}): {after.outcome.reason}"
        yield f"spent so far: {_spent(after)}"
    if after.phase is JobPhase.ENDED and before.phase is not JobPhase.ENDED:
        yield "nothing is rented any more: the job is over"
    if after.activity != before.activity:
        yield f"the job now: {after.activity}"


def _spent(state: State) -> str:
    money, *hours = budgets(state)
    cap = state.job.budget.max_usd
    words = f"${money.spent.usd:.2f}" + ("" if cap is None else f" of ${cap:g}")
    used = (f", {h.spent.usd:.2f} of {state.job.budget.max_gpu_hours:g} {h.unit}" for h in hours)
    return words + "".join(used)


def _asked(entry: Sequence[str], before: State, after: State) -> Iterator[str]:
    match entry:
        case ["LaunchVms", name, count, *_]:
            if (intent := after.launches.intents.get(name)) is not None:
                if name not in before.launches.intents:
                    have = sum(vm.counts for vm in after.fleet.vms.values())
                    yield f"{name}: rent {count} more, as {have} of {counted(after.most_vms, 'VM')} are there"
                    yield from why_rented(intent)
                else:
                    yield f"ask again for {count} x {offer_name(intent.offer)}"
        case ["TerminateVms", *names]:
            reasons: dict[str, list[str]] = {}
            for name in names:
                vm = after.fleet.vms.get(name)
                reasons.setdefault(vm.return_reason if vm else "", []).append(name)
            for reason, those in reasons.items():
                yield f"return {ids(those)}" + (f": {reason}" if reason else "")
        case ["ReserveVm", *names]:
            yield f"keep {ids(names)} for another job of the pool"
        case ["AcquireVm", *names]:
            vms = [one.order for k, one in after.fleet.orders.items() if k in names]
            for order in vms:
                yield f"take {order.vm_id} from job {order.by}"
        case ["ComputePlan", *_]:
            slots = sum(vm.num_slots for vm in after.fleet.vms.values() if vm.is_usable)
            yield f"ask the planner for the best plan over the usable slots ({slots})"
        case ["AskProvider", *names]:
            yield f"ask the cloud about {ids(names)}"
        case ["StartAgent", *names]:
            yield f"start agents on {ids(names)}"
        case ["Finish", *_]:
            yield "the manager ends"
        case _:
            return


def _of_vms(before: State, after: State) -> Iterator[str]:
    if after.history.interruptions != before.history.interruptions:
        for hit in after.history.interruptions:
            if hit not in before.history.interruptions:
                yield f"interruption ({hit.interruption}) of {hit.vm_id}: {hit.reason}"
    for name, vm in after.fleet.vms.items():
        old = before.fleet.vms.get(name)
        if old is None:
            price = f"${vm.offer.usd_per_hour:g}/hour"
            on_demand = f"${vm.on_demand_usd_per_hour:g} on demand"
            yield f"{name} is billed at {price} ({on_demand})"
        elif vm.phase is VmPhase.READY and old.phase is not VmPhase.READY:
            boot = duration(after.now_s - vm.launched_at_s)
            yield f"{name} is ready (slots: {vm.num_slots}), {boot} after its launch"
        elif vm.leaves_at_s is not None and old.leaves_at_s is None:
            yield f"{name} leaves at {clock(vm.leaves_at_s)}: its sections move before"
    for name, vm in before.fleet.vms.items():
        if name not in after.fleet.vms:
            reason = f": {vm.return_reason}" if vm.return_reason else ""
            yield f"{name} is gone from the job{reason}"


def _of_move(old: Move | None, new: Move | None) -> Iterator[str]:
    if old is None and new is not None:
        how = "by a checkpoint" if new.is_far else "from memory to memory"
        yield f"move from {new.source} to {new.to}: {new.why}"
        count = len(new.vm_ids)
        yield f"rent {counted(count, 'VM')} beside the old ones, which train on; then go over {how}"
    elif old is not None and new is None:
        yield f"the move to {old.to} is over, or was given up"
    elif old is not None and new is not None and new.is_cut_over and not old.is_cut_over:
        yield f"leave {ids(old.vm_ids)}: the new VMs in {old.to} are ready"


def _of_generations(before: State, after: State) -> Iterator[str]:
    old, new = before.training.generation, after.training.generation
    opened = new is not None and (old is None or old.number != new.number)
    if old is not None and (new is None or opened):
        ended = after.history.generations[-1].ended_by if after.history.generations else ""
        yield f"generation {old.number} ({old.plan.shape}) is over: {ended}"
    if new is None:
        return
    if opened:
        yield f"open generation {new.number} as {new.plan.shape}: {new.reason}"
        yield from why_plan(new, after)
    elif old is not None and new.phase is not old.phase:
        if new.phase is GenerationPhase.STOPPING:
            yield f"leave generation {new.number} ({new.plan.shape}): {after.training.plan_reason}"
        elif new.phase is GenerationPhase.BREAKING:
            yield f"generation {new.number} broke: {new.break_reason}"
        elif new.phase is GenerationPhase.RUNNING:
            yield f"generation {new.number} trains from step {new.from_step}"
    if after.training.morph is not None and after.training.morph != before.training.morph:
        yield from why_morph(new, after.training.morph, after)


def why_plan(generation: Generation, state: State) -> Iterator[str]:
    """Yield the predictions by which a plan was chosen."""
    rule = "most examples/s, counting what a loss would undo"
    if state.job.plan_objective == "examples_per_dollar":
        rule = "fewest dollars per example"
    yield f"rule: {rule}"
    plan = generation.plan
    each_s = plan.minibatch_size / plan.predicted_step_s
    yield (
        f"{plan.shape} predicted: "
        f"{predicted_time(plan.predicted_step_s, plan.predicted_max_s)} a mini-batch, "
        f"{'' if plan.predicted_max_s is None else 'at most '}{each_s:.3g} examples/s on {counted(len(plan.slots), 'slot')}"
    )
    for one in generation.candidates:
        if one.why_not:
            yield f"rejected {_candidate(one)}: {one.why_not}"


def _candidate(one: Candidate) -> str:
    if one.examples_per_s is None:
        return one.shape
    most, least = ("", "") if one.max_step_s is None else ("at most ", "at least ")
    speed = f"{most}{one.examples_per_s:.3g} examples/s"
    if one.usd_per_million_examples is not None:
        speed += f", {least}${one.usd_per_million_examples:.3g} per million"
    return f"{one.shape} with {one.microbatch_size} a micro-batch ({speed})"


def why_morph(generation: Generation, choice: MorphChoice, state: State) -> Iterator[str]:
    """Yield the numbers by which a morph pays, or does not."""
    unit = "examples/s"
    if state.job.plan_objective == "examples_per_dollar":
        unit = "examples/s per $/hour"
    yield (
        f"compared: {generation.plan.shape} trains {choice.present_examples_per_s:.3g} "
        f"{unit}, {choice.shape} would train {choice.new_examples_per_s:.3g}"
    )
    if choice.needed_s is None:
        yield "no morph: the other plan is no faster"
        return
    cost = f"a morph costs {duration(choice.cost_s)}, made up for in {duration(choice.needed_s)}"
    if choice.at_s is None:
        left = duration(choice.left_s)
        yield f"no morph: {cost}, but only {left} of training are left"
    elif choice.at_s > state.now_s:
        quiet = duration(choice.quiet_s)
        when = clock(choice.at_s)
        yield f"not before {when}: {cost}; the next loss is expected in {quiet}"
    else:
        yield f"it pays: {cost}; the next loss is expected in {duration(choice.quiet_s)}"


def now(state: State) -> Iterator[str]:
    """Yield what the job does or waits for, with the numbers behind it."""
    yield state.activity
    if state.phase is JobPhase.ENDED:
        if state.outcome is not None:
            yield f"{state.outcome.kind} after step {state.history.progress.step}"
            yield f"spent: {_spent(state)}"
        return
    generation = state.training.generation
    if generation is not None:
        if generation.measured_step_s is not None:
            yield f"measured: {step_time(generation.measured_step_s)} a mini-batch"
        yield from why_plan(generation, state)
        if (
            state.training.morph is not None
            and state.training.morph.inputs_hash == generation.inputs_hash
        ):
            yield from why_morph(generation, state.training.morph, state)
    if (move := state.fleet.move) is not None:
        yield f"moves from {move.source} to {move.to}: {move.why}"
    if state.phase is JobPhase.ACTIVE:
        yield from why_not_renting(state)
    if state.deadline.decision is not None:
        decision = state.deadline.decision
        yield f"deadline policy: {decision.mode}: {decision.reason}"
    if state.timer_at_s is not None:
        yield f"decides again at {clock(state.timer_at_s)} at the latest"


# --- Offers -----------------------------------------------------------------------------


def offer_name(offer: Offer | PassedOver) -> str:
    """Return an offer for people."""
    market = "spot" if offer.spot else "on demand"
    return f"{offer.instance_type} in {offer.zone}, {market}, ${offer.usd_per_hour:g}/hour"


def why_rented(intent: Intent) -> Iterator[str]:
    """Yield why an offer was rented, and why others were not."""
    choice = intent.choice
    yield f"rent {intent.count} x {offer_name(intent.offer)}{_worth(choice.examples_per_usd)}"
    rule = (
        "most examples per dollar first, interruptions counted"
        if choice.is_ranked
        else "nothing is known of their worth yet: spot first, then by price of a slot"
    )
    yield f"rule: {rule}; evenly over zones whose prices differ little"
    for one in choice.passed_over:
        yield f"not {offer_name(one)}{_worth(one.examples_per_usd)}: {one.why}"
    if more := choice.others - len(choice.passed_over):
        yield f"and {more} more offers"


def why_not_renting(state: State) -> Iterator[str]:
    """Yield why no more VMs are rented now."""
    room = allocation.room(state)
    if room <= 0:
        if state.fleet.size_limit is not None:
            yield (
                f"rents no more: {counted(state.fleet.size_limit.vms, 'VM is', 'VMs are')} enough for the plan until "
                f"prices fall {allocation.CHEAPER:.0%} below ${state.fleet.size_limit.usd_per_hour:g}"
            )
        return
    yield f"room for {room} more VMs of {state.most_vms}"
    for one in allocation.passed_over(state):
        yield f"not {offer_name(one)}: {one.why}"


def _worth(examples_per_usd: float | None) -> str:
    if examples_per_usd is None:
        return ""
    return f", {examples_per_usd:,.0f} examples per dollar"

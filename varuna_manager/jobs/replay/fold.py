"""The fold of a job's journal into its state.

A fact is journalled together with what was decided because of it: the difference between
the state before it and the state after the step. The fold puts these differences in, and
decides nothing: it leads where the manager was, whatever its code would decide today.

Facts without a decision are those that a command wrote while no manager ran, and all of
journals from before decisions were kept. They are stepped, which is for readers only: the
next manager decides on them, and its first decision says the whole state.

The first versions journalled every rank's report of every mini-batch. What such a report
means for the state is derived as it is for reports that are not journalled any more: by the
watches, which then tell of each mini-batch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from spottrain.codec import from_data, to_data
from spottrain.errors import SpottrainError, WireError
from spottrain.varuna_manager.core.model import commands as c
from spottrain.varuna_manager.core.model.events import Event, ReportReceived
from spottrain.varuna_manager.core.model.state import State
from spottrain.varuna_manager.jobs.replay.changes import apply, difference
from spottrain.wire.messages import MinibatchCommitted

if TYPE_CHECKING:
    from spottrain.varuna_manager.watch.watches import Watches

FORMAT = 2
"""Of decisions. States may get new fields with defaults without another one."""
_PART_OF = {
    name: part
    for part, names in {
        "market": "offers offers_seen_at_s worths rankings considered",
        "launches": "cooldowns unfit arithmetic images intents asked_clouds given_up "
        "next_intent takeover_epoch launch_pending launch_choice",
        "fleet": "reconciled vms enough move move_after_s fleet_changed_at_s "
        "short_since_s shortages",
        "preparation": "profile known_profiles calibration next_round measure_after_s "
        "initialiser prepare_since_s failed_preparations checkpoints damaged "
        "checkpoint_saved_at_s checkpoint_error",
        "training": "next_generation generation previous_plan answer plan_asked morph "
        "plan_reason fruitless",
        "history": "progress tally ledger alerts generations interruptions "
        "price_changes slow_vms",
    }.items()
    for name in names.split()
}
"""The fields of format 1, in which states were flat, that are in parts since."""
BASE = '{"state":'
"""What a decision begins with that says the whole state."""


class DecisionError(SpottrainError):
    """A decision cannot be read."""


class Step(NamedTuple):
    """A fact, and what followed from it."""

    before: State
    event: Event
    """As in the journal, or what follows from it."""
    after: State
    commands: tuple[c.Command, ...] = ()
    """What was asked for; none if the step was read from a journal."""

    def decision(self, *, whole: bool = False) -> str:
        """Return what a journal keeps of it beside the event.

        Args:
            whole: Say the whole state: readers cannot know the one before.
        """
        what: dict[str, Any] = {}
        if whole:
            what["state"] = to_data(self.after)
        elif (changes := difference(self.before, self.after)) is not None:
            what["changes"] = changes
        if asked := asked_for(self.commands):
            what["asked"] = asked
        return _text(what)


def snapshot_of(state: State) -> str:
    """Return a decision that says the whole state, and asks for nothing."""
    return _text({"state": to_data(state)})


def _text(what: dict[str, Any]) -> str:
    return json.dumps({**what, "format": FORMAT}, separators=(",", ":"))


def news_of(decision: str) -> str:
    """Return the news in a decision; empty if there are none.

    Those of a whole state may be older than the decision.

    Raises:
        DecisionError: It cannot be read.
    """
    if '"last_news":' not in decision:
        return ""
    what = _read(decision)
    if "state" in what:
        return str(what["state"]["last_news"])
    changed = what.get("changes", {}).get("last_news")
    return str(changed[1]) if changed else ""


def parts_of(decision: str) -> dict[str, Any]:
    """Return a decision's parts: ``changes`` or ``state``, and ``asked``, in the present
    format; an event without a decision has none.

    Raises:
        DecisionError: It cannot be read.
    """
    return _read(decision) if decision else {}


def _read(decision: str) -> dict[str, Any]:
    """Return a decision's parts in the present format.

    Raises:
        DecisionError: It is damaged, or from a newer version.
    """
    try:
        what: dict[str, Any] = json.loads(decision)
        known = what["format"] <= FORMAT
        if what["format"] == 1:
            what |= {k: _in_parts(what[k]) for k in ("state", "changes") if k in what}
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise DecisionError(f"it is damaged: {error}") from error
    if known:
        return what
    raise DecisionError(
        f"it has format {what['format']}, this spottrain reads up to {FORMAT}: use the "
        "newer version that wrote it"
    )


def _in_parts(flat: dict[str, Any]) -> dict[str, Any]:
    """Return a state of format 1, or a difference of two, as one of format 2."""
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        part = _PART_OF.get(name)
        (nested if part is None else nested.setdefault(part, {}))[name] = value
    return nested


def asked_for(commands: Iterable[c.Command]) -> list[list[str]]:
    """Return what was asked for: the kind of each command, and the ids that it names.

    A message to several VMs is one entry.
    """
    asked: dict[tuple[str, ...], list[str]] = {}
    for command in commands:
        kind = (type(command).__name__,)
        match command:
            case c.IntendLaunch() | c.LaunchVms():
                asked.setdefault((*kind, command.intent, str(command.count)), [])
            case c.StartAgent() | c.AskProvider() | c.KeepVm():
                asked.setdefault(kind, []).append(command.vm_id)
            case c.TakeVm():
                asked.setdefault(kind, []).append(command.order.name)
            case c.TerminateVms():
                asked.setdefault(kind, []).extend(command.vm_ids)
            case c.Send(vm_id=vm_id, command=message):
                number = getattr(message, "generation", "")
                named = (*kind, type(message).__name__, str(number))
                asked.setdefault(named, []).append(vm_id)
            case c.ComputePlan():
                asked.setdefault((*kind, command.inputs_hash), [])
            case c.ReleaseJob() | c.ListCheckpoints() | c.Finish():
                asked.setdefault(kind, [])
            case c.KeepProfile() | c.SetTimer():
                pass  # nothing in the job's life depends on them
    return [[*named, *ids] for named, ids in asked.items()]


class Fold:
    """The state of a job, brought forward event by event.

    Args:
        state: To begin with.
    """

    def __init__(self, state: State | None = None) -> None:
        self.state = State() if state is None else state
        self._watches: Watches | None = None

    def take(self, event: Event, decision: str | None = None) -> list[Step]:
        """Fold an event; return the steps that it takes, the first one with itself.

        Args:
            event: As journalled.
            decision: What was decided because of it, as journalled; None: nothing was.

        Raises:
            DecisionError: The decision cannot be read.
        """
        before = self.state
        if decision is not None:
            self.put(decision)
            return [Step(before, event, self.state)]
        steps = [self._step(event)]
        report = event.report if isinstance(event, ReportReceived) else None
        if isinstance(event, ReportReceived) and isinstance(report, MinibatchCommitted):
            vm = before.fleet.vms.get(event.vm_id)
            if vm is not None and event.number >= vm.reports_received:
                follows = self._watching().observe(
                    self.state, event.vm_id, report, event.at_s
                )
                steps += map(self._step, follows)
        return steps

    def put(self, decision: str) -> None:
        """Put in what was decided.

        Raises:
            DecisionError: It cannot be read.
        """
        what = _read(decision)
        try:
            if "state" in what:
                self.state = from_data(State, what["state"])
            else:
                self.state = apply(self.state, what.get("changes"))
        except (WireError, RecursionError) as error:
            raise DecisionError(
                f"it does not fit this version's state ({error}): use the version of "
                "spottrain that wrote it"
            ) from error

    def _watching(self) -> Watches:
        from spottrain.varuna_manager.watch.watches import EACH, Watches

        if self._watches is None:
            self._watches = Watches(EACH)
        return self._watches

    def _step(self, event: Event) -> Step:
        # Not above: readers of decisions do without the core, which takes long to import.
        from spottrain.varuna_manager.core import step

        before = self.state
        self.state, commands = step.step(before, event)
        return Step(before, event, self.state, commands)

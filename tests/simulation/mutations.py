"""Bugs put into the core, to see that the simulation finds them.

``python -m tests.simulation.mutations`` prints at which seed each is caught. A mutation
changes the syntax tree of one function: an expression becomes another. Each would cost money, progress or a VM, and none breaks a job without faults at
once: that is what the faults of ``LongWorld`` are for.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType

from tests.simulation.long_run import LongWorld

from spottrain.varuna_manager.core import (
    allocation,
    fleet,
    generation,
    launches,
    planning,
    reports,
    shutdown,
    spending,
    step,
)
from spottrain.varuna_manager.core.model.errors import InternalError

MAX_SEEDS = 200
_FAILS = (AssertionError, InternalError, KeyError)


@dataclass(frozen=True)
class Mutation:
    """One bug."""

    name: str
    function: Callable[..., object]
    before: str
    """An expression that the function has once."""
    after: str
    """What it becomes."""
    rare: bool = False
    """Whether ten seeds may not be enough to find it."""
    slow: bool = False
    """Whether a world with it stands still, which takes a minute to be sure of."""

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Have the function behave so for a while."""
        assert isinstance(self.function, FunctionType)
        code = self.function.__code__
        self.function.__code__ = self.mutated()
        try:
            yield
        finally:
            self.function.__code__ = code

    def mutated(self) -> CodeType:
        """Return the code of the function with the bug in it.

        Raises:
            AssertionError: the function has no such place, or several.
        """
        assert isinstance(self.function, FunctionType)
        tree = ast.parse(textwrap.dedent(inspect.getsource(self.function)))
        swap = _Swap(self.before, self.after)
        mutated = ast.fix_missing_locations(swap.visit(tree))
        assert isinstance(mutated, ast.Module)
        assert swap.places == 1, f"{self.name}: {swap.places} places"
        made = compile(mutated, "mutation", "exec").co_consts
        return next(code for code in made if isinstance(code, CodeType))


class _Swap(ast.NodeTransformer):
    def __init__(self, before: str, after: str) -> None:
        self._before = _node(before)
        self._wanted = ast.dump(self._before)
        self._after = _node(after)
        self.places = 0

    def visit(self, node: ast.AST) -> ast.AST:
        if type(node) is type(self._before) and ast.dump(node) == self._wanted:
            self.places += 1
            return self._after
        return self.generic_visit(node)


def _node(text: str) -> ast.AST:
    return ast.parse(text, mode="eval").body


MUTATIONS = (
    Mutation(
        "all launches have one token",
        launches.launch,
        "f'{transition.state.job.uid}-{intent.intent}'",
        "transition.state.job.uid",
        slow=True,
    ),
    Mutation(
        "an answered launch stays open",
        launches.vms_launched,
        "_close_intent(transition, event.intent)",
        "transition.state.launches.intents.get(event.intent)",
    ),
    Mutation(
        "a launch without an answer is not asked for again",
        launches.advance,
        "launch(transition, again)",
        "None",
    ),
    Mutation(
        "a VM that is adopted is not in the ledger",
        fleet.adopt,
        "spending.opened(transition, vm)",
        "None",
    ),
    Mutation(
        "an old list forgets VMs that were launched since",
        fleet.vms_listed,
        "record.known_at_s < event.asked_at_s",
        "record.known_at_s > event.asked_at_s",
    ),
    Mutation(
        "VMs are called returned, and stay",
        fleet.return_vms,
        "transition.emit(c.TerminateVms(vm_ids=ids))",
        "None",
    ),
    Mutation(
        "a return that failed is not tried again",
        fleet.command_failed,
        "transition.now_s + RETRY_S",
        "None",
    ),
    Mutation(
        "a VM that never comes up is waited for without end",
        fleet.advance,
        "vm.is_coming",
        "False",
        rare=True,
    ),
    Mutation(
        "a VM that leaves goes before others have its state",
        fleet.is_needed,
        "generation.phase is GenerationPhase.RUNNING",
        "True",
        rare=True,
    ),
    Mutation(
        "two generations have one number",
        generation.open_generation,
        "generation.number + 1",
        "generation.number",
    ),
    Mutation(
        "a generation trains on without one of its ranks",
        generation.leave,
        "(RankPhase.INVITED, RankPhase.STARTED)",
        "(RankPhase.INVITED,)",
    ),
    Mutation(
        "ranks that hang are not told to give up",
        generation._enforce_break,
        "transition.send(to, messages.AbandonGeneration(generation=number))",
        "None",
    ),
    Mutation(
        "VMs outside the plan are not asked for newer sections",
        generation.run_generation,
        "slots + donors",
        "slots",
        rare=True,
    ),
    Mutation(
        "a job succeeds without its last checkpoint",
        generation._outcome_of_done,
        "newest.step >= steps",
        "newest.step >= 0",
        rare=True,
    ),
    Mutation(
        "the budget is watched once nothing is rented",
        shutdown._watch_budget,
        "is_over or _is_over_budget(state, money.key)",
        "_is_over_budget(state, money.key)",
        rare=True,
    ),
    Mutation(
        "a job ends while launches are open",
        shutdown.advance,
        "not state.fleet.vms and not state.launches.intents",
        "not state.fleet.vms",
        rare=True,
    ),
    Mutation(
        "a plan for an earlier fleet is taken for the present one",
        planning._answer,
        "known.inputs_hash == inputs_hash",
        "True",
    ),
    Mutation(
        "launches in flight do not count",
        allocation._count,
        "sum(one.missing for one in intents)",
        "0",
    ),
    Mutation(
        "the oldest checkpoint passes for the newest",
        reports._checkpoint_saved,
        "True",
        "False",
        rare=True,
    ),
    Mutation(
        "what the cloud says of a VM's end is not taken over",
        spending.listed,
        "transition.state.history.ledger.ended(vm.vm_id, vm.ended_at_s)",
        "transition.state.history.ledger",
    ),
    Mutation(
        "a manager that starts does not repeat what the one before asked of clouds",
        step._manager_started,
        "(records.VmPhase.BOOTING, records.VmPhase.RETURNING)",
        "()",
        rare=True,
    ),
)


def caught(mutation: Mutation, seeds: range) -> tuple[int, str] | None:
    """Return the first seed at which a mutation is caught, and how; None: at none."""
    with mutation.applied():
        for seed in seeds:
            try:
                small_world(seed).live()
            except _FAILS as error:
                lines = str(error).splitlines() or [type(error).__name__]
                return seed, lines[0]
    return None


def small_world(seed: int) -> LongWorld:
    """Return a short job of four VMs with a fault every three minutes."""
    return LongWorld(seed, max_vms=4, hours=1.0, fault_h=0.05)


def main() -> None:
    """Print a line for each mutation; exit with 1 if one is not caught."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, default=MAX_SEEDS)
    parser.add_argument("--only", default="", help="mutations whose name has this")
    args = parser.parse_args()
    missed = 0
    for mutation in MUTATIONS:
        if args.only not in mutation.name:
            continue
        began_s = time.process_time()
        found = caught(mutation, range(args.seeds))
        cpu_s = time.process_time() - began_s
        told = f"seed {found[0]}: {found[1]}" if found else "NOT CAUGHT"
        print(f"{mutation.name}: {told} ({cpu_s:.1f} s)", flush=True)
        missed += found is None
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()

"""Small optimizers that keep values where libraries keep them, and where none may."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import nn

Group = dict[str, Any]
NamedParameters = Sequence[tuple[str, nn.Parameter]]


class Base(torch.optim.Optimizer):
    """Steps each group by ``factor``, a function of what the group has kept."""

    start: ClassVar[Group] = {}

    def __init__(self, named: NamedParameters, **options: Any) -> None:
        decayed = [p for name, p in named if not name.endswith("bias")]
        rest = [p for name, p in named if name.endswith("bias")]
        groups: list[Group] = [
            {"params": decayed},
            {"params": rest, "weight_decay": 0.0},
        ]
        defaults = {"lr": 0.1, "weight_decay": 0.01, "wide": (0.5, 0.25)}
        super().__init__(groups, {**defaults, **self.start, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            factor = self.factor(group)
            for parameter in group["params"]:
                assert parameter.grad is not None
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(parameter.grad * (-group["lr"] * factor))

    def factor(self, group: Group) -> Any:
        """Return the factor on the group's gradients, and count this step."""
        return 1.0


class StepMadeByFirstStep(Base):
    """As timm's Lamb and Adan, and nearly all of pytorch_optimizer."""

    def factor(self, group: Group) -> Any:
        group["step"] = group["step"] + 1 if "step" in group else 1
        assert type(group["step"]) is int
        return 1 - 0.9 ** group["step"]


class EveryThird(Base):
    """Counts only every third step, by a counter that begins again."""

    start: ClassVar[Group] = {"since": 0, "rounds": 0}

    def factor(self, group: Group) -> Any:
        group["since"] = (group["since"] + 1) % 3
        group["rounds"] += group["since"] == 0
        return 1 / (1 + group["rounds"])


class LateTensor(Base):
    """A value that is None, then a number, then a tensor."""

    start: ClassVar[Group] = {"scale": None}

    def factor(self, group: Group) -> Any:
        scale = group["scale"]
        if scale is None:
            group["scale"] = 1.0
        elif isinstance(scale, float):
            group["scale"] = torch.tensor(1 / 3, dtype=torch.float64)
        else:
            scale.mul_(1.1)
        return float(group["scale"])


class Nested(Base):
    """Numbers within a list within a dictionary, and a tuple; the list grows."""

    start: ClassVar[Group] = {"kept": None}

    def factor(self, group: Group) -> Any:
        if group["kept"] is None:
            group["kept"] = {"recent": [], "pair": (1, 0.5), 3: True}
        kept = group["kept"]
        assert isinstance(kept["pair"], tuple)
        assert kept[3] is True
        kept["recent"] = [*kept["recent"][-2:], torch.tensor(float(kept["pair"][0]))]
        kept["pair"] = (kept["pair"][0] + 1, kept["pair"][1] / 3)
        return sum(kept["recent"]) * kept["pair"][1]


class RaisesInFourth(Nested):
    """Raises in its fourth step, when it has changed all but one of its parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if group["kept"] and group["kept"]["pair"][0] > 3:
                for parameter in group["params"][1:]:
                    parameter.zero_()
                raise ArithmeticError("did not converge")
        super().step()


class NotANumber(Base):
    """NaN as the mark of a value that was never set, and again at every third step."""

    start: ClassVar[Group] = {"best": math.nan, "count": 0}

    def factor(self, group: Group) -> Any:
        group["count"] += 1
        known = not math.isnan(group["best"])
        group["best"] = math.nan if group["count"] % 3 == 0 else 0.7
        return 1.0 if known else 0.5


class TypedState(Base):
    """Python numbers in the state, which must stay what they are."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["turn"] = state.get("turn", 0) + 1
                state["odd"] = not state.get("odd", False)
                state["rate"] = state.get("rate", 0.1) / 3
                assert type(state["odd"]) is bool
                factor = [1.0, 0.5, 0.25][state["turn"] % 3] + state["rate"]
                assert parameter.grad is not None
                parameter.sub_(parameter.grad * (group["lr"] * factor))


class ListsInState(Base):
    """As SOAP: a matrix for each dimension, none for vectors; bases that are None at first."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state, gradient = self.state[parameter], parameter.grad
                assert gradient is not None
                if not state:
                    state["GG"] = [torch.zeros(n, n) for n in gradient.shape]
                    state["Q"] = None
                    if gradient.ndim == 1:
                        state["GG"] = state["Q"] = [[]]
                if gradient.ndim > 1:
                    gradient = self.rotated(state, gradient)
                parameter.sub_(gradient * group["lr"])

    def rotated(self, state: dict[str, Any], gradient: torch.Tensor) -> torch.Tensor:
        """Return a matrix in the newest bases, which replace the old ones."""
        bases = state["Q"] or [torch.eye(n) for n in gradient.shape]
        state["Q"] = []
        for dim, (product, basis) in enumerate(zip(state["GG"], bases, strict=True)):
            flat = gradient.movedim(dim, 0).flatten(1)
            product.lerp_(flat @ flat.T, 0.1)
            made = torch.linalg.qr(product @ basis + basis).Q
            state["Q"].append(made.T.contiguous().T)  # in columns, as of eigh
        return state["Q"][0].T @ gradient  # type: ignore[no-any-return]


class NestedState(Base):
    """As Kron: texts between tensors; a history that new ones enter from the front."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state, gradient = self.state[parameter], parameter.grad
                assert gradient is not None
                if not state:
                    state["recent"] = [torch.zeros_like(gradient) for _ in range(3)]
                    state["how"] = ("sum", {"turn": 0, "rate": 0.5}, None)
                word, numbers, nothing = state["how"]
                assert (word, nothing) == ("sum", None)
                assert type(numbers["turn"]) is int
                numbers["turn"] += 1
                numbers["rate"] /= 3
                state["recent"] = [gradient.clone(), *state["recent"][:2]]
                weights = (0.6 + numbers["rate"], 0.3 / numbers["turn"], 0.1)
                mean = sum(w * g for w, g in zip(weights, state["recent"], strict=True))
                parameter.sub_(mean * group["lr"])


class InEightBits(torch.Tensor):
    """Numbers of 8 bits with a scale for each row, made as torchao makes them."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=torch.float32, device=codes.device
        )
        made.codes, made.scale = codes, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], object]:
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, torch.Tensor], *_: object) -> InEightBits:
        return InEightBits(**parts)

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: object) -> Any:
        raise NotImplementedError(f"{function} of numbers of 8 bits")

    def read(self) -> torch.Tensor:
        """Return the numbers."""
        return self.codes * (self.scale / 127)

    def write(self, numbers: torch.Tensor) -> None:
        """Take over numbers, rounded."""
        self.scale.copy_(numbers.abs().amax(-1, keepdim=True).clamp_min(1e-30))
        self.codes.copy_((numbers * (127 / self.scale)).round_())


class MomentInEightBits(Base):
    """As torchao's AdamW8bit: a moment that is a tensor of a subclass."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state, gradient = self.state[parameter], parameter.grad
                assert gradient is not None
                if not state:
                    codes = torch.zeros_like(gradient, dtype=torch.int8)
                    scale = gradient.new_zeros((*gradient.shape[:-1], 1))
                    state["moment"] = InEightBits(codes, scale)
                moment = state["moment"].read().mul_(0.9).add_(gradient)
                state["moment"].write(moment)
                parameter.sub_(moment * (group["lr"] * 0.1))


class AttributeUnused(Base):
    """Sets a flag once, as bitsandbytes does, and counts as torch's schedulers did."""

    initialized = False

    def factor(self, group: Group) -> Any:
        self.initialized = True
        self._step_count = getattr(self, "_step_count", 0) + 1
        return 1.0


ACCEPTED: dict[str, type[Base]] = {
    kind.__name__: kind
    for kind in (
        StepMadeByFirstStep,
        EveryThird,
        LateTensor,
        Nested,
        NotANumber,
        TypedState,
        ListsInState,
        NestedState,
        MomentInEightBits,
        AttributeUnused,
    )
}


class OwnCounter(Base):
    """Keeps its steps in an attribute."""

    steps = 0

    def factor(self, group: Group) -> Any:
        self.steps += 1
        return 1 / self.steps


class HelperCounter(Base):
    """Keeps its steps in an object of its own."""

    class Helper:
        steps = 0

    def __init__(self, named: NamedParameters) -> None:
        super().__init__(named)
        self.helper = self.Helper()

    def factor(self, group: Group) -> Any:
        self.helper.steps += 1
        return 1.0


class SchedulerCounter(Base):
    """Relies on an attribute that torch's own code sets, too."""

    def factor(self, group: Group) -> Any:
        self._step_count = getattr(self, "_step_count", 0) + 1
        return 1 / self._step_count


class HiddenCounter(Base):
    """Keeps its steps where nobody looks."""

    def __init__(self, named: NamedParameters) -> None:
        super().__init__(named)
        self.counter: Iterator[int] = iter(range(1, 1000))

    def factor(self, group: Group) -> Any:
        return 1 / next(self.counter)


class FirstTime(Base):
    """Does something else in the first step of each process."""

    started = False

    def factor(self, group: Group) -> Any:
        first, self.started = not self.started, True
        return 0.5 if first else 1.0


class SetsRate(Base):
    """Has a schedule of its own."""

    def factor(self, group: Group) -> Any:
        group["lr"] *= 0.9
        return 1.0


class ObjectInGroup(Base):
    """Keeps an object in its groups that changes."""

    def factor(self, group: Group) -> Any:
        group["odd"] = object()
        return 1.0


class GlobalNorm(Base):
    """As NVLAMB: gradients are divided by their norm over all parameters, if above 1."""

    def factor(self, group: Group) -> Any:
        norm = sum(
            float(p.grad.double().square().sum())
            for g in self.param_groups
            for p in g["params"]
            if p.grad is not None
        )
        return 1 / max(1.0, math.sqrt(norm))


class CountsParameters(Base):
    """Counts its group's step at each parameter: another count in each section."""

    start: ClassVar[Group] = {"step": 0}

    def factor(self, group: Group) -> Any:
        group["step"] += len(group["params"])
        return 1.0


class TensorsInGroup(Base):
    """Averages of gradients, in a list of the group in place of the state."""

    def factor(self, group: Group) -> Any:
        gradients = [p.grad for p in group["params"]]
        averages = group.setdefault("averages", [torch.zeros_like(g) for g in gradients])
        for average, gradient in zip(averages, gradients, strict=True):
            average.lerp_(gradient, 0.1)
            gradient.copy_(average)
        return 1.0


class ConfiguredBySize(Base):
    """Its factory looks at all parameters."""

    def __init__(self, named: NamedParameters) -> None:
        super().__init__(named, weight_decay=1 / len(named))


class Noisy(Base):
    """Draws random numbers in its step."""

    def factor(self, group: Group) -> Any:
        return float(torch.rand(()))


class LooksAtValues(Base):
    """As Prodigy: what it keeps depends on parameters and gradients."""

    def factor(self, group: Group) -> Any:
        for parameter in group["params"]:
            large = parameter.grad is not None and bool(parameter.grad.abs().max() > 1)
            state = self.state[parameter]
            state["start"] = torch.zeros_like(parameter) if large else torch.zeros(())
        return 1.0


class LooksForZeros(Base):
    """Keeps where it began, unless that is nothing."""

    def factor(self, group: Group) -> Any:
        for parameter in group["params"]:
            start = parameter.clone() if parameter.any() else torch.zeros(())
            self.state[parameter].setdefault("start", start)
        return 1.0


class GrowingList(Base):
    """Keeps all gradients."""

    def factor(self, group: Group) -> Any:
        for parameter in group["params"]:
            assert parameter.grad is not None
            history = self.state[parameter].setdefault("history", [])
            history.append(parameter.grad.clone())
        return 1.0


class Raises(Base):
    """Has a fault that only random values show."""

    def factor(self, group: Group) -> Any:
        if any(p.grad is not None and bool(p.grad.any()) for p in group["params"]):
            raise ZeroDivisionError("no gradient may be")
        return 1.0


REFUSED: dict[type[Base], str] = {
    OwnCounter: "OwnCounter changes its attribute 'steps' from step to step",
    HelperCounter: "HelperCounter changes its attribute 'helper' from step to step",
    SchedulerCounter: "SchedulerCounter updates .* rebuilt .* attribute '_step_count'",
    HiddenCounter: "HiddenCounter updates .* rebuilt",
    FirstTime: "FirstTime updates .* rebuilt .* attribute 'started'",
    SetsRate: "SetsRate sets 'lr' of its param_groups",
    ObjectInGroup: "changes 'odd' of its param_groups, a object",
    GlobalNorm: "GlobalNorm looks across sections",
    CountsParameters: "looks across sections: it sets 'step' of param_groups",
    TensorsInGroup: "looks across sections: it sets 'averages' of param_groups",
    ConfiguredBySize: "ConfiguredBySize looks across sections: it updates",
    Noisy: "Noisy draws random numbers in its step",
    LooksAtValues: "state 'start' of .* must be of one kind",
    LooksForZeros: "state 'start' of .* must be of one kind",
    GrowingList: r"state 'history' of .* must keep the lists, .*, \[\*\]: got \[\*, \*\]",
    Raises: "raised ZeroDivisionError: no gradient may be",
}
"""And what is said of them."""

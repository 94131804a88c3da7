"""Cuts of a model, and the contents of its sections."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Self, cast

import torch
from torch import nn
from torch.utils._pytree import TreeSpec

from spottrain.errors import UserCodeError
from spottrain.pipeline.base.blank import BlankBatch
from spottrain.pipeline.model.job import DIVIDING, SUMMING, CutPoint, Helper, TensorStyle
from spottrain.pipeline.model.naming import is_call
from spottrain.wire.model import TiedParameter


@dataclass(frozen=True, slots=True)
class Attached:
    """What the user's code has made of a parameter, besides its values."""

    kind: type[nn.Parameter] = nn.Parameter
    attributes: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, parameter: torch.Tensor) -> Self:
        """Return what is attached to a parameter."""
        # One that holds a tensor class of another library is of that class instead.
        is_own = nn.Parameter in type(parameter).__mro__
        kind = cast("type[nn.Parameter]", type(parameter)) if is_own else nn.Parameter
        return cls(kind, dict(parameter.__dict__))

    def parameter(self, data: torch.Tensor, requires_grad: bool = True) -> nn.Parameter:
        """Make a parameter over ``data`` to which the same is attached."""
        made: nn.Parameter = torch.Tensor._make_subclass(self.kind, data, requires_grad)
        made.__dict__.update(self.attributes)
        return made


@dataclass(frozen=True, slots=True)
class Running:
    """How a buffer that forwards change, such as BatchNorm's running mean, is committed.

    Each virtual node begins with the committed value; what its forward adds to it is summed
    over virtual nodes, as gradients are, and the sum is added at the commit.
    """

    dtype: torch.dtype
    """Of the user's buffer. Integers are committed as float64."""
    keeps: float | None
    """The share of the value before that an update keeps, if each adds to such a share what
    depends on the micro-batch alone; ``None``: nothing is known about updates."""
    counter: str = ""
    """Where it is the mean of all updates, the attribute of its module that counts them."""

    def weight(self, node: int, nodes: int, count: float = 0.0) -> float:
        """Return what a virtual node's change counts in the sum.

        With ``keeps`` the sum is what one update after the other leads to, in the order of
        virtual nodes: of x + d and k x + c, d is c - (1 - k) x, so that the changes of
        nodes 0 to n - 1, all from x, make x + d_0 k^(n-1) + ... + d_(n-1). A mean of t updates
        becomes that of t + n: of the mean of t + 1, which each node makes, d is (u - x) / (t + 1).
        Else the sum is the mean over nodes.

        Args:
            node: The virtual node.
            nodes: Of a mini-batch.
            count: Updates that ``counter`` has counted, that of this node included.
        """
        if self.counter:
            return count / (count - 1 + nodes)
        return 1 / nodes if self.keeps is None else self.keeps ** (nodes - 1 - node)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Shape and type of a tensor to be allocated."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    number_type: type[bool | int | float] | None = None
    """Of a Python number of the optimizer's state, kept as a tensor of no dimension."""
    attached: Attached = Attached()
    """To a parameter."""
    running: Running | None = None
    """Of a buffer that forwards change: it is committed as parameters that are trained are."""

    @property
    def num_bytes(self) -> int:
        """Bytes of a contiguous tensor of this kind."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """A tensor that passes from section to section."""

    name: str
    """Of the module that returns it (a block that ends a section, or another one that stages
    run whole or not at all), or of the call in the code between these; see ``naming``."""
    shape_of_1: tuple[int, ...]
    """For a micro-batch of one example."""
    shape_of_2: tuple[int, ...]
    dtype: torch.dtype
    has_gradient: bool
    """False for integers, and for what no trained parameter had a part in."""

    def shape(self, examples: int) -> tuple[int, ...]:
        """Return the shape for a micro-batch of ``examples``.

        Holds where examples all have one size.
        """
        pairs = zip(self.shape_of_1, self.shape_of_2, strict=True)
        return tuple(one + (two - one) * (examples - 1) for one, two in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Where a wave leaves a section: ``module`` has returned, a block or a CutPoint."""

    module: str
    name: str
    """Of what it returns, among all that passes cuts."""
    output: TreeSpec
    """Structure of what the block returns."""
    leaves: tuple[object, ...] = field(compare=False)  # tensors do not compare to a bool
    """Of it; those that are tensors are empty here."""
    like: tuple[int | None, ...]
    """Of each leaf, which tensor among the block's arguments has its shape and dtype."""
    must_run: bool
    """The block computes something besides its output that a later section needs,
    from inputs and buffers alone; so later stages run it too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The end of a section."""

    ends: Mapping[int, End]
    """By wave: of each that comes through the section."""
    crossing: tuple[Crossing, ...]
    """What passes the cut: first the activation, which the block returns; then what was made
    in this section or an earlier one and is used in a later one."""

    def num_bytes(self, examples: int) -> int:
        """Return the bytes of all that passes for a micro-batch of ``examples``."""
        return sum(math.prod(c.shape(examples)) * c.dtype.itemsize for c in self.crossing)


class Wave(NamedTuple):
    """A call of a model that the loss calls several times, or of a helper."""

    module: str
    section: int
    """The one that it begins in. It ends in the last one, which all code between waves is in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLayout:
    """Result of the tracer: sections, their parameters, activations at the cuts.

    Parameters go by the first of their names in ``model.named_parameters()``.
    """

    blocks: str
    """Names of the lists of blocks that were cut, or ``"CutPoint"``."""
    units: tuple[str, ...]
    """All blocks of these lists, or all CutPoints."""
    cuts: tuple[Cut, ...]
    """Cut ``k`` ends section ``k``; the last section has none."""
    parameters: tuple[tuple[str, ...], ...]
    """Names of each section's parameters, in the model's order; a tied one is in every
    section that uses it. Then those of buffers that its forward changes."""
    specs: Mapping[str, TensorSpec]
    """Every parameter of the model, in the model's order; then buffers that forwards change."""
    matrices: frozenset[str]
    """Parameters that autocast converts before anything else is done with them."""
    tied: tuple[TiedParameter, ...]
    skippable: Mapping[str, frozenset[int]]
    """Modules with parameters that stages without them need not run, and the sections
    in which they run; none lies within another."""
    batch: tuple[TensorSpec, ...]
    """The tensors of a micro-batch of one example."""
    flops_per_example: tuple[int, ...]
    """Of each section's forward, see ``morphing.plan.flops``."""
    saved_bytes_per_example: tuple[int, ...] | None
    """What each section's forward saves, see ``SectionFacts``; ``None``: unknown."""
    needs_values: bool = False
    """The user's code reads values of tensors: it does not run on the meta device."""
    metrics: tuple[str, ...] = ()
    """What the loss measures besides the loss, sorted."""
    reads_batch: frozenset[int] = frozenset()
    """Sections that use values of the batch."""
    heldout_reads: frozenset[int] | None = None
    """The same in evaluations; ``None``: any section may."""
    blank: BlankBatch | None = None
    """Stands in for the batch in other sections; ``None``: nothing can."""
    base: str = ""
    """What transformers calls the weights that the model begins with; empty: unknown."""

    uncut: str = ""
    """Why the model is one section; empty: it is cut."""

    inner: Mapping[str, End] = field(default_factory=dict)
    """Blocks that end no section, and what they return, as of those that do."""

    waves: tuple[Wave, ...] = ()
    """In the order in which they run; empty: the whole loss is one wave."""

    helpers: tuple[torch.Tensor, ...] = ()
    """Parameters of other models that the loss uses, such as a teacher's."""

    writes_input: frozenset[int] = frozenset()
    """Sections that change the activation in place that they begin with."""

    tensor_styles: Mapping[str, TensorStyle] = field(default_factory=dict)
    """How modules are divided in tensor parallelism; see ``tensor_parallel.find_styles``."""

    undivided: str = ""
    """Why no module is divided; empty: some are."""

    @property
    def crossing(self) -> frozenset[str]:
        """Names of all that passes a cut."""
        return frozenset(one.name for cut in self.cuts for one in cut.crossing)

    @property
    def names_calls(self) -> bool:
        """Whether something passes a cut that no block returns which ends a section."""
        return any(map(is_call, self.crossing))

    def blank_for(self, sections: Iterable[int], *, heldout: bool = False) -> BlankBatch | None:
        """Return what these sections can do with instead of a batch, if they can.

        Args:
            sections: Of a stage.
            heldout: Whether the batch is evaluated.
        """
        reads = self.heldout_reads if heldout else self.reads_batch
        return None if reads is None or reads & {*sections} else self.blank

    @property
    def num_sections(self) -> int:
        """Sections of the whole model."""
        return len(self.parameters)

    @property
    def running(self) -> frozenset[str]:
        """Buffers that forwards change."""
        return frozenset(n for n, spec in self.specs.items() if spec.running)

    @property
    def normalises_batches(self) -> str:
        """A module that keeps statistics of micro-batches, as BatchNorm does, if there is one."""
        for name, spec in self.specs.items():
            rule = spec.running
            if rule and rule.dtype.is_floating_point and (rule.keeps or rule.counter):
                return name.rpartition(".")[0]
        return ""

    @property
    def frozen(self) -> frozenset[str]:
        """Parameters that are not trained."""
        return frozenset(n for n, spec in self.specs.items() if not spec.requires_grad)

    def named_parameters(self, section: int) -> list[tuple[str, TensorSpec]]:
        """Return a section's parameters, without buffers."""
        specs = ((name, self.specs[name]) for name in self.parameters[section])
        return [(name, spec) for name, spec in specs if spec.running is None]

    def param_bytes(self, section: int) -> int:
        """Return the bytes of a section's parameters, tied ones included."""
        return sum(self.specs[name].num_bytes for name in self.parameters[section])

    def lowered_bytes(self, section: int) -> int:
        """Return the bytes of those of a section's parameters that autocast converts."""
        own = set(self.parameters[section]) & self.matrices
        specs = (self.specs[name] for name in own)
        return sum(spec.num_bytes for spec in specs if spec.dtype is torch.float32)

    def gradient_bytes(self, section: int) -> int:
        """Return the bytes of those of a section's parameters that are trained."""
        return sum(spec.num_bytes for spec in self._trained(section))

    def divided_share(self, section: int) -> float:
        """Return the share of the elements of a section's matrices that ranks may divide."""
        # An embedding multiplies nothing but where it is the head, too.
        heads = {tied.name for tied in self.tied if section != tied.sections[0]}
        names = (self.matrices | heads) & {*self.parameters[section]}
        sizes = {name: math.prod(self.specs[name].shape) for name in names}
        styles = ((name, self.tensor_styles.get(name.rpartition(".")[0])) for name in names)
        divided = sum(sizes[name] for name, style in styles if style in DIVIDING)
        return divided / sum(sizes.values()) if sizes else 0.0

    def divided_sums(self, section: int) -> int:
        """Return how many sums over ranks that divide matrices a section's backward has."""
        modules = {name.rpartition(".")[0] for name in self.parameters[section]}
        return sum(self.tensor_styles.get(name) in SUMMING for name in modules)

    def divided_gathers(self, section: int) -> float:
        """Return the features that a section's forward gathers from such ranks, over those of what
        they are made from."""
        weights = ((name, *name.rpartition(".")[::2]) for name in self.parameters[section])
        shapes = (
            self.specs[name].shape
            for name, module, attribute in weights
            if attribute == "weight" and self.tensor_styles.get(module) == "colwise_gather_output"
        )
        return sum(made / given for made, given in shapes)

    def integer_bytes(self, section: int) -> int:
        """Return the bytes of exact sums of their gradients, which are of int64."""
        return sum(8 * math.prod(spec.shape) for spec in self._trained(section))

    def _trained(self, section: int) -> Iterator[TensorSpec]:
        specs = (self.specs[name] for name in self.parameters[section])
        return (spec for spec in specs if spec.requires_grad)


class Trunk(NamedTuple):
    """A module of which each call is a wave of its own through the sections.

    A wave ends in the last section; it begins as many before as it has cuts.
    """

    module: str
    units: tuple[str, ...]
    """All blocks, those included that end no section."""
    cuts: tuple[str, ...]
    """Blocks in it that end a section, in the order in which they run."""


class CutPlaces(NamedTuple):
    """Places where a model may be cut."""

    blocks: str
    """Names of lists of blocks, or ``"CutPoint"``."""
    cuts: tuple[str, ...]
    """Modules that end a section, in order."""
    units: tuple[str, ...]
    """All blocks, those included that end none."""
    is_guess: bool = False
    """Found by position alone: why the model cannot be cut there says little."""
    trunks: tuple[Trunk, ...] = ()
    """Empty: the whole loss is one wave."""

    @property
    def num_cuts(self) -> int:
        """Cuts that a model gets here."""
        return max((len(one.cuts) for one in self.trunks), default=len(self.cuts))

    @property
    def is_by_hand(self) -> bool:
        """Whether the user has chosen them."""
        return self.blocks == BY_HAND

    def sorted_by(self, calls: Sequence[str]) -> CutPlaces:
        """Return the places behind the blocks of lists, these in the order of ``calls``; as
        they are where it does not have all of them."""
        if self.is_guess or self.is_by_hand or not {*calls} >= {*self.units}:
            return self
        units = tuple(sorted(self.units, key=calls.index))
        return self._replace(cuts=units[:-1], units=units)


BY_HAND = "CutPoint"
WHOLE = CutPlaces("", (), ())
"""No cut: the model is one section. Its loss may then do what it likes with it."""


def find_cuts(model: nn.Module) -> list[CutPlaces]:
    """Find places where the model may be cut, those first that give more sections.

    CutPoint modules win. Else they are behind the modules of a list of two or more
    modules of one class: of all such lists (as of the four of a ResNet), or of lists with
    modules of the same class, or of the one that holds the most parameters. Lists within
    modules of unequal size (stages, each with a list of blocks) go before the list of
    these. After these come modules that stand side by side: unlike blocks of one list, as of a
    model with attention in some layers and Mamba in others, the modules of a Sequential, or
    attributes of one class. The model's code decides which of them can be: it has to run
    all blocks one after another.

    Raises:
        UserCodeError: There are none.
    """
    points = tuple(n for n, m in model.named_modules() if isinstance(m, CutPoint))
    if points:
        return [CutPlaces(BY_HAND, points, points)]
    choices = _cuts_in_lists(model)
    known = {one.cuts for one in choices}
    choices += [one for one in _cuts_between_siblings(model) if one.cuts not in known]
    if not choices:
        raise UserCodeError(
            "model has no repeated blocks and no CutPoint: got "
            f"{type(model).__name__}; keep its blocks in a torch.nn.ModuleList or put "
            "spottrain.CutPoint() modules where it may be cut"
        )
    return choices


def helper_names(model: nn.Module) -> list[str]:
    """Return the names of helpers that are in no other helper."""
    return _outermost(model, "", lambda one: isinstance(one, Helper))


def without_helpers(model: nn.Module) -> nn.Module:
    """Take the helpers out of a model, and return it."""
    for name in helper_names(model):
        model.set_submodule(name, nn.Identity())
    return model


def in_waves(
    places: CutPlaces,
    runs: Sequence[tuple[str, ...]],
    helpers: Mapping[str, Helper] = MappingProxyType({}),
) -> CutPlaces | None:
    """Return places where a model is cut that the loss calls several times, or with helpers.

    Args:
        places: Where it could be cut by itself.
        runs: Calls of modules in a run of the loss; see ``TraceFacts``.
        helpers: By name.

    Returns:
        ``None`` if no module runs all of these places in each of its calls.
    """
    calls = Counter(run[-1] for run in runs)
    own = [run for run in runs if run[-1] in places.cuts]
    if not own:
        return None
    around = set.intersection(*({*run[:-1]} for run in own))
    around -= {name for run in runs if run[-1] in helpers for name in run}
    times = calls[own[0][-1]]
    module = next((n for n in own[0] if n in around and calls[n] == times), None)
    if module is None:
        return None
    in_order = tuple(dict.fromkeys(run[-1] for run in own))
    own_cuts = in_order if places.is_by_hand else places.cuts
    trunks = [Trunk(module, places.units, own_cuts)]
    trunks += [_trunk_of(name, one, len(own_cuts)) for name, one in helpers.items()]
    return places._replace(
        cuts=tuple(cut for trunk in trunks for cut in trunk.cuts),
        units=tuple(unit for trunk in trunks for unit in trunk.units),
        trunks=tuple(trunks),
    )


def _trunk_of(name: str, helper: Helper, most: int) -> Trunk:
    """Return where a helper is cut: at ``most`` places at most, evenly apart."""
    try:
        places = find_cuts(helper)[0]
    except UserCodeError:
        return Trunk(name, (), ())
    cuts = tuple(f"{name}.{cut}" for cut in places.cuts)
    blocks, parts = len(cuts) + 1, min(len(cuts), most) + 1
    chosen = (cuts[math.ceil(part * blocks / parts) - 1] for part in range(1, parts))
    return Trunk(name, tuple(f"{name}.{unit}" for unit in places.units), tuple(chosen))


def _cuts_in_lists(model: nn.Module) -> list[CutPlaces]:
    lists = _block_lists(model)
    if not lists:
        return []
    largest = max(lists, key=lambda name: _size(model.get_submodule(name)))
    choices = [lists, _lists_of_class(model, _class_in(model, largest)), [largest]]
    if (inner := _lists_in_stages(model, lists)) != lists:
        widest = max(inner, key=lambda name: _size(model.get_submodule(name)))
        choices = [inner, _lists_of_class(model, _class_in(model, widest)), *choices]
    different = dict.fromkeys(tuple(choice) for choice in choices if choice)
    places = [_places(model, choice) for choice in different]
    return sorted(places, key=lambda one: len(one.cuts), reverse=True)


def _block_lists(module: nn.Module, prefix: str = "") -> list[str]:
    """Return the names of lists of blocks that are in no other such list."""
    return _outermost(module, prefix, lambda one: _is_block_list(one, 2))


def _outermost(module: nn.Module, prefix: str, wanted: Callable[[nn.Module], bool]) -> list[str]:
    found: list[str] = []
    for name, inner in module.named_modules(prefix=prefix):
        within = any(not one or name.startswith(f"{one}.") for one in found)
        if not within and wanted(inner):
            found.append(name)
    return found


def _lists_in_stages(model: nn.Module, lists: list[str]) -> list[str]:
    """Return the lists within modules of unequal size, in place of the lists of these."""
    result: list[str] = []
    for name in lists:
        children = list(model.get_submodule(name).named_children())
        prefix = f"{name}." if name else ""
        inner = [one for key, child in children for one in _block_lists(child, prefix + key)]
        unequal = len({_size(child) for _, child in children}) > 1
        result += inner if unequal and inner else [name]
    return result


def _lists_of_class(model: nn.Module, kind: type[nn.Module]) -> list[str]:
    """Return the lists of blocks of one class; of torch's own, those of two or more."""
    least = 2 if _is_of_torch(kind) else 1
    return _outermost(
        model,
        "",
        lambda one: _is_block_list(one, least) and type(next(one.children())) is kind,
    )


def _class_in(model: nn.Module, name: str) -> type[nn.Module]:
    return type(next(model.get_submodule(name).children()))


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _is_block_list(module: nn.Module, least: int) -> bool:
    blocks = list(module.children())
    return (
        isinstance(module, nn.ModuleList | nn.Sequential)
        and len(blocks) >= least
        and len({type(block) for block in blocks}) == 1
        and all(any(True for _ in block.parameters()) for block in blocks)
    )


def _places(model: nn.Module, lists: Sequence[str]) -> CutPlaces:
    units = tuple(
        f"{name}.{child}" if name else child
        for name in lists
        for child, _ in model.get_submodule(name).named_children()
    )
    return CutPlaces(", ".join(lists), units[:-1], units)


# --- Modules side by side -----------------------------------------------------------------

_MOST_GUESSES = 4


def _cuts_between_siblings(model: nn.Module) -> list[CutPlaces]:
    """Return places behind children of modules: of all outermost ones, then of one each."""
    found: dict[str, tuple[str, ...]] = {}
    for name, module in model.named_modules():
        if len(children := _siblings(module)) > 1:
            found[name] = children
    outermost = _outermost(model, "", lambda one: len(_siblings(one)) > 1)
    by_size = sorted(found, key=lambda name: _size(model.get_submodule(name)))
    groups = [tuple(outermost), *((name,) for name in reversed(by_size))]
    different = [group for group in dict.fromkeys(groups) if group][:_MOST_GUESSES]
    guesses = []
    for names in different:
        units = [f"{n}.{one}" if n else one for n in names for one in found[n]]
        ends = [end for n in names for end in _ends(model, n, found[n])]
        guesses.append(CutPlaces(", ".join(names), tuple(ends[:-1]), tuple(units), True))
    return guesses


def _siblings(module: nn.Module) -> tuple[str, ...]:
    """Return the names of children that may be blocks, in the order of their definition.

    In containers these are all of classes that are not torch's own; in a Sequential without
    such ones, all with parameters. Of other modules it is the largest group of one class.
    """
    children = [(n, c) for n, c in module.named_children() if _size(c)]
    theirs = [(n, c) for n, c in children if not _is_of_torch(type(c))]
    if isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
        plain = isinstance(module, nn.Sequential) and len(theirs) < 2
        return tuple(name for name, _ in (children if plain else theirs))
    kinds = Counter(type(child) for _, child in theirs)
    most = max(kinds, key=lambda kind: kinds[kind], default=None)
    return tuple(name for name, child in theirs if type(child) is most)


def _ends(model: nn.Module, name: str, blocks: tuple[str, ...]) -> list[str]:
    """Return the modules that end blocks: in a Sequential, what follows without parameters.

    So what changes an activation in place is in the section that has computed it.
    """
    module = model.get_submodule(name)
    ends: list[str] = []
    for child, inner in module.named_children():
        full = f"{name}.{child}" if name else child
        if child in blocks:
            ends.append(full)
        elif ends and isinstance(module, nn.Sequential) and not _size(inner):
            ends[-1] = full
    return ends


def _is_of_torch(kind: type[nn.Module]) -> bool:
    return kind.__module__.startswith("torch.")


ParameterSlots = dict[str, list[tuple[nn.Module, str]]]
"""For every parameter's first name, all (module, attribute) that hold it."""


_CONVERTED = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
"""Modules whose operation is in autocast's list of lower precision."""


def is_matrix(slots: list[tuple[nn.Module, str]]) -> bool:
    """Return whether autocast converts a parameter before anything is done with it.

    So it is with the weights of linear layers and convolutions of torch's own classes;
    of subclasses and of other modules nobody knows.

    Args:
        slots: The modules that hold the parameter.
    """
    return all(type(m) in _CONVERTED and name == "weight" for m, name in slots)


def parameter_slots(model: nn.Module) -> ParameterSlots:
    """Return the modules that hold each parameter; tied parameters have several."""
    first_names: dict[int, str] = {}
    slots: ParameterSlots = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = first_names.setdefault(id(parameter), name)
        owner, _, attribute = name.rpartition(".")
        slots.setdefault(first, []).append((model.get_submodule(owner), attribute))
    return slots


def buffer_slots(model: nn.Module, name: str) -> list[tuple[nn.Module, str]]:
    """Return the modules that hold a buffer; of one that several modules share, all."""
    buffer = model.get_buffer(name)
    return [
        (module, attribute)
        for module in model.modules()
        for attribute, one in module._buffers.items()
        if one is buffer
    ]

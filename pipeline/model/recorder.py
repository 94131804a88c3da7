"""Watches every operation of a dry run of the loss, and what passes between them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakTensorKeyDictionary

from spottrain.errors import UserCodeError
from spottrain.pipeline.base.operations import OperationMode
from spottrain.pipeline.model.naming import is_call
from spottrain.pipeline.model.sections import Wave

_FILLS = ("zeros", "ones", "empty", "full")
_VALUE_FREE = frozenset(
    [f"{fill}_like" for fill in _FILLS] + [f"new_{fill}" for fill in (*_FILLS, "empty_strided")]
)
"""Operations that depend on their argument's shape and type only."""

_MAX_KNOWN = 1 << 20
"""Elements of a tensor on the meta device whose values are followed."""


@dataclass(eq=False)
class _Value:
    """Facts about the tensors in one storage."""

    storage: StorageWeakRef
    """Its address is not used again as long as this refers to it; its memory is."""
    section: int = 0
    """Section that made it, or wrote it last."""
    computed: bool = False
    parameter: str | None = None
    buffer: str | None = None
    batch: bool = False
    """True if it is part of the batch, or was made from its values."""
    makers: frozenset[str] = frozenset()
    """Modules that ran while it, or what it was made from, was made."""
    received: bool = False
    """True if it is the activation that its section begins with."""
    writes: int = 0
    """Operations that have changed it."""
    is_replaced: bool = False
    """True if an operator has changed a copy in its place."""


@dataclass(frozen=True, eq=False)
class _Made:
    """Facts about a tensor that a call has returned, which may share its storage."""

    section: int
    name: str
    """Empty: no stage could put it there."""
    writes: int
    """To its storage, so far."""
    has_gradient: bool


@dataclass(frozen=True, kw_only=True)
class CutFacts:
    """Observations of one dry run where a wave leaves a section; see ``sections.End``."""

    module: str
    name: str
    output: TreeSpec
    leaves: tuple[Any, ...]
    like: tuple[frozenset[int], ...]
    """Of each leaf, all that it is like."""


@dataclass
class CrossingFacts:
    """Observations of one dry run about what passes cuts; see ``sections.Crossing``."""

    tensor: torch.Tensor
    made: _Made
    last: int
    """The last section that uses it."""


@dataclass
class TraceFacts:
    """Findings of one dry run."""

    uses: dict[str, set[int]] = field(default_factory=dict)
    """Parameter to the sections that use it."""
    captured: dict[str, str] = field(default_factory=dict)
    """Parameters of one section seen in another, and by which module."""
    calls: dict[str, set[tuple[int, int]]] = field(default_factory=dict)
    """Module to the sections at the beginning and end of its calls."""
    needed: set[str] = field(default_factory=set)
    """Modules that make values used in later sections than theirs."""
    cuts: dict[tuple[int, int], CutFacts] = field(default_factory=dict)
    """By section and wave, in the order in which they were passed."""
    inner: dict[str, CutFacts] = field(default_factory=dict)
    """Of blocks that end no section, by name."""
    waves: list[Wave] = field(default_factory=list)
    """That have begun."""
    runs: list[tuple[str, ...]] = field(default_factory=list)
    """Of each call of a module: itself, and the modules around it, outer ones first."""
    fed_by: dict[str, str] = field(default_factory=dict)
    """Module to the outermost one whose output its first call is given; empty: to none."""
    crossing: dict[str, CrossingFacts] = field(default_factory=dict)
    """What passes cuts, by name, in the order in which it is first used behind one."""
    passes_over: bool = False
    """True if something passes that no block returns which ends a section."""
    reads_batch: set[int] = field(default_factory=set)
    """Sections whose operations take values of the batch, or made from these, received
    activations aside."""
    checks_batch: bool = False
    """True if an operation without a result takes them, such as an assertion, or the
    user's code reads them."""
    writes_input: set[int] = field(default_factory=set)
    """Sections that change the activation in place that they begin with."""
    flops: Counter[int] = field(default_factory=Counter)
    """Of each section's matrix multiplications, as ``morphing.plan.flops`` counts."""
    saved_bytes: Counter[int] = field(default_factory=Counter)
    """Of each section: storages that autograd keeps for the backward, but parameters."""
    metrics: tuple[str, ...] = ()
    """Names of what the loss has measured."""
    changed: dict[str, set[int]] = field(default_factory=dict)
    """Buffers that forwards change, and in which sections."""
    writes: Counter[str] = field(default_factory=Counter)
    """How often they change each."""
    helpers: dict[int, torch.Tensor] = field(default_factory=dict)
    """Parameters that are not the model's, by their storage, in order of use."""


class Recorder(OperationMode):
    """Watches every operation of one dry run.

    Args:
        names: Whether what passes cuts must have a name; else it is only noticed.
    """

    def __init__(self, names: bool = True) -> None:
        super().__init__()
        self.facts = TraceFacts()
        self._names = names
        self.section = self.wave = 0
        self.stack: list[str] = []
        self._values: dict[int, _Value] = {}
        self._made: MutableMapping[torch.Tensor, _Made] = WeakTensorKeyDictionary()
        self.given: list[torch.Tensor] = []
        """Arguments of the function that the user's code calls."""
        self.known = KnownValues()
        self._saved: dict[int, StorageWeakRef] = {}

    def register(self, tensor: torch.Tensor, **what: Any) -> None:
        """Register the facts about a tensor."""
        storage = tensor.untyped_storage()
        self._values[storage._cdata] = _Value(_weakly(storage), **what)

    def to_change(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of what passes cuts, which others use, too, for an operator to change.

        The user's code has the copy in its place from then on; it must have no other view of it.
        """
        made = self._made.get(tensor)
        value = self._values.get(tensor.untyped_storage()._cdata)
        if made is None or made.section >= self.section or value is None:
            return tensor
        if value.received or not value.computed or value.parameter or value.buffer:
            return tensor
        self.given = [tensor]
        copy = tensor.clone()
        value.is_replaced = True
        return copy

    def before(self, arguments: Any) -> None:
        """Note what the user's code gives to a function of torch's."""
        self.given = strided_tensors(arguments)

    def after(self, result: Any) -> None:
        """Note what the function has returned, if it has no name."""
        self.made(result, "", self.section)
        self.given = []

    def take(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Note what a call returns that stages know by name; return a tensor of its own."""
        if not strided_tensors(tensor) or isinstance(tensor, nn.Parameter):
            return tensor
        if tensor in self._made:  # a call has returned what it was given
            self.given = [tensor]
            with torch._C.DisableTorchFunction():
                tensor = tensor.view_as(tensor)
        self.made(tensor, name, self.section)
        return tensor

    def made(self, tree: Any, name: str, section: int) -> None:
        """Note what was made in a section, unless it is known already."""
        for tensor in strided_tensors(tree):
            if tensor not in self._made:
                value = self._values.get(tensor.untyped_storage()._cdata)
                writes = 0 if value is None else value.writes
                self._made[tensor] = _Made(section, name, writes, tensor.requires_grad)

    def see(self, tensor: torch.Tensor, value: _Value, what: str) -> None:
        """Let a computed tensor that is used pass the cuts behind which it was made.

        Args:
            tensor: It.
            value: Of its storage.
            what: Uses it.
        """
        made = self._made.get(tensor)
        section = value.section if made is None else made.section
        known = self.facts.crossing.get(made.name) if made else None
        if section > self.section:
            self._refuse_later(section, what)
        if known and known.last > self.section and known.made.has_gradient:
            raise UserCodeError(
                f"model cannot be cut: several calls of it use ({what}) a tensor that depends on "
                f"parameters ({known.made.name}), each in several sections, so that its gradient "
                "would be summed in another order: compute it within each call"
            )
        if section == self.section:
            return
        if made is None or not made.name or made.has_gradient != tensor.requires_grad:
            self._pass_over(value, what)
        else:
            self.cross(tensor)

    def returned(self, result: Any) -> None:
        """Note what the loss returns."""
        for tensor in strided_tensors(result):
            value = self._values.get(tensor.untyped_storage()._cdata)
            if value is not None and value.computed and value.parameter is None:
                self.see(tensor, value, "return")

    def cross(self, tensor: torch.Tensor) -> None:
        """Let a tensor with a name pass all cuts from where it was made to here."""
        made = self._made[tensor]
        self.facts.passes_over |= is_call(made.name)
        facts = CrossingFacts(tensor, made, self.section)
        known = self.facts.crossing.setdefault(made.name, facts)
        known.last = max(known.last, self.section)

    def saved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor that autograd keeps for the backward, and return it."""
        for part in strided_tensors(tensor):
            storage = part.untyped_storage()
            value = self._values.get(storage._cdata)
            is_models = value is not None and (value.parameter or value.buffer)
            if storage._cdata not in self._saved and not is_models:
                self._saved[storage._cdata] = _weakly(storage)
                self.facts.saved_bytes[self.section] += storage.nbytes()
        return tensor

    def where(self) -> str:
        """Name the module that runs."""
        return (self.stack[-1] if self.stack else "") or "the model"

    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation and register what it says of its operands."""
        name = func.overloadpacket.__name__
        inputs = [] if name in _VALUE_FREE else self._registered((args, kwargs))
        self._note_helpers((args, kwargs))
        for value in inputs:
            self._use(value, name)
        self._note_writes(func, args, kwargs)
        result, was_read = self.known.call(func, args, kwargs)
        if (formula := FLOPS.get(func.overloadpacket)) is not None:
            self.facts.flops[self.section] += formula(*args, **kwargs, out_val=result)
        random = torch.Tag.nondeterministic_seeded in func.tags
        computed = random or any(v.computed or v.parameter for v in inputs)
        makers = frozenset(self.stack).union(*(v.makers for v in inputs))
        batch = any(v.batch for v in inputs)
        if batch:
            self.facts.reads_batch.add(self.section)
            self.facts.checks_batch |= was_read or not func._schema.returns
        written = self._registered(_written(func, args, kwargs))
        self.facts.writes_input |= {v.section for v in written if v.received}
        for value in written:
            value.writes += 1
        for tensor in strided_tensors(result):
            known = self._values.get(tensor.untyped_storage()._cdata)
            if known is None:
                self.register(
                    tensor,
                    section=self.section,
                    computed=computed,
                    batch=batch,
                    makers=makers,
                )
            elif known in written and known.parameter is None:
                known.section, known.computed = self.section, known.computed or computed
                known.batch, known.makers = known.batch or batch, known.makers | makers
        return result

    def _registered(self, tree: Any) -> list[_Value]:
        keys = (t.untyped_storage()._cdata for t in strided_tensors(tree))
        return [self._values[key] for key in keys if key in self._values]

    def _note_helpers(self, tree: Any) -> None:
        """Note parameters of helper models; refuse those that seem to be trained."""
        for tensor in strided_tensors(tree):
            key = tensor.untyped_storage()._cdata
            is_own = key in self._values or tensor.is_meta
            if is_own or not isinstance(tensor, nn.Parameter):
                continue
            if tensor.requires_grad and torch.is_grad_enabled():
                raise UserCodeError(
                    f"loss uses a parameter of shape {tuple(tensor.shape)} that is not the "
                    "model's, so it would not be trained: make it part of what model() "
                    "returns, or freeze it (requires_grad_(False)) if it is a helper's, "
                    "such as a teacher's"
                )
            self.facts.helpers[key] = tensor

    def _use(self, value: _Value, operation: str) -> None:
        if value.parameter is not None:
            self.facts.uses.setdefault(value.parameter, set()).add(self.section)
            if value.section != self.section:
                self.facts.captured[value.parameter] = self.where()
        elif value.is_replaced:
            raise UserCodeError(
                f"model cannot be cut: {self.where()} in section {self.section} uses "
                f"({operation}) a tensor that was changed in place under another name: change a "
                "new one (x = x + y in place of x += y)"
            )
        elif value.computed:
            own = [t for t in self.given if t.untyped_storage()._cdata == value.storage.cdata]
            for tensor in own:
                self.see(tensor, value, operation)
            if value.section < self.section and not own:
                self._pass_over(value, operation)
            if value.section > self.section and not own:
                self._refuse_later(value.section, operation)
        elif value.section != self.section:
            self.facts.needed |= value.makers

    def _pass_over(self, value: _Value, operation: str) -> None:
        """Note, or refuse, that something is used which no stage could be given."""
        self.facts.passes_over = True
        if not self._names:
            return
        cut = self.facts.cuts.get((value.section, self.wave))
        raise UserCodeError(
            f"model cannot be cut: {self.where()} in section {self.section} uses ({operation}) a "
            f"value computed in section {value.section}{f' ({cut.module})' if cut else ''} "
            "that was neither returned by a block nor made between blocks (a hook or an attribute "
            "has it): let the block return it"
        )

    def _refuse_later(self, section: int, operation: str) -> None:
        raise UserCodeError(
            f"model cannot be cut: {self.where()} in section {self.section} uses ({operation}) a "
            f"value that was computed in section {section} before: calls of a model must not depend "
            "on what others return, and random numbers for all of them are drawn before the first"
        )

    def check_writes(self) -> None:
        """Refuse changes of what passes cuts.

        The activation alone may be changed where it comes in: that section gets a copy.
        """
        for name, one in self.facts.crossing.items():
            value = self._values[one.tensor.untyped_storage()._cdata]
            if value.writes == one.made.writes:
                continue
            if not (value.received and one.last == one.made.section + 1):
                raise UserCodeError(
                    f"model cannot be cut: a tensor made in section {one.made.section} ({name}) is "
                    "changed in place and used in a later section: change a new one "
                    "(x = x + y in place of x += y)"
                )

    def _note_writes(self, func: Any, args: Any, kwargs: Any) -> None:
        for value in dict.fromkeys(self._registered(_written(func, args, kwargs))):
            if value.buffer:
                self.facts.changed.setdefault(value.buffer, set()).add(self.section)
                self.facts.writes[value.buffer] += 1
            elif value.parameter:
                raise UserCodeError(
                    f"model changes its parameter {value.parameter} in forward ({self.where()}), "
                    "which only the optimizer may: keep what forward changes in a buffer"
                )

    def replaced(self, name: str, buffer: torch.Tensor) -> None:
        """Note that a buffer is another tensor than before."""
        value = self._values.get(buffer.untyped_storage()._cdata)
        if value is not None and value.buffer == name:
            return  # another view of it, whose writes are noted
        section = self.section if value is None else value.section
        self.facts.changed.setdefault(name, set()).add(section)


class KnownValues:
    """Values of small tensors on the meta device that no parameter had a part in.

    The user's code may read such values to choose what it does (``if mask.all()``), and
    operations on them may have results whose shapes depend on them (``nonzero``).
    """

    def __init__(self) -> None:
        self._storages: dict[int, tuple[StorageWeakRef, torch.Tensor]] = {}
        """By the storage on the meta device: itself, as in ``_Value``, and its bytes on the CPU,
        which are forgotten once nobody has it: every block of a model may make a mask."""

    def add(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Note the values of a tensor on the meta device, as they are now."""
        strides, storage = tensor.stride(), tensor.untyped_storage()
        if not tensor.is_meta or value.is_meta or value.numel() > _MAX_KNOWN:
            return
        if 0 in strides or tensor.storage_offset():  # a view of what is not known
            return
        held = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype)
        if held.untyped_storage().nbytes() == storage.nbytes():
            for key in [k for k, (known, _) in self._storages.items() if _is_gone(known)]:
                del self._storages[key]
            self._storages[storage._cdata] = _weakly(storage), held.copy_(value)

    def call(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, bool]:
        """Call an operation, on known values as well.

        Returns:
            Its result, and whether that says what values are.
        """
        given = self._on_cpu(func, args, kwargs)
        try:
            result = call_on_stand_ins(func, args, kwargs)
        except (NotImplementedError, RuntimeError):
            if given is None or not _on_meta((args, kwargs)):
                raise
            return self._read(func, *given), True
        is_small = all(t.numel() <= _MAX_KNOWN for t in strided_tensors(result))
        if given is not None and is_small and _on_meta((args, kwargs, result)):
            values = strided_tensors(func(*given[0], **given[1]))
            for one, value in zip(strided_tensors(result), values, strict=True):
                if one.untyped_storage()._cdata not in self._storages:
                    self.add(one, value)
        else:
            for tensor in strided_tensors(_written(func, args, kwargs)):
                self._storages.pop(tensor.untyped_storage()._cdata, None)
        return result, False

    def _read(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what an operation makes of known values, as on the meta device."""

        def on_meta(value: torch.Tensor) -> torch.Tensor:
            twin = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device="meta"
            )
            self.add(twin, value)
            return twin

        return tree_map_only(torch.Tensor, on_meta, func(*args, **kwargs))

    def _on_cpu(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Return the arguments with known values; ``None`` where some are not known."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            return None
        is_free = func.overloadpacket.__name__ in _VALUE_FREE
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if not is_free and not all(map(self._is_known, tensors)):
            return None
        if any(argument.name == "device" for argument in func._schema.arguments):
            asked = kwargs.get("device")
            if is_free or not tensors or (asked and torch.device(asked).type == "meta"):
                kwargs = {**kwargs, "device": "cpu"}
            elif asked:
                return None
        elif is_free:
            return None
        if is_free:
            return args, kwargs
        values: tuple[Any, Any] = tree_map_only(torch.Tensor, self._value, (args, kwargs))
        return values

    def _is_known(self, tensor: torch.Tensor) -> bool:
        if tensor.numel() > _MAX_KNOWN or tensor.layout != torch.strided:
            return False
        return not tensor.is_meta or tensor.untyped_storage()._cdata in self._storages

    def _value(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor
        _, held = self._storages[tensor.untyped_storage()._cdata]
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(
            held.untyped_storage(),
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
        )


def _weakly(storage: torch.UntypedStorage) -> StorageWeakRef:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _is_gone(storage: StorageWeakRef) -> bool:
    """Return whether no tensor has a storage any more."""
    return bool(storage.expired())  # type: ignore[no-untyped-call]


def _on_meta(tree: Any) -> bool:
    """Return whether a tensor in a pytree is on the meta device."""
    return any(tensor.is_meta for tensor in strided_tensors(tree))


def call_on_stand_ins(func: Any, args: Any, kwargs: Any) -> Any:
    """Call an operation, with stand-ins of parameters written out if it computes.

    Some operations refuse the strides of a tensor that takes no memory.
    """
    if any(r.alias_info is not None for r in func._schema.returns):
        return func(*args, **kwargs)
    args, kwargs = tree_map_only(
        torch.Tensor,
        lambda t: t.contiguous() if 0 in t.stride() and t.numel() > 1 else t,
        (args, kwargs),
    )
    return func(*args, **kwargs)


def _by_columns(rows: torch.Tensor, by: torch.Tensor) -> int:
    """Return the FLOPs of a product in which each element of ``rows`` meets a row of
    ``by``, such as of a matrix and a vector."""
    return 2 * rows.numel() * (by.shape[-1] if by.ndim > 1 else 1)


def _rnn(x: torch.Tensor, by_input: torch.Tensor, by_state: torch.Tensor) -> int:
    """Return the FLOPs of an RNN's layer over all elements of its sequences."""
    return 2 * math.prod(x.shape[:-1]) * (by_input.numel() + by_state.numel())


_OPS = torch.ops.aten
FLOPS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    # What torch's own table lacks of what a dry run can meet, here or on the CPU.
    _OPS._scaled_dot_product_flash_attention_for_cpu: flop_registry[
        _OPS._scaled_dot_product_flash_attention
    ],
    _OPS.mv: lambda a, b, **_: _by_columns(a, b),
    _OPS.addmv: lambda _, a, b, **__: _by_columns(a, b),
    _OPS.dot: lambda a, b, **_: _by_columns(a, b),
    _OPS.addbmm: lambda _, a, b, **__: _by_columns(a, b),
    # Rows in groups, each with a matrix of its own: experts.
    _OPS._grouped_mm: lambda a, b, *_, **__: _by_columns(a, b),
    _OPS.mkldnn_rnn_layer: lambda x, w, h, *_, **__: _rnn(x, w, h),
}
"""By operation, from its arguments and, as ``out_val``, its result."""


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that an operation writes to."""
    schema = func._schema
    given = {a.name: v for a, v in zip(schema.arguments, args, strict=False)} | kwargs
    written = [
        given[a.name]
        for a in schema.arguments
        if a.alias_info is not None and a.alias_info.is_write and a.name in given
    ]
    if "batch_norm" in schema.name and (given.get("training") or given.get("train")):
        # Older operations do not declare that they update running statistics.
        written += [given.get("running_mean"), given.get("running_var")]
    return written


def cut_facts(block: str, name: str, args: Any, kwargs: Any, output: Any) -> CutFacts:
    """Note what a block returns, under the name that it has at cuts."""
    leaves, structure = tree_flatten(output)
    given = strided_tensors((args, kwargs))
    return CutFacts(
        module=block,
        name=name,
        output=structure,
        leaves=tuple(_stand_in_of(block, leaf) for leaf in leaves),
        like=tuple(_alike(leaf, given) for leaf in leaves),
    )


def _alike(leaf: Any, given: Sequence[torch.Tensor]) -> frozenset[int]:
    """Return which of a block's arguments are like a part of its output."""
    if not isinstance(leaf, torch.Tensor):
        return frozenset()
    kind = leaf.shape, leaf.dtype
    return frozenset(k for k, one in enumerate(given) if (one.shape, one.dtype) == kind)


def _stand_in_of(block: str, item: Any) -> Any:
    """Return the placeholder for a part of a block's output on a later stage."""
    if isinstance(item, torch.Tensor):
        return torch.empty(0, dtype=item.dtype)
    if item is None or isinstance(item, bool | int | float | str):
        return item
    advice = ""
    if isinstance(item, tuple | list):
        advice = (
            "; one that also returns its state, such as nn.LSTM, goes into a module that "
            "returns the activation alone"
        )
    raise UserCodeError(
        f"block {block} returns a {type(item).__name__} besides its activation: "
        f"return tensors, numbers or None{advice}"
    )


def strided_tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in a pytree that have a storage."""
    return [
        leaf
        for leaf in tree_leaves(tree)
        if isinstance(leaf, torch.Tensor)
        and leaf.layout == torch.strided
        and not is_functorch_wrapped_tensor(leaf)  # inside of torch.func
    ]

"""Names the tensors that the user's code makes, alike in a dry run and on every stage.

A stage runs all of the user's code but for modules that it skips. So what the code calls
outside of these has the same names on every stage: the section, the function, and how often
it was called in that section before. Modules that stages run whole or skip are named
themselves, and what happens inside of them is not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

Take = Callable[[str, torch.Tensor], torch.Tensor]
"""Given a tensor and its name: returns what the user's code gets in its place."""


_OPERATORS = frozenset(["add_", "sub_", "mul_", "div_"])
"""What torch calls ``+=`` and the like, after which the user's variable is their result: that need
not be the tensor that they were given."""


class Naming(TorchFunctionMode):
    """Names what calls of torch's functions return while it is entered.

    Args:
        take: Told each tensor and its name.
        section: Returns the section that runs.
        to_change: Given a tensor that an operator such as ``+=`` is to change: returns the one
            that it changes, and that the user's code has from then on.
        before: Told the arguments of every call, named or not.
        after: Told the result of every call.
    """

    def __init__(
        self,
        take: Take,
        section: Callable[[], int],
        to_change: Callable[[torch.Tensor], torch.Tensor],
        before: Callable[[Any], None] = lambda _: None,
        after: Callable[[Any], None] = lambda _: None,
    ) -> None:
        super().__init__()
        self._take, self._section, self._to_change = take, section, to_change
        self._before, self._after = before, after
        self._depth = 0
        """Modules around the current call that are named themselves."""
        self.calls: Counter[str] = Counter()
        """That have returned tensors, by section and function."""

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a function of torch's."""
        name = getattr(function, "__name__", "")
        if not self._depth and name in _OPERATORS:
            args = self._to_change(args[0]), *args[1:]
        self._before((args, kwargs))
        result = function(*args, **(kwargs or {}))
        if not self._depth:
            result = self.named(name, result)
        self._after(result)
        return result

    @property
    def is_inside(self) -> bool:
        """Whether calls have no names now."""
        return self._depth > 0

    @contextmanager
    def again(self, calls: Counter[str]) -> Iterator[None]:
        """Name calls inside as they were named after those given."""
        self.calls = calls.copy()
        with self:
            yield

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Name no calls inside."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def named(self, what: str, result: Any) -> Any:
        """Return what the user's code gets in place of the result of a call.

        Args:
            what: The function or module.
            result: Any pytree.
        """
        if self._depth:
            return result
        leaves, structure = tree_flatten(result)
        if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            return result
        call = f"{self._section()}:{what}"
        number = self.calls[call]
        self.calls[call] += 1
        name = f"{call}#{number}"
        with self.inside():
            taken = [
                self._take(leaf_name(name, index), leaf) if isinstance(leaf, torch.Tensor) else leaf
                for index, leaf in enumerate(leaves)
            ]
        return tree_unflatten(taken, structure)


def leaf_name(name: str, index: int) -> str:
    """Return the name of one tensor among those that a call returns under ``name``."""
    return f"{name}[{index}]" if index else name


def is_call(name: str) -> bool:
    """Return whether a name is not that of what a block returns which ends a section."""
    return ":" in name

"""Reads YAML 1.2 with its core schema, and nothing that is not plain data.

ruamel.yaml parses; which scalar is a number is decided here, by the tables of the core
schema (YAML 1.2.2, section 10.3.2): ``1:30`` and ``on`` are text, and ``010`` is ten, unlike
in YAML 1.1. Digits may be grouped, ``10_000``, as in TOML.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode

from spottrain.errors import ConfigError, one_line

Lines = Mapping[tuple[int | str, ...], int]
"""The line of each value, by the keys and indices that lead to it; the first is 1."""
NO_LINES: Lines = {}
NOT_IN_FILE = 0
"""Instead of a line: the value is given beside the file, on the command line or in a call."""
AS_WRITTEN = ("env",)
"""The mapping whose numbers are texts: ``3.10`` is a version there, and ``007`` a name."""
MAX_ALIASED = 100_000
"""Characters that aliases may add to a document in all. A page of aliases of aliases can
stand for more than any memory holds."""
_NULL = re.compile(r"null|Null|NULL|~|")
_TRUE, _FALSE = re.compile(r"true|True|TRUE"), re.compile(r"false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+(_[0-9]+)*")
_OCTAL, _HEX = re.compile(r"0o[0-7]+"), re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(_[0-9]+)*(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INFINITE = re.compile(r"[-+]?\.(inf|Inf|INF)")
_NAN = re.compile(r"\.(nan|NaN|NAN)")


def read_yaml(text: str, where: tuple[int | str, ...] = ()) -> tuple[Any, Lines]:
    """Return the value of a document, and the lines of its parts.

    The keys of mappings are texts, as they are written. ``<<`` merges mappings.

    Args:
        text: The document.
        where: The keys that lead to it, if it is a part of a job file.

    Raises:
        ConfigError: It is not YAML, gives a key twice, has tags, or its aliases stand for
            more than ``MAX_ALIASED``; begins with the line.
    """
    yaml = YAML(typ="safe", pure=True)
    yaml.composer.warn_double_anchors = False  # YAML 1.2 allows them
    try:
        node = yaml.compose(text)
        if node is None:
            return None, NO_LINES
        _check_aliases(node)
        lines: dict[tuple[int | str, ...], int] = {}
        return _value(node, where, lines), lines
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = "" if mark is None else f"line {mark.line + 1}: "
        what = ", ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{at}{what}; fix the file") from error
    except YAMLError as error:
        raise ConfigError(f"{one_line(error)}; fix the file") from error
    except RecursionError as error:
        raise ConfigError("lists and mappings are nested too deeply; fix the file") from error


def _check_aliases(root: Node) -> None:
    """Check how much aliases stand for, without writing it out: each node is looked at once.

    Raises:
        ConfigError: For too much.
        RecursionError: For itself.
    """
    sizes: dict[int, int] = {}
    written = 0

    def size_of(node: Node) -> int:
        """Return the characters of a node, and one for each node in it."""
        nonlocal written
        if (known := sizes.get(id(node))) is not None:
            return known
        own = 1 + (len(node.value) if isinstance(node, ScalarNode) else 0)
        written += own
        parts = chain.from_iterable(node.value) if isinstance(node, MappingNode) else node.value
        total = own if isinstance(node, ScalarNode) else own + sum(map(size_of, parts))
        sizes[id(node)] = total
        if total > written + MAX_ALIASED:
            raise ConfigError(
                f"line {_line(node)}: aliases stand for more than {MAX_ALIASED:,} characters; "
                "write less with them"
            )
        return total

    size_of(root)


def _value(
    node: Node, where: tuple[int | str, ...], lines: dict[tuple[int | str, ...], int]
) -> Any:
    """Return the value of a node, and enter the lines of its parts into ``lines``."""
    if node.ctag.handles is not None:
        raise ConfigError(
            f"line {_line(node)}: the tag {node.tag} is not supported; remove it, and put "
            "text that looks like a number in quotes"
        )
    if isinstance(node, ScalarNode):
        value = _scalar(node)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return node.value if is_number and where[:1] == AS_WRITTEN else value
    if isinstance(node, MappingNode):
        return _mapping(node, where, lines)
    values = []
    for index, item in enumerate(node.value):
        lines[*where, index] = _line(item)
        values.append(_value(item, (*where, index), lines))
    return values


def _scalar(node: ScalarNode) -> Any:
    text: str = node.value
    if node.style is not None:  # in quotes, or a block
        return text
    if _NULL.fullmatch(text):
        return None
    if _TRUE.fullmatch(text):
        return True
    if _FALSE.fullmatch(text):
        return False
    try:
        if _INT.fullmatch(text):
            return int(text)
        if _OCTAL.fullmatch(text) or _HEX.fullmatch(text):
            return int(text, 0)
    except ValueError as error:  # more digits than Python reads
        reason = str(error).partition("; use sys.")[0]
        raise ConfigError(f"line {_line(node)}: {reason}; fix the file") from error
    if _FLOAT.fullmatch(text):
        return float(text)
    if _INFINITE.fullmatch(text):
        return float(text.replace(".", ""))
    return math.nan if _NAN.fullmatch(text) else text


def _mapping(
    node: MappingNode,
    where: tuple[int | str, ...],
    lines: dict[tuple[int | str, ...], int],
) -> dict[str, Any]:
    own: dict[str, Any] = {}
    merged: dict[str, Any] = {}
    # Merged mappings first, so that the lines of their keys give way.
    for key, value in sorted(node.value, key=lambda item: not _merges(item[0])):
        if not isinstance(key, ScalarNode):
            raise ConfigError(f"line {_line(key)}: a key is a list or mapping; use a text")
        if _merges(key):
            for mapping in _merged(value):
                merged = {**_mapping(mapping, where, lines), **merged}
            continue
        if key.value in own:
            raise ConfigError(f"line {_line(key)}: {key.value}: is given twice; remove one")
        lines[*where, key.value] = _line(key)
        own[key.value] = _value(value, (*where, key.value), lines)
    return {**merged, **own}


def _merges(key: Node) -> bool:
    return isinstance(key, ScalarNode) and key.value == "<<" and key.style is None


def _merged(node: Node) -> Iterator[MappingNode]:
    """Yield the mappings that ``<<`` names: one, or a list of them."""
    for one in [node] if isinstance(node, MappingNode) else node.value:
        if not isinstance(one, MappingNode):
            raise ConfigError(
                f"line {_line(node)}: << merges mappings only: use aliases of mappings"
            )
        yield one


def _line(node: Node) -> int:
    line: int = node.start_mark.line
    return line + 1

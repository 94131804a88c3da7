"""Reads job files and explains in one line what is wrong with them."""

from __future__ import annotations

import difflib
import itertools
import json
import math
import re
import tomllib
from collections.abc import Hashable, Iterable, Iterator
from datetime import date
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from spottrain.errors import ConfigError

MAX_CHARACTERS = 1_000_000
"""Of a job file whose aliases are written out. Nine levels of nine aliases each are some
hundred characters, and would be 387 million values."""
_PARSER_ERRORS = (
    *(tomllib.TOMLDecodeError, yaml.YAMLError, RecursionError),
    # PyYAML lets through what int() and its own tables raise, as for !!bool x.
    *(ValueError, LookupError, TypeError),
)


class _Loader(yaml.SafeLoader):
    """A safe loader that refuses a key given twice, and reads 1e9 as a number."""

    def get_single_data(self) -> Any:
        """Return the document, unless aliases make it grow beyond all bounds."""
        node = self.get_single_node()
        if node is None:
            return None
        if _characters(node, {}) > MAX_CHARACTERS:
            raise ConfigError(
                f"must have at most {MAX_CHARACTERS:,} characters once its aliases are "
                "written out; use fewer aliases"
            )
        return self.construct_document(node)

    def construct_time(self, node: yaml.ScalarNode) -> Any:
        """Return a date or time; the text of one that does not exist, to be refused."""
        try:
            return self.construct_yaml_timestamp(node)
        except (ValueError, AttributeError, OverflowError):
            return node.value

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue  # refused by the base class
            if key_node.value in seen:
                line = key_node.start_mark.line + 1
                raise ConfigError(
                    f"line {line}: {key_node.value}: is given twice; remove one"
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


_Loader.add_constructor("tag:yaml.org,2002:timestamp", _Loader.construct_time)
# YAML 1.1, which the base class reads, needs a dot in every such number; YAML 1.2 and
# people do not.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+"),
    list("-+0123456789"),
)


def _characters(node: yaml.Node, known: dict[int, float]) -> float:
    """Return the size of a node with all aliases written out, as every use counts.

    Args:
        node: Of a document; infinite if it holds itself.
        known: Sizes by the ids of nodes.
    """
    if isinstance(node, yaml.ScalarNode):
        return 1 + len(node.value)
    if id(node) not in known:
        known[id(node)] = math.inf  # for its parts, should they hold it
        children: Iterable[yaml.Node] = node.value
        if isinstance(node, yaml.MappingNode):
            children = itertools.chain.from_iterable(node.value)
        known[id(node)] = 1 + sum(_characters(child, known) for child in children)
    return known[id(node)]


def _reason(error: Exception) -> str:
    """Return what is wrong with a file in one line."""
    if isinstance(error, RecursionError):
        return "lists and mappings are nested too deeply"
    return " ".join(str(error).partition("; use sys.")[0].split())


def read_value(text: str) -> Any:
    """Return one plain value as a job file would have it.

    Raises:
        ConfigError: It is not YAML.
    """
    try:
        return yaml.load(text, _Loader)
    except _PARSER_ERRORS as error:
        raise ConfigError(f"must be a plain value: got {text!r}") from error


def read_job_file(path: Path) -> Any:
    """Return the plain data in a YAML or TOML file.

    Raises:
        ConfigError: The file does not exist, is not readable, or neither YAML nor TOML.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such job file; check the path") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    try:
        if path.suffix == ".toml":
            return tomllib.loads(text)
        if path.suffix in (".yaml", ".yml"):
            return yaml.load(text, _Loader)
    except ConfigError as error:
        raise ConfigError(f"{path.name}: {error}") from error
    except _PARSER_ERRORS as error:
        raise ConfigError(f"{path.name}: {_reason(error)}; fix the file") from error
    raise ConfigError(f"{path.name}: must end in .yaml, .yml or .toml; rename it")


def to_json(data: Any, source: str) -> str:
    """Return parsed YAML or TOML as JSON, dates as ISO 8601.

    Raises:
        ConfigError: ``data`` is not a mapping or not valid JSON.
    """
    if not isinstance(data, dict):
        got = "nothing" if data is None else f"a {type(data).__name__}"
        raise ConfigError(f"{source}: must contain keys and values: got {got}")
    try:
        return json.dumps(data, default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{source}: {_reason(error)}; use plain keys and values"
        ) from error


def _plain(value: Any) -> str:
    if isinstance(value, date):
        return value.isoformat()
    raise TypeError(f"{value!r} is not a text, number, list or mapping")


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """Return one line: the first thing wrong, and how many others there are.

    Unknown keys come first: a misspelt key is also reported as a missing one.
    """
    details = sorted(error.errors(), key=lambda d: d["type"] != "extra_forbidden")
    first = _explain_one(details[0], model)
    more = len(details) - 1
    return first if not more else f"{first} (and {more} more)"


def _explain_one(detail: ErrorDetails, model: type[BaseModel]) -> str:
    where = _dotted(detail["loc"])
    match detail["type"]:
        case "extra_forbidden":
            return f"{where}: unknown key{_suggest(detail['loc'], model)}"
        case "missing":
            return f"{where}: is missing; add it"
        case "value_error":
            message = str(detail["ctx"]["error"])
        case "timezone_aware":
            message = "must have a time zone, such as +00:00 at its end for UTC"
        case kind if kind.startswith(("datetime_", "date_")):
            message = "must be a time, such as 2030-01-31T18:00:00+00:00"
        case _:
            message = detail["msg"].replace("Input should", "must", 1)
    got = detail["input"]
    shown = "" if isinstance(got, dict | list) or "got" in message else f": got {got!r}"
    return f"{where}: {message}{shown}" if where else f"{message}{shown}"


def _dotted(loc: tuple[int | str, ...]) -> str:
    text = ""
    for part in loc:
        plain = isinstance(part, str) and part.isprintable()
        text += f".{part}" if plain else f"[{part!r}]"
    return text.removeprefix(".")


def _suggest(loc: tuple[int | str, ...], model: type[BaseModel]) -> str:
    """Return a hint with the nearest known key: in the same section, then anywhere."""
    here: type[BaseModel] | None = model
    for part in loc[:-1]:
        # Parts that are not fields are keys of a mapping, chosen by the user.
        if here is not None and part in here.model_fields:
            here = _model_in(here.model_fields[str(part)].annotation)
    wrong = str(loc[-1])
    known = list(here.model_fields) if here else []
    if near := difflib.get_close_matches(wrong, known, n=1):
        return f"; did you mean {near[0]}?"
    everywhere = {path.rpartition(".")[2]: path for path in key_paths(model)}
    if near := difflib.get_close_matches(wrong, everywhere, n=1, cutoff=0.8):
        return f"; did you mean {everywhere[near[0]]}?"
    return f"; known keys are {', '.join(known)}"


def key_paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted paths of all keys of a job file; a list counts as one item."""
    for name, field in model.model_fields.items():
        yield prefix + name
        if inner := _model_in(field.annotation):
            yield from key_paths(inner, f"{prefix}{name}.")


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model inside ``X | None`` or ``tuple[X, ...]``, if there is one."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_model_in(part) for part in get_args(annotation))
    return next((model for model in found if model is not None), None)

"""Reads job files and explains in one line what is wrong with them."""

from __future__ import annotations

import json
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from datetime import date, time
from itertools import takewhile
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from spottrain.errors import ConfigError, one_line
from spottrain.suggest import near
from spottrain.varuna_manager.config.yaml_core import NO_LINES, NOT_IN_FILE, Lines, read_yaml

ModelT = TypeVar("ModelT", bound=BaseModel)
_VARIABLE = re.compile(r"\$(?:[A-Za-z_]|\{)")
_EXPANDED_LATER = {("setup",), ("notify", "command"), ("notify", "webhook"), ("notify", "apprise")}
"""Keys whose variables a shell expands, or the manager."""
_UNITS = {
    r".*(?<!_per)_s": "seconds, such as 90",
    r"(.*_)?hours": "hours, such as 1.5",
}
"""Of durations, by their keys."""
_ON, _OFF = ("yes", "on", "y"), ("no", "off", "n")
"""What YAML 1.1 reads as true and false, and YAML 1.2 as text."""
_NEAR = ((0, 0.8), (1, 0.8), (2, 1.0), (0, 0.6))
"""How many sections away a key may be that is suggested in place of an unknown one, and how alike
it must be at least; the first that are found count."""
_MOST_KEYS = 3
"""Of equally near ones: more say less than the keys of the section."""


def read_text(path: Path, what: str = "file") -> str:
    """Return the text of a file that a person gives, without a byte order mark.

    Args:
        what: It is, for errors.

    Raises:
        ConfigError: It does not exist, cannot be read or is not UTF-8; one line.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such {what}; check the path") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}: is not UTF-8: got byte 0x{data[error.start]:02x} in line {line}; "
            "save it as UTF-8"
        ) from error


def read_value(text: str, key: str = "") -> Any:
    """Return one plain value as a job file would have it, for a key given by its dotted path.

    Raises:
        ConfigError: It is not YAML.
    """
    try:
        return read_yaml(text, (*key.split("."),))[0]
    except ConfigError as error:
        raise ConfigError(f"must be a plain value: got {text!r}") from error


def read_job_file(path: Path) -> tuple[Any, Lines]:
    """Return the plain data in a YAML or TOML file, and in YAML their lines.

    Raises:
        ConfigError: The file does not exist, is not readable, or neither YAML nor TOML.
    """
    text = read_text(path, "job file")
    if path.suffix in (".yaml", ".yml"):
        try:
            return read_yaml(text)
        except ConfigError as error:
            raise ConfigError(f"{path.name}: {error}") from error
    if path.suffix != ".toml":
        raise ConfigError(f"{path.name}: must end in .yaml, .yml or .toml; rename it")
    try:
        return tomllib.loads(text), NO_LINES
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path.name}: {_reason(error)}; fix the file") from error


def _reason(error: Exception) -> str:
    """Return what is wrong with a file in one line."""
    if isinstance(error, RecursionError):
        return "lists and mappings are nested too deeply"
    return one_line(str(error).partition("; use sys.")[0])


def validate(
    model: type[ModelT],
    data: Any,
    source: str,
    lines: Lines = NO_LINES,
    base: Path | None = None,
) -> ModelT:
    """Return what parsed data say, as a job file or a part of one.

    Args:
        model: Its keys.
        data: The parsed YAML or TOML.
        source: Name of the file, for errors.
        lines: Of the data.
        base: Folder that paths are relative to; None: they stay as they are.

    Raises:
        ConfigError: In one line, the first error and the number of others.
    """
    text = _to_json(data, source, lines)
    try:
        return model.model_validate_json(text, context=base)
    except ValidationError as error:
        raise ConfigError(f"{source}: {explain(error, model, lines)}") from error


def _to_json(data: Any, source: str, lines: Lines) -> str:
    """Return parsed YAML or TOML as JSON, dates as ISO 8601."""
    if not isinstance(data, dict):
        got = "nothing" if data is None else f"a {type(data).__name__}"
        raise ConfigError(f"{source}: must contain keys and values: got {got}")
    try:
        _check_texts(data, source, lines)
        return json.dumps(data, default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: {_reason(error)}; use plain keys and values") from error


def _plain(value: Any) -> str:
    if isinstance(value, date | time):
        return value.isoformat()
    raise TypeError(f"{value!r} is not a text, number, list or mapping")


def is_text(value: str) -> bool:
    """Return whether a text can be written as UTF-8: it holds no half of a character."""
    return value.encode(errors="ignore").decode() == value


def _check_texts(data: Any, source: str, lines: Lines, where: tuple[int | str, ...] = ()) -> None:
    """Refuse what is no text, and ``$NAME`` and ``${NAME}`` where nothing expands them.

    A value that is stored as it is now must not depend on whose environment reads it.
    """
    if isinstance(data, dict):
        for key, value in data.items():
            _check_texts(str(key), source, lines, (*where, key))
            _check_texts(value, source, lines, (*where, key))
    elif isinstance(data, list):
        for index, value in enumerate(data):
            _check_texts(value, source, lines, (*where, index))
    elif isinstance(data, str):
        key, place = f"{source}: {_dotted(where)}", at_line(where, lines)
        if not is_text(data):
            raise ConfigError(f"{key}: must be Unicode text: got {data!a}; correct it{place}")
        later = where[:1] in _EXPANDED_LATER or where[:2] in _EXPANDED_LATER
        if _VARIABLE.search(data) and not later:
            secret = "; or name the variable under secrets" * (where[:1] == ("env",))
            raise ConfigError(
                f"{key}: variables are not expanded: got {data!r}; write the value "
                f"itself{secret}{place}"
            )


def explain(error: ValidationError, model: type[BaseModel], lines: Lines = NO_LINES) -> str:
    """Return one line: the first thing wrong, and how many others there are.

    Unknown keys come first: a misspelt key is also reported as a missing one.
    """
    details = sorted(error.errors(), key=lambda d: d["type"] != "extra_forbidden")
    (first, *_), loc = details, details[0]["loc"]
    same = [first]
    if _is_choice(loc[:-1], model):  # each of its types has an error, with its name at the end
        loc = loc[:-1]
        same = [detail for detail in details if detail["loc"][:-1] == loc]
    if first["type"] == "extra_forbidden":
        text = f"unknown key{_suggest(loc, model)}"
    else:
        text = " or ".join(dict.fromkeys(map(_message, same))).replace(" or must be ", " or ")
        got = first["input"]
        if first["type"] != "missing" and not isinstance(got, dict | list) and "got" not in text:
            text += f": got {got!r}"
    where, more = _dotted(loc), len(details) - len(same)
    text = f"{where}: {text}{at_line(loc, lines)}" if where else f"{text}{at_line(loc, lines)}"
    return f"{text} (and {more} more)" if more else text


def _message(detail: ErrorDetails) -> str:
    got = str(detail["input"]).lower()
    match detail["type"]:
        case "missing":
            return "is missing; add it"
        case "value_error":
            return str(detail["ctx"]["error"])
        case "timezone_aware":
            return "must have a time zone, such as +00:00 at its end for UTC"
        case kind if kind.startswith(("datetime_", "date_")):
            return "must be a time, such as 2030-01-31T18:00:00+00:00"
        case "bool_type" if got in (*_ON, *_OFF):
            return f"must be {'true' if got in _ON else 'false'}"
        case "int_type" | "float_type" if unit := _unit(detail["loc"]):
            return f"must be a number of {unit}"
    return detail["msg"].replace("Input should", "must", 1)


def _unit(loc: tuple[int | str, ...]) -> str:
    """Return the unit of a duration, by its key; empty for anything else."""
    key = str(loc[-1])
    return next((unit for name, unit in _UNITS.items() if re.fullmatch(name, key)), "")


def at_line(loc: tuple[int | str, ...], lines: Lines) -> str:
    """Return where the value is that ``loc`` leads to, or what holds it: `` (line 3)``,
    `` (not in the file)``, or nothing if that is not known."""
    for length in range(len(loc), 0, -1):
        if (line := lines.get(loc[:length])) is not None:
            return " (not in the file)" if line == NOT_IN_FILE else f" (line {line})"
    return ""


def _dotted(loc: tuple[int | str, ...]) -> str:
    text = ""
    for part in loc:
        plain = isinstance(part, str) and part.isprintable()
        text += f".{part}" if plain else f"[{part!r}]"
    return text.removeprefix(".")


def _suggest(loc: tuple[int | str, ...], model: type[BaseModel]) -> str:
    """Return a hint with known keys that are near in place and spelling, else with all of the
    section."""
    here, section = _section_at(loc[:-1], model)
    at = defaultdict[int, list[str]](list)
    for path in key_paths(model):
        place = path.split(".")[:-1]
        both = zip(place, section, strict=False)
        shared = sum(1 for _ in takewhile(lambda parts: parts[0] == parts[1], both))
        at[len(place) + len(section) - 2 * shared].append(path)
    for steps, cutoff in _NEAR:
        names = near(str(loc[-1]), map(_key_of, at[steps]), cutoff)
        keys = [path if steps else _key_of(path) for path in at[steps] if _key_of(path) in names]
        if len(keys) > _MOST_KEYS:
            break
        if keys:
            return f"; did you mean {' or '.join(keys)}?"
    return f"; known keys are {', '.join(here.model_fields)}"


def _section_at(
    loc: tuple[int | str, ...], model: type[BaseModel]
) -> tuple[type[BaseModel], list[str]]:
    """Return the innermost section that ``loc`` leads into, and the keys of sections on its way."""
    here, section = model, list[str]()
    for part in loc:
        # Other parts are the user's own keys of a mapping, or places in a list.
        field = here.model_fields.get(str(part))
        if field is not None and (inner := _model_in(field.annotation)):
            here, section = inner, [*section, str(part)]
    return here, section


def _is_choice(loc: tuple[int | str, ...], model: type[BaseModel]) -> bool:
    """Return whether ``loc`` leads to a value of one of several types, but no section."""
    here, section = _section_at(loc, model)
    field = here.model_fields.get(str(loc[-1])) if loc and str(loc[-1]) not in section else None
    if field is None or get_origin(field.annotation) not in (Union, UnionType):
        return False
    return sum(one is not NoneType for one in get_args(field.annotation)) > 1


def _key_of(path: str) -> str:
    return path.rpartition(".")[2]


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

"""Values of the command line, or of a call in Python, that replace those of a job file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any

from spottrain.errors import ConfigError
from spottrain.varuna_manager.config.files import read_value
from spottrain.varuna_manager.config.yaml_core import NOT_IN_FILE, Lines

Overrides = Mapping[str, Any]
"""Values by the dotted path of their key, such as ``budget.max_usd``."""
NO_OVERRIDES: Overrides = {}


def read_overrides(
    settings: Iterable[str],
    env: Iterable[str] = (),
    name: str | None = None,
    steps: int | None = None,
) -> dict[str, Any]:
    """Return what options of the command line say, as yet unchecked.

    Args:
        settings: ``KEY=VALUE``, with the value as a job file would have it.
        env: ``NAME=VALUE`` of environment variables, whose values are text.
        name: Of the job.
        steps: Of the job.

    Raises:
        ConfigError: An option has another form, or a key is given twice.
    """
    found: dict[str, Any] = {}
    given = [("--set", *split(text, "--set", "budget.max_usd=60")) for text in settings]
    given += [("--env", *split(text, "--env", "LR=0.001")) for text in env]
    pairs = [
        (f"env.{key}", value) if option == "--env" else (key, value_of(key, value))
        for option, key, value in given
    ]
    pairs += [
        (key, value) for key, value in (("name", name), ("steps", steps)) if value is not None
    ]
    for key, value in pairs:
        if key in found:
            raise ConfigError(f"{key}: is given twice on the command line; remove one")
        found[key] = value
    return found


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by the dotted paths of their keys.

    Args:
        settings: Values of a job file, sections as mappings.
        prefix: Of all paths.

    Raises:
        ConfigError: A key is no text.
    """
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if not isinstance(key, str):
            raise ConfigError(f"{prefix or 'settings'}: keys must be text: got {key!r}")
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = str(value) if isinstance(value, PurePath) else value
    return found


def split(text: str, option: str, example: str) -> tuple[str, str]:
    """Return the two sides of an option such as ``KEY=VALUE``.

    Raises:
        ConfigError: It has no ``=``, or nothing before it.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"{option}: must be KEY=VALUE, such as {example}: got {text!r}")
    return key.strip(), value


def value_of(key: str, text: str) -> Any:
    """Return a value as a job file would have it.

    Raises:
        ConfigError: It is not YAML.
    """
    try:
        return read_value(text, key)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error


def overridden(data: Any, lines: Lines, overrides: Overrides, source: str) -> tuple[Any, Lines]:
    """Return a file's plain data and their lines with values replaced.

    Args:
        data: As read; not changed.
        lines: Of the data; a value that replaces one has ``NOT_IN_FILE``.
        overrides: The values.
        source: Name of the file, for errors.

    Raises:
        ConfigError: A key leads into a value that has no keys.
    """
    if not isinstance(data, dict):
        return data, lines  # refused as any such file
    for path, value in overrides.items():
        keys = tuple(path.split("."))
        data = _replaced(data, keys, value, f"{source}: {path}")
        kept = {loc: line for loc, line in lines.items() if loc[: len(keys)] != keys}
        lines = {**kept, keys: NOT_IN_FILE}
    return data, lines


def _replaced(data: Any, keys: tuple[str, ...], value: Any, place: str) -> Any:
    """Return a mapping with one value in it replaced, or added."""
    if not keys:
        return value
    if not isinstance(data, dict | None):
        raise ConfigError(f"{place}: leads into a value that has no keys; set that as a whole")
    first, *rest = keys
    inner = (data or {}).get(first)
    return {**(data or {}), first: _replaced(inner, tuple(rest), value, place)}

"""``python -m spottrain.pipeline.weights.warm_start``: given weights as a checkpoint.

Runs in a child of ``launch``, before anything is rented. Weights that fit become the
checkpoint of step 0, from which the job starts as it resumes. The optimizer's state is
not taken over. Only safetensors files are read: other formats may run code.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from spottrain.codec import decode
from spottrain.errors import ConfigError
from spottrain.manifest import parse_name, read_manifest
from spottrain.pipeline.model.entrypoint import user_code
from spottrain.pipeline.model.inspect import answer
from spottrain.pipeline.model.libraries import pretrained_in
from spottrain.pipeline.model.loaded import LoadedJob, load
from spottrain.pipeline.model.sections import helper_names
from spottrain.pipeline.model.skeleton import build_skeleton, first_values
from spottrain.pipeline.weights.export import gather_parameters
from spottrain.pipeline.weights.first import FirstCheckpoint, FirstFiles
from spottrain.storage.open import open_store
from spottrain.wire.messages import JobSpec
from spottrain.wire.model import FirstWeights

_SHOWN = 3
"""Names in an error, of each kind of misfit."""

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Fit:
    """How given tensors fit a model."""

    taken: dict[str, str] = field(default_factory=dict)
    """Given name by the first name of the parameter that gets its value."""
    misfits: dict[str, list[str]] = field(default_factory=dict)
    """Lines by kind: missing, unexpected, other."""

    def add(self, kind: str, what: str) -> None:
        """Note that something does not fit."""
        self.misfits.setdefault(kind, []).append(what)

    def lines(self) -> Iterator[str]:
        """Yield a line for each kind of misfit."""
        for kind, found in self.misfits.items():
            more = len(found) - _SHOWN
            shown = ", ".join(found[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
            yield f"{kind} {shown}"


def fit(model: nn.Module, given: Tensors, running: Collection[str] = ()) -> Fit:
    """Compare given tensors with a model's parameters and buffers, by name.

    A tied parameter may come under any of its names, and under several if they agree. One of a
    helper that is not given begins as that of the model itself with the same name and shape, as
    a reference does.
    Buffers that no forward changes stay as the model makes them; given ones must be equal.

    Args:
        model: From ``build_skeleton``.
        given: Tensors by the names of ``state_dict``.
        running: Buffers that forwards change.
    """
    found = Fit()
    all_names: dict[str, list[str]] = {}
    first_names = {id(p): name for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        all_names.setdefault(first_names[id(parameter)], []).append(name)
    helpers = helper_names(model)
    for first, names in all_names.items():
        wanted = model.get_parameter(first)
        present = [name for name in names if name in given]
        if not present and (like := _like_model(first, helpers)) in given:
            present = [like] if given[like].shape == wanted.shape else []
        if not present:
            found.add("missing", first)
            continue
        values = [given[name] for name in present]
        if (wrong := _misfit(present[0], values[0], wanted)) is not None:
            found.add(*wrong)
        elif any(not torch.equal(values[0], value) for value in values[1:]):
            found.add("tied in the model, but given with different values:", " and ".join(present))
        else:
            found.taken[first] = present[0]
    for name in sorted(given.keys() & running):
        shapes = tuple(model.get_buffer(name).shape), tuple(given[name].shape)
        if shapes[0] == shapes[1]:
            found.taken[name] = name
        else:
            found.add("another shape:", f"{name} must be {shapes[0]}, got {shapes[1]}")
    known = {n for ns in all_names.values() for n in ns}
    _compare_others(found, model, given, known.union(running))
    return found


def _like_model(name: str, helpers: Sequence[str]) -> str:
    """Return the name that a helper's parameter has in the helper; empty: it is of none."""
    own = (name.removeprefix(f"{h}.module.") for h in helpers if name.startswith(f"{h}.module."))
    return next(own, "")


def _misfit(name: str, value: torch.Tensor, wanted: torch.Tensor) -> tuple[str, str] | None:
    """Return why a tensor cannot be a parameter's value: kind and name."""
    shapes = tuple(wanted.shape), tuple(value.shape)
    if shapes[0] != shapes[1]:
        return "another shape:", f"{name} must be {shapes[0]}, got {shapes[1]}"
    if value.is_floating_point() != wanted.is_floating_point():
        types = f"{name} must be {wanted.dtype}, got {value.dtype}"
        return "another type:", types.replace("torch.", "")
    return None


def _compare_others(found: Fit, model: nn.Module, given: Tensors, parameters: set[str]) -> None:
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for name in given:
        if name in parameters:
            continue
        if (own := buffers.get(name)) is None:
            found.add("unexpected", name)
        elif not torch.equal(own, given[name].to(own.dtype)):
            found.add("a buffer to which model() gives another value:", name)


def take(
    model: nn.Module,
    given: Tensors,
    *,
    strict: bool,
    source: str,
    running: Collection[str] = (),
) -> tuple[Fit, list[str]]:
    """Return what is taken of given tensors, and remarks for the user.

    Raises:
        ConfigError: Something does not fit, or, unless ``strict``, nothing fits.
    """
    found = fit(model, given, running)
    lines = list(found.lines())
    if lines and strict:
        raise ConfigError(
            f"init_from: {source} does not fit the model: {'; '.join(lines)}; fix the "
            "model, or set init_from.strict to false to take what fits"
        )
    if not found.taken:
        raise ConfigError(f"init_from: nothing of {source} fits the model: {'; '.join(lines)}")
    parameters = {n: name for n, name in found.taken.items() if n not in running}
    for first, name in parameters.items():
        types = given[name].dtype, model.get_parameter(first).dtype
        if types[0] is not types[1]:
            lines.append(f"converted from {types[0]} to {types[1]}: {first}, maybe more")
            break
    return found, [line.replace("torch.", "") for line in lines]


def read_files(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file, or of all in a folder, mapped.

    Raises:
        ConfigError: There are none, a file is damaged, or two hold the same name.
    """
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or files[0].suffix != ".safetensors":
        raise ConfigError(
            f"init_from: {path} must be a .safetensors file, or a folder of them; "
            "convert other formats first (see docs/export.md)"
        )
    tensors: dict[str, torch.Tensor] = {}
    for one in files:
        try:
            with safe_open(one, framework="pt") as file:
                names = list(file.keys())
                found = {name: file.get_tensor(name) for name in names}
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"init_from: {one} cannot be read: {error}") from error
        if twice := sorted(set(found) & set(tensors)):
            raise ConfigError(f"init_from: {twice[0]} is in two files of {path}; name one file")
        tensors |= found
    return tensors


def read_pretrained(model: nn.Module, path: Path) -> dict[str, torch.Tensor] | None:
    """Return the tensors that a transformers model's own ``from_pretrained`` reads.

    It knows older names, prefixes and layouts, which the files alone do not tell.

    Args:
        model: The user's, with the transformers model in it.
        path: A folder with ``config.json``.

    Returns:
        Tensors by the names of the user's model; ``None`` if it holds no such model.

    Raises:
        UserCodeError: transformers cannot read the folder.
    """
    if (found := pretrained_in(model)) is None:
        return None
    prefix, inner = found
    with user_code("from_pretrained"):
        read, info = type(inner).from_pretrained(
            path,
            config=inner.config,
            dtype=inner.dtype,
            local_files_only=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    state: dict[str, torch.Tensor] = read.state_dict()
    for name in (*info["missing_keys"], *(key[0] for key in info["mismatched_keys"])):
        state.pop(name, None)
    state |= {name: torch.empty(shape) for name, shape, _ in info["mismatched_keys"]}
    state |= {name: torch.empty(0) for name in info["unexpected_keys"]}
    return {f"{prefix}{name}": value for name, value in state.items()}


def begin(
    loaded: LoadedJob, given: Tensors, *, strict: bool, source: str, target: str
) -> FirstWeights:
    """Check given weights, and write them as the job's checkpoint of step 0.

    Args:
        loaded: The job.
        given: Tensors by name.
        strict: See ``InitFromConfig``.
        source: Where they are from, for errors.
        target: Folder or URL of the checkpoints; empty: they are only checked.

    Raises:
        ConfigError: They do not fit.
        CheckpointError, StorageError: The checkpoint cannot be written.
    """
    model = build_skeleton(loaded.job.model)
    running = loaded.layout.running
    found, remarks = take(model, given, strict=strict, source=source, running=running)
    if not target:
        return FirstWeights(
            checkpoint="", sha256="", num_taken=len(found.taken), remarks=tuple(remarks)
        )
    values = {first: given[name] for first, name in found.taken.items()}
    if lacking := [name for name in loaded.layout.specs if name not in values]:
        values |= next(first_values(loaded.job, loaded.spec.seed, [lacking]))
    for name, tensor in loaded.layout.specs.items():
        values[name] = values[name].to(tensor.dtype)
    digest = _digest(values)
    spec = dataclasses.replace(loaded.spec, init_from=digest)
    # Data sets of this machine may be samples.
    mine = dataclasses.replace(loaded, spec=spec, datasets=())
    checkpoint = FirstCheckpoint(open_store(target), mine)
    sections = range(loaded.layout.num_sections)
    files = (checkpoint.write(section, values) for section in sections)
    manifest = checkpoint.complete(sum(files, FirstFiles()))
    return FirstWeights(
        checkpoint=manifest.name,
        sha256=digest,
        num_taken=len(found.taken),
        remarks=tuple(remarks),
    )


def _digest(values: Tensors) -> str:
    """Return the SHA-256 of all names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name, value in sorted(values.items()):
        digest.update(f"{name}\0{value.dtype}\0{tuple(value.shape)}\0".encode())
        flat = value.detach().contiguous().flatten()
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def main(arguments: list[str] | None = None) -> int:
    """Check weights, and write them if a place is given; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m spottrain.pipeline.weights.warm_start")
    parser.add_argument("entrypoint", help="module:function")
    parser.add_argument("workdir", type=Path)
    parser.add_argument("spec", help="JobSpec as JSON")
    parser.add_argument("source", help="checkpoint store, or file or folder of weights")
    parser.add_argument("--checkpoint", help="name of one in the store")
    parser.add_argument("--partial", action="store_true")
    parser.add_argument("--target", default="", help="checkpoint store; else only check")
    chosen = parser.parse_args(arguments)

    def run() -> FirstWeights:
        loaded = load(decode(JobSpec, chosen.spec), chosen.workdir)
        with tempfile.TemporaryDirectory(prefix="spottrain-") as parts:
            given: Tensors | None = None
            source = chosen.source
            if chosen.checkpoint:
                assert parse_name(chosen.checkpoint), "the caller looked it up"
                store = open_store(chosen.source)
                manifest = read_manifest(store, chosen.checkpoint)
                given = gather_parameters(store, manifest, Path(parts))
                source = manifest.name
            elif Path(chosen.source, "config.json").exists():
                model = build_skeleton(loaded.job.model)
                given = read_pretrained(model, Path(chosen.source))
            if given is None:
                given = read_files(Path(chosen.source))
            return begin(
                loaded,
                given,
                strict=not chosen.partial,
                source=source,
                target=chosen.target,
            )

    return answer(run)


if __name__ == "__main__":
    sys.exit(main())

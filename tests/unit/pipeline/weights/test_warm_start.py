"""Given weights become the checkpoint of step 0, or are refused by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.builders import a_spec
from tests.tiers import costly
from torch import nn

os.environ["HF_HUB_OFFLINE"] = "1"  # before the import: nothing is downloaded
import transformers as hf
from tests.integration.tiny_job import Tiny

from spottrain.errors import ConfigError
from spottrain.manifest import config_fingerprint, list_checkpoints, read_manifest
from spottrain.pipeline.model.job import Helper
from spottrain.pipeline.model.loaded import LoadedJob, load
from spottrain.pipeline.model.skeleton import build_skeleton, materialise
from spottrain.pipeline.state.checkpoint import load_section
from spottrain.pipeline.weights.warm_start import (
    begin,
    fit,
    read_files,
    read_pretrained,
    take,
)
from spottrain.storage.open import open_store
from spottrain.wire.model import FirstWeights

pytestmark = pytest.mark.usefixtures("one_thread")

Tensors = dict[str, torch.Tensor]
WORKDIR = Path(__file__).parents[3] / "integration"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.head = nn.Linear(3, 3, bias=False)
        self.head.weight = self.blocks[0].weight  # type: ignore[assignment]
        self.register_buffer("scale", torch.arange(3.0))


def net(**changes: Any) -> Tensors:
    state = {k: torch.ones_like(v) for k, v in Net().state_dict().items()}
    state["scale"] = torch.arange(3.0)
    return {k: v for k, v in (state | changes).items() if v is not None}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"blocks.1.bias": None}, "missing blocks.1.bias"),
        ({"extra": torch.ones(1)}, "unexpected extra"),
        (
            {"blocks.1.bias": torch.ones(4)},
            r"another shape: blocks.1.bias must be \(3,\), got \(4,\)",
        ),
        (
            {"blocks.1.bias": torch.ones(3, dtype=torch.int8)},
            "another type: blocks.1.bias must be float32, got int8",
        ),
        ({"scale": torch.zeros(3)}, "a buffer to which .* another value: scale"),
        (
            {"head.weight": torch.zeros(3, 3)},
            "tied in the model, .*: blocks.0.weight and head.weight",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes: dict[str, Any], reason: str) -> None:
    model = build_skeleton(Net)
    with pytest.raises(
        ConfigError,
        match=f"^init_from: w.safetensors does not fit the model: {reason}; fix the mod",
    ):
        take(model, net(**changes), strict=True, source="w.safetensors")
    found, remarks = take(model, net(**changes), strict=False, source="w.safetensors")
    assert len(remarks) == 1
    assert found.taken


@pytest.mark.parametrize("left", ["head.weight", "blocks.0.weight", "scale"])
def test_one_name_of_a_tied_parameter_and_no_buffer_suffice(left: str) -> None:
    found = fit(build_skeleton(Net), net(**{left: None}))
    assert found.misfits == {}
    assert len(found.taken) == 4


def test_buffers_that_forwards_change_are_taken_unless_they_have_another_shape() -> None:
    model = build_skeleton(Net)
    found = fit(model, net(scale=torch.zeros(3)), {"scale"})
    assert found.misfits == {}
    assert found.taken["scale"] == "scale"

    found = fit(model, net(scale=torch.zeros(2)), {"scale"})
    assert found.misfits == {"another shape:": ["scale must be (3,), got (2,)"]}


def test_a_reference_that_is_not_given_begins_as_the_model_does() -> None:
    def build() -> nn.Module:
        model = Net()
        model.reference = Helper(Net())
        model.teacher = Helper(nn.Sequential(nn.Linear(5, 5)))
        return model

    teacher = {f"teacher.module.0.{n}": v for n, v in nn.Linear(5, 5).state_dict().items()}
    found = fit(build_skeleton(build), net(**teacher))
    assert found.misfits == {}
    assert found.taken["reference.module.blocks.1.bias"] == "blocks.1.bias"
    given = {"reference.module.blocks.1.bias": torch.zeros(3)}
    found = fit(build_skeleton(build), net(**teacher, **given))
    assert found.taken["reference.module.blocks.1.bias"] == "reference.module.blocks.1.bias"
    assert fit(build_skeleton(build), net()).misfits == {"missing": [*teacher]}


def test_all_kinds_of_misfit_are_told_at_once_and_bounded() -> None:
    with pytest.raises(ConfigError) as caught:
        take(build_skeleton(Net), {f"x{k}": torch.ones(1) for k in range(9)}, **WRONG)
    told = str(caught.value)
    assert "missing blocks.0.weight, blocks.0.bias, blocks.1.weight and 1 more" in told
    assert "unexpected x0, x1, x2 and 6 more" in told


WRONG: dict[str, Any] = {"strict": True, "source": "it"}


def test_nothing_that_fits_is_an_error_however_lenient() -> None:
    with pytest.raises(ConfigError, match="nothing of it fits"):
        take(build_skeleton(Net), {"x": torch.ones(1)}, strict=False, source="it")


@costly
@given(st.sets(st.sampled_from([*Net().state_dict(), "a", "b"])))
def test_every_parameter_is_taken_or_missing(names: set[str]) -> None:
    model = build_skeleton(Net)
    found = fit(model, {k: v for k, v in net(a=SOME, b=SOME).items() if k in names})
    missing = found.misfits.get("missing", [])
    assert sorted([*found.taken, *missing]) == sorted(n for n, _ in model.named_parameters())
    assert set(found.misfits.get("unexpected", ())) == names & {"a", "b"}


SOME = torch.ones(1)


# --- Written as a checkpoint ----------------------------------------------------------


@pytest.fixture(scope="module")
def loaded() -> LoadedJob:
    spec = a_spec(
        name="warm",
        entrypoint="tiny_job:job",
        seed=3,
        steps=5,
        reduction="exact",
        checkpoint_path="",
        checkpoint_every_steps=5,
        checkpoint_keep=1,
        lease_s=60.0,
    )
    return load(spec, WORKDIR)


def start(loaded: LoadedJob, state: Tensors, place: Path, **more: Any) -> FirstWeights:
    options = {"strict": True, "source": "it", "target": str(place), **more}
    return begin(loaded, state, **options)


def read(place: Path) -> Tensors:
    store = open_store(place)
    (entry,) = list_checkpoints(store)
    assert entry.step == 0
    manifest = read_manifest(store, entry.name)
    tensors: Tensors = {}
    for section in range(manifest.num_sections):
        tensors |= load_section(store, manifest, section)
    return tensors


def test_given_weights_are_the_checkpoint_of_step_0(loaded: LoadedJob, tmp_path: Path) -> None:
    state = {k: torch.randn_like(v) for k, v in Tiny().state_dict().items()}
    done = start(loaded, state, tmp_path)
    found = read(tmp_path)
    assert done.num_taken == len(found) == len(state)
    assert all(torch.equal(found[name], state[name]) for name in state)
    assert done.remarks == ()


def test_what_is_left_is_as_the_model_makes_it(loaded: LoadedJob, tmp_path: Path) -> None:
    state = {"norm.weight": torch.full((16,), 3.0)}
    done = start(loaded, state, tmp_path, strict=False)
    own = materialise(loaded.job, loaded.spec.seed).state_dict()
    found = read(tmp_path)
    assert all(torch.equal(found[name], (own | state)[name]) for name in own)
    assert done.num_taken == 1
    assert "missing embedding.weight" in done.remarks[0]


def test_types_are_converted_and_told(loaded: LoadedJob, tmp_path: Path) -> None:
    state = {k: v.bfloat16() for k, v in Tiny().state_dict().items()}
    done = start(loaded, state, tmp_path)
    assert {v.dtype for v in read(tmp_path).values()} == {torch.float32}
    assert done.remarks[0].startswith("converted from bfloat16 to float32")


def test_a_check_writes_nothing(loaded: LoadedJob, tmp_path: Path) -> None:
    done = start(loaded, Tiny().state_dict(), tmp_path, target="")
    assert (done.checkpoint, done.sha256) == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_first_weights_are_part_of_the_fingerprint(loaded: LoadedJob, tmp_path: Path) -> None:
    state = Tiny().state_dict()
    again = {name: value.clone() for name, value in state.items()}
    other = state | {"norm.bias": state["norm.bias"] + 1}
    runs = [start(loaded, one, tmp_path / str(k)) for k, one in enumerate((state, again, other))]
    assert runs[0].sha256 == runs[1].sha256 != runs[2].sha256
    prints = set()
    for k, run in enumerate(runs):
        manifest = read_manifest(open_store(tmp_path / str(k)), run.checkpoint)
        prints.add(manifest.config_fingerprint)
    assert len(prints) == 2
    assert config_fingerprint(loaded.spec) not in prints


# --- Files ----------------------------------------------------------------------------


def test_files_of_a_folder_are_read_as_one(tmp_path: Path) -> None:
    state = Net().state_dict()
    del state["head.weight"]
    names = sorted(state)
    save_file({n: state[n] for n in names[:2]}, tmp_path / "a.safetensors")
    save_file({n: state[n] for n in names[2:]}, tmp_path / "b.safetensors")
    assert sorted(read_files(tmp_path)) == names
    assert sorted(read_files(tmp_path / "a.safetensors")) == names[:2]


def test_what_is_no_safetensors_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must be a \.safetensors file"):
        read_files(tmp_path)
    (tmp_path / "model.pt").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"model\.pt"):
        read_files(tmp_path / "model.pt")
    (tmp_path / "a.safetensors").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"a\.safetensors cannot be read"):
        read_files(tmp_path)
    for name in "ab":
        save_file({"w": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ConfigError, match="init_from: w is in two files"):
        read_files(tmp_path)


def gpt2(**changes: Any) -> nn.Module:
    sizes = {"n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 16} | changes
    model: nn.Module = hf.GPT2LMHeadModel(hf.GPT2Config(n_positions=8, **sizes))
    return model


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lm = gpt2()


@pytest.mark.parametrize("factory", [gpt2, Wrapped])
def test_a_folder_of_transformers_is_read_as_transformers_reads_it(
    factory: Callable[[], nn.Module], tmp_path: Path
) -> None:
    body: Any = hf.GPT2Model(gpt2().config)
    body.save_pretrained(tmp_path)  # its names lack the prefix "transformer."
    assert "wte.weight" in load_file(tmp_path / "model.safetensors")
    model = build_skeleton(factory)
    state = read_pretrained(model, tmp_path)
    assert state is not None
    found = fit(model, state)
    assert found.misfits == {}
    name = next(n for n, _ in model.named_parameters())
    assert torch.equal(state[found.taken[name]], body.wte.weight)


def test_what_transformers_would_make_anew_is_refused(tmp_path: Path) -> None:
    saved: Any = gpt2(n_layer=1, vocab_size=17)
    saved.save_pretrained(tmp_path)
    model = build_skeleton(gpt2)
    state = read_pretrained(model, tmp_path)
    assert state is not None
    with pytest.raises(ConfigError) as caught:
        take(model, state, strict=True, source="folder")
    assert "missing transformer.h.1.ln_1.weight" in str(caught.value)
    assert "transformer.wte.weight must be (16, 8), got (17, 8)" in str(caught.value)
    saved = gpt2(n_layer=3)
    saved.save_pretrained(tmp_path)
    state = read_pretrained(model, tmp_path)
    assert state is not None
    with pytest.raises(ConfigError, match=r"unexpected transformer\.h\.2\."):
        take(model, state, strict=True, source="folder")


def test_other_models_read_the_files_of_such_a_folder_themselves(
    tmp_path: Path,
) -> None:
    assert read_pretrained(build_skeleton(Net), tmp_path) is None

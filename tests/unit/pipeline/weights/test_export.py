"""What is exported is what a fresh model loads: names, ties, buffers, bits."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tests.builders import a_manifest
from tests.fakes.object_store import S3
from torch import nn

os.environ["HF_HUB_OFFLINE"] = "1"  # before the import: nothing is downloaded
import transformers as hf

from spottrain.errors import SpottrainError, UserCodeError
from spottrain.manifest import CheckpointError, new_name, write_manifest
from spottrain.pipeline.model.job import Helper, TrainingJob
from spottrain.pipeline.model.sections import parameter_slots, without_helpers
from spottrain.pipeline.model.skeleton import materialise
from spottrain.pipeline.state.checkpoint import save_section
from spottrain.pipeline.weights import formats
from spottrain.pipeline.weights.export import export
from spottrain.storage.open import open_store
from spottrain.storage.store import Store
from spottrain.wire.model import ExportedWeights, ExportFormat

pytestmark = pytest.mark.usefixtures("one_thread")
Factory = Callable[[], nn.Module]


def gpt2() -> nn.Module:
    config = hf.GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=16, n_positions=8)
    model: nn.Module = hf.GPT2LMHeadModel(config)
    return model


def llama() -> nn.Module:
    config = hf.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=8,
        intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=16,
        tie_word_embeddings=True,
    )
    model: nn.Module = hf.LlamaForCausalLM(config)
    return model


def bert() -> nn.Module:
    config = hf.BertConfig(
        num_hidden_layers=2,
        hidden_size=8,
        num_attention_heads=2,
        intermediate_size=16,
        vocab_size=16,
        max_position_embeddings=8,
    )
    model: nn.Module = hf.BertForMaskedLM(config)
    return model


class Buffered(nn.Module):
    """Buffers that are saved and one that is not; a tie; a parameter in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.blocks[2].weight = self.blocks[0].weight
        self.gains = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("scale", torch.arange(4.0))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mask", torch.ones(4), persistent=False)


class Wrapped(nn.Module):
    def __init__(self, inner: Factory = gpt2) -> None:
        super().__init__()
        self.lm = inner()


def frozen_gpt2() -> nn.Module:
    model = gpt2()
    for parameter in model.transformer.wte.parameters():  # type: ignore[union-attr]
        parameter.requires_grad = False
    return model


def job_of(factory: Factory) -> TrainingJob:
    never: Any = None
    return TrainingJob(model=factory, dataset=never, loss=never, optimizer=never)


def trained(factory: Factory) -> nn.Module:
    """Return a model as training would leave it: no weight is as it was built."""
    model = materialise(job_of(factory), seed=5)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def save(store: Store, model: nn.Module, step: int = 9, *, ema: bool = False) -> str:
    """Write a checkpoint of three sections; a tied parameter is in two of them."""
    values = {n: getattr(*s[0]).detach() for n, s in parameter_slots(model).items()}
    names, name = list(values), new_name(step, 1)
    shares = [names[:2], names[2:-1] + names[:1], names[-1:] + names[:1]]
    files = []
    for k, share in enumerate(shares):
        tensors = {n: values[n] for n in share}
        states = {f"{n}//exp_avg": torch.zeros_like(values[n]) for n in share}
        if ema:
            states |= {f"{n}//ema": values[n].float() / 2 for n in share}
        files.append(save_section(store, name, k, {**tensors, **states}))
    manifest = a_manifest(name, step, tuple(files))
    write_manifest(store, manifest)
    return name


def run(
    folder: Path, factory: Factory, kind: ExportFormat, **options: Any
) -> tuple[nn.Module, Path, ExportedWeights]:
    """Export a checkpoint; return the model it was made of, and where to."""
    store, model = open_store(folder / "checkpoints"), trained(factory)
    target = folder / "export"
    target.mkdir()
    written = export(job_of(factory), store, save(store, model), kind, target, **options)
    found = [p.relative_to(target) for p in target.rglob("*") if p.is_file()]
    assert sorted(str(p) for p in found) == sorted(written.files)
    return model, target, written


def assert_same(got: nn.Module, wanted: nn.Module) -> None:
    assert list(got.state_dict()) == list(wanted.state_dict())
    for name, value in wanted.state_dict().items():
        assert got.state_dict()[name].dtype is value.dtype
        assert torch.equal(got.state_dict()[name], value), name


def run_lines(written: ExportedWeights, folder: Path, **names: Any) -> Any:
    """Run the lines that load it, as documented; return the last one's value."""
    first, last = (line.replace("{}", str(folder)) for line in written.load)
    exec(f"{first}\nloaded = {last}", names)  # noqa: S102 - the lines are ours
    return names["loaded"]


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
@pytest.mark.parametrize("factory", [gpt2, llama, bert, Buffered, Wrapped])
def test_a_state_dict_loads_strictly(tmp_path: Path, factory: Factory, kind: ExportFormat) -> None:
    model, folder, written = run(tmp_path, factory, kind)
    fresh = materialise(job_of(factory), seed=6)
    run_lines(written, folder, model=fresh)
    assert_same(fresh, model)


@pytest.mark.parametrize("factory", [gpt2, llama, bert])
def test_a_transformers_model_loads_from_pretrained(tmp_path: Path, factory: Factory) -> None:
    model, folder, written = run(tmp_path, factory, "hf")
    assert_same(run_lines(written, folder), model)
    base: Any = model.base_model
    auto = dict(hf.AutoModel.from_pretrained(folder).named_parameters())
    for name, value in base.named_parameters():
        assert torch.equal(auto[name], value), name


def test_what_is_written_is_what_save_pretrained_writes(tmp_path: Path) -> None:
    model, folder, _ = run(tmp_path, gpt2, "hf")
    save: Any = model.save_pretrained
    save(tmp_path / "own")
    ours, theirs = (
        {p.name: p.read_bytes() for p in one.iterdir()} for one in (folder, tmp_path / "own")
    )
    assert ours == theirs


def test_a_wrapped_transformers_model_is_exported_by_itself(tmp_path: Path) -> None:
    model, folder, written = run(tmp_path, Wrapped, "hf")
    assert_same(run_lines(written, folder), model.lm)  # type: ignore[arg-type]


def test_large_weights_come_in_shards_with_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "MAX_SHARD_BYTES", 2000)
    model, folder, written = run(tmp_path, gpt2, "hf")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert_same(run_lines(written, folder), model)


def test_a_model_of_another_kind_is_refused_for_hf(tmp_path: Path) -> None:
    with pytest.raises(UserCodeError, match=r"format hf: Buffered .* safetensors or torch"):
        run(tmp_path, Buffered, "hf")


def test_parameters_beside_the_transformers_model_are_refused(tmp_path: Path) -> None:
    def factory() -> nn.Module:
        model = Wrapped()
        model.head = nn.Linear(3, 3)
        return model

    with pytest.raises(UserCodeError, match=r"head\.weight is outside of lm"):
        run(tmp_path, factory, "hf")


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_frozen_parameters_are_left_out_unless_asked_for(
    tmp_path: Path, kind: ExportFormat
) -> None:
    for full in (False, True):
        (tmp_path / str(full)).mkdir()
        model, folder, written = run(tmp_path / str(full), frozen_gpt2, kind, full=full)
        left_out = () if full else ("lm_head.weight", "transformer.wte.weight")
        assert written.left_out == left_out
        assert set(_load(folder)) == set(model.state_dict()) - set(left_out)
        fresh = materialise(job_of(frozen_gpt2), seed=6)
        run_lines(written, folder, model=fresh)


def referring() -> nn.Module:
    model = gpt2()
    model.reference = Helper(gpt2())
    return model


@pytest.mark.parametrize("kind", ["torch", "hf"])
def test_a_helper_is_never_exported(tmp_path: Path, kind: ExportFormat) -> None:
    full = kind == "torch"
    model, folder, written = run(tmp_path, referring, kind, full=full)
    assert written.left_out == ()
    fresh = materialise(job_of(gpt2), seed=6)
    loaded = run_lines(written, folder, **({"model": fresh} if full else {}))
    assert_same(fresh if full else loaded, without_helpers(model))


def test_hf_holds_frozen_parameters(tmp_path: Path) -> None:
    model, folder, written = run(tmp_path, frozen_gpt2, "hf")
    assert written.left_out == ()
    assert_same(run_lines(written, folder), model)


def _load(folder: Path) -> dict[str, torch.Tensor]:
    path = folder / "model.safetensors"
    if path.exists():
        return load_file(path)
    loaded: dict[str, torch.Tensor] = torch.load(folder / "model.pt", weights_only=True)
    return loaded


def test_the_moving_average_in_place_of_the_weights(tmp_path: Path) -> None:
    store, model = open_store(tmp_path / "checkpoints"), trained(Buffered)
    (tmp_path / "out").mkdir()
    name = save(store, model, ema=True)
    export(job_of(Buffered), store, name, "safetensors", tmp_path / "out", ema=True)
    found = load_file(tmp_path / "out" / "model.safetensors")
    for key, value in model.named_parameters():
        assert torch.equal(found[key], value / 2)
        assert found[key].dtype is value.dtype
    with pytest.raises(UserCodeError, match=r"has no moving average .*keep_ema"):
        run(tmp_path, gpt2, "safetensors", ema=True)


def test_a_tied_tensor_is_written_once_by_torch(tmp_path: Path) -> None:
    _, folder, _ = run(tmp_path, gpt2, "torch")
    loaded = _load(folder)
    tied = loaded["lm_head.weight"], loaded["transformer.wte.weight"]
    assert tied[0].data_ptr() == tied[1].data_ptr()


def test_from_a_bucket(tmp_path: Path, s3: S3) -> None:
    model, store = trained(Buffered), open_store(s3.url("job"))
    (tmp_path / "out").mkdir()
    export(job_of(Buffered), store, save(store, model), "safetensors", tmp_path / "out")
    fresh = Buffered()
    fresh.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    assert_same(fresh, model)


# --- What goes wrong ------------------------------------------------------------------


def test_a_damaged_section_is_named(tmp_path: Path) -> None:
    store = open_store(tmp_path / "checkpoints")
    name = save(store, trained(Buffered))
    path = tmp_path / "checkpoints" / name / "section-1.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match=r"section-1\.safetensors"):
        export(job_of(Buffered), store, name, "torch", tmp_path / "out")


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path / "checkpoints")
    name = save(store, trained(Buffered))
    (tmp_path / "out").mkdir()

    def wider() -> nn.Module:
        model = Buffered()
        model.gains = nn.Parameter(torch.ones(4))
        return model

    for factory, reason in (
        (wider, r"gains must be \(4,\), got \(3,\)"),
        (gpt2, r"transformer.wte.weight must be \(16, 8\), got nothing"),
        (Extra, r"extra must be \(2,\), got nothing"),
    ):
        with pytest.raises(CheckpointError, match=reason):
            export(job_of(factory), store, name, "torch", tmp_path / "out")


class Extra(Buffered):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.ones(2))


class Stateful(Buffered):
    def get_extra_state(self) -> int:
        return 3

    def set_extra_state(self, state: int) -> None:
        assert state == 3


def test_state_that_is_no_tensor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserCodeError, match="_extra_state is neither a parameter"):
        run(tmp_path, Stateful, "torch")


def test_a_file_holds_the_metadata_that_transformers_wants(tmp_path: Path) -> None:
    _, folder, _ = run(tmp_path, Buffered, "safetensors")
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("kind", ["safetensors", "torch", "hf"])
def test_a_full_disk_is_one_line(tmp_path: Path, kind: ExportFormat, small_disk: Path) -> None:
    store = open_store(tmp_path / "checkpoints")
    name = save(store, trained(gpt2))
    room = os.statvfs(small_disk)
    filler = (room.f_bavail - 4) * room.f_bsize
    (small_disk / "fill").write_bytes(b"0" * filler)
    with pytest.raises(SpottrainError, match="cannot write to") as caught:
        export(job_of(gpt2), store, name, kind, small_disk)
    assert "\n" not in str(caught.value)
    assert not isinstance(caught.value, UserCodeError)


# --- peft -----------------------------------------------------------------------------


of_peft = pytest.mark.filterwarnings("ignore::FutureWarning")  # peft asks by old names


def lora() -> nn.Module:
    peft = pytest.importorskip("peft")
    model: nn.Module = peft.get_peft_model(
        llama(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    )
    return model


@of_peft
def test_adapters_are_written_as_peft_does(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model, folder, written = run(tmp_path, lora, "hf")
    assert {"adapter_model.safetensors", "adapter_config.json"} <= set(written.files)
    base = llama()
    values = {n: p for n, p in model.named_parameters() if not p.requires_grad}
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            stem = name.removesuffix(".weight")
            found = [v for n, v in values.items() if f"{stem}." in n]
            parameter.copy_(found[0])
    assert_same(run_lines(written, folder, base=base), model)
    assert peft.PeftModel


@of_peft
@pytest.mark.filterwarnings("ignore:Could not find a config file")
@pytest.mark.parametrize("origin", ["/home/me/work", ""])
def test_an_adapter_names_its_base_where_the_user_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: str
) -> None:
    peft, code = pytest.importorskip("peft"), tmp_path / "copy"
    monkeypatch.syspath_prepend(str(code))

    def adapter() -> nn.Module:
        base: Any = llama()
        base.name_or_path = base.config._name_or_path = str(code / "base")
        model: nn.Module = peft.get_peft_model(
            base, peft.LoraConfig(r=2, target_modules=["q_proj"])
        )
        return model

    _, folder, written = run(tmp_path, adapter, "hf", code=code, origin=origin)

    adapted = json.loads((folder / "adapter_config.json").read_text())
    base = f"{origin}/base" if origin else "base"
    assert adapted["base_model_name_or_path"] == base
    assert written.base == "base"
    texts = [p.read_text() for p in folder.iterdir() if p.suffix != ".safetensors"]
    assert str(code) not in "".join(texts)


@of_peft
def test_adapters_have_no_full_form_in_hf(tmp_path: Path) -> None:
    with pytest.raises(UserCodeError, match="without their base"):
        run(tmp_path, lora, "hf", full=True)


@of_peft
def test_only_adapters_are_in_a_state_dict(tmp_path: Path) -> None:
    model, folder, written = run(tmp_path, lora, "safetensors")
    assert set(_load(folder)) == {n for n, p in model.named_parameters() if p.requires_grad}
    assert all("lora" not in name for name in written.left_out)

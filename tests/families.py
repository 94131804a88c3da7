"""Families of models that people train, small: 4 blocks where they have blocks.

``FAMILIES`` has one entry per row of docs/families.md. What a library that is not installed
has is left out when it is built: ``ImportError``.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

os.environ["HF_HUB_OFFLINE"] = "1"  # before the import: nothing is downloaded

from spottrain.pipeline.model.job import CutPoint, Helper, TrainingJob
from tests import family_losses

LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH = 4, 32, 4, 64, 16
IMAGE, CLASSES, DROPOUT = 16, 10, 0.1
_ATTENTION: dict[str, Any] = {
    "num_hidden_layers": LAYERS,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_attention_heads": HEADS,
}
_TEXT: dict[str, Any] = {
    **_ATTENTION,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": LENGTH,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA: dict[str, Any] = {
    **_TEXT,
    "num_key_value_heads": 2,
    "attention_dropout": DROPOUT,
}
_PICTURE: dict[str, Any] = {
    **_ATTENTION,
    "image_size": IMAGE,
    "patch_size": 8,
    "num_labels": CLASSES,
}
_DROPOUT: dict[str, Any] = {
    "hidden_dropout_prob": DROPOUT,
    "attention_probs_dropout_prob": DROPOUT,
}

Loss = Callable[[nn.Module, Any], Any]


def mean_of_model(model: nn.Module, batch: Any) -> tuple[torch.Tensor, float]:
    """Return the loss that a Hugging Face model returns, over the examples."""
    number = len(batch["labels"])
    mean: Any = model(**batch).loss
    return mean * number, float(number)


def cross_entropy(model: nn.Module, batch: Any) -> tuple[torch.Tensor, float]:
    """Return the loss of a model that returns scores."""
    inputs = batch.get("input_ids", batch.get("pixel_values"))
    scores: torch.Tensor = model(inputs)
    labels = batch["labels"].flatten()
    loss = F.cross_entropy(scores.flatten(0, -2), labels, reduction="sum")
    return loss, float(len(labels))


class Examples:
    """Random tokens, pictures or sounds, with labels."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        dice = torch.Generator().manual_seed(index)
        tokens = torch.randint(3, VOCABULARY, (LENGTH,), generator=dice)
        image = torch.randn(3, IMAGE, IMAGE, generator=dice)
        match self.kind:
            case "text":
                return {"input_ids": tokens, "labels": tokens}
            case "pictures":
                return {"pixel_values": image, "labels": torch.tensor(index % CLASSES)}
            case "sounds":
                sound = torch.randn(400, generator=dice)
                return {"input_values": sound, "labels": tokens[:2]}
            case "spectra":
                spectrum = torch.randn(8, 2 * LENGTH, generator=dice)
                return {"input_features": spectrum, "labels": tokens}
            case "both":
                return {"input_ids": tokens, "pixel_values": image, "labels": tokens}
        raise KeyError(self.kind)


@dataclass(frozen=True)
class Family:
    """Models of one kind."""

    build: Callable[[], nn.Module]
    examples: str = "text"
    loss: Loss = mean_of_model

    def job(self) -> TrainingJob:
        return TrainingJob(
            model=self.build,
            dataset=Examples(self.examples),
            loss=self.loss,
            optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
        )


def hugging_face(
    name: str,
    head: str = "ForCausalLM",
    examples: str = "text",
    *,
    kind: str = "Config",
    **config: Any,
) -> Family:
    """Return a family of transformers: ``<name><kind>`` and ``<name><head>``."""

    def build() -> nn.Module:
        library: Any = importlib.import_module("transformers")
        made: Any = getattr(library, name + kind)(**config)
        model: nn.Module = getattr(library, name + head)(made)
        return model

    return Family(build, examples)


def llama_like(name: str, **more: Any) -> Family:
    return hugging_face(name, **{**_LLAMA, **more})


_GPT2: dict[str, Any] = {
    "n_layer": LAYERS,
    "n_embd": WIDTH,
    "n_head": HEADS,
    "vocab_size": VOCABULARY,
    "n_positions": LENGTH,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_T5: dict[str, Any] = {
    "num_layers": LAYERS,
    "d_model": WIDTH,
    "d_kv": WIDTH // HEADS,
    "d_ff": 2 * WIDTH,
    "num_heads": HEADS,
    "vocab_size": VOCABULARY,
    "decoder_start_token_id": 0,
}
_BART: dict[str, Any] = {
    "d_model": WIDTH,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 2 * WIDTH,
    "decoder_ffn_dim": 2 * WIDTH,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
_MIXTURE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": WIDTH,
}
_WAV2VEC2: dict[str, Any] = {
    **_ATTENTION,
    "conv_dim": (8, 8),
    "conv_stride": (4, 4),
    "conv_kernel": (4, 4),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": VOCABULARY,
    "mask_time_prob": 0.0,
    "pad_token_id": 0,
}


def clip() -> nn.Module:
    library: Any = importlib.import_module("transformers")
    config = library.CLIPConfig(text_config=_TEXT, vision_config=_PICTURE, projection_dim=8)
    model: nn.Module = library.CLIPModel(config)
    return model


def clip_loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, float]:
    number = len(batch.pop("labels"))
    mean: Any = model(**batch, return_loss=True).loss
    return mean * number, float(number)


def lora() -> nn.Module:
    library: Any = importlib.import_module("peft")
    base = llama_like("Llama").build()
    config = library.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model: nn.Module = library.get_peft_model(base, config)
    return model


def checkpointing() -> nn.Module:
    """With the model's own activation checkpoints."""
    model: Any = llama_like("Llama").build()
    model.gradient_checkpointing_enable()
    return model  # type: ignore[no-any-return]


def torchvision(name: str, norm: Callable[[int], nn.Module] | None = None) -> Family:
    """Return a family of torchvision, with another norm than BatchNorm."""

    def build() -> nn.Module:
        try:
            models: Any = importlib.import_module("torchvision.models")
        except RuntimeError as error:
            raise ImportError(f"torchvision for another torch: {error}") from error
        more = {} if norm is None else {"norm_layer": norm}
        model: nn.Module = getattr(models, name)(num_classes=CLASSES, **more)
        return model

    return Family(build, "pictures", cross_entropy)


# --- Models written by hand ---------------------------------------------------------------


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(mixed.transpose(1, 2).flatten(2))
        return x + torch.as_tensor(self.dropout(self.down(F.gelu(self.up(self.norms[1](x))))))


class Gpt(nn.Module):
    """A GPT written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) / 10)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return block(x)  # type: ignore[no-any-return]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(x)  # type: ignore[no-any-return]


def sequential() -> nn.Module:
    """All of it in one list, with what comes before and after the blocks."""
    blocks = [Block() for _ in range(LAYERS)]
    ends = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
    return nn.Sequential(ends[0], *blocks, nn.Dropout(DROPOUT), ends[1])


class OtherBlock(Block):
    """A block of another class."""


class Unlike(Gpt):
    """Every other block is of another class."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList((Block, OtherBlock)[k % 2]() for k in range(LAYERS))


class Attributes(Gpt):
    """Blocks in no list."""

    def __init__(self) -> None:
        super().__init__()
        del self.blocks
        for number in range(LAYERS):
            self.add_module(f"layer{number}", Block())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions
        for number in range(LAYERS):
            x = self.get_submodule(f"layer{number}")(x)
        return self.head(x)  # type: ignore[no-any-return]


class Checkpointed(Gpt):
    """Activation checkpoints around its blocks."""

    reentrant = False

    def run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(block, x, use_reentrant=self.reentrant)
        return result


class Reentrant(Checkpointed):
    """With those of older code."""

    reentrant = True


def tied() -> nn.Module:
    """Embedding and head share a weight, and two blocks one."""
    model = Gpt()
    model.head.weight = model.tokens.weight
    blocks: list[Any] = list(model.blocks)
    blocks[3].up.weight = blocks[0].up.weight
    return model


def compiled_blocks() -> nn.Module:
    model = Gpt()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model


def compiled() -> nn.Module:
    return torch.compile(Gpt(), backend="aot_eager")  # type: ignore[return-value]


class Residual(nn.Module):
    """A block of a residual network, which may halve the picture."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.GroupNorm(2, outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.GroupNorm(2, outputs),
        )
        self.short = nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        short = x if self.short is None else self.short(x)
        return torch.relu(self.body(x) + short)


class ResNet(nn.Module):
    """Four lists of blocks, as torchvision has them."""

    def __init__(self, depths: tuple[int, ...] = (2, 2, 3, 2)) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        widths = [8, 8, 16, 32, 64]
        for k, depth in enumerate(depths):
            blocks = [Residual(widths[k], widths[k + 1])]
            blocks += [Residual(widths[k + 1], widths[k + 1]) for _ in range(depth - 1)]
            self.add_module(f"layer{k + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(widths[-1], CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.stem(x))
        for k in range(4):
            x = self.get_submodule(f"layer{k + 1}")(x)
        return self.fc(x.mean((2, 3)))  # type: ignore[no-any-return]


def with_batch_norm(model: nn.Module) -> nn.Module:
    """Put BatchNorm in place of GroupNorm."""
    for module in list(model.modules()):
        for name, inner in module.named_children():
            if isinstance(inner, nn.GroupNorm):
                setattr(module, name, nn.BatchNorm2d(inner.num_channels))
    return model


def compiled_batch_norm() -> nn.Module:
    model = with_batch_norm(ResNet())
    for module in model.modules():
        if isinstance(module, Residual):
            module.compile(backend="aot_eager")
    return model


class Bottleneck(nn.Module):
    """A block of ResNet-50 (He et al., 2015, figure 5), a sixteenth as wide."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, 4 * width, 1, bias=False),
            nn.BatchNorm2d(4 * width),
        )
        self.short: nn.Module = nn.Identity()
        if inputs != 4 * width:
            convolution = nn.Conv2d(inputs, 4 * width, 1, stride, bias=False)
            self.short = nn.Sequential(convolution, nn.BatchNorm2d(4 * width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.short(x))


class ResNet50(nn.Module):
    """ResNet-50's layers, for small pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        )
        inputs = 4
        for k, depth in enumerate((3, 4, 6, 3)):
            blocks = []
            for block in range(depth):
                blocks.append(Bottleneck(inputs, 4 << k, 2 if k and not block else 1))
                inputs = 16 << k
            self.add_module(f"layer{k + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(inputs, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for k in range(4):
            x = self.get_submodule(f"layer{k + 1}")(x)
        return self.fc(x.mean((2, 3)))  # type: ignore[no-any-return]


class Inverted(nn.Module):
    """A block of EfficientNet (Tan and Le, 2019): wide and by channel, some of them chosen."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        width = 4 * inputs
        self.widen = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.SiLU(inplace=True)
        )
        self.by_channel = nn.Sequential(
            nn.Conv2d(width, width, 3, stride, padding=1, groups=width, bias=False),
            nn.BatchNorm2d(width),
            nn.SiLU(inplace=True),
        )
        self.choose = nn.Sequential(
            nn.Conv2d(width, inputs, 1), nn.SiLU(), nn.Conv2d(inputs, width, 1), nn.Sigmoid()
        )
        self.narrow = nn.Sequential(
            nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        )
        self.adds = inputs == outputs and stride == 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.by_channel(self.widen(x))
        out: torch.Tensor = self.narrow(wide * self.choose(wide.mean((2, 3), keepdim=True)))
        return x + F.dropout(out, DROPOUT, self.training) if self.adds else out


class EfficientNet(nn.Module):
    """A small one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.SiLU(inplace=True)
        )
        widths = ((8, 8, 1), (8, 16, 2), (16, 16, 1), (16, 32, 2), (32, 32, 1))
        self.blocks = nn.ModuleList(Inverted(*width) for width in widths)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


def spectral() -> nn.Module:
    """The weights of its blocks are divided by their norm."""
    model = ResNet()
    for module in list(model.modules()):
        if isinstance(module, Residual):
            nn.utils.parametrizations.spectral_norm(module.body[0])
    return model


class ChannelsLast(ResNet):
    """The same over pictures whose channels are their last dimension in memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.contiguous(memory_format=torch.channels_last))


class UNet(nn.Module):
    """Skips over blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))
        self.up = nn.ModuleList(nn.Conv2d(6, 3, 3, padding=1) for _ in range(3))
        self.head = nn.Linear(3, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for down in self.down:
            x = down(x).relu()
            skips.append(x)
        for up in self.up:
            x = up(torch.cat([x, skips.pop()], 1)).relu()
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


class Outside(Gpt):
    """Residuals outside of its blocks."""

    def run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x + block(x)  # type: ignore[no-any-return]


class InPlace(Gpt):
    """The same, in place: what a block is given must not be what its backward needs."""

    def run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x += block(F.dropout(x, DROPOUT, self.training))
        return x


class Reverse(Gpt):
    """Its last block runs first."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions
        for block in reversed(self.blocks):
            x = self.run(block, x)
        return self.head(x)  # type: ignore[no-any-return]


class Modulated(nn.Module):
    """A block of a diffusion transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.modulation = Block(), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        scale, shift = self.modulation(F.silu(condition))[:, None].chunk(2, -1)
        return self.block(x * (1 + scale) + shift)  # type: ignore[no-any-return]


class Dit(nn.Module):
    """All blocks are given the timestep and the class."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.time, self.kind = nn.Linear(1, WIDTH), nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(Modulated() for _ in range(LAYERS))
        self.head = nn.ConvTranspose2d(WIDTH, 3, 4, stride=4)

    def forward(self, x: torch.Tensor, time: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        x = self.patches(x)
        size = x.shape[2:]
        x = x.flatten(2).transpose(1, 2)
        condition = self.time(time[:, None]) + self.kind(kind)
        for block in self.blocks:
            x = block(x, condition)
        return self.head(x.transpose(1, 2).reshape(len(x), WIDTH, *size))  # type: ignore[no-any-return]


def denoise(model: nn.Module, batch: Any) -> tuple[torch.Tensor, float]:
    """Return the error of the noise that the model finds in pictures."""
    pictures = batch["pixel_values"]
    noise, time = torch.randn_like(pictures), torch.rand(len(pictures), device=pictures.device)
    found = model(pictures + time[:, None, None, None] * noise, time, batch["labels"])
    return (found - noise).square().mean((1, 2, 3)).sum(), float(len(pictures))


# --- Models with frozen ones beside them ----------------------------------------------------


def preferring() -> nn.Module:
    """A Llama, and what it was before."""
    model: Any = llama_like("Llama").build()
    model.reference = Helper(llama_like("Llama").build())
    return model  # type: ignore[no-any-return]


def taught() -> nn.Module:
    """A ViT, and a wider and deeper one that it learns from."""
    model: Any = hugging_face("ViT", "ForImageClassification", **_PICTURE, **_DROPOUT).build()
    larger = {**_PICTURE, "num_hidden_layers": 6, "hidden_size": 2 * WIDTH}
    model.teacher = Helper(hugging_face("ViT", "ForImageClassification", **larger).build())
    return model  # type: ignore[no-any-return]


class Points(nn.Module):
    """Convolution and LSTM, cut by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 16, 4, stride=4)
        self.first = CutPoint()
        self.lstm = nn.LSTM(16, 16, batch_first=True)
        self.second = CutPoint()
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(self.convolution(x).flatten(2).transpose(1, 2))
        x = self.second(self.lstm(x)[0])
        return self.head(x.mean(1))  # type: ignore[no-any-return]


FAMILIES: dict[str, Family] = {
    "GPT-2": hugging_face("GPT2", "LMHeadModel", **_GPT2),
    "GPT-2 eager": hugging_face("GPT2", "LMHeadModel", attn_implementation="eager", **_GPT2),
    "Llama": llama_like("Llama"),
    "Llama tied": llama_like("Llama", tie_word_embeddings=True),
    "Llama, gradient_checkpointing_enable()": Family(checkpointing),
    "Llama, LoRA (peft)": Family(lora),
    "Mistral": llama_like("Mistral"),
    "Qwen2 tied": llama_like("Qwen2", tie_word_embeddings=True),
    "Qwen3": llama_like("Qwen3", head_dim=8),
    "Qwen3-MoE": llama_like("Qwen3Moe", head_dim=8, **_MIXTURE),
    "Mixtral": llama_like("Mixtral", num_local_experts=4),
    "Mixtral, output_router_logits": llama_like(
        "Mixtral", num_local_experts=4, output_router_logits=True
    ),
    "Jamba": llama_like("Jamba", attn_layer_period=2, attn_layer_offset=1, num_experts=4),
    "Gemma2": llama_like("Gemma2", head_dim=8),
    "Gemma3": llama_like(
        "Gemma3", kind="TextConfig", head_dim=8, sliding_window=8
    ),
    "Phi3": llama_like("Phi3"),
    "OPT": hugging_face("OPT", ffn_dim=64, word_embed_proj_dim=WIDTH, **_TEXT),
    "GPT-NeoX": hugging_face("GPTNeoX", **_TEXT),
    "BLOOM": hugging_face(
        "Bloom", n_layer=LAYERS, hidden_size=WIDTH, n_head=HEADS, vocab_size=VOCABULARY
    ),
    "Falcon": hugging_face("Falcon", **_TEXT),
    "BERT": hugging_face("Bert", "ForMaskedLM", **_TEXT, **_DROPOUT),
    "RoBERTa": hugging_face(
        "Roberta", "ForMaskedLM", **{**_TEXT, "max_position_embeddings": LENGTH + 4}
    ),
    "ModernBERT": hugging_face(
        "ModernBert", "ForMaskedLM", cls_token_id=1, sep_token_id=2, **_TEXT
    ),
    "ALBERT": hugging_face("Albert", "ForMaskedLM", embedding_size=WIDTH, **_TEXT, **_DROPOUT),
    "DeBERTa-v2": hugging_face(
        "DebertaV2", "ForMaskedLM", relative_attention=True, **_TEXT, **_DROPOUT
    ),
    "DeBERTa-v3": hugging_face(
        "DebertaV2", "ForMaskedLM", relative_attention=True, norm_rel_ebd="layer_norm",
        pos_att_type="p2c|c2p", **_TEXT, **_DROPOUT,
    ),
    "Mamba": hugging_face(
        "Mamba", num_hidden_layers=LAYERS, hidden_size=WIDTH, vocab_size=VOCABULARY
    ),
    "Mamba2": hugging_face(
        "Mamba2", num_hidden_layers=LAYERS, hidden_size=WIDTH, vocab_size=VOCABULARY,
        num_heads=8, head_dim=8, state_size=16, n_groups=1,
    ),
    "RWKV": hugging_face(
        "Rwkv", num_hidden_layers=LAYERS, hidden_size=WIDTH, vocab_size=VOCABULARY,
        attention_hidden_size=WIDTH,
    ),
    "ViT": hugging_face("ViT", "ForImageClassification", "pictures", **_PICTURE, **_DROPOUT),
    "DINOv2": hugging_face("Dinov2", "ForImageClassification", "pictures", **_PICTURE),
    "Swin": hugging_face(
        "Swin", "ForImageClassification", "pictures", image_size=IMAGE, patch_size=2,
        embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4, num_labels=CLASSES,
    ),
    "ConvNeXt": hugging_face(
        "ConvNext", "ForImageClassification", "pictures", image_size=IMAGE, patch_size=2,
        hidden_sizes=[8, 16], depths=[2, 3], num_stages=2, num_labels=CLASSES,
    ),
    "ResNet-50 of torchvision, GroupNorm": torchvision(
        "resnet50", lambda width: nn.GroupNorm(8, width)
    ),
    "ResNet-18 of torchvision, BatchNorm": torchvision("resnet18"),
    "ResNet of Hugging Face, BatchNorm": hugging_face(
        "ResNet", "ForImageClassification", "pictures", embedding_size=8,
        hidden_sizes=[8, 16], depths=[2, 2], num_labels=CLASSES,
    ),
    "T5": hugging_face("T5", "ForConditionalGeneration", **_T5),
    "Switch Transformers": hugging_face(
        "SwitchTransformers", "ForConditionalGeneration", num_experts=4,
        num_decoder_layers=LAYERS, num_sparse_encoder_layers=2, num_sparse_decoder_layers=2, **_T5,
    ),
    "Switch Transformers, router losses": hugging_face(
        "SwitchTransformers", "ForConditionalGeneration", num_experts=4, output_router_logits=True,
        num_decoder_layers=LAYERS, num_sparse_encoder_layers=2, num_sparse_decoder_layers=2, **_T5,
    ),
    "BART": hugging_face("Bart", "ForConditionalGeneration", **_BART),
    "Whisper": hugging_face(
        "Whisper", "ForConditionalGeneration", "spectra", num_mel_bins=8,
        max_source_positions=LENGTH, max_target_positions=LENGTH, **_BART,
    ),
    "wav2vec2": hugging_face("Wav2Vec2", "ForCTC", "sounds", **_WAV2VEC2),
    "wav2vec2, layerdrop=0": hugging_face(
        "Wav2Vec2", "ForCTC", "sounds", layerdrop=0.0, **_WAV2VEC2
    ),
    "CLIP": Family(clip, "both", clip_loss),
    "GPT by hand": Family(Gpt, loss=cross_entropy),
    "GPT by hand, a Sequential": Family(sequential, loss=cross_entropy),
    "GPT by hand, blocks of two classes": Family(Unlike, loss=cross_entropy),
    "GPT by hand, blocks as attributes": Family(Attributes, loss=cross_entropy),
    "GPT by hand, weights tied twice": Family(tied, loss=cross_entropy),
    "GPT by hand, checkpoint(block, x)": Family(Checkpointed, loss=cross_entropy),
    "GPT by hand, checkpoint, reentrant": Family(Reentrant, loss=cross_entropy),
    "GPT by hand, block.compile()": Family(compiled_blocks, loss=cross_entropy),
    "GPT by hand, torch.compile(model)": Family(compiled, loss=cross_entropy),
    "GPT by hand, residuals outside": Family(Outside, loss=cross_entropy),
    "GPT by hand, residuals in place": Family(InPlace, loss=cross_entropy),
    "GPT by hand, blocks in reverse": Family(Reverse, loss=cross_entropy),
    "DiT by hand": Family(Dit, "pictures", denoise),
    "UNet by hand": Family(UNet, "pictures", cross_entropy),
    "Convolution and LSTM, CutPoint": Family(Points, "pictures", cross_entropy),
    "ResNet by hand, GroupNorm": Family(ResNet, "pictures", cross_entropy),
    "ResNet by hand, channels_last": Family(ChannelsLast, "pictures", cross_entropy),
    "ResNet by hand, BatchNorm": Family(
        lambda: with_batch_norm(ResNet()), "pictures", cross_entropy
    ),
    "ResNet by hand, BatchNorm, block.compile()": Family(
        compiled_batch_norm, "pictures", cross_entropy
    ),
    "ResNet by hand, spectral_norm": Family(spectral, "pictures", cross_entropy),
    "ResNet-50 by hand, BatchNorm": Family(ResNet50, "pictures", cross_entropy),
    "EfficientNet by hand, BatchNorm": Family(EfficientNet, "pictures", cross_entropy),
    "BERT, SimCSE": Family(hugging_face("Bert", "Model", **_TEXT, **_DROPOUT).build, loss=family_losses.simcse),
    "GPT by hand, R-Drop": Family(Gpt, loss=family_losses.r_drop),
    "ResNet by hand, BatchNorm, SimSiam": Family(
        lambda: with_batch_norm(ResNet()), "pictures", family_losses.siamese
    ),
    "Llama, DPO with a reference": Family(preferring, loss=family_losses.dpo),
    "ViT, distilled from a larger one": Family(taught, "pictures", family_losses.distil),
}  # fmt: skip

"""Pretrains a GPT-2 on your own text, by default the one of 124 million parameters.

    python pretrain.py TEXT TOKENS

makes tokens of the .txt files of a folder once, before: TOKENS/train.bin and val.bin, of 16
bits each, as nanoGPT has them. TOKENS/tokenizer.json is used where it is there, and otherwise
trained on the same text.
"""

from __future__ import annotations

import os
import sys
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from spottrain import TrainingJob, data_path, hf, optim, schedules

VOCABULARY = int(os.environ.get("VOCABULARY", "50304"))
CONTEXT = int(os.environ.get("CONTEXT", "1024"))
LAYERS = int(os.environ.get("LAYERS", "12"))
HEADS = int(os.environ.get("HEADS", "12"))
WIDTH = int(os.environ.get("WIDTH", "768"))
END_OF_TEXT = "<|endoftext|>"


class Windows:
    """A file of tokens, memory-mapped, in windows of ``CONTEXT``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.number = path.stat().st_size // (2 * CONTEXT)

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.tokens[index * CONTEXT : (index + 1) * CONTEXT]
        return {"input_ids": torch.from_numpy(window.astype(np.int64))}

    @cached_property
    def tokens(self) -> np.memmap:
        """The file, opened by whoever reads the first example."""
        return np.memmap(self.path, dtype=np.uint16, mode="r")


def build() -> nn.Module:
    """Return a GPT-2 with fresh weights."""
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=CONTEXT,
            n_layer=LAYERS,
            n_head=HEADS,
            n_embd=WIDTH,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )


def training_job() -> TrainingJob:
    """Describe the job; steps, batch sizes and evaluations are in the job file."""
    return TrainingJob(
        model=build,
        dataset=Windows(data_path("tokens") / "train.bin"),
        heldout=Windows(data_path("tokens") / "val.bin"),
        loss=hf.causal_lm_loss,
        optimizer=lambda named: torch.optim.AdamW(
            optim.decay_groups(named, 0.1), lr=6e-4, betas=(0.9, 0.95)
        ),
        lr_schedule=schedules.cosine(warmup_steps=0.02, final=0.1),
        clip_grad_norm=1.0,
    )


def make_tokens(text: Path, folder: Path) -> None:
    """Write the tokens of a folder's files: the last twentieth of each file is held out."""
    from tokenizers import ByteLevelBPETokenizer, Tokenizer

    files = sorted(map(str, text.rglob("*.txt")))
    if not files:
        sys.exit(f"{text}: has no .txt files")
    folder.mkdir(parents=True, exist_ok=True)
    saved = folder / "tokenizer.json"
    if not saved.exists():
        trained = ByteLevelBPETokenizer()
        trained.train(files, vocab_size=VOCABULARY, special_tokens=[END_OF_TEXT])
        trained.save(str(saved))
    tokenizer = Tokenizer.from_file(str(saved))
    end = tokenizer.token_to_id(END_OF_TEXT)
    with open(folder / "train.bin", "wb") as train, open(folder / "val.bin", "wb") as val:
        for file in files:
            ids = tokenizer.encode(Path(file).read_text()).ids
            tokens = np.array([*ids, *([] if end is None else [end])], dtype=np.uint16)
            cut = len(tokens) * 19 // 20
            train.write(tokens[:cut].tobytes())
            val.write(tokens[cut:].tobytes())


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    make_tokens(Path(sys.argv[1]), Path(sys.argv[2]))

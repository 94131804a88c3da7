"""A user's module that initialises CUDA when it is imported, as far as torch can tell."""

from __future__ import annotations

import importlib

import torch

torch.cuda._initialized = True  # left behind by torch.zeros(1).cuda()

job = importlib.import_module("tiny_job").job

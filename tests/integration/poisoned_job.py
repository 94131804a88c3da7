"""A user's module that asks torch what its kernels were built for when it is imported.

A torch that is built for CUDA then refuses CUDA to all processes forked from this one;
one that is not answers as if.
"""

from __future__ import annotations

import importlib

import torch

if hasattr(torch._C, "_cuda_getArchFlags"):
    torch._C._cuda_getArchFlags()
else:
    torch.cuda._is_in_bad_fork = lambda: True

job = importlib.import_module("tiny_job").job

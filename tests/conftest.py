"""Imports that the forked ranks share, and one thread for the process they are forked from."""

from __future__ import annotations

import importlib
import os
import sys
import warnings

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TORCH_EXTENSIONS_DIR", os.path.join(sys.prefix, "torch_extensions"))
warnings.filterwarnings("ignore")  # before the imports: torch and transformers warn while they load

import lightning.pytorch
import torch

import lightning_partrain.strategies

torch.set_num_threads(1)
for name in ("transformers.models.llama.modeling_llama", "transformers.models.gpt2.modeling_gpt2"):
    importlib.import_module(name)
__all__ = ["lightning", "lightning_partrain"]

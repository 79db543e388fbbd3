"""Kernel tests run Triton under its CPU interpreter where there is no GPU."""

import os

import torch

if not torch.cuda.is_available():
    # Read when Triton is imported, so it must be set before any test module asks for it.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The matrices here are small: more threads only wait for each other.
torch.set_num_threads(1)

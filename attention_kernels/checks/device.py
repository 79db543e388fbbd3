"""Outcome of a check, and checks of what every other one trusts: PyTorch's own kernels and the
generator's words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from attention_kernels.noise import random_words
from attention_kernels.testing import make_draws


class Checked(NamedTuple):
    """A kernel that is right.

    Attributes:
        difference: Largest difference from float64, in the unit of the output.
        call: Runs the kernel once more, for a clock.
    """

    difference: float
    call: Callable[[], object]


def check_noise(device: torch.device) -> Checked:
    """Compare the generator's words with those of the host, bit for bit.

    Args:
        device: Where they are drawn.

    Raises:
        AssertionError: If a word differs.
    """
    draws = make_draws(16, torch.Generator().manual_seed(1))

    def words_on(device: torch.device) -> Tensor:
        keys = (draws.seed, draws.canvas_idx, draws.step, draws.position)
        seed, canvas_idx, step, position = (key.to(device) for key in keys)
        return random_words(seed, canvas_idx, step, position, 4096)

    words = words_on(device)
    assert torch.equal(words_on(torch.device("cpu")), words.cpu()), "other words than on the host"
    return Checked(0.0, lambda: words_on(device))


def check_device(device: torch.device) -> Checked:
    """Compare PyTorch's own kernels, which the other checks trust, with the host's.

    Args:
        device: Where they run.

    Raises:
        AssertionError: If they differ.
    """
    a, b = torch.arange(64 * 64).view(64, 64).double(), torch.eye(64).double() * 3
    there = a.to(device) @ b.to(device)
    assert torch.equal(there.cpu(), a * 3), "PyTorch's own matrix product is wrong"
    total = a.to(device).sum().item()
    assert total == a.sum().item(), "PyTorch's own sum is wrong"
    return Checked(0.0, lambda: a.to(device) @ b.to(device))

"""Random prompts in the vocabulary of the checkpoints that tests make."""

from typing import Any

import torch


def random_prompt(length: int, seed: int) -> list[int]:
    """Return token ids that are neither special nor beyond the smallest vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(20, 276, (length,), generator=generator).tolist()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Return a random prompt of its own for each length and seed."""
    return random_prompt(length, 1000 * seed + length)


def chat_prompt(tokenizer: Any, text: str) -> list[int]:
    """Return the prompt of a chat with one message of a user."""
    messages = [{"role": "user", "content": text}]
    prompt: list[int] = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    return prompt

"""An engine with a draft: its options, its requests, its counters, what its parts are given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tests.support.drafts import VOCAB
from tests.support.engine import TracedEngine

NUM_DRAFTS = 7
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_model_len": 256,
    "max_num_seqs": 8,
    # Less the places of drafts: prompts are computed in chunks.
    "max_num_batched_tokens": 128,
}


def prompt_of(length: int, seed: int, vocab_size: int = VOCAB) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, vocab_size, (length,), generator=generator).tolist()


PROMPTS = [prompt_of(length, seed=length) for length in (1, 2, 31, 33, 64, 81, 100, 150)]


def generate(engine: TracedEngine, prompts: list[Any], **changes: Any) -> list[Any]:
    """Finished requests of one batch; prompts are token ids or what vLLM takes."""
    from vllm import SamplingParams

    options: dict[str, Any] = {
        "max_tokens": 30,
        "temperature": 0.0,
        "ignore_eos": True,
        "detokenize": False,
    }
    return engine.llm.generate(
        [{"prompt_token_ids": each} if isinstance(each, list) else each for each in prompts],
        SamplingParams(**(options | changes)),
        use_tqdm=False,
    )


def metric(engine: TracedEngine, name: str) -> Any:
    (found,) = (m for m in engine.llm.get_metrics() if m.name == f"vllm:spec_decode_{name}")
    return found.values if hasattr(found, "values") else found.value


@contextmanager
def observed(owner: Any, name: str, calls: list[tuple[Any, Any]]) -> Iterator[None]:
    """Note arguments and result of a method's calls."""
    original = getattr(owner, name)

    def noting(*args: Any, **kwargs: Any) -> Any:
        arguments = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
        result = original(*args, **kwargs)
        calls.append((arguments, result.clone()))
        return result

    setattr(owner, name, noting)
    yield
    setattr(owner, name, original)

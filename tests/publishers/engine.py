"""The engine beside a publisher's loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.engine import TracedEngine

OPTIONS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 8}


def answers(folder: Path, requests: list[tuple[list[int], int, dict[str, Any]]]) -> list[list[int]]:
    """The engine's greedy answers, all in one batch: prompt, tokens and arguments of each."""
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=0, max_tokens=n, ignore_eos=True, detokenize=False, extra_args=arguments
        )
        for _, n, arguments in requests
    ]
    with TracedEngine(folder, **OPTIONS) as engine:
        outputs = engine.outputs([prompt for prompt, *_ in requests], params)
    return [list(output.outputs[0].token_ids) for output in outputs]

"""The engine next to a publisher's loop."""

from pathlib import Path
from typing import Any

from tests.support.engines.engine import TracedEngine

OPTIONS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 8}


def answers(
    folder: Path, requests: list[tuple[list[int], int, dict[str, Any]]], **options: Any
) -> list[list[int]]:
    """The engine's answers, all in one batch: prompt, tokens and arguments of each, greedy if they
    set nothing else.

    Arguments without ``diffusion_`` in front of their names are vLLM's.
    """
    from vllm import SamplingParams

    params = []
    for _, num_tokens, arguments in requests:
        own = {name: value for name, value in arguments.items() if name.startswith("diffusion_")}
        rest = {name: value for name, value in arguments.items() if name not in own}
        settings = {"temperature": 0, "max_tokens": num_tokens, "ignore_eos": True} | rest
        params.append(SamplingParams(**settings, detokenize=False, extra_args=own))
    with TracedEngine(folder, **OPTIONS, **options) as engine:
        outputs = engine.outputs([prompt for prompt, *_ in requests], params)
    return [list(output.outputs[0].token_ids) for output in outputs]

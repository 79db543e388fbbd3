"""Fast-dLLM v2: the tokens of ``generate`` of the publisher's class."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicCache
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.publishers import (
    answers,
    checkout,
    default_rope,
    fields_of,
    forbid_mask,
    keys_and_values,
    modules_of,
    with_weights,
)
from tests.support.families import makers as tiny
from tests.support.families.model import MASK_ID, VOCAB_SIZE, prompt_of

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.mark.parametrize("sharpness", [3.0, 8.0])
def test_fast_dllm(sharpness: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of Fast-dLLM v2 are those of the publisher's ``modeling.py`` for several thresholds,
    lengths of prompts and end tokens.
    """
    folder = checkout("DualDiffusion") / "FastDLLM_inferencing/Fast_dLLM_v2_7B"
    load = modules_of(folder, "publisher_fast_dllm")
    toy = tiny.fast_dllm(sharpness=sharpness)
    monkeypatch.setitem(ROPE_INIT_FUNCTIONS, "default", default_rope)
    monkeypatch.setattr(DynamicCache, "__getitem__", keys_and_values, raising=False)
    config = load("configuration").Fast_dLLM_QwenConfig(**fields_of(toy))
    body = with_weights(load("modeling").Fast_dLLM_QwenForCausalLM(config), toy)
    forbid_mask(body.lm_head)
    requests: list[tuple[list[int], int, dict[str, Any]]] = []
    expected: list[list[int]] = []
    # None of exactly one block, which the publisher's does not prefill.
    for length in (1, 5, 17, 31, 33, 63, 64, 65, 130):
        prompt = prompt_of(length, seed=length)

        def generate(threshold: float, end: int = -7, prompt: list[int] = prompt) -> list[int]:
            ids = body.generate(
                torch.tensor([prompt]),
                max_new_tokens=96,
                mask_id=MASK_ID,
                threshold=threshold,
                stop_token=end,
            )[0]
            answer: list[int] = ids[0, len(prompt) :].tolist()
            return answer

        for threshold in (0.05, 0.2, 0.6, 0.9, 1.0):
            # An answer ends where a block does.
            answer = generate(threshold)[:75]
            requests.append((prompt, len(answer), {"diffusion_reveal_threshold": threshold}))
            expected.append(answer)
        plain = generate(0.2)
        for place in (0, 3, 20, 40):
            end = plain[place]
            answer = generate(0.2, end)
            if answer[-1] == end and len(answer) <= 75:
                asked = {"diffusion_reveal_threshold": 0.2, "stop_token_ids": [end]}
                requests.append((prompt, 75, asked))
                expected.append(answer)
    assert len(expected) > 60
    assert len({token for tokens in expected for token in tokens}) > VOCAB_SIZE // 8
    assert answers(toy.save(tmp_path), requests) == expected

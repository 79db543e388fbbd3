"""A2D's BD3LM and MDLM: the tokens of the publisher's class and samplers."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.publishers import answers, checkout, fields_of, forbid_mask, modules_of, with_weights
from tests.support.families import makers as tiny
from tests.support.families.model import MASK_ID, prompt_of

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.mark.parametrize("is_mdlm", [False, True], ids=["bd3lm", "mdlm"])
def test_a2d(tmp_path: Path, is_mdlm: bool) -> None:
    """Tokens of A2D's checkpoints are those of the publisher's ``bd3lm.py`` and ``mdlm.py`` with
    its modeling file, for several lengths of prompts and answers and numbers of steps.
    """
    folder = checkout("dllm") / "dllm"
    # Without the packages' own imports, which are of trainers.
    for name in ("dllm", "dllm.core", "dllm.core.samplers"):
        modules_of(folder.parent / name.replace(".", "/"), name)
    name = "mdlm" if is_mdlm else "bd3lm"
    sampler = importlib.import_module(f"dllm.core.samplers.{name}")
    classes = modules_of(folder / "pipelines/a2d/models/qwen3", "publisher_a2d")("modeling_qwen3")
    toy = tiny.a2d()
    config = classes.A2DQwen3Config(**fields_of(toy))
    body = with_weights(classes.A2DQwen3LMHeadModel(config), toy)
    # Which transformers 5 keeps elsewhere.
    body.model.has_sliding_layers = False
    for layer in body.model.layers:
        layer.attention_type = "full_attention"
    forbid_mask(body.lm_head)
    tokens = SimpleNamespace(mask_token_id=MASK_ID, bos_token_id=1, pad_token_id=0, eos_token_id=-7)
    publisher = getattr(sampler, f"{name.upper()}Sampler")(model=body, tokenizer=tokens)
    requests, expected = [], []
    for length, num_tokens, steps in (
        (1, 32, 32),
        (9, 64, 32),
        (32, 40, 32),
        (33, 96, 5),
        (70, 50, 8),
        (130, 32, 1),
    ):
        prompt = prompt_of(length, seed=length)
        requests.append((prompt, num_tokens, {"diffusion_max_steps": steps}))
        num_blocks = -(-num_tokens // 32)
        own = {"steps": steps * num_blocks} if is_mdlm else {"steps_per_block": steps}
        ids = publisher.sample([prompt], max_new_tokens=num_tokens, block_size=32, **own)
        expected.append(ids[0, -num_tokens:].tolist())
    sys.modules.pop("dllm")
    options = {}
    if is_mdlm:
        options = {
            "hf_overrides": {"architectures": ["A2DQwen3MDLM"]},
            "additional_config": {"diffusion": {"block_length": 32}},
        }
    assert answers(toy.save(tmp_path), requests, **options) == expected

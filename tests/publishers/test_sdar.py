"""SDAR: the tokens of the publisher's class, of its ``generate.py`` and of the loop of its
evaluation.
"""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers.utils
from torch import Tensor
from torch.nn import functional as F
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
from tests.support.families.cases import STRATEGIES
from tests.support.families.model import MASK_ID, VOCAB_SIZE, prompt_of
from tests.support.families.run import cut

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def attention(
    query: Tensor, key: Tensor, value: Tensor, *, softmax_scale: float, **_: Any
) -> Tensor:
    """Compute flash-attn's function, [1, T, heads, head_dim], with PyTorch's."""
    heads_first = (one.transpose(1, 2) for one in (query, key, value))
    attended = F.scaled_dot_product_attention(*heads_first, scale=softmax_scale, enable_gqa=True)
    return attended.transpose(1, 2)


def norm(x: Tensor, *, weight: Tensor, bias: None, eps: float) -> Tensor:
    """Compute flash-attn's norm with PyTorch's."""
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def publisher(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import the publisher's files as a package, with stand-ins for what transformers 5 or a CPU
    lacks.
    """
    folder = checkout("SDAR") / "training/model/SDAR-4B-Chat"
    load = modules_of(folder, "publisher_sdar")
    for name, content in {
        "flash_attn": {"flash_attn_func": attention, "flash_attn_varlen_func": None},
        "flash_attn.ops.triton.layer_norm": {"rms_norm_fn": norm},
        "publisher_sdar.fused_linear_diffusion_cross_entropy": {
            "FusedLinearDiffusionCrossEntropyLoss": None
        },
    }.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**content))
    arguments = transformers.utils.TransformersKwargs
    monkeypatch.setattr(transformers.utils, "LossKwargs", arguments, raising=False)
    monkeypatch.setitem(ROPE_INIT_FUNCTIONS, "default", default_rope)
    monkeypatch.setattr(DynamicCache, "__getitem__", keys_and_values, raising=False)
    return load


def evaluation() -> ModuleType:
    """Load the evaluation's loop without the module around it, which imports OpenCompass."""
    path = "evaluation/opencompass/opencompass/models/huggingface_bd3.py"
    text = (checkout("SDAR") / path).read_text()
    module = ModuleType("publisher_sdar_evaluation")
    exec(text[text.index("## bd3 gen") : text.index("def forward_add_noise")], module.__dict__)
    return module


@pytest.mark.parametrize(("block_length", "sharpness"), [(4, 3.0), (16, 8.0)])
def test_sdar(
    block_length: int, sharpness: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of SDAR are those of the publisher's class and loops for several thresholds,
    strategies, numbers of steps and end tokens.
    """
    loop = modules_of(checkout("SDAR"), "publisher_sdar_loop")("generate")
    its_evaluation = evaluation()
    toy = tiny.sdar(block_length=block_length, sharpness=sharpness)
    load = publisher(monkeypatch)
    config = load("configuration_sdar").SDARConfig(**fields_of(toy) | {"fuse_cross_entropy": False})
    body = with_weights(load("modeling_sdar").SDARForCausalLM(config), toy)
    forbid_mask(body.lm_head)
    drawn = loop.sample_with_temperature_topk_topp

    def likeliest(logits: Tensor, **_: Any) -> Any:
        """Return the likeliest tokens by the evaluation's function, with their probabilities before
        top-k.
        """
        return its_evaluation.sample_with_temperature_topk_topp(logits, 1.0, 1, 1.0)

    requests: list[tuple[list[int], int, dict[str, Any]]] = []
    expected: list[list[int]] = []
    B, num_tokens = block_length, 2 * block_length + 9
    for length in (1, 5, 17, 64, 130):
        prompt = prompt_of(length, seed=length)
        ids = torch.tensor([prompt])
        common: dict[str, Any] = {
            "prompt": {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
            "mask_id": MASK_ID,
            "gen_length": num_tokens,
            "block_length": B,
        }

        def add(
            tokens: Tensor,
            arguments: dict[str, Any],
            ends: list[int],
            prompt: list[int] = prompt,
        ) -> None:
            answer = tokens[0, len(prompt) :][:num_tokens].tolist()
            requests.append((prompt, num_tokens, arguments))
            expected.append(cut(answer, ends))

        for threshold in (0.05, 0.2, 0.6, 0.95, 1.0):
            tokens = its_evaluation.block_diffusion_generate(
                body,
                None,
                **common,
                denoising_steps=B,
                temperature=1.0,
                top_k=1,
                threshold=threshold,
                stopping_criteria_idx=[-7],
            )
            dynamic = {"diffusion_reveal_threshold": threshold}
            add(tokens, {"diffusion_strategy": "static"} if threshold == 1.0 else dynamic, [])
        for strategy in ("dynamic", "static", "sequential"):
            asked = {"diffusion_strategy": strategy, "diffusion_reveal_threshold": 0.3}
            named = common | {"remasking_strategy": STRATEGIES[strategy]}
            # Of the only token that top-k leaves the probability is 1, and any are the most
            # confident.
            if strategy != "static":
                tokens = loop.block_diffusion_generate(
                    body, **named, denoising_steps=B, temperature=1.0, top_k=1
                )
                add(tokens, asked | {"temperature": 1.0, "top_k": 1}, [])
            loop.sample_with_temperature_topk_topp = likeliest
            # With fewer steps the publisher's overwrites tokens of a block that begins in the
            # prompt.
            for steps in (B, B // 2) if strategy != "dynamic" and length % B == 0 else (B,):
                tokens = loop.block_diffusion_generate(
                    body, **named, denoising_steps=steps, confidence_threshold=0.3
                )
                add(tokens, asked | {"diffusion_max_steps": steps}, [])
            end = int(tokens[0, length + 7])
            tokens = loop.block_diffusion_generate(
                body,
                **named,
                denoising_steps=B,
                confidence_threshold=0.3,
                stopping_criteria_idx=[end],
            )
            add(tokens, asked | {"stop_token_ids": [end]}, [end])
            loop.sample_with_temperature_topk_topp = drawn
    assert len({token for tokens in expected for token in tokens}) > VOCAB_SIZE // 8
    assert answers(toy.save(tmp_path), requests) == expected

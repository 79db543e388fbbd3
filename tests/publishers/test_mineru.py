"""MinerU-Diffusion: the tokens of ``generate`` of the publisher's class, with pictures and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.modeling_rope_utils
from torch import Tensor

from tests.publishers import checkout, modules_of, without_mask
from tests.support.engine import TracedEngine
from tests.support.families.mineru_model import (
    IMAGE_ID,
    mineru,
    num_tokens,
    picture,
    processed,
)
from tests.support.families.model import MASK_ID, VOCAB_SIZE, prompt_of

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def likeliest(logits: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """Tokens of temperature 0, by which the publisher's function divides, and their plain probabilities."""
    probabilities = logits.softmax(-1)
    tokens = probabilities.argmax(-1)
    return tokens, probabilities.gather(-1, tokens[..., None])[..., 0]


@pytest.mark.parametrize("sharpness", [3.0, 8.0])
def test_mineru(sharpness: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its modelling file: lengths of prompts, thresholds, steps and pictures of several sizes."""
    from vllm import SamplingParams

    monkeypatch.setattr(
        transformers.modeling_rope_utils, "rope_config_validation", lambda _: None, raising=False
    )
    load = modules_of(checkout("MinerU-Diffusion") / "mineru_diffusion", "publisher_mineru")
    toy = mineru(sharpness=sharpness)
    own = ("architectures", "auto_map", "model_type", "torch_dtype")
    fields = {name: value for name, value in toy.config.items() if name not in own}
    fields["text_config"] |= {"pad_token_id": 0}
    config = load("configuration_mineru_diffusion").MinerUDiffusionConfig(**fields)
    modelling = load("modeling_mineru_diffusion")
    body = modelling.MinerUDiffusionForConditionalGeneration(config).float().eval()
    body.load_state_dict(toy.tensors())
    body.language_model.lm_head.register_forward_hook(
        lambda module, inputs, output: without_mask(output)
    )
    monkeypatch.setattr(body.language_model, "sample_with_temperature_topk_topp", likeliest)
    pictures = [picture(40, 24, 1), picture(80, 56, 2), picture(24, 64, 3)]
    requests, params, expected = [], [], []
    for length, num_pictures, threshold, steps in (
        (1, 0, 0.95, 32),
        (32, 0, 0.2, 32),
        (70, 0, 0.05, 32),
        (9, 1, 0.95, 32),
        (33, 2, 0.3, 32),
        (20, 3, 0.05, 32),
        # No step reveals more than its part, so that none is to reveal more than are left.
        (20, 3, 1.0, 5),
    ):
        head, tail, seen = prompt_of(length, seed=length), prompt_of(7), pictures[:num_pictures]
        prompt = [*head, *(t for one in seen for t in [IMAGE_ID] * num_tokens(one)), *tail]
        pixels, grid = processed(seen) if seen else (None, None)
        ids, _, _ = body.generate(
            pixel_values=pixels,
            image_grid_thw=grid,
            input_ids=torch.tensor([prompt]),
            mask_token_id=MASK_ID,
            denoising_steps=steps,
            gen_length=64,
            block_length=32,
            temperature=1.0,
            dynamic_threshold=threshold,
        )
        expected.append(ids[0].tolist())
        requests.append(
            {
                "prompt_token_ids": [*head, *[IMAGE_ID] * num_pictures, *tail],
                "multi_modal_data": {"image": seen},
            }
        )
        arguments = {"diffusion_reveal_threshold": threshold, "diffusion_max_steps": steps}
        params.append(
            SamplingParams(
                temperature=0,
                max_tokens=64,
                ignore_eos=True,
                detokenize=False,
                extra_args=arguments,
            )
        )
    options = {"max_model_len": 512, "limit_mm_per_prompt": {"image": 3}, "max_num_seqs": 8}
    with TracedEngine(toy.save(tmp_path), **options) as engine:
        outputs = engine.llm.generate(requests, params, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    assert len({token for tokens in expected for token in tokens}) > VOCAB_SIZE // 8

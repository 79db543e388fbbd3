"""An image in the prompt attends in both directions, as in ``transformers``."""

from __future__ import annotations

import pytest
import torch

from tests.integration.test_parity import LOGIT_TOLERANCE, denoising
from tests.support.checkpoints import random_checkpoint
from tests.support.engine import TracedEngine
from tests.support.oracle import Oracle

pytestmark = pytest.mark.engine

CANVAS = 32


def picture(seed: int):
    from PIL import Image

    pixels = torch.randint(0, 256, (96, 96, 3), generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(pixels.to(torch.uint8).numpy())


@pytest.mark.parametrize("attention", ["reference", pytest.param("triton", marks=pytest.mark.slow)])
def test_image_prompt(tmp_path, attention):
    """Logits of every step with an image larger than the window, and other images other logits."""
    from transformers import AutoProcessor

    checkpoint = random_checkpoint(tmp_path)
    processor = AutoProcessor.from_pretrained(checkpoint)
    messages = [
        {
            "role": "user",
            "content": [{"type": "image"}, {"type": "text", "text": "What is in the picture?"}],
        }
    ]
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    engine = TracedEngine(
        checkpoint,
        limit_mm_per_prompt={"image": 1, "video": 0, "audio": 0},
        additional_config={"diffusion": {"attention": attention}},
    )
    oracle = Oracle(checkpoint)
    try:
        first_logits = []
        for seed in (1, 2):
            image = picture(seed)
            with engine.recording() as steps:
                output = engine.llm.generate(
                    [{"prompt": text, "multi_modal_data": {"image": image}}],
                    engine.sampling_params(seed=5, max_tokens=CANVAS, ignore_eos=True),
                    use_tqdm=False,
                )[0]
            inputs = processor(text=text, images=[image], return_tensors="pt")
            prompt = inputs.pop("input_ids")[0].tolist()
            inputs.pop("attention_mask", None)
            assert list(output.prompt_token_ids) == prompt
            expected = oracle.generate(prompt, seed=5, max_tokens=CANVAS, ignore_eos=True, **inputs)
            ours = denoising(steps)
            for i, (step, logits) in enumerate(zip(ours, expected.logits, strict=True)):
                error = (step.logits - logits).abs().max().item()
                assert error <= LOGIT_TOLERANCE, f"step {i}: logits differ by {error:.2e}"
            assert list(output.outputs[0].token_ids) == expected.tokens
            first_logits.append(ours[0].logits)
        assert (first_logits[0] - first_logits[1]).abs().max() > 100 * LOGIT_TOLERANCE
    finally:
        engine.close()

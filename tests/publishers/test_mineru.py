"""MinerU-Diffusion: the tokens of ``generate`` of the publisher's class, with pictures and
without.
"""

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers.modeling_rope_utils
from torch import Tensor

from tests.publishers import answers, checkout, fields_of, forbid_mask, modules_of, with_weights
from tests.support.engines.engine import TracedEngine
from tests.support.families.mineru_model import (
    IMAGE_ID,
    MinerU,
    mineru,
    num_tokens,
    picture,
    processed,
)
from tests.support.families.model import MASK_ID, VOCAB_SIZE, prompt_of

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def likeliest(logits: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """Return the tokens of temperature 0, by which the publisher's function divides, and their
    plain probabilities.
    """
    probabilities = logits.softmax(-1)
    tokens = probabilities.argmax(-1)
    return tokens, probabilities.gather(-1, tokens[..., None])[..., 0]


def publishers_body(toy: MinerU, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Build the publisher's class with the toy's weights, which takes the likeliest tokens and
    never the mask.
    """
    monkeypatch.setattr(
        transformers.modeling_rope_utils, "rope_config_validation", lambda _: None, raising=False
    )
    load = modules_of(checkout("MinerU-Diffusion") / "mineru_diffusion", "publisher_mineru")
    fields = fields_of(toy)
    fields["text_config"] |= {"pad_token_id": 0}
    config = load("configuration_mineru_diffusion").MinerUDiffusionConfig(**fields)
    made = load("modeling_mineru_diffusion").MinerUDiffusionForConditionalGeneration(config)
    body = with_weights(made, toy)
    forbid_mask(body.language_model.lm_head)
    monkeypatch.setattr(body.language_model, "sample_with_temperature_topk_topp", likeliest)
    return body


def test_lengths_that_are_no_multiples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The publisher's function refuses an answer whose length is not a multiple of the block's, so
    it has no shorter last block to compare with.
    """
    body = publishers_body(mineru(), monkeypatch)
    ids = torch.tensor([prompt_of(9)])
    with pytest.raises(ValueError, match="multiple of block_length"):
        body.generate(input_ids=ids, mask_token_id=MASK_ID, gen_length=40, block_length=32)


@pytest.mark.parametrize("sharpness", [3.0, 8.0])
def test_mineru(sharpness: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of MinerU-Diffusion are those of the publisher's modeling file for several lengths of
    prompts, thresholds, steps and sizes of pictures.
    """
    toy = mineru(sharpness=sharpness)
    body = publishers_body(toy, monkeypatch)
    pictures = [picture(40, 24, 1), picture(80, 56, 2), picture(24, 64, 3)]
    requests, expected = [], []
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
        asked = {
            "prompt_token_ids": [*head, *[IMAGE_ID] * num_pictures, *tail],
            "multi_modal_data": {"image": seen},
        }
        arguments = {"diffusion_reveal_threshold": threshold, "diffusion_max_steps": steps}
        requests.append((asked, 64, arguments))
    options = {"max_model_len": 512, "limit_mm_per_prompt": {"image": 3}}
    assert answers(toy.save(tmp_path), requests, **options) == expected
    assert len({token for tokens in expected for token in tokens}) > VOCAB_SIZE // 8


def test_runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The publisher's runner prints for the file of a picture the answer that a chat with this
    picture gets, with the runner's processor, arguments of ``generate`` and stop strings.
    """
    from transformers import PreTrainedTokenizerFast
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from vllm import SamplingParams

    root = checkout("MinerU-Diffusion")
    toy = mineru(sharpness=8.0)
    folder = toy.save(tmp_path / "toy")
    # Tokens under the published names, among them one that these weights often write, so that
    # answers end.
    names = {"mask": "<|MASK|>", "eos": "<|endoftext|>", "unused35": "<|im_end|>"}
    names["|image|"] = "<|image_pad|>"
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        text = (folder / file).read_text()
        for name, published in names.items():
            text = text.replace(f"<{name}>", published)
        (folder / file).write_text(text)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    body = publishers_body(toy, monkeypatch)
    load = modules_of(root / "mineru_diffusion", "publisher_mineru")
    processor = load("processing_mineru_diffusion").MinerUDiffusionProcessor(
        Qwen2VLImageProcessorPil.from_pretrained(folder), tokenizer
    )
    # Which transformers 5 does not take from that class.
    processor.chat_template = tokenizer.chat_template
    # The runner prints in colours with it, and is not to print here.
    monkeypatch.setitem(sys.modules, "termcolor", SimpleNamespace(cprint=lambda *_, **__: None))
    runner = modules_of(root / "engines" / "hf", "publisher_mineru_runner")("runner")
    for name, made in (("Tokenizer", tokenizer), ("Processor", processor), ("Model", body)):
        loaded = SimpleNamespace(from_pretrained=lambda *_, made=made, **__: made)
        monkeypatch.setattr(runner, f"Auto{name}", loaded)
    expected: list[str] = []
    monkeypatch.setattr(runner, "_print_response", lambda text, seconds: expected.append(text))
    parser = argparse.ArgumentParser()
    runner.add_arguments(parser)
    chats = []
    for i, (task, prompt) in enumerate(runner.TASK_PROMPTS.items()):
        page, file = picture(40 + 8 * i, 24, i), tmp_path / f"{task}.png"
        page.save(file)
        options = {"model-path": folder, "image-path": file, "prompt-type": task, "gen-length": 96}
        options |= {"device": "cpu", "dtype": "float32"}
        runner.run(parser.parse_args([f"--{name}={value}" for name, value in options.items()]))
        parts = [{"type": "image_pil", "image_pil": page}, {"type": "text", "text": prompt}]
        system = {"role": "system", "content": runner.SYSTEM_PROMPT}
        chats.append([system, {"role": "user", "content": parts}])
    # The checkpoint names no end token, and the requests no string.
    (folder / "generation_config.json").write_text("{}")
    params = SamplingParams(temperature=0, max_tokens=96, skip_special_tokens=False)
    with TracedEngine(folder, max_model_len=512, limit_mm_per_prompt={"image": 1}) as engine:
        outputs = [output.outputs[0] for output in engine.llm.chat(chats, params, use_tqdm=False)]
    assert {output.finish_reason for output in outputs} == {"stop", "length"}
    for output, text in zip(outputs, expected, strict=True):
        if output.finish_reason == "stop":
            assert tokenizer.decode(output.token_ids[-1:]) in runner.STOP_STRINGS
        # vLLM's text is made token by token, which differs where bytes are not characters.
        answer = tokenizer.decode(output.token_ids)
        for end in runner.STOP_STRINGS:
            answer = answer.partition(end)[0]
        assert answer.strip() == text

"""Tests of pictures, adapters and FP8 in DiffusionGemma's ``autoregressive`` and ``linear_spec``.

The oracle is the encoder of transformers' DiffusionGemma.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.lora.request import LoRARequest

from tests.support.engines.engine import TracedEngine, tokens_of
from tests.support.families.cases import Wanted
from tests.support.families.mineru_model import picture
from tests.support.families.model import prompt_of
from tests.support.models.adapters import DECODER, ENCODER, EXPERTS, adapt
from tests.support.models.checkpoints import random_checkpoint
from tests.support.models.quantized import QuantizedOracle, quantized_checkpoint
from tests.support.oracles.oracle import Oracle

pytestmark = pytest.mark.engine

RULES = ("autoregressive", "linear_spec")
# As in test_parity.py.
LOGIT_TOLERANCE = 1e-3


def options(rule: str, **more: Any) -> dict[str, Any]:
    """Return options of an engine."""
    return {
        "max_model_len": 256,
        "max_num_seqs": 8,
        "additional_config": {"diffusion": {"rule": rule}},
    } | more


# vLLM's parameters, with ``max_tokens`` as the only end.
params = Wanted(max_tokens=24, strategy=None, threshold=None).sampling_params


@torch.no_grad()
def encoder_logits(model: Any, ids: Tensor, **inputs: Any) -> Tensor:
    """[num_tokens, vocab_size], float32: the encoder's hidden states through the head.

    Args:
        model: transformers' DiffusionGemma.
        ids: [num_tokens].
        inputs: What a processor makes of a picture.
    """
    encoder = model.model.encoder
    embeds = encoder.get_input_embeddings()(ids[None])
    kinds = inputs.pop("mm_token_type_ids", None)
    if kinds is not None:
        kinds = torch.nn.functional.pad(kinds, (0, len(ids) - kinds.shape[1]))
    # As ``generate`` makes them: the encoder alone forgets the masks that it makes.
    masks = encoder.create_masks_for_generate(
        model.config,
        embeds,
        None,
        # The cache by its place: its name is another since transformers 5.24.
        None,
        position_ids=torch.arange(len(ids))[None],
        mm_token_type_ids=kinds,
    )
    hidden = encoder(input_ids=ids[None], attention_mask=masks, **inputs).last_hidden_state[0]
    cap = model.config.text_config.final_logit_softcapping
    logits: Tensor = model.lm_head(hidden).float()
    return torch.tanh(logits / cap) * cap


def greedy(model: Any, prompt: list[int], max_tokens: int, **inputs: Any) -> list[int]:
    """Return the ``max_tokens`` likeliest tokens, one after another, whatever ends an answer."""
    ids = torch.tensor(prompt)
    for _ in range(max_tokens):
        ids = torch.cat([ids, encoder_logits(model, ids, **inputs)[-1:].argmax(-1)])
    return ids[len(prompt) :].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_pictures(tmp_path: Path, rule: str) -> None:
    """A picture larger than the window attends to itself in both directions, in every layer."""
    from transformers import AutoProcessor

    checkpoint = random_checkpoint(tmp_path, seed=2, gain=1.0, embed=1.0)
    processor = AutoProcessor.from_pretrained(checkpoint)
    content = [{"type": "image"}, {"type": "text", "text": "What is in the picture?"}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True
    )
    model = Oracle(checkpoint).model
    answers = []
    limits = {"image": 1, "video": 0, "audio": 0}
    with TracedEngine(checkpoint, **options(rule, limit_mm_per_prompt=limits)) as engine:
        wanted = params(prompt_logprobs=0 if rule == "autoregressive" else None)
        for seed in (1, 2):
            image = picture(96, 96, seed)
            inputs = processor(text=text, images=[image], return_tensors="pt")
            ids = inputs.pop("input_ids")[0]
            inputs.pop("attention_mask", None)
            asked = {"prompt": text, "multi_modal_data": {"image": image}}
            (output,) = engine.llm.generate([asked], wanted, use_tqdm=False)
            assert output.prompt_token_ids == ids.tolist()
            tokens = list(output.outputs[0].token_ids)
            assert tokens == greedy(model, ids.tolist(), len(tokens), **inputs)
            # The second time the prompt comes from the prefix cache.
            (again,) = engine.llm.generate([asked], params(), use_tqdm=False)
            assert again.num_cached_tokens
            assert list(again.outputs[0].token_ids) == tokens
            answers.append(tokens)
            if rule == "autoregressive":
                exact = encoder_logits(model, ids, **inputs)[:-1].log_softmax(-1)
                exact = exact.gather(1, ids[1:, None])[:, 0]
                rows = zip(output.prompt_logprobs[1:], ids[1:].tolist(), strict=True)
                ours = torch.tensor([row[token].logprob for row, token in rows])
                assert (ours - exact).abs().max() <= LOGIT_TOLERANCE
    assert answers[0] != answers[1]


# What acts on known tokens alone, on canvases alone, and on both.
ADAPTERS: dict[str, dict[str, Any]] = {
    "encoder": {"target_modules": ENCODER, "rank": 8},
    "decoder": {"target_modules": DECODER},
    "both": {"target_modules": f"{ENCODER}|{DECODER}", "target_parameters": EXPERTS},
}


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_adapters(tmp_path: Path, rule: str) -> None:
    """Tokens are those of the encoder's adapter, and the decoder's part acts on drafts alone."""
    checkpoint = random_checkpoint(tmp_path / "checkpoint", seed=2, gain=1.0, embed=1.0)
    models = {None: Oracle(checkpoint).model}
    requests: dict[str | None, LoRARequest | None] = {None: None}
    for i, (name, config) in enumerate(ADAPTERS.items(), 1):
        models[name] = Oracle(checkpoint).model
        adapt(models[name], tmp_path / name, seed=i, **config)
        requests[name] = LoRARequest(name, i, str(tmp_path / name))
    work = [(name, prompt_of(length, seed=length)) for name in models for length in (5, 70)]
    lora = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
    with TracedEngine(checkpoint, **options(rule, **lora)) as engine:
        outputs = engine.outputs(
            [prompt for _, prompt in work],
            params(),
            lora_request=[requests[name] for name, _ in work],
        )
    found = tokens_of(outputs)
    assert found == [greedy(models[name], prompt, 24) for name, prompt in work]
    plain, encoder, decoder, both = found[:2], found[2:4], found[4:6], found[6:]
    assert plain == decoder
    assert plain != encoder != both != plain


@pytest.mark.slow
def test_fp8(tmp_path: Path) -> None:
    """With activations quantized by row, drafts change no token."""
    source = random_checkpoint(tmp_path / "source", seed=2, gain=1.0, embed=1.0)
    checkpoint = quantized_checkpoint(tmp_path / "fp8", "fp8-dynamic", source)
    prompts = [prompt_of(length, seed=length) for length in (5, 33, 90)]
    answers = []
    for rule in RULES:
        with TracedEngine(checkpoint, **options(rule)) as engine:
            answers.append(tokens_of([engine.outputs([prompt], params())[0] for prompt in prompts]))
    assert answers[0] == answers[1]
    assert len(set(map(tuple, answers[0]))) == len(prompts)
    model = QuantizedOracle(checkpoint, torch.float32, source).model
    # Later a rounding error may move a quantised activation, and the answer goes another way.
    first = [answer[:8] for answer in answers[0]]
    assert first == [greedy(model, prompt, 8) for prompt in prompts]

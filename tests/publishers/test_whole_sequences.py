"""LLaDA, Dream and CoDA: the tokens of their publishers' classes and loops."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.publishers import checkout, default_rope, modules_of, without_mask
from tests.publishers.engine import answers
from tests.publishers.llada import model_and_loop
from tests.support.families import makers as tiny
from tests.support.families.model import MASK_ID, VOCAB_SIZE, prompt_of

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_llada(tmp_path: Path) -> None:
    """Tokens of LLaDA are those of the publisher's ``generate.py`` and modeling file for several
    blocks, numbers of steps and lengths.
    """
    toy = tiny.llada()
    model, generate = model_and_loop(toy)
    requests, expected = [], []
    for length, num_tokens, block, steps in (
        (1, 32, 8, 8),
        (7, 64, 16, 16),
        (33, 64, 64, 64),
        (33, 64, 32, 5),
        (90, 96, 32, 32),
        (120, 128, 128, 40),
    ):
        prompt = prompt_of(length, seed=length)
        arguments = {
            "diffusion_block_length": block,
            "diffusion_max_steps": steps,
            "diffusion_strategy": "static",
        }
        requests.append((prompt, num_tokens, arguments))
        ids = generate(
            model,
            torch.tensor([prompt]),
            steps=steps * (num_tokens // block),
            gen_length=num_tokens,
            block_length=block,
            mask_id=MASK_ID,
        )
        expected.append(ids[0, length:].tolist())
    assert answers(toy.save(tmp_path), requests) == expected
    assert len({token for tokens in expected for token in tokens}) > VOCAB_SIZE // 8


def test_llada_moe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of LLaDA-MoE are those of LLaDA's loop with the publisher's modeling file of
    LLaDA-MoE.
    """
    toy = tiny.llada_moe()
    monkeypatch.setitem(ROPE_INIT_FUNCTIONS, "default", default_rope)
    load = modules_of(checkout("dllm") / "dllm/pipelines/llada/models", "publisher_llada_moe")
    generate = modules_of(checkout("LLaDA"), "publisher_llada_loop")("generate").generate
    own = ("architectures", "auto_map", "model_type", "torch_dtype")
    fields = {name: value for name, value in toy.config.items() if name not in own}
    config = load("configuration_lladamoe").LLaDAMoEConfig(**fields)
    config._attn_implementation = "eager"
    body = load("modeling_lladamoe").LLaDAMoEModelLM(config).float().eval()
    body.load_state_dict(toy.tensors())

    def model(ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:
        return SimpleNamespace(logits=without_mask(body(ids).logits))

    model.device = torch.device("cpu")  # type: ignore[attr-defined]
    requests, expected = [], []
    for length, num_tokens, block, steps in ((1, 32, 8, 8), (33, 64, 32, 5), (90, 96, 32, 32)):
        prompt = prompt_of(length, seed=length)
        arguments = {"diffusion_block_length": block, "diffusion_max_steps": steps}
        requests.append((prompt, num_tokens, arguments))
        ids = generate(
            model,
            torch.tensor([prompt]),
            steps=steps * (num_tokens // block),
            gen_length=num_tokens,
            block_length=block,
            mask_id=MASK_ID,
        )
        expected.append(ids[0, length:].tolist())
    assert answers(toy.save(tmp_path), requests) == expected


def test_held_back_ends(tmp_path: Path) -> None:
    """With ``logits_eos_inf`` and ``confidence_eos_eot_inf``, which name tokens by the published
    ids, the tokens are those of the publisher's loop.
    """
    end, turn_end = 126081, 126348
    toy = tiny.llada(vocab_size=126464, eos_token_id=end)
    with torch.no_grad():
        # So that both are often the likeliest.
        toy.body.lm_head.weight[[end, turn_end]] *= 3
    model, generate = model_and_loop(toy)
    requests, expected = [], []
    for i in range(8):
        flags = {"logits_eos_inf": bool(i & 1), "confidence_eos_eot_inf": bool(i & 2)}
        prompt = prompt_of(20 + i, seed=i)
        arguments = {
            "diffusion_block_length": 32,
            "diffusion_max_steps": 32 if i < 4 else 8,
            **{f"diffusion_{name}": int(value) for name, value in flags.items()},
        }
        requests.append((prompt, 64, arguments))
        ids = generate(
            model,
            torch.tensor([prompt]),
            steps=2 * arguments["diffusion_max_steps"],
            gen_length=64,
            block_length=32,
            mask_id=MASK_ID,
            **flags,
        )
        expected.append(ids[0, len(prompt) :].tolist())
    assert any(end in tokens for tokens in expected)
    assert any(turn_end in tokens for tokens in expected)
    assert answers(toy.save(tmp_path), requests) == expected


def test_dream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of Dream are those of ``diffusion_generate`` of the publisher's modeling file for
    several algorithms, numbers of steps and lengths.
    """
    load = modules_of(checkout("dllm") / "dllm/pipelines/dream/models", "publisher_dream")
    toy = tiny.dream()
    monkeypatch.setitem(ROPE_INIT_FUNCTIONS, "default", default_rope)
    own = ("architectures", "auto_map", "model_type", "torch_dtype")
    fields = {name: value for name, value in toy.config.items() if name not in own}
    config = load("configuration_dream").DreamConfig(**fields)
    body = load("modeling_dream").DreamModel(config).float().eval()
    body.load_state_dict(toy.tensors())
    requests, expected = [], []
    for length, num_tokens, steps, algorithm in (
        (1, 24, 24, "entropy"),
        (9, 40, 64, "entropy"),
        (33, 64, 13, "entropy"),
        (33, 64, 64, "maskgit_plus"),
        (120, 100, 512, "maskgit_plus"),
        (70, 48, 1, "maskgit_plus"),
        (40, 60, 60, "topk_margin"),
    ):
        prompt = prompt_of(length, seed=length)
        arguments = {"diffusion_max_steps": steps, "diffusion_algorithm": algorithm}
        requests.append((prompt, num_tokens, arguments))
        asked = load("generation_utils").DreamGenerationConfig(
            max_new_tokens=num_tokens, steps=steps, alg=algorithm, mask_token_id=MASK_ID
        )
        ids = body.diffusion_generate(
            torch.tensor([prompt]),
            generation_config=asked,
            generation_logits_hook_func=lambda step, x, logits: without_mask(logits),
        )
        ids = getattr(ids, "sequences", ids)
        expected.append(ids[0, length:].tolist())
    assert answers(toy.save(tmp_path), requests) == expected
    assert len({token for tokens in expected for token in tokens}) > VOCAB_SIZE // 8


def test_coda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of CoDA are those of ``diffusion_generate`` of the publisher's class for several
    algorithms, numbers of steps and lengths, with the head that the class keeps apart.
    """
    load = modules_of(checkout("CoDA") / "CoDALanguageModel", "publisher_coda")
    toy = tiny.coda()
    own = ("architectures", "auto_map", "model_type", "torch_dtype")
    fields = {name: value for name, value in toy.config.items() if name not in own}
    config = load("model_config").CoDAConfig(**fields)
    # transformers 5 asks whether the class has SDPA, which calls it by itself, and makes fields of
    # an embedding that is not scaled.
    config._attn_implementation, config.rope_theta = "eager", fields["rope_theta"]
    config.rope_scaling = None
    body = load("modeling_coda").CoDALanguageModel(config).float().eval()
    body.load_state_dict(toy.tensors())
    assert not torch.equal(body.lm_head.weight, body.model.embed_tokens.weight)
    asking = load("generation_utils").DLMGenerationConfig
    # It has no body, and an argument more in transformers 5.
    monkeypatch.setattr(asking, "validate", lambda self, **_: None)
    requests, expected = [], []
    for length, num_tokens, steps, algorithm in (
        (1, 24, 24, "entropy"),
        (9, 40, 64, "entropy"),
        (33, 64, 13, "entropy"),
        (33, 64, 64, "maskgit_plus"),
        (120, 100, 128, "entropy"),
        (70, 48, 1, "maskgit_plus"),
        (40, 60, 60, "topk_margin"),
    ):
        prompt = prompt_of(length, seed=length)
        arguments = {
            "diffusion_max_steps": steps,
            "diffusion_algorithm": algorithm,
            "diffusion_alg_temp": 0.0,
        }
        requests.append((prompt, num_tokens, arguments))
        asked = asking(
            max_new_tokens=num_tokens,
            steps=steps,
            alg=algorithm,
            mask_token_id=MASK_ID,
            pad_token_id=0,
        )
        ids = body.diffusion_generate(
            torch.tensor([prompt]),
            generation_config=asked,
            generation_logits_hook_func=lambda step, x, logits: without_mask(logits),
        )
        expected.append(ids[0, length:].tolist())
    assert answers(toy.save(tmp_path), requests) == expected
    assert len({token for tokens in expected for token in tokens}) > VOCAB_SIZE // 8

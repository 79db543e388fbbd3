"""LLaDA, Dream, CoDA and RND1: the tokens of their publishers' classes and loops."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.publishers import (
    answers,
    checkout,
    default_rope,
    fields_of,
    modules_of,
    with_weights,
    without_mask,
)
from tests.publishers.llada import llada, model_and_loop
from tests.support.families import makers as tiny
from tests.support.families.model import MASK_ID, VOCAB_SIZE, TinyModel, prompt_of
from tests.support.families.run import block_draws, keyed_sample

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def llada_moe(toy: TinyModel) -> Any:
    """Build the publisher's class of LLaDA-MoE with a toy's weights."""
    load = modules_of(checkout("dllm") / "dllm/pipelines/llada/models", "publisher_llada_moe")
    config = load("configuration_lladamoe").LLaDAMoEConfig(**fields_of(toy))
    config._attn_implementation = "eager"
    return with_weights(load("modeling_lladamoe").LLaDAMoEModelLM(config), toy)


def assert_lladas(
    body: Any,
    folder: Path,
    asked: Iterable[tuple[list[int], int, int, int, dict[str, bool]]],
    **also: str,
) -> list[list[int]]:
    """Compare answers with those of LLaDA's ``generate.py``, which draws no mask; return them.

    Args:
        body: The publisher's model.
        folder: The toy's checkpoint.
        asked: Prompt, tokens, block's length, its steps, and what the loop has besides.
        also: Further arguments of each request.
    """
    model, generate = model_and_loop(body)
    requests, expected = [], []
    for prompt, num_tokens, block, steps, flags in asked:
        arguments = {"diffusion_block_length": block, "diffusion_max_steps": steps, **also}
        arguments |= {f"diffusion_{name}": int(value) for name, value in flags.items()}
        requests.append((prompt, num_tokens, arguments))
        ids = generate(
            model,
            torch.tensor([prompt]),
            steps=steps * (num_tokens // block),
            gen_length=num_tokens,
            block_length=block,
            mask_id=MASK_ID,
            **flags,
        )
        expected.append(ids[0, len(prompt) :].tolist())
    assert answers(folder, requests) == expected
    return expected


def test_llada(tmp_path: Path) -> None:
    """Tokens of LLaDA are those of the publisher's ``generate.py`` and modeling file for several
    blocks, numbers of steps and lengths.
    """
    toy = tiny.llada()
    asked = [
        (prompt_of(length, seed=length), num_tokens, block, steps, {})
        for length, num_tokens, block, steps in (
            (1, 32, 8, 8),
            (7, 64, 16, 16),
            (33, 64, 64, 64),
            (33, 64, 32, 5),
            (90, 96, 32, 32),
            (120, 128, 128, 40),
        )
    ]
    found = assert_lladas(llada(toy), toy.save(tmp_path), asked, diffusion_strategy="static")
    assert len({token for tokens in found for token in tokens}) > VOCAB_SIZE // 8


def test_llada_moe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of LLaDA-MoE are those of LLaDA's loop with the publisher's modeling file of
    LLaDA-MoE.
    """
    toy = tiny.llada_moe()
    monkeypatch.setitem(ROPE_INIT_FUNCTIONS, "default", default_rope)
    asked = [
        (prompt_of(length, seed=length), num_tokens, block, steps, {})
        for length, num_tokens, block, steps in ((1, 32, 8, 8), (33, 64, 32, 5), (90, 96, 32, 32))
    ]
    assert_lladas(llada_moe(toy), toy.save(tmp_path), asked)


def test_held_back_ends(tmp_path: Path) -> None:
    """With ``logits_eos_inf`` and ``confidence_eos_eot_inf``, which name tokens by the published
    ids, the tokens are those of the publisher's loop.
    """
    end, turn_end = 126081, 126348
    toy = tiny.llada(vocab_size=126464, eos_token_id=end)
    with torch.no_grad():
        # So that both are often the likeliest.
        toy.body.lm_head.weight[[end, turn_end]] *= 3
    asked = []
    for i in range(8):
        flags = {"logits_eos_inf": bool(i & 1), "confidence_eos_eot_inf": bool(i & 2)}
        asked.append((prompt_of(20 + i, seed=i), 64, 32, 32 if i < 4 else 8, flags))
    found = assert_lladas(llada(toy), toy.save(tmp_path), asked)
    assert any(end in tokens for tokens in found)
    assert any(turn_end in tokens for tokens in found)


def diffused(
    body: Any, asking: Callable[..., Any], longest: tuple[int, int, int, str], **also: float
) -> tuple[list[Any], list[list[int]]]:
    """Return requests, and their answers by ``diffusion_generate`` of Dream's or CoDA's class.

    Args:
        body: The publisher's model.
        asking: Makes its generation settings.
        longest: Length of the prompt, tokens of the answer, steps and algorithm of one request
            beside the others.
        also: Further arguments of each request.
    """
    requests, expected = [], []
    for length, num_tokens, steps, algorithm in (
        (1, 24, 24, "entropy"),
        (9, 40, 64, "entropy"),
        (33, 64, 13, "entropy"),
        (33, 64, 64, "maskgit_plus"),
        longest,
        (70, 48, 1, "maskgit_plus"),
        (40, 60, 60, "topk_margin"),
    ):
        prompt = prompt_of(length, seed=length)
        arguments = {"diffusion_max_steps": steps, "diffusion_algorithm": algorithm, **also}
        requests.append((prompt, num_tokens, arguments))
        ids = body.diffusion_generate(
            torch.tensor([prompt]),
            generation_config=asking(
                max_new_tokens=num_tokens, steps=steps, alg=algorithm, mask_token_id=MASK_ID
            ),
            generation_logits_hook_func=lambda step, x, logits: without_mask(logits),
        )
        ids = getattr(ids, "sequences", ids)
        expected.append(ids[0, length:].tolist())
    return requests, expected


def test_dream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of Dream are those of ``diffusion_generate`` of the publisher's modeling file for
    several algorithms, numbers of steps and lengths.
    """
    load = modules_of(checkout("dllm") / "dllm/pipelines/dream/models", "publisher_dream")
    toy = tiny.dream()
    monkeypatch.setitem(ROPE_INIT_FUNCTIONS, "default", default_rope)
    config = load("configuration_dream").DreamConfig(**fields_of(toy))
    body = with_weights(load("modeling_dream").DreamModel(config), toy)
    asking = load("generation_utils").DreamGenerationConfig
    requests, expected = diffused(body, asking, (120, 100, 512, "maskgit_plus"))
    assert answers(toy.save(tmp_path), requests) == expected
    assert len({token for tokens in expected for token in tokens}) > VOCAB_SIZE // 8


def test_coda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of CoDA are those of ``diffusion_generate`` of the publisher's class for several
    algorithms, numbers of steps and lengths, with the head that the class keeps apart.
    """
    load = modules_of(checkout("CoDA") / "CoDALanguageModel", "publisher_coda")
    toy = tiny.coda()
    config = load("model_config").CoDAConfig(**fields_of(toy))
    # transformers 5 asks whether the class has SDPA, which calls it by itself, and makes fields of
    # an embedding that is not scaled.
    config._attn_implementation, config.rope_theta = "eager", toy.config["rope_theta"]
    config.rope_scaling = None
    body = with_weights(load("modeling_coda").CoDALanguageModel(config), toy)
    assert not torch.equal(body.lm_head.weight, body.model.embed_tokens.weight)
    asking = load("generation_utils").DLMGenerationConfig
    # It has no body, and an argument more in transformers 5.
    monkeypatch.setattr(asking, "validate", lambda self, **_: None)
    requests, expected = diffused(
        body, partial(asking, pad_token_id=0), (120, 100, 128, "entropy"), diffusion_alg_temp=0.0
    )
    assert answers(toy.save(tmp_path), requests) == expected
    assert len({token for tokens in expected for token in tokens}) > VOCAB_SIZE // 8


class Stable:
    """``torch`` for RND1's loop: of equals ``topk`` keeps the rightmost, and draws are keyed as the
    engine's are.
    """

    def __init__(self, seed: int) -> None:
        self._sample, self._count = keyed_sample(seed), 0
        self.distributions = SimpleNamespace(Categorical=self._categorical)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def topk(self, scores: torch.Tensor, k: int, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the k largest of each row, and their places."""
        order = scores.flip(-1).argsort(dim=-1, descending=True, stable=True)[..., :k]
        places = scores.shape[-1] - 1 - order
        return scores.gather(-1, places), places

    def _categorical(self, logits: torch.Tensor) -> Any:
        # A row predicts the token at the next position.
        draws = block_draws(0, self._count, range(1, logits.shape[1] + 1))
        self._count += 1
        return SimpleNamespace(sample=lambda: self._sample(logits[0], draws)[None])


def test_rnd1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of RND1 are those of ``generate`` of the publisher's class for several temperatures,
    numbers of steps and lengths.
    """
    load = modules_of(checkout("RND1") / "rnd", "publisher_rnd1")
    toy = tiny.rnd1()
    config = load("configuration_rnd").RND1Config()
    # The class overwrites what it is given with the published values.
    for name, value in toy.config.items():
        if name not in ("architectures", "auto_map", "model_type", "rope_scaling"):
            setattr(config, name, value)
    config._attn_implementation = "sdpa"
    config.rope_parameters = {"rope_type": "default", "rope_theta": toy.config["rope_theta"]}
    body = with_weights(load("modeling_rnd").RND1LM(config), toy)

    def forbid(_: Any, inputs: Any, output: Any) -> Any:
        # An entropy with minus infinity would be NaN there.
        output.logits[..., MASK_ID] = -1e4
        return output

    body.register_forward_hook(forbid)
    requests, expected = [], []
    for length, num_tokens, steps, temperature in (
        (1, 24, 24, 0.0),
        (9, 40, 7, 0.0),
        (33, 64, 64, 1.0),
        (33, 64, 13, 0.5),
        (90, 96, 96, 0.01),
        (70, 48, 1, 1.0),
    ):
        prompt = prompt_of(length, seed=length)
        arguments = {"diffusion_max_steps": steps, "temperature": temperature, "seed": length}
        requests.append((prompt, num_tokens, arguments))
        monkeypatch.setattr(load("sampling"), "torch", Stable(length))
        asked = load("generation_config").RND1GenerationConfig(
            # The last position of the published loop holds padding.
            max_new_tokens=num_tokens + 1,
            num_diffusion_steps=steps,
            mask_token_id=MASK_ID,
            temperature=temperature,
            greedy=temperature == 0,
        )
        ids = body.generate(inputs=torch.tensor([prompt]), generation_config=asked)
        assert ids[0, -1] == toy.config["pad_token_id"]
        expected.append(ids[0, length:-1].tolist())
    assert answers(toy.save(tmp_path), requests) == expected
    assert len({token for tokens in expected for token in tokens}) > VOCAB_SIZE // 8

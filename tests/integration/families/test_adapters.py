"""LoRA adapters of masked families: the engine's tokens are the published loop's on PEFT's model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from tests.support.adapters import LINEAR, adapt, rename
from tests.support.engine import TracedEngine
from tests.support.families.cases import CASES, Wanted, expected
from tests.support.families.model import prompt_of

pytestmark = pytest.mark.engine

# PEFT's modules of each family's layers; SDAR's experts are published one by one, and not so here.
TARGETS: dict[str, Any] = {
    **dict.fromkeys(CASES, rf".*\.(self_attn|mlp)\.{LINEAR}"),
    **dict.fromkeys(
        ("llada2.0", "llada2.1", "llada2.2"),
        r".*\.(query_key_value|dense|gate_proj|up_proj|down_proj)",
    ),
    "sdar-moe": r".*\.self_attn\.[qkvo]_proj",
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
def test_tokens(name: str, tmp_path: Path) -> None:
    """Two adapters and the model without one, in one batch, greedy and drawn."""
    case = CASES[name]
    checkpoint = case.make().save(tmp_path / "checkpoint")
    models: dict[int, Any] = {0: case.make()}
    for i in (1, 2):
        models[i] = case.make()
        folder = tmp_path / str(i)
        adapted = adapt(models[i].body, folder, seed=i, rank=2 * i, target_modules=TARGETS[name])
        # What PEFT changed in place is called as before.
        assert adapted.base_model.model is models[i].body
        if name == "nemotron":
            rename(folder, lambda module: module.replace("model.", "encoder.", 1))
    wanted = [Wanted(), Wanted(temperature=1.0, seed=3)]
    work = [(i, prompt_of(n, seed=n), one) for i in models for n in (5, 33) for one in wanted]
    engine = TracedEngine(
        checkpoint,
        max_model_len=256,
        max_num_seqs=8,
        enable_lora=True,
        max_loras=2,
        max_lora_rank=8,
        **case.options,
    )
    try:
        outputs = engine.llm.generate(
            [{"prompt_token_ids": prompt} for _, prompt, _ in work],
            [one.sampling_params() for *_, one in work],
            lora_request=[
                LoRARequest(str(i), i, str(tmp_path / str(i))) if i else None for i, *_ in work
            ],
            use_tqdm=False,
        )
    finally:
        engine.close()
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    for (i, prompt, one), answer in zip(work, answers, strict=True):
        assert answer == expected(case, models[i], prompt, one).tokens, (i, len(prompt), one)
    assert len(set(map(tuple, answers))) > len(work) // 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_drafts(tmp_path: Path) -> None:
    """With ``linear_spec`` the checkpoint's own adapter drafts beside one of a request, and both act.

    Tokens are those of the autoregressive mode, with the request's adapter alone.
    """
    checkpoint = CASES["nemotron"].make().save(tmp_path / "checkpoint")
    model = CASES["nemotron"].make()
    adapt(model.body, tmp_path / "adapter", seed=1, target_modules=TARGETS["nemotron"])
    rename(tmp_path / "adapter", lambda module: module.replace("model.", "encoder.", 1))
    request = LoRARequest("adapter", 1, str(tmp_path / "adapter"))
    prompts = [prompt_of(length, seed=length) for length in (5, 33, 70)]
    found = {}
    for rule in ("linear_spec", "autoregressive"):
        engine = TracedEngine(
            checkpoint,
            max_model_len=256,
            enable_lora=True,
            max_lora_rank=8,
            additional_config={"diffusion": {"rule": rule}},
        )
        try:
            for adapter in (None, request):
                outputs = engine.llm.generate(
                    [{"prompt_token_ids": prompt} for prompt in prompts],
                    engine.sampling_params(temperature=0.0, max_tokens=40, ignore_eos=True),
                    lora_request=adapter,
                    use_tqdm=False,
                )
                found[rule, adapter] = [list(output.outputs[0].token_ids) for output in outputs]
        finally:
            engine.close()
    assert found["linear_spec", None] == found["autoregressive", None]
    assert found["linear_spec", request] == found["autoregressive", request]
    assert found["linear_spec", request] != found["linear_spec", None]

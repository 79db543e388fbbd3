"""At the width that is published, the engine's tokens are those of the published loop, on both
sides of each length that the checkpoint's file names.

Weights are random, of two layers, or of all where that is a small model. The loops are those that
``tests/publishers`` holds to the publishers' own; the layers are ``transformers``' or this
package's second implementation of LLaDA2's.
"""

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engines.engine import TracedEngine, tokens_of
from tests.support.families.cases import EVERY_CASE, expected
from tests.support.families.makers import LLaDA
from tests.support.families.model import prompt_of
from tests.support.families.published import files_of
from tests.support.models.checkpoints import copy_checkpoint, randomize
from tests.support.models.prompts import prompt_of as gemma_prompt_of
from tests.support.oracles.oracle import Oracle

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# Fields that decide shapes, positions and the choice of experts.
SIZES = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "max_position_embeddings", "tie_word_embeddings", "rotary_dim"),
    *("moe_intermediate_size", "num_experts", "num_experts_per_tok", "n_group", "topk_group"),
    *("sliding_window", "max_window_layers", "rope_parameters", "rms_norm_eps"),
)


@dataclass(frozen=True)
class Sized:
    """A checkpoint at its published width.

    Attributes:
        case: Name in ``EVERY_CASE``.
        file: Its id, and revision.
        lengths: Tokens of prompts.
        num_layers: Of the model; ``None`` for all.
        sizes: Other sizes than those of the file.
        max_tokens: Tokens of answers.
        steps: Of answers; ``None`` for few passes by a threshold, as each runs the whole loop.
    """

    case: str
    file: tuple[str, ...]
    lengths: Sequence[int]
    num_layers: int | None = 2
    sizes: tuple[tuple[str, Any], ...] = ()
    max_tokens: int = 24
    steps: int | None = None


# 2,048 rows are a chunk of a prompt on a CPU.
SIZED = [
    Sized("sdar", ("JetLM/SDAR-1.7B-Chat",), (30, 2100)),
    Sized("sdar-moe", ("JetLM/SDAR-30B-A3B-Chat",), (30, 1000)),
    # The sliding_window of its file, which no layer has, is 4,096.
    Sized("llada2.0", ("inclusionAI/LLaDA2.0-mini",), (30, 4040, 4200)),
    Sized("llada2.1", ("inclusionAI/LLaDA2.1-mini",), (30, 4040, 4200)),
    Sized(
        "stable-diffcoder", ("ByteDance-Seed/Stable-DiffCoder-8B-Instruct", "d0808fa"), (30, 2100)
    ),
    # Its max_sequence_length is 4,096.
    Sized("llada", ("GSAI-ML/LLaDA-8B-Instruct",), (30, 4064), max_tokens=32),
    Sized("dream", ("Dream-org/Dream-v0-Instruct-7B",), (30, 1900), steps=6),
    # From its original_max_position_embeddings on queries are scaled: 16,384, for which the loop
    # needs more than 20 GB.
    Sized(
        "nemotron",
        ("nvidia/Nemotron-Labs-Diffusion-3B",),
        # Logits of 2,070 have a tie, of 3e-5.
        (30, 2030, 2080),
        sizes=(("original_max_position_embeddings", 2048),),
    ),
    Sized("fast-dllm", ("Efficient-Large-Model/Fast_dLLM_v2_1.5B",), (30, 700), num_layers=None),
    # Its file was not found whole; it is Qwen3-0.6B's body.
    Sized(
        "a2d",
        ("dllm-hub/Qwen3-0.6B-diffusion-mdlm-v0.1",),
        (30, 700),
        num_layers=None,
        sizes=(
            *(("hidden_size", 1024), ("intermediate_size", 3072), ("head_dim", 128)),
            *(("num_attention_heads", 16), ("num_key_value_heads", 8)),
            *(("max_position_embeddings", 40960), ("num_hidden_layers", 28)),
        ),
    ),
]


def published_sizes(file: Sequence[str], num_layers: int | None, **sizes: Any) -> dict[str, Any]:
    """Return the sizes of a published ``config.json``, by the names of a Llama."""
    own = {theirs: name for name, theirs in LLaDA.fields.items()}
    found = {own.get(name, name): value for name, value in files_of(*file).config.items()}
    taken = {name: value for name, value in found.items() if name in (*SIZES, "num_hidden_layers")}
    name = "original_max_position_embeddings"
    if name in sizes:
        taken["rope_parameters"] = {**taken["rope_parameters"], name: sizes.pop(name)}
    return taken | sizes | ({} if num_layers is None else {"num_hidden_layers": num_layers})


@pytest.mark.parametrize("sized", SIZED, ids=lambda sized: sized.file[0].split("/")[1])
def test_published_width(sized: Sized, tmp_path: Path) -> None:
    """Greedy tokens of a model of published width are the published loop's, for prompts on both
    sides of the limits in its file, in one batch.
    """
    case = EVERY_CASE[sized.case]
    sizes = published_sizes(sized.file, sized.num_layers, **dict(sized.sizes))
    model = case.make(sharpness=12.0, **sizes)
    config = getattr(model.body, "config", None)
    if hasattr(config, "_attn_implementation"):
        # Eager attention keeps all weights of a long prompt.
        config._attn_implementation = "sdpa"
    few_passes = {"steps": sized.steps} if sized.steps else {"threshold": 0.02}
    one = case.wanted(max_tokens=sized.max_tokens, **few_passes)
    prompts = [prompt_of(length, seed=length) for length in sized.lengths]
    with torch.inference_mode():
        wanted = [expected(case, model, prompt, one).tokens for prompt in prompts]
    # By another name the path may say another way of training.
    folder = model.save(tmp_path / sized.case)
    del model
    gc.collect()
    longest = max(sized.lengths) + 2 * sized.max_tokens
    room = min(-(-longest // 64) * 64, sizes["max_position_embeddings"])
    options = {"max_model_len": room, "max_num_seqs": 3, "kv_cache_memory_bytes": 2**30}
    with TracedEngine(folder, **options | case.options) as engine:
        outputs = engine.outputs(prompts, one.sampling_params())
    found = tokens_of(outputs)
    assert found == wanted
    print(f"{sized.file[0]}: {sum(map(len, found))} tokens equal after {list(sized.lengths)}")
    assert len({token for tokens in wanted for token in tokens}) > sum(map(len, wanted)) // 3


def test_published_width_of_diffusion_gemma(tmp_path: Path) -> None:
    """Logits and tokens of DiffusionGemma are those of ``transformers``, on both sides of the
    window, whose canvases of 256 positions it has too; with a quarter of its experts, so that both
    fit into the memory of a small machine.
    """
    from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

    config = files_of("google/diffusiongemma-26B-A4B-it").config
    text = config["text_config"] | {
        "num_hidden_layers": 2,
        "num_experts": 32,
        "layer_types": ["sliding_attention", "full_attention"],
        "dtype": "float32",
    }
    folder = copy_checkpoint(
        tmp_path,
        config={"canvas_length": config["canvas_length"]},
        text_config=text,
        generation_config={"max_denoising_steps": 2},
    )
    with torch.device("cpu"):
        model = DiffusionGemmaForBlockDiffusion(DiffusionGemmaConfig.from_pretrained(folder))
    randomize(model)
    settings = folder / "generation_config.json"
    kept = settings.read_text(encoding="utf-8")
    model.save_pretrained(folder)
    settings.write_text(kept, encoding="utf-8")
    del model
    gc.collect()
    prompts = [gemma_prompt_of(length) for length in (30, text["sliding_window"] + 76)]
    asked: dict[str, Any] = {"max_tokens": config["canvas_length"], "ignore_eos": True}
    oracle = Oracle(folder)
    wanted = [oracle.generate(prompt, seed=7, **asked) for prompt in prompts]
    del oracle
    gc.collect()
    options = {"max_model_len": 2048, "max_num_seqs": 2, "kv_cache_memory_bytes": 2**30}
    with TracedEngine(folder, **options) as engine:
        for prompt, run in zip(prompts, wanted, strict=True):
            with engine.recording() as steps:
                (found,) = engine.generate([prompt], seeds=[7], **asked)
            denoised = [step.logits for step in steps if not step.encoding]
            errors = [
                (ours - theirs).abs().max().item()
                for ours, theirs in zip(denoised, run.logits, strict=True)
            ]
            print(f"google/diffusiongemma-26B-A4B-it: {len(prompt)} tokens, {errors} apart")
            assert max(errors) < 1e-3
            assert list(found.token_ids) == run.tokens

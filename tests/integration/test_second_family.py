"""A second family costs a class, start-up checks and a line: a masked block-diffusion Llama.

Neither the runner nor the scheduler knows of it, and nothing it uses is Gemma-specific. What the
engine generates is compared with a plain loop over ``transformers``' Llama.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.engine import TracedEngine
from tests.support.families import model as tiny
from tests.support.families.model import MASK_ID
from tests.support.families.run import causal_then_block, most_confident, suppress
from vllm_diffusion.decoding.layouts import FreeCanvas
from vllm_diffusion.decoding.reveal import Reveal
from vllm_diffusion.runner.model_state import BlockDiffusionModelState
from vllm_diffusion.startup.engine_config import MaskedEngineConfig, PublishedRule
from vllm_diffusion.weights.tensor_rules import BodyTensors, TensorRules

pytestmark = pytest.mark.engine

CANVAS, THRESHOLD = 8, 0.05


class MaskedLlamaEngineConfig(MaskedEngineConfig):
    """The whole of the second family's start-up: canvases begin where a causal context ends."""

    rules = {
        "reveal": PublishedRule(Reveal, {"reveal_threshold": THRESHOLD, "strategy": "dynamic"})
    }
    mask_token_id = MASK_ID
    block_length = CANVAS
    layout = FreeCanvas

    @classmethod
    def tensor_rules(cls) -> TensorRules:
        return BodyTensors("LlamaForCausalLM")


LLAMA = replace(
    tiny.stable_diffcoder,
    config=tiny.stable_diffcoder.config | {"architectures": ["MaskedLlamaForTests"]},
    block_length_key=None,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return LLAMA().save(tmp_path_factory.mktemp("masked"))


@pytest.fixture(scope="module")
def model_class():
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.llama import LlamaForCausalLM

    class MaskedLlamaForTests(LlamaForCausalLM):
        @staticmethod
        def get_model_state_cls() -> type:
            return BlockDiffusionModelState

    ModelRegistry.register_model("MaskedLlamaForTests", MaskedLlamaForTests)


OPTIONS = {
    "max_model_len": 128,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 16 * 1024**2,
}


@pytest.fixture(scope="module", params=[False, True], ids=["synchronous", "asynchronous"])
def llm(request, checkpoint, model_class):
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS_CONFIG_MAP, "MaskedLlamaForTests", MaskedLlamaEngineConfig)
        engine = TracedEngine(checkpoint, async_scheduling=request.param, **OPTIONS)
    yield engine.llm
    engine.close()


@torch.no_grad()
def expected_tokens(prompt: list[int], num_canvases: int) -> list[int]:
    """The same rule in a plain loop: whole sequences, a dense mask, no cache."""
    model = suppress(LLAMA(), [MASK_ID])
    known = torch.tensor(prompt)
    for _ in range(num_canvases):
        canvas = torch.full((CANVAS,), MASK_ID)
        visible = causal_then_block(len(known), CANVAS)
        while (masked := canvas == MASK_ID).any():
            logits = model(torch.cat([known, canvas]), visible)[len(known) :]
            confidence, argmax = logits.softmax(-1).max(-1)
            reveal = (masked & (confidence > THRESHOLD)) | most_confident(confidence, masked, 1)
            canvas[reveal] = argmax[reveal]
        known = torch.cat([known, canvas])
    return known[len(prompt) :].tolist()


def test_masked_family(llm):
    """Three prompts in one batch, two canvases each, greedy: token by token the plain loop's."""
    from vllm import SamplingParams

    prompts = [[5, 9, 33], list(range(20, 50)), [7] * 11]
    params = SamplingParams(
        max_tokens=2 * CANVAS, temperature=0.0, ignore_eos=True, detokenize=False
    )
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
    )
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == expected_tokens(prompt, 2)


def test_family_without_start_up_checks(checkpoint, model_class):
    """Under vLLM's own scheduler its tokens would be wrong from the second canvas on: refused."""
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    diffusion = {"canvas_length": CANVAS}
    with pytest.raises(ValueError, match="MaskedLlamaForTests has no start-up checks"):
        LLM(str(checkpoint), diffusion_config=diffusion, async_scheduling=False, **OPTIONS)
    cleanup_dist_env_and_memory()

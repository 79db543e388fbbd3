"""A second family costs a class, start-up checks and a line: a masked block-diffusion Llama.

Neither the runner nor the scheduler knows of it, and nothing it uses is Gemma-specific. What the
engine generates is compared with a plain loop over ``transformers``' Llama.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.engine import TracedEngine
from vllm_diffusion.decoding.reveal import Reveal
from vllm_diffusion.layouts import FreeCanvas
from vllm_diffusion.runner.model_state import BlockDiffusionModelState
from vllm_diffusion.startup.engine_config import PublishedRule
from vllm_diffusion.startup.masked_engine_config import MaskedEngineConfig
from vllm_diffusion.weights.body_tensors import BodyTensors
from vllm_diffusion.weights.tensor_rules import TensorRules

pytestmark = pytest.mark.engine

VOCAB, MASK, CANVAS, THRESHOLD = 128, 127, 8, 0.05


class MaskedLlamaEngineConfig(MaskedEngineConfig):
    """The whole of the second family's start-up: canvases begin where a causal context ends."""

    rules = {
        "reveal": PublishedRule(Reveal, {"reveal_threshold": THRESHOLD, "strategy": "dynamic"})
    }
    mask_token_id = MASK
    block_length = CANVAS
    layout = FreeCanvas

    @classmethod
    def tensor_rules(cls) -> TensorRules:
        return BodyTensors("LlamaForCausalLM")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("masked")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.15,
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    path = folder / "config.json"
    content = json.loads(path.read_text())
    content["architectures"] = ["MaskedLlamaForTests"]
    path.write_text(json.dumps(content))
    return folder


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
    "skip_tokenizer_init": True,
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


def expected_tokens(checkpoint: Path, prompt: list[int], num_canvases: int) -> list[int]:
    """The same rule in a plain loop: whole sequences, a dense mask, no cache."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(checkpoint, attn_implementation="eager").eval()
    known = list(prompt)
    for _ in range(num_canvases):
        canvas = torch.full((CANVAS,), MASK)
        while bool((canvas == MASK).any()):
            length = len(known) + CANVAS
            visible = torch.ones(length, length, dtype=torch.bool).tril()
            visible[len(known) :] = True
            bias = torch.zeros(1, 1, length, length).masked_fill(~visible, float("-inf"))
            with torch.no_grad():
                logits = model(torch.tensor([known + canvas.tolist()]), attention_mask=bias).logits[
                    0, len(known) :
                ]
            confidence, argmax = logits.softmax(-1).max(-1)
            masked = canvas == MASK
            confidence = confidence.masked_fill(~masked, -1.0)
            reveal = masked & (confidence > THRESHOLD)
            reveal[confidence.argmax()] = True
            canvas = torch.where(reveal, argmax, canvas)
        known += canvas.tolist()
    return known[len(prompt) :]


def test_masked_family(llm, checkpoint):
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
        tokens = list(output.outputs[0].token_ids)
        assert MASK not in tokens
        assert tokens == expected_tokens(checkpoint, prompt, 2)


def test_family_without_start_up_checks(checkpoint, model_class):
    """Under vLLM's own scheduler its tokens would be wrong from the second canvas on: refused."""
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    diffusion = {"canvas_length": CANVAS}
    with pytest.raises(ValueError, match="MaskedLlamaForTests has no start-up checks"):
        LLM(str(checkpoint), diffusion_config=diffusion, async_scheduling=False, **OPTIONS)
    cleanup_dist_env_and_memory()

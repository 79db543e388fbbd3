"""Checkpoints that trainers' own export code writes."""

import importlib
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3Config

from tests.integration.families.test_trainers import answer_of
from tests.publishers import checkout
from tests.support.models.checkpoints import SHIPPED, changed
from vllm_diffusion.checkpoints import shipped_checkpoint, shipped_draft

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_diffusion_gemma_of_nemo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A DiffusionGemma that NeMo AutoModel has read and written again gives the same tokens as
    before.
    """
    monkeypatch.syspath_prepend(str(checkout("Automodel")))
    name = "nemo_automodel.components.models.diffusion_gemma.state_dict_adapter"
    adapter = importlib.import_module(name).DiffusionGemmaStateDictAdapter(
        SimpleNamespace(), SimpleNamespace(n_routed_experts=4), SimpleNamespace(), torch.float32
    )

    def write_again(tensors: dict[str, Tensor]) -> None:
        written = adapter.to_hf(adapter.from_hf(dict(tensors)))
        tensors.clear()
        tensors.update({name: tensor.contiguous() for name, tensor in written.items()})

    folder = changed(SHIPPED, tmp_path / "nemo", write_again)
    assert answer_of(folder) == answer_of(SHIPPED)


# What each recipe writes into ``dflash_config`` besides what the shipped draft has, at sizes of a
# toy.
DRAFTS: dict[str, tuple[str, dict[str, Any]]] = {
    "draft_qwen3": ("Qwen3DFlashDraftModel", {}),
    "draft_qwen3_dflash2": (
        "Qwen3DFlash2DraftModel",
        {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 16, "selector_top_k": 4},
    ),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("module", DRAFTS)
def test_drafts_of_nemo(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that NeMo's class has read and written again is accepted as often as before, where
    the convolutions that NeMo adds start as identities.
    """
    monkeypatch.syspath_prepend(str(checkout("Automodel")))
    name, more = DRAFTS[module]
    of_trainer = importlib.import_module(f"nemo_automodel.components.speculative.dflash.{module}")
    config = json.loads((shipped_draft() / "config.json").read_text())
    config["dflash_config"] |= {"block_size": config["block_size"], **more}
    for field in ("architectures", "model_type", "dtype"):
        del config[field]
    draft = getattr(of_trainer, name)(Qwen3Config(**config, attn_implementation="sdpa")).float()
    draft.load_state_dict(load_file(shipped_draft() / "model.safetensors"), strict=False)
    draft.save_pretrained(tmp_path)

    assert answers(tmp_path) == answers(shipped_draft())


# What runs in the environment of ``speculators``: its converter, and its class with a part of the
# vocabulary, whose ids are not those of the target. No answer here has the other ids.
CONVERT = """
import sys

import torch
from speculators.convert.dflash.converter import DFlashConverter
from speculators.models.dflash import DFlashDraftModel

draft, target, whole, part = sys.argv[1:]
DFlashConverter().convert(draft, whole, target)
model = DFlashDraftModel.from_pretrained(whole)
head, ids = model.lm_head.weight.data, torch.arange(model.config.draft_vocab_size)
body = {name: tensor for name, tensor in model.state_dict().items() if "lm_head" not in name}
kept = torch.cat([ids[:2], ids[6:]])
model.config.draft_vocab_size = len(kept)
model = DFlashDraftModel(model.config)
model.load_state_dict(body, strict=False)
model.load_vocab_mappings(torch.isin(ids, kept), kept - ids[: len(kept)])
model.load_verifier_weights()
model.lm_head.weight.data = head[kept]
model.save_pretrained(part)
"""


@pytest.mark.timeout(600)
def test_drafts_of_speculators(tmp_path: Path) -> None:
    """The shipped draft, converted and saved by ``speculators``, is accepted as often as before,
    with the whole vocabulary and with a part of it.
    """
    python = checkout("speculators-env") / "bin" / "python"
    whole, part = tmp_path / "whole", tmp_path / "part"
    folders = shipped_draft(), shipped_checkpoint("qwen3"), whole, part
    subprocess.run([python, "-c", CONVERT, *folders], check=True, timeout=300)
    ours = answers(shipped_draft())
    assert answers(whole) == ours
    assert answers(part) == ours


def answers(folder: Path) -> list[tuple[str, list[int]]]:
    """Return greedy answers with a draft, and how many tokens each verification accepted."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(shipped_checkpoint("qwen3")),
        max_model_len=256,
        per_request_spec_decode_metrics="detailed",
        speculative_config={"method": "dflash", "model": str(folder), "num_speculative_tokens": 7},
        disable_log_stats=False,
    )
    questions = ("Count from 3 to 12.", "What is 27 + 58?", "Write the word hello in capitals.")
    chats = [[{"role": "user", "content": question}] for question in questions]
    params = SamplingParams(temperature=0, max_tokens=60)
    outputs = [output.outputs[0] for output in llm.chat(chats, params, use_tqdm=False)]
    llm.llm_engine.engine_core.shutdown()
    found = [(output.text, output.spec_decode_metrics.per_step_accepted) for output in outputs]
    # Some drafts are right and some are not, so that one that is read wrongly would be seen.
    assert {0, 7} <= {accepted for _, steps in found for accepted in steps}
    return found

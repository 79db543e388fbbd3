"""Checkpoints that trainers' own export code writes."""

from __future__ import annotations

import importlib
import json
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
    from vllm import LLM, SamplingParams

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

    def answers(folder: Path) -> tuple[list[list[int]], float]:
        """Return greedy answers, and how many drafted tokens were accepted."""
        spec = {"method": "dflash", "model": str(folder), "num_speculative_tokens": 7}
        llm = LLM(
            str(shipped_checkpoint("qwen3")),
            max_model_len=128,
            speculative_config=spec,
            disable_log_stats=False,
        )
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        outputs = llm.generate([[2, 40, 41, 42, 43, 44], [2, 50, 51, 52]], params, use_tqdm=False)
        found = {metric.name: metric for metric in llm.get_metrics()}
        accepted = found["vllm:spec_decode_num_accepted_tokens"].value
        llm.llm_engine.engine_core.shutdown()
        return [list(output.outputs[0].token_ids) for output in outputs], accepted

    ours = answers(shipped_draft())
    assert answers(tmp_path) == ours
    assert ours[1] > 24

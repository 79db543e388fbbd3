"""The tiny models, and the names of their tensors."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file

from tests.support.families import model, run
from tests.support.families.llada2_model import Gate
from tests.support.families.llada2_model import llada2 as llada2_model
from tests.support.families.model import END_IDS, MASK_ID, TinyModel, prompt_of
from tests.support.families.published_tensors import (
    PUBLISHED,
    nemotron_lora,
    num_parameters,
    published_tensors,
)

MODELS: dict[str, Callable[[], TinyModel]] = {
    "sdar": model.sdar,
    "sdar-moe": model.sdar_moe,
    "nemotron": model.nemotron,
    "fast-dllm": model.fast_dllm,
    "stable-diffcoder": model.stable_diffcoder,
    "llada2.0": llada2_model,
    "llada2.2": lambda: llada2_model(version="2.2"),
}


class TestModels:
    @pytest.mark.parametrize("name", MODELS)
    def test_checkpoint(self, name, tmp_path):
        """A saved folder holds exactly the published tensors for its configuration."""
        tiny = MODELS[name]()
        tiny.save(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        saved = {
            key: tuple(t.shape) for key, t in load_file(tmp_path / "model.safetensors").items()
        }
        assert saved == published_tensors(config)
        assert config["architectures"] == tiny.config["architectures"]
        ends = json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"]
        assert END_IDS[0] in (ends if isinstance(ends, list) else [ends])
        assert (tmp_path / "tokenizer.json").exists()

    @pytest.mark.parametrize("name", MODELS)
    def test_logits(self, name):
        """[T, V] float32, different at every mask, and random under a given seed."""
        tiny = MODELS[name]()
        ids = torch.tensor(prompt_of(40) + [MASK_ID] * 24)
        logits = tiny(ids, run.block_causal(64, 32))
        assert logits.shape == (64, tiny.config["vocab_size"])
        assert logits.dtype == torch.float32
        assert len(set(logits[40:].argmax(-1).tolist())) > 8
        assert torch.equal(logits, MODELS[name]()(ids, run.block_causal(64, 32)))

    @pytest.mark.parametrize("name", MODELS)
    def test_a_later_block_changes_nothing(self, name):
        """Under a block-causal mask a token is seen by its own block and by later ones only.

        So that a finished block's keys and values are final, and recomputing is caching.
        """
        tiny = MODELS[name]()
        ids = torch.tensor(prompt_of(64))
        visible = run.block_causal(64, 32)
        before = tiny(ids, visible)
        ids[40] = 25 if ids[40] != 25 else 26
        after = tiny(ids, visible)
        torch.testing.assert_close(after[:32], before[:32], rtol=0, atol=1e-5)
        changed = (after - before).abs().amax(-1) > 1e-4
        assert changed[32:].all()

    def test_query_scaling(self):
        """Nemotron's queries grow with the position, from the original length on."""
        tiny = model.nemotron()
        ids = torch.tensor(prompt_of(40))
        logits = tiny(ids, run.causal(40))
        tiny.body.config.rope_parameters["llama_4_scaling_beta"] = 0.0
        plain = tiny(ids, run.causal(40))
        torch.testing.assert_close(plain[:16], logits[:16], rtol=0, atol=1e-5)
        assert ((plain - logits).abs().amax(-1) > 1e-4)[16:].all()

    def test_lora_rows(self, tmp_path):
        """The LoRA acts on the rows that ask for it, and no context row sees it."""
        tiny = model.nemotron()
        ids = torch.tensor(prompt_of(12))
        visible = run.causal_then_block(8, 4)
        plain = tiny(ids, visible)
        adapted = tiny(ids, visible, adapted=torch.arange(12) >= 8)
        torch.testing.assert_close(adapted[:8], plain[:8], rtol=0, atol=1e-5)
        assert ((adapted - plain).abs().amax(-1) > 1e-2)[8:].all()
        assert torch.equal(tiny(ids, visible), plain)
        tiny.save(tmp_path)
        saved = load_file(tmp_path / "linear_spec_lora" / "adapter_model.safetensors")
        assert {key: tuple(t.shape) for key, t in saved.items()} == nemotron_lora(tiny.config, 4)

    def test_gate(self):
        """The bias chooses groups and experts; the weights are the plain scores, normalised, scaled.

        Two groups of two experts, one group and one expert of it taken... by hand: group 1 has the
        best sum only with its bias, and in it expert 2 the best biased score.
        """
        gate = _gate(n_group=2, topk_group=1, num_experts=4, num_experts_per_tok=2)
        scores = torch.tensor([0.9, 0.8, 0.5, 0.4])
        gate.weight.data = torch.logit(scores)[:, None]
        gate.expert_bias = torch.tensor([0.0, 0.0, 0.6, 0.5])
        chosen, weights = gate(torch.ones(1, 1))
        assert chosen.tolist() == [[2, 3]]
        torch.testing.assert_close(weights, torch.tensor([[0.5, 0.4]]) / 0.9 * 2.5)

    def test_gate_per_block(self):
        """A block's experts are the best of any of its tokens; each token chooses among them.

        Token 0 likes experts 0 and 1, token 1 expert 2 most of all: with room for two, expert 2 and
        expert 0 are in, so token 0 takes 0 and then 2, not 1.
        """
        gate = _gate(
            n_group=2,
            topk_group=1,
            num_experts=3,
            num_experts_per_tok=2,
            expert_capacity=2,
            block_size=2,
        )
        scores = torch.tensor([[0.8, 0.7, 0.1], [0.2, 0.3, 0.9]])
        gate.weight.data = torch.logit(scores).T
        chosen, weights = gate(torch.eye(2))
        assert chosen.tolist() == [[0, 2], [2, 0]]
        torch.testing.assert_close(weights[0], torch.tensor([0.8, 0.1]) / 0.9 * 2.5)
        with pytest.raises(ValueError, match="no whole number"):
            gate(torch.eye(2)[:1])


def _gate(**config: int) -> Gate:
    from types import SimpleNamespace

    names = {"hidden_size": 1, "routed_scaling_factor": 2.5} | config
    return Gate(SimpleNamespace(**names))


class TestPublishedTensors:
    @pytest.mark.parametrize("name", PUBLISHED)
    def test_published_figures(self, name):
        """As many tensors and bytes as the published files have, where these are known."""
        published = PUBLISHED[name]
        if published.num_tensors is not None:
            assert len(published_tensors(published.config)) == published.num_tensors
        if published.num_bytes is not None:
            assert 2 * num_parameters(published.config) == published.num_bytes

    @pytest.mark.parametrize(
        ("name", "billions"),
        [
            ("Nemotron-Labs-Diffusion-3B", 3.83),
            ("LLaDA2.0-flash", 102.89),
            ("LLaDA2.0-mini", 16.26),
            ("Stable-DiffCoder-8B-Instruct", 8.25),
        ],
    )
    def test_sizes_on_the_cards(self, name, billions):
        """The cards say 3.8, 103, 16 and 8.25 billion."""
        assert num_parameters(PUBLISHED[name].config) / 1e9 == pytest.approx(billions, abs=0.01)

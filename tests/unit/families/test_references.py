"""The reference loops do what their publishers' do: small cases worked out by hand."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.families import (
    fast_dllm,
    llada2,
    model,
    nemotron,
    run,
    sdar,
    stable_diffcoder,
)
from tests.support.families.llada2_model import DELETE_ID, SPLIT_ID, Gate
from tests.support.families.llada2_model import llada2 as llada2_model
from tests.support.families.model import END_IDS, MASK_ID, TinyModel, prompt_of, scripted
from tests.support.families.published_tensors import (
    PUBLISHED,
    nemotron_lora,
    num_parameters,
    published_tensors,
)

VOCAB, MASK, END = 100, 4, 1
DELETE, SPLIT = 98, 99
MODELS: dict[str, Callable[[], TinyModel]] = {
    "sdar": model.sdar,
    "sdar-moe": model.sdar_moe,
    "nemotron": model.nemotron,
    "fast-dllm": model.fast_dllm,
    "stable-diffcoder": model.stable_diffcoder,
    "llada2.0": llada2_model,
    "llada2.2": lambda: llada2_model(version="2.2"),
}


def row(token: int, p: float, second: int | None = None) -> Tensor:
    """[VOCAB]: logits under which ``token`` has probability ``p``, and ``second`` all the rest.

    Without a second all other tokens share the rest; with ``p=0.5`` and a second both are exactly
    as likely, and the softmax is exact.
    """
    rest = (1 - p) / (VOCAB - 1)
    logits = torch.full((VOCAB,), math.log(rest) if second is None else float("-inf"))
    if second is not None:
        logits[second] = math.log(1 - p)
    logits[token] = math.log(p)
    return logits


def constant(rows: Sequence[Tensor]) -> run.Model:
    """A model that says the same at each position whatever stands there."""
    return scripted(lambda ids: torch.stack(list(rows[: len(ids)])))


def decreasing(length: int, *, first: float = 0.9, by: float = 0.05, token: int = 10) -> run.Model:
    """Position i says ``token + i``, each with less certainty than the one before."""
    return constant([row(token + i, first - by * i) for i in range(length)])


def blocks(result: run.Run, kind: str) -> list[int]:
    """Passes of that kind per block, in the order of the blocks."""
    starts = [one.start for one in result.passes if one.kind == kind]
    return [len(list(group)) for _, group in itertools.groupby(starts)]


class TestSharedParts:
    @pytest.mark.parametrize(
        ("num_masked", "steps", "expected"),
        [(8, 3, [3, 3, 2]), (4, 4, [1] * 4), (3, 5, [1, 1, 1, 0, 0]), (0, 2, [0, 0])],
    )
    def test_even_schedule(self, num_masked, steps, expected):
        """Larger numbers come first, and all masks are spent."""
        assert run.even_schedule(num_masked, steps) == expected

    def test_most_confident(self):
        """Candidates only, never more than there are, the leftmost of equals first."""
        confidence = torch.tensor([0.9, 0.5, 0.5, 0.7])
        candidates = torch.tensor([False, True, True, True])
        chosen = run.most_confident(confidence, candidates, 2)
        assert chosen.tolist() == [False, True, False, True]
        assert run.most_confident(confidence, candidates, 9).tolist() == candidates.tolist()
        assert not run.most_confident(confidence, candidates, 0).any()

    def test_filtered(self):
        """Top-k keeps ties with the last one; top-p the token with which its sum is passed."""
        logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()[None]
        assert run.filtered(logits, 2, 1.0).isfinite().tolist() == [[True, True, False, False]]
        assert run.filtered(logits, 0, 0.5).isfinite().tolist() == [[True, True, False, False]]
        assert run.filtered(logits, 0, 0.3).isfinite().tolist() == [[True, False, False, False]]
        tied = torch.tensor([[1.0, 1.0, 0.0]])
        assert run.filtered(tied, 1, 1.0).isfinite().tolist() == [[True, True, False]]

    def test_block_causal(self):
        """Blocks are counted from position 0, also where the sequence ends inside one."""
        visible = run.block_causal(5, 2).int().tolist()
        assert visible == [
            [1, 1, 0, 0, 0],
            [1, 1, 0, 0, 0],
            [1, 1, 1, 1, 0],
            [1, 1, 1, 1, 0],
            [1, 1, 1, 1, 1],
        ]
        assert run.causal_then_block(1, 2).int().tolist() == [[1, 0, 0], [1, 1, 1], [1, 1, 1]]

    def test_keyed_sample(self):
        """A draw depends on its key, and on no other row; over keys it follows the law."""
        sample = run.keyed_sample(7)
        logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(3000, 3)
        draws = run.block_draws(0, 0, range(3000))
        tokens = sample(logits, draws)
        alone = sample(logits[:1], run.block_draws(0, 0, [17]))
        assert int(alone) == int(tokens[17])
        counts = tokens.bincount(minlength=3) / 3000
        assert (counts - torch.tensor([0.5, 0.3, 0.2])).abs().max() < 0.03


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


class TestSdar:
    def generate(self, scripted_model, prompt=(), **kwargs) -> run.Run:
        settings = {
            "mask_id": MASK,
            "gen_length": 8,
            "block_length": 8,
            "denoising_steps": 8,
            "temperature": 0.0,
        }
        return sdar.generate(scripted_model, list(prompt), **(settings | kwargs))

    @pytest.mark.parametrize(("threshold", "steps"), [(0.5, 8), (0.49, 1)])
    def test_threshold_is_strict(self, threshold, steps):
        """A probability of exactly the threshold is not above it."""
        even = constant([row(10, 0.5, second=11)] * 8)
        result = self.generate(even, confidence_threshold=threshold)
        assert result.count("denoise") == steps
        assert result.tokens == [10] * 8

    def test_dynamic(self):
        """Everything above the threshold, or the schedule's number where that is more."""
        result = self.generate(decreasing(8), confidence_threshold=0.77)
        assert result.revealed == [0, 0, 0, 1, 2, 3, 4, 5]
        assert result.tokens == list(range(10, 18))
        few = self.generate(decreasing(8), confidence_threshold=0.77, denoising_steps=2)
        assert few.revealed == [0, 0, 0, 0, 1, 1, 1, 1]

    def test_static(self):
        """The schedule's number of the most confident, whatever the threshold."""
        reverse = constant([row(10, 0.3 + 0.05 * i) for i in range(8)])
        result = self.generate(
            reverse,
            denoising_steps=3,
            remasking_strategy="low_confidence_static",
            confidence_threshold=0.0,
        )
        assert result.revealed == [2, 2, 1, 1, 1, 0, 0, 0]

    def test_sequential(self):
        """From left to right, whatever is more certain."""
        reverse = constant([row(10, 0.3 + 0.05 * i) for i in range(8)])
        result = self.generate(reverse, denoising_steps=3, remasking_strategy="sequential")
        assert result.revealed == [0, 0, 0, 1, 1, 1, 2, 2]

    def test_prompt_remainder(self):
        """The prompt's last tokens are the first block's, fixed; blocks start at multiples."""
        result = self.generate(
            decreasing(24, by=0.02), prompt=[30] * 10, gen_length=9, confidence_threshold=0.0
        )
        assert [(one.kind, one.start) for one in result.passes] == [
            ("prefill", 0),
            ("denoise", 8),
            ("commit", 8),
            ("denoise", 16),
            ("commit", 16),
        ]
        assert result.passes[1].num_masked == 6
        assert result.tokens == list(range(20, 34))

    def test_decided_positions_stay(self):
        """More to reveal than masks are left: the prompt's tokens are not touched."""
        seen: list[list[int]] = []

        def script(ids: Sequence[int]) -> Tensor:
            seen.append(list(ids))
            return torch.stack([row(10, 0.9)] * len(ids))

        result = self.generate(
            scripted(script), prompt=[30, 31, 32], gen_length=5, block_length=4, denoising_steps=1
        )
        assert result.tokens == [10] * 5
        assert seen[-1][:4] == [30, 31, 32, 10]

    def test_end_token(self):
        """Looked for when the block is finished and committed; its block is returned whole."""
        rows = [row(10, 0.9)] * 16
        rows[1] = row(END, 0.9)
        result = self.generate(
            constant(rows),
            gen_length=16,
            block_length=4,
            denoising_steps=4,
            stopping_criteria_idx=[END],
        )
        assert result.tokens == [10, END, 10, 10]
        assert result.passes[-1].kind == "commit"
        endless = self.generate(constant(rows), gen_length=16, block_length=4, denoising_steps=4)
        assert len(endless.tokens) == 16

    def test_probability_is_of_the_filtered_draw(self):
        """With one token left by ``top_k`` its probability is 1, however flat the logits are."""
        flat = constant([row(10, 0.1)] * 8)
        result = self.generate(flat, temperature=1.0, top_k=1, confidence_threshold=0.99)
        assert result.count("denoise") == 1
        assert result.tokens == [10] * 8

    def test_temperature_zero_ignores_filters(self):
        """There the probability is the plain one."""
        flat = constant([row(10, 0.1)] * 8)
        result = self.generate(flat, temperature=0.0, top_k=1, confidence_threshold=0.99)
        assert result.count("denoise") == 8

    def test_drawn_mask_is_an_error(self):
        """Masks that are left after the last step are not returned."""
        masks = constant([row(MASK, 0.9)] * 8)
        with pytest.raises(ValueError, match="mask token was drawn"):
            self.generate(masks)
        result = self.generate(run.suppress(masks, [MASK]))
        assert MASK not in result.tokens

    def test_unknown_strategy(self):
        """Named, where the publisher's ``entropy_bounded`` would run into an unassigned name."""
        with pytest.raises(ValueError, match="entropy_bounded"):
            self.generate(decreasing(8), remasking_strategy="entropy_bounded")

    @pytest.mark.parametrize("strategy", ["low_confidence_dynamic", "sequential"])
    @pytest.mark.parametrize("prompt_length", [1, 4, 7])
    def test_passes_of_random_weights(self, strategy, prompt_length):
        """Every block is filled in at most its steps, and forwarded once more."""
        tiny = run.suppress(model.sdar(), [MASK_ID])
        result = sdar.generate(
            tiny,
            prompt_of(prompt_length),
            mask_id=MASK_ID,
            gen_length=12,
            block_length=4,
            denoising_steps=4,
            temperature=0.7,
            top_p=0.9,
            confidence_threshold=0.3,
            remasking_strategy=strategy,
            sample=run.keyed_sample(3),
        )
        assert MASK_ID not in result.tokens
        assert blocks(result, "commit") == [1] * len(blocks(result, "denoise"))
        assert max(blocks(result, "denoise")) <= 4
        assert -1 not in result.revealed


class TestNemotron:
    def test_seed(self):
        """The prompt's causal pass gives a block's first token; the rest starts as masks."""
        tiny = run.suppress(model.nemotron(), [MASK_ID])
        prompt = prompt_of(9)
        first = nemotron.ar_generate(tiny, prompt, max_new_tokens=1).tokens
        result = nemotron.generate(
            tiny, prompt, max_new_tokens=16, block_length=8, threshold=0.3, mask_id=MASK_ID
        )
        assert result.tokens[:1] == first
        assert result.revealed[0] == result.revealed[8] == -1
        assert [one.num_masked for one in result.passes if one.kind == "commit"] == [0, 0]
        # The second block's seed is what the causal pass over everything before it says.
        following = nemotron.ar_generate(tiny, prompt + result.tokens[:8], max_new_tokens=1)
        assert result.tokens[8:9] == following.tokens

    def test_even_schedule(self):
        """Without a threshold one mask a step: a block less its seed, and one commit."""
        result = nemotron.generate(
            decreasing(17), [30], max_new_tokens=16, block_length=8, mask_id=MASK
        )
        assert blocks(result, "denoise") == [7, 7]
        assert blocks(result, "commit") == [1, 1]
        assert result.count("prefill") == 1

    @pytest.mark.parametrize(("threshold", "steps"), [(0.5, 1), (0.51, 7)])
    def test_threshold_is_not_strict(self, threshold, steps):
        """A probability of exactly the threshold is enough; below it the best one goes alone."""
        even = constant([row(10, 0.5, second=11)] * 9)
        result = nemotron.generate(
            even, [30], max_new_tokens=8, block_length=8, threshold=threshold, mask_id=MASK
        )
        assert result.count("denoise") == steps

    def test_probability_has_no_temperature(self):
        """Candidates get the temperature, confidence does not."""
        even = constant([row(10, 0.5, second=11)] * 9)
        result = nemotron.generate(
            even,
            [30],
            max_new_tokens=8,
            block_length=8,
            threshold=0.5,
            temperature=5.0,
            mask_id=MASK,
            sample=run.keyed_sample(1),
        )
        assert result.count("denoise") == 1
        assert set(result.tokens) == {10, 11}

    def test_end_token(self):
        """A block ends at an end token with no mask before it, is committed, and cut behind it."""
        rows = [row(10 + i, 0.9 - 0.05 * i) for i in range(9)]
        rows[3] = row(END, 0.99)
        result = nemotron.generate(
            constant(rows),
            [30],
            max_new_tokens=16,
            block_length=8,
            threshold=0.95,
            eos_token_id=END,
            mask_id=MASK,
        )
        # Positions 1 (the seed), 3 (the end, at once), then 2 by being the best.
        assert result.tokens == [10, 12, END]
        assert result.revealed == [-1, 1, 0]
        assert [one.kind for one in result.passes] == ["prefill", "denoise", "denoise", "commit"]
        assert result.passes[-1].num_masked == 5

    def test_whole_blocks(self):
        """As in the publisher's loop the length is a whole number of blocks."""
        with pytest.raises(ValueError, match="max_new_tokens=9"):
            nemotron.generate(decreasing(9), [30], max_new_tokens=9, block_length=8)

    def test_autoregressive(self):
        """One pass a token, of which the prompt's is the first; an end token is the last."""
        rows = [row(10 + i, 0.9) for i in range(8)]
        rows[4] = row(END, 0.9)
        result = nemotron.ar_generate(constant(rows), [30, 30], max_new_tokens=6, eos_token_id=END)
        assert result.tokens == [11, 12, 13, END]
        assert result.count("prefill", "decode") == 4

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize("threshold", [0.0, 0.6])
    @pytest.mark.parametrize("prompt_length", [1, 8, 13])
    def test_linear_spec_is_autoregressive(self, prompt_length, threshold, temperature):
        """Token by token, whatever the drafts are, with the draws of the verifying pass keyed."""
        # Two ids, so that drafts agree now and then.
        tiny = run.suppress(model.nemotron(), set(range(320)) - {100, 101})
        prompt = prompt_of(prompt_length)
        settings = {
            "max_new_tokens": 20,
            "temperature": temperature,
            "sample": run.keyed_sample(5),
        }
        expected = nemotron.ar_generate(tiny, prompt, **settings).tokens
        result = nemotron.linear_spec_generate(
            tiny,
            prompt,
            block_length=8,
            threshold=threshold,
            mask_token_id=MASK_ID,
            draft_sample=run.keyed_sample(6),
            **settings,
        )
        assert result.tokens[:20] == expected
        verified = [one.start for one in result.passes if one.kind == "verify"]
        accepted = [b - a for a, b in itertools.pairwise(verified)]
        assert all(1 <= count <= 8 for count in accepted)

    def test_linear_spec_accepts_what_agrees(self):
        """A model that says i at position i + 1 of a draft, and before it: the whole block is kept.

        Row p of the causal pass says p + 11; a draft's row p says p + 10, which is the same token.
        """

        def script(ids: Sequence[int]) -> Tensor:
            # A draft holds masks, the pass that verifies it holds none.
            offset = 10 if MASK in ids else 11
            return torch.stack([row(offset + p, 0.9) for p in range(len(ids))])

        result = nemotron.linear_spec_generate(
            scripted(script), [30], max_new_tokens=9, block_length=4, mask_token_id=MASK
        )
        assert result.tokens == list(range(11, 20))
        kinds = [one.kind for one in result.passes]
        assert kinds == ["prefill", "draft", "verify", "draft", "verify"]

    def test_linear_spec_ends(self):
        """At an end token, which is the last one returned; a seed that is one ends it at once."""

        def script(ids: Sequence[int]) -> Tensor:
            offset = 10 if MASK in ids else 11
            said = [offset + p for p in range(len(ids))]
            return torch.stack([row(END if token == 13 else token, 0.9) for token in said])

        result = nemotron.linear_spec_generate(
            scripted(script),
            [30],
            max_new_tokens=9,
            block_length=4,
            mask_token_id=MASK,
            eos_token_id=END,
        )
        assert result.tokens == [11, 12, END]
        at_once = nemotron.linear_spec_generate(
            constant([row(END, 0.9)] * 9), [30], max_new_tokens=9, eos_token_id=END
        )
        assert at_once.tokens == [END]
        assert [one.kind for one in at_once.passes] == ["prefill"]


class TestLLaDA20:
    def generate(self, scripted_model, prompt=(), **kwargs) -> run.Run:
        settings = {"mask_id": MASK, "eos_id": END, "gen_length": 8, "block_length": 8, "steps": 8}
        return llada2.generate_2_0(scripted_model, list(prompt), **(settings | kwargs))

    @pytest.mark.parametrize(("threshold", "steps"), [(0.5, 8), (0.49, 1)])
    def test_threshold_is_strict(self, threshold, steps):
        """A probability of exactly the threshold is not above it."""
        even = constant([row(10, 0.5, second=11)] * 8)
        result = self.generate(even, threshold=threshold)
        assert result.count("denoise") == steps

    def test_steps(self):
        """Fewer steps reveal more each; ``minimal_topk`` and a short generation make them fewer."""
        result = self.generate(decreasing(8), threshold=1.0, steps=2)
        assert result.revealed == [0] * 4 + [1] * 4
        result = self.generate(decreasing(8), threshold=1.0, minimal_topk=4)
        assert result.count("denoise") == 2

    def test_commit(self):
        """With a cache a finished block is forwarded once more, but not the last one."""
        result = self.generate(decreasing(24, by=0.02), gen_length=24, threshold=0.0)
        assert [one.kind for one in result.passes] == ["denoise", "commit"] * 2 + ["denoise"]

    @pytest.mark.parametrize(
        ("early", "p", "steps"), [(False, 0.85, 8), (True, 0.85, 2), (True, 0.99, 8)]
    )
    def test_end_token(self, early, p, steps):
        """Early, in the step that reveals it, if nothing masked stands before it; else when full.

        One that was revealed before what stands before it waits for its block.
        """
        rows = [row(10 + i, 0.9 - 0.05 * i) for i in range(16)]
        rows[1] = row(END, p)
        result = self.generate(constant(rows), gen_length=16, threshold=0.95, eos_early_stop=early)
        assert result.tokens == [10, END]
        assert result.count("denoise") == steps

    def test_end_token_in_the_prompt(self):
        """A chat's earlier turns end nothing."""
        result = self.generate(
            decreasing(16), prompt=[30, END, 31], gen_length=5, threshold=0.0, eos_early_stop=True
        )
        assert result.tokens == [13, 14, 15, 16, 17]

    def test_gen_length(self):
        """The last block is denoised whole and cut."""
        result = self.generate(decreasing(16), prompt=[30] * 3, gen_length=7, threshold=0.0)
        assert len(result.tokens) == 7
        assert result.passes[-1].num_masked == 8


class TestLLaDA21:
    def generate(self, scripted_model, prompt=(), **kwargs) -> run.Run:
        settings = {"mask_id": MASK, "eos_id": END, "gen_length": 4, "block_length": 4}
        return llada2.generate_2_1(scripted_model, list(prompt), **(settings | kwargs))

    def test_ends_with_a_step_that_changes_nothing(self):
        """That step ran on the final tokens: its KV is final, and no pass commits."""
        result = self.generate(
            constant([row(10, 0.9)] * 12), gen_length=12, threshold=0.5, editing_threshold=0.5
        )
        assert [(one.kind, one.num_masked) for one in result.passes] == [
            ("denoise", 4),
            ("denoise", 0),
        ] * 3

    def test_at_least_one_a_step(self):
        """Below the threshold, the best one."""
        result = self.generate(decreasing(4), threshold=0.95, editing_threshold=0.9)
        assert result.revealed == [0, 1, 2, 3]
        assert result.count("denoise") == 5

    @pytest.mark.parametrize(
        ("editing_threshold", "expected"), [(0.0, 20), (0.19, 20), (0.21, 10), (0.9, 10)]
    )
    def test_editing(self, editing_threshold, expected):
        """A decided token gives way to a likelier one above the threshold; one of 0 edits too."""

        def script(ids: Sequence[int]) -> Tensor:
            first = row(10, 0.9) if MASK in ids else row(20, 0.2)
            return torch.stack([first] + [row(11, 0.9)] * (len(ids) - 1))

        result = self.generate(scripted(script), threshold=0.5, editing_threshold=editing_threshold)
        assert result.tokens == [expected, 11, 11, 11]
        assert result.rewritten == (expected == 20)
        assert result.count("denoise") == (3 if expected == 20 else 2)

    def test_editing_threshold_is_strict(self):
        """Exactly the threshold does not edit."""

        def script(ids: Sequence[int]) -> Tensor:
            said = row(10, 0.9) if MASK in ids else row(20, 0.5, second=21)
            return torch.stack([said] * len(ids))

        kept = self.generate(scripted(script), threshold=0.5, editing_threshold=0.5)
        assert kept.tokens == [10] * 4
        edited = self.generate(scripted(script), threshold=0.5, editing_threshold=0.49)
        assert edited.tokens == [20] * 4

    def test_prompt_is_not_edited(self):
        """The prompt's remainder stands in the first block, and stays."""
        seen: list[list[int]] = []

        def script(ids: Sequence[int]) -> Tensor:
            seen.append(list(ids))
            return torch.stack([row(20, 0.9)] * len(ids))

        result = self.generate(
            scripted(script), prompt=[30, 31], gen_length=2, editing_threshold=0.0
        )
        assert result.tokens == [20, 20]
        assert seen[-1] == [30, 31, 20, 20]

    def test_post_steps_bound_the_block(self):
        """A token that never settles: so many steps without masks, and then a commit."""

        def script(ids: Sequence[int]) -> Tensor:
            return torch.stack([row(10 if token != 10 else 11, 0.9) for token in ids])

        result = self.generate(
            scripted(script),
            gen_length=8,
            threshold=0.5,
            editing_threshold=0.0,
            max_post_steps=3,
        )
        kinds = [one.kind for one in result.passes]
        assert kinds == ["denoise"] * 4 + ["commit"] + ["denoise"] * 4
        # Written as 10, then 11, 10 and 11 again.
        assert result.tokens == [11] * 8

    @pytest.mark.parametrize("early", [False, True])
    def test_end_token(self, early):
        """Early, after its block; otherwise generation goes on. What is returned is the same."""
        rows = [row(10, 0.9)] * 12
        rows[2] = row(END, 0.9)
        result = self.generate(constant(rows), gen_length=12, threshold=0.5, eos_early_stop=early)
        assert result.tokens == [10, 10, END]
        assert blocks(result, "denoise") == ([2] if early else [2, 2, 2])


class TestLLaDA22:
    def generate(self, scripted_model, prompt=(), **kwargs) -> run.Run:
        settings = {
            "mask_id": MASK,
            "eos_ids": (END,),
            "delete_token_id": DELETE,
            "split_token_id": SPLIT,
            "gen_length": 4,
            "block_length": 4,
            "steps": 4,
        }
        return llada2.generate_2_2(scripted_model, list(prompt), **(settings | kwargs))

    def says(self, script: Callable[[list[int]], Sequence[int]], p: float = 0.95) -> run.Model:
        """A model that says these tokens for the last block, each with probability ``p``."""

        def rows(ids: Sequence[int]) -> Tensor:
            block = list(ids[-4:])
            said = [10] * (len(ids) - 4) + list(script(block))
            return torch.stack([row(token, p) for token in said])

        return scripted(rows)

    @pytest.mark.parametrize(
        ("written", "expected", "marks"),
        [
            ([10, DELETE, 12, 13], [10, 12, 13, MASK], [0, 1, 0, 0]),
            ([10, SPLIT, 12, 13], [10, MASK, 21, 12], [0, 0, 0, 1]),
            ([DELETE, 11, SPLIT, 13], [11, MASK, 22, 13], [0, 0, 1, 0]),
            ([10, 11, 12, 13], [10, 11, 12, 13], [0, 0, 1, 0]),
            ([DELETE] * 4, [MASK] * 4, [0, 0, 0, 0]),
            ([SPLIT] * 4, [MASK, 20, MASK, 21], [0, 0, 0, 0]),
        ],
    )
    def test_apply_edits(self, written, expected, marks):
        """DELETE shifts left and fills up; SPLIT restores the old token behind a new mask."""
        tokens, original = llada2.apply_edits(
            written,
            [20, 21, 22, 23],
            [False, False, True, False],
            0,
            mask_id=MASK,
            delete_token_id=DELETE,
            split_token_id=SPLIT,
        )
        assert tokens == expected
        assert original == [bool(mark) for mark in marks]

    def test_apply_edits_leaves_the_prompt(self):
        """Also where it holds the ids themselves."""
        tokens, _ = llada2.apply_edits(
            [DELETE, SPLIT, DELETE, 13],
            [DELETE, SPLIT, 22, 23],
            [False, False, True, True],
            2,
            mask_id=MASK,
            delete_token_id=DELETE,
            split_token_id=SPLIT,
        )
        assert tokens == [DELETE, SPLIT, 13, MASK]

    def test_fill(self):
        """Above the threshold at once, then a step that changes nothing."""
        result = self.generate(self.says(lambda block: [10, 11, 12, 13]))
        assert result.tokens == [10, 11, 12, 13]
        assert [one.num_masked for one in result.passes] == [4, 0]

    def test_schedule(self):
        """Below the threshold, the step's share of the first masks; after the steps, all."""

        def script(ids: Sequence[int]) -> Tensor:
            return torch.stack([row(10 + i, 0.4 - 0.05 * i) for i in range(len(ids))])

        result = self.generate(scripted(script), steps=3, editing_threshold=0.9)
        assert result.revealed == [0, 0, 1, 2]

    def test_delete(self):
        """A filled block whose second token is deleted: the rest moves up, a mask is filled."""

        def script(block: list[int]) -> list[int]:
            if block == [10, 11, 12, 13]:
                return [10, DELETE, 12, 13]
            if MASK in block and block != [MASK] * 4:
                return [10, 12, 13, 14]
            return [10, 11, 12, 13] if MASK in block else block

        result = self.generate(self.says(script))
        assert result.tokens == [10, 12, 13, 14]
        assert [one.num_masked for one in result.passes] == [4, 0, 1, 0]

    def test_split(self):
        """A token gets a mask before it; the last token of the block falls off."""

        def script(block: list[int]) -> list[int]:
            if block == [10, 11, 12, 13]:
                return [10, SPLIT, 12, 13]
            if block == [10, MASK, 11, 12]:
                return [10, 20, 11, 12]
            return [10, 11, 12, 13] if MASK in block else block

        result = self.generate(self.says(script))
        assert result.tokens == [10, 20, 11, 12]
        assert [one.num_masked for one in result.passes] == [4, 0, 1, 0]

    def test_masks_of_edits_are_needed_at_once(self):
        """They raise a step's floor, so that they are filled below the threshold too."""
        calls = 0

        def script(ids: Sequence[int]) -> Tensor:
            nonlocal calls
            calls += 1
            if calls == 1:
                return torch.stack([row(10 + i, 0.95) for i in range(4)])
            if calls == 2:
                return torch.stack([row(token, 0.95) for token in [10, DELETE, DELETE, 13]])
            said = [10, 13, 14, 15]
            return torch.stack([row(token, 0.3) for token in said])

        result = self.generate(scripted(script), steps=1, editing_threshold=0.5)
        assert result.tokens == [10, 13, 14, 15]
        assert [one.num_masked for one in result.passes] == [4, 0, 2, 0]

    def test_final_round(self):
        """A first token that always wants to be deleted: the last post step takes its second choice."""

        def script(ids: Sequence[int]) -> Tensor:
            rows = [row(10 + i, 0.95) for i in range(4)]
            if ids[-1] != MASK:
                rows[0] = row(DELETE, 0.9, second=30)
            return torch.stack(rows)

        result = self.generate(scripted(script), max_post_steps=3)
        assert DELETE not in result.tokens
        assert MASK not in result.tokens
        assert result.tokens[0] == 30
        # Filled, three rounds without first masks of which the last is final, and no more.
        assert result.count("denoise") <= 1 + 2 * 3

    def test_no_post_steps(self):
        """The round that reveals the last of the first masks is the final one."""
        result = self.generate(
            self.says(lambda block: [10, 11, 12, 13]), gen_length=8, max_post_steps=0
        )
        assert [one.kind for one in result.passes] == ["denoise", "commit", "denoise"]

    def test_cap(self):
        """The last step allowed is a final round."""
        result = self.generate(
            self.says(lambda block: [10, 11, 12, DELETE], p=0.1), max_steps_per_block=2
        )
        assert result.count("denoise") == 2
        assert MASK not in result.tokens
        assert DELETE not in result.tokens

    def test_anti_loop(self):
        """A result that was seen before is left by the least certain change's second choice."""

        def script(ids: Sequence[int]) -> Tensor:
            # The first token swings between 10 and 11; 12 is the second choice in the swing back.
            if ids[-1] == MASK:
                return torch.stack([row(10, 0.95)] * 4)
            swing = {10: row(11, 0.7, second=13), 11: row(10, 0.6, second=12)}
            first = swing.get(ids[-4], row(ids[-4], 0.95))
            return torch.stack([first] + [row(10, 0.95)] * 3)

        result = self.generate(scripted(script))
        assert result.tokens == [12, 10, 10, 10]
        # Filled with 10; 11; back to 10, which was seen: 12; then nothing changes.
        assert result.count("denoise") == 4

    def test_escape_is_injected(self):
        """The position that is drawn again is the caller's choice; the publisher's is random."""
        asked: list[tuple[int, ...]] = []

        def escape(before: Tensor, after: Tensor, confidence: Tensor) -> int:
            asked.append(tuple((before != after).nonzero()[:, 0].tolist()))
            return asked[-1][-1]

        def script(ids: Sequence[int]) -> Tensor:
            if ids[-1] == MASK:
                return torch.stack([row(10, 0.95)] * 4)
            rows = [row(10, 0.95)] * 4
            for i in (0, 1):
                there = ids[len(ids) - 4 + i]
                rows[i] = {10: row(11, 0.7, second=13), 11: row(10, 0.6, second=12)}.get(
                    there, row(there, 0.95)
                )
            return torch.stack(rows)

        result = self.generate(scripted(script), escape=escape, max_post_steps=8)
        assert asked[0] == (0, 1)
        assert result.tokens[1] == 12

    @pytest.mark.parametrize("early", [False, True])
    def test_end_tokens(self, early):
        """Any of the ids ends what is returned."""
        result = self.generate(
            self.says(lambda block: [10, 11, 7, 13]),
            gen_length=8,
            eos_ids=(END, 7),
            eos_early_stop=early,
        )
        assert result.tokens == [10, 11, 7]
        assert len(blocks(result, "denoise")) == (1 if early else 2)

    def test_random_weights(self):
        """Whatever a model says, blocks end, without masks and without edit ids."""
        tiny = run.suppress(llada2_model(version="2.2"), [MASK_ID])
        result = llada2.generate_2_2(
            tiny,
            prompt_of(5),
            gen_length=40,
            mask_id=MASK_ID,
            eos_ids=(),
            delete_token_id=DELETE_ID,
            split_token_id=SPLIT_ID,
            max_post_steps=4,
            editing_threshold=0.3,
        )
        assert len(result.tokens) == 40
        assert not {MASK_ID, DELETE_ID, SPLIT_ID} & set(result.tokens)


class TestFastDllm:
    def generate(self, scripted_model, prompt, **kwargs) -> run.Run:
        settings = {
            "mask_id": MASK,
            "stop_token": END,
            "max_new_tokens": 8,
            "block_size": 8,
            "small_block_size": 4,
        }
        return fast_dllm.generate(scripted_model, list(prompt), **(settings | kwargs))

    def test_shift(self):
        """A token is drawn from the row before it."""
        result = self.generate(decreasing(24, by=0.01), [30, 31], threshold=0.0)
        # Row 1 says 11, for position 2; the seed of the next block is row 7's.
        assert result.tokens == [11, 12, 13, 14, 15, 16, 17]

    def test_sub_blocks(self):
        """From left to right, each until it holds no mask; the best one of it a step, at least."""
        reverse = constant([row(10 + i, 0.1 + 0.05 * i) for i in range(8)])
        result = self.generate(reverse, [30])
        assert result.revealed == [2, 1, 0, 6, 5, 4, 3, -1]
        assert [one.num_masked for one in result.passes] == [7, 6, 5, 4, 3, 2, 1, 0]

    @pytest.mark.parametrize(("threshold", "steps"), [(0.5, 7), (0.49, 2)])
    def test_threshold_is_strict(self, threshold, steps):
        """A probability of exactly the threshold is not above it."""
        even = constant([row(10, 0.5, second=11)] * 8)
        result = self.generate(even, [30], threshold=threshold)
        assert result.count("denoise") == steps

    @pytest.mark.parametrize("prompt_length", [8, 16])
    def test_seed(self, prompt_length):
        """A prompt of whole blocks is prefilled, one of exactly one block too, and gives a seed."""
        result = self.generate(
            decreasing(32, by=0.01), [30] * prompt_length, max_new_tokens=16, threshold=0.0
        )
        assert [one.kind for one in result.passes] == [
            "prefill",
            *(["denoise"] * 2 + ["commit"]) * 2,
        ]
        assert result.passes[1].num_masked == 7
        assert result.revealed[0] == result.revealed[8] == -1
        # Two blocks, and the seed of a third.
        assert result.tokens == [9 + prompt_length + i for i in range(17)]

    def test_first_block_counts(self):
        """The block that holds the prompt's remainder is one of ``max_new_tokens // block_size``."""
        result = self.generate(decreasing(32, by=0.01), [30] * 5, max_new_tokens=16, threshold=0.0)
        assert result.count("commit") == 2
        assert len(result.tokens) == 3 + 8 + 1

    def test_stop_token(self):
        """With no mask before it, even where its block has masks left; no commit follows."""
        rows = [row(10 + i, 0.9) for i in range(8)]
        rows[2] = row(END, 0.9)
        result = self.generate(constant(rows), [30], threshold=0.0)
        assert result.tokens == [10, 11, END]
        assert [one.kind for one in result.passes] == ["prefill", "denoise"][1:]

    def test_stop_token_behind_masks(self):
        """It waits for the masks before it."""
        rows = [row(10 + i, 0.9 - 0.1 * i) for i in range(8)]
        rows[2] = row(END, 0.95)
        result = self.generate(constant(rows), [30])
        assert result.revealed == [1, 2, 0]
        assert result.tokens == [10, 11, END]

    def test_stop_token_as_seed(self):
        """A seed that stops ends before the next block."""
        rows = [row(10, 0.9)] * 16
        rows[7] = row(END, 0.9)
        result = self.generate(constant(rows), [30], max_new_tokens=16, threshold=0.0)
        assert result.tokens == [10] * 7 + [END]
        assert result.count("commit") == 1

    def test_seeds_are_not_drawn(self):
        """At a temperature the candidates are; their probability is the filtered one."""
        rows = [row(10, 0.5, second=11)] * 16
        result = self.generate(
            constant(rows),
            [30] * 8,
            threshold=0.99,
            temperature=1.0,
            top_p=0.4,
            sample=run.keyed_sample(2),
        )
        # Of two equally likely tokens ``top_p`` leaves the first, whose probability is 1.
        assert result.count("denoise") == 2
        assert set(result.tokens) == {10}


class TestStableDiffcoder:
    def generate(self, scripted_model, prompt=(), **kwargs) -> run.Run:
        settings = {"mask_id": MASK, "steps": 8, "gen_length": 8, "block_length": 4}
        return stable_diffcoder.generate_block(scripted_model, list(prompt), **(settings | kwargs))

    @pytest.mark.parametrize(("threshold", "steps"), [(0.5, 1), (0.51, 4)])
    def test_threshold_is_not_strict(self, threshold, steps):
        """A probability of exactly the threshold is enough."""
        even = constant([row(10, 0.5, second=11)] * 8)
        result = self.generate(even, threshold=threshold)
        assert blocks(result, "denoise") == [steps, steps]

    def test_schedule(self):
        """Without a threshold, an even number of masks a step; fewer steps take more each."""
        result = self.generate(decreasing(8), threshold=None)
        assert result.revealed == [0, 1, 2, 3] * 2
        result = self.generate(decreasing(8), threshold=None, steps=4)
        assert result.revealed == [0, 0, 1, 1] * 2

    @pytest.mark.parametrize("prompt_length", [1, 4, 6])
    def test_length(self, prompt_length):
        """Exactly ``gen_length`` tokens: the last block is as much shorter as the first is."""
        result = self.generate(decreasing(16), [30] * prompt_length)
        assert len(result.tokens) == 8
        remainder = prompt_length % 4
        masked = [one.num_masked for one in result.passes if one.kind == "denoise"]
        assert masked[0] == 4 - remainder
        assert blocks(result, "commit") == [1] * (3 if remainder else 2)
        assert result.count("prefill") == (prompt_length >= 4)

    def test_end_token(self):
        """A full block with one ends without a commit, filled with it to its end."""
        rows = [row(10, 0.99)] * 8
        rows[1] = row(END, 0.99)
        result = self.generate(constant(rows), eos_id=END)
        assert result.tokens == [10, END, END, END]
        assert [one.kind for one in result.passes] == ["denoise"]

    def test_end_token_in_the_prompt(self):
        """It ends nothing."""
        result = self.generate(constant([row(10, 0.99)] * 12), [30, END], eos_id=END)
        assert result.tokens == [10] * 8

    def test_bad_lengths(self):
        """As in the publisher's loop; and a block may not be left with masks."""
        with pytest.raises(ValueError, match="gen_length=9"):
            self.generate(decreasing(9), gen_length=9)
        with pytest.raises(ValueError, match="steps=7"):
            self.generate(decreasing(9), steps=7)
        with pytest.raises(ValueError, match="masks are left"):
            self.generate(decreasing(8), steps=4, threshold=0.99)

    def test_random_weights(self):
        """Every block is filled in at most its steps."""
        tiny = run.suppress(model.stable_diffcoder(), [MASK_ID])
        result = self.generate(
            tiny,
            prompt_of(6),
            mask_id=MASK_ID,
            temperature=0.8,
            threshold=0.3,
            sample=run.keyed_sample(4),
        )
        assert MASK_ID not in result.tokens
        assert max(blocks(result, "denoise")) <= 4

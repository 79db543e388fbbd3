"""Uno: tokens, and how many each draft keeps, of the publisher's two-pass decoder."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_kernels.noise import Purpose, uniform_tokens
from tests.publishers import answers, checkout, modules_of
from tests.support.families import makers, uno
from tests.support.families.makers import SelfDrafting
from tests.support.families.model import VOCAB_SIZE, prompt_of
from tests.support.families.run import causal, keyed_sample

pytestmark = [pytest.mark.engine, pytest.mark.slow]

MASK_ID = makers.uno.config["mask_token_id"]
NUM_TOKENS = 60


def decoder_of(model: SelfDrafting) -> Any:
    """Return the publisher's decoder with our random tokens, whose passes are those of a toy."""
    engine = modules_of(checkout("uno") / "nano_vllm_uno", "nano_vllm_uno")
    decoding = engine("engine.two_pass_decoding")

    def run_block(seqs: Any, tokens: Tensor, lora_mask_batch: Tensor | None = None) -> Tensor:
        (seq,) = seqs
        known = torch.tensor(seq.token_ids[: seq.num_cached_tokens])
        ids = torch.cat([known, tokens[0]])
        adapted = None
        if lora_mask_batch is not None:
            adapted = torch.cat([torch.zeros(len(known)), lora_mask_batch[0]]).bool()
        seq.num_cached_tokens += tokens.shape[1]
        return model(ids, causal(len(ids)), adapted=adapted)[None, len(known) :]

    def draft_batch(seqs: Any, block_len: int, *_: Any, **__: Any) -> Tensor:
        (seq,) = seqs
        keys = (torch.tensor([number]) for number in (0, seq.stats["forwards"] // 2, 0))
        noise = uniform_tokens(*keys, block_len + 1, MASK_ID - 1, Purpose.INITIAL)[0]
        return torch.cat([torch.tensor([seq.token_ids[-1]]), 1 + noise[1:block_len]])[None]

    decoding.build_draft_batch = draft_batch
    made = decoding.TwoPassDecoder(run_block, -1, 0, VOCAB_SIZE, gated_lora=True)
    settings = engine("sampling_params").SamplingParams(temperature=0.0, ignore_eos=True)
    return made, settings, engine("engine.sequence").Sequence


@pytest.mark.parametrize("block_length", [1, 4, 8, 16])
def test_two_pass_decoder(block_length: int, tmp_path: Path) -> None:
    """Greedy tokens are the publisher's for its lengths of a block, and our loop, to whose counts
    engines are held, keeps as many of each draft.
    """
    toy = makers.uno()
    with torch.no_grad():
        for _, up in toy.lora.values():
            up *= 0.05
    decoder, settings, sequence = decoder_of(toy)
    settings.diffusion_block_size = block_length
    prompts = [prompt_of(length, seed=length) for length in (1, 20, 90)]
    expected = []
    for prompt in prompts:
        # The pass over a prompt gives the first token.
        first = int(toy(torch.tensor(prompt), causal(len(prompt)))[-1].argmax())
        seq = sequence([*prompt, first])
        seq.num_cached_tokens = len(prompt)
        kept = []
        while seq.num_completion_tokens < NUM_TOKENS:
            (committed,) = decoder.run_cycle([seq], settings)
            kept.append(len(committed))
        expected.append(seq.token_ids[len(prompt) :][:NUM_TOKENS])
        ours = uno.generate(
            toy,
            prompt,
            max_new_tokens=NUM_TOKENS,
            block_length=block_length + 1,
            mask_token_id=MASK_ID,
            sample=keyed_sample(0),
            seed=0,
        )
        starts = [one.start for one in ours.passes if one.kind == "verify"]
        assert kept[: len(starts) - 1] == [b - a for a, b in pairwise(starts)]
        assert len(set(kept)) > 1 or block_length == 1
    requests: list[Any] = [(prompt, NUM_TOKENS, {"seed": 0}) for prompt in prompts]
    section = {"diffusion": {"draft_length": block_length + 1}}
    assert answers(toy.save(tmp_path), requests, additional_config=section) == expected

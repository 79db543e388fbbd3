"""Above temperature 0 a block follows the law of the published loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.engine import TracedEngine
from tests.support.families.cases import Wanted
from tests.support.families.law import check_law, outcomes
from tests.support.families.model import MASK_ID, prompt_of, sdar
from tests.support.families.run import block_causal, filtered

pytestmark = pytest.mark.engine

TOP_K, TEMPERATURE, NUM_REQUESTS = 3, 1.3, 600


def test_law_of_a_block(tmp_path: Path) -> None:
    """Two free positions behind two of the prompt, from the left, three tokens each.

    The second one's law is that given the first, so all nine outcomes have their own probability.
    """
    model = sdar(sharpness=1.0)
    prompt = prompt_of(6)

    def law(said: list[int]) -> torch.Tensor:
        known = [*prompt, *said]
        ids = torch.tensor(known + [MASK_ID] * (8 - len(known)))
        logits = model(ids, block_causal(8, 4))[len(known)] / TEMPERATURE
        logits[MASK_ID] = float("-inf")
        return filtered(logits[None], TOP_K, 1.0)[0].double().softmax(-1)

    expected = outcomes(law, 2)
    assert len(expected) == TOP_K**2

    with TracedEngine(model.save(tmp_path), max_model_len=64, max_num_seqs=32) as engine:
        wanted = [
            Wanted(2, strategy="sequential", temperature=TEMPERATURE, top_k=TOP_K, seed=i)
            for i in range(NUM_REQUESTS)
        ]
        outputs = engine.outputs([prompt] * NUM_REQUESTS, [one.sampling_params() for one in wanted])
    check_law(expected, [tuple(output.outputs[0].token_ids) for output in outputs])

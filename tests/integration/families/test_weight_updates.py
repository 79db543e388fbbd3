"""Tests of new weights in a running engine, of every masked family and quantized checkpoints."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.integration.families.test_parity import OPTIONS, Family
from tests.integration.test_weight_updates import changed_weights, reload, written
from tests.support.engines.engine import TracedEngine
from tests.support.families.cases import CASES, Wanted, assert_loops
from tests.support.families.model import prompt_of
from tests.support.models.checkpoints import SHIPPED
from tests.support.models.prompts import chat_prompt
from tests.support.models.quantized import quantized_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.mark.parametrize("name", CASES)
def test_families(name: str, tmp_path: Path) -> None:
    """After a reload the tokens are the published loop's with the other weights."""
    family = Family(name, tmp_path / "served")
    try:
        model = family.case.make(seed=11)
        prompts = [prompt_of(length, seed=length) for length in (5, 33, 70)]
        wanted = [Wanted(max_tokens=family.block_length + 5)] * len(prompts)
        before = family.generate(prompts, wanted)
        reload(family.engine, model.save(tmp_path / "new"))
        after = family.generate(prompts, wanted)
        assert after != before
        assert_loops(family.case, model, prompts, wanted, after)
        reload(family.engine, tmp_path / "served")
        assert family.generate(prompts, wanted) == before
    finally:
        family.engine.close()


@pytest.mark.parametrize("scheme", ["fp8-dynamic", "nvfp4"])
def test_quantised(scheme: str, tmp_path: Path) -> None:
    """Layers transform reloaded packed weights and scales again, more than once."""
    other = written(tmp_path / "other", changed_weights(SHIPPED, 0), SHIPPED)
    folders = [
        quantized_checkpoint(tmp_path / f"quantised-{source.name}", scheme, source, num_prompts=2)
        for source in (SHIPPED, other)
    ]
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    # Noise it answers with ends of text alone, whatever its weights.
    prompts = [chat_prompt(tokenizer, text) for text in ("Count from 3 to 12.", "Reverse: amber")]

    def answers(engine: TracedEngine) -> list[Any]:
        outputs = engine.generate(prompts, seeds=[1, 2], max_tokens=40, ignore_eos=True)
        return [output.token_ids for output in outputs]

    fresh = []
    for folder in folders:
        engine = TracedEngine(folder, **OPTIONS)
        fresh.append(answers(engine))
        engine.close()
    assert fresh[0] != fresh[1]
    with TracedEngine(folders[0], **OPTIONS) as engine:
        assert answers(engine) == fresh[0]
        for index in (1, 0, 1):
            reload(engine, folders[index])
            assert answers(engine) == fresh[index]


def test_static_activation_scales(tmp_path: Path) -> None:
    """A reload of experts' static scales, which vLLM cannot do, is an error and changes nothing."""
    folder = quantized_checkpoint(tmp_path / "quantised", "fp8-static", num_prompts=2)
    with TracedEngine(folder, **OPTIONS) as engine:

        def answers() -> list[Any]:
            outputs = engine.generate([[2, 5, 40, 41]], seeds=[1], max_tokens=40, ignore_eos=True)
            return [output.token_ids for output in outputs]

        before = answers()
        with pytest.raises(Exception, match="scale|meta"):
            reload(engine, folder)
        engine.llm.reset_prefix_cache()
        assert answers() == before

"""A draft in three passes with a random target gives the tokens that ``transformers`` gives."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.engines.draft_engine import (
    NUM_DRAFTS,
    PROMPTS,
    draft_spec,
    generate,
    metric,
    observed,
    prompt_of,
    serving,
)
from tests.support.engines.engine import TracedEngine
from tests.support.models import drafts
from tests.support.models.drafts import MASK
from vllm_diffusion.drafting.reveal_block import (
    CONFIDENCE,
    likeliest,
    revealed,
    unmask_counts,
    without_mask_token,
)

pytestmark = pytest.mark.engine

STEPS = 3


@pytest.fixture(scope="module")
def model(models: Any) -> Any:
    return models["qwen3"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TracedEngine]:
    folder = tmp_path_factory.mktemp("drafts")
    drafts.save_draft(folder / "draft", architectures=["DFlashMaskedDraftModel"])
    options: dict[str, Any] = {
        # Of the longest request, and some of the others.
        "num_gpu_blocks_override": 48,
        "per_request_spec_decode_metrics": "detailed",
    }
    with serving(folder, draft_spec(folder), {"steps": STEPS}, **options) as served:
        yield served


def test_greedy_tokens(engine: TracedEngine, model: Any) -> None:
    """Greedy answers of eight requests at once, with chunked prompts and preemptions, are the plain
    model's, and vLLM's counters of drafts agree with those of the requests.
    """
    engine.preempted.clear()
    before = metric(engine, "num_drafts"), metric(engine, "num_accepted_tokens")
    outputs = generate(engine, PROMPTS)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = drafts.greedy_tokens(model, prompt, 30)
        assert list(output.outputs[0].token_ids) == expected
    assert engine.preempted
    verified = metric(engine, "num_drafts") - before[0]
    accepted = metric(engine, "num_accepted_tokens") - before[1]
    assert accepted > 0
    assert metric(engine, "num_draft_tokens") == NUM_DRAFTS * metric(engine, "num_drafts")
    assert sum(metric(engine, "num_accepted_tokens_per_pos")) == metric(
        engine, "num_accepted_tokens"
    )
    # A request's own are vLLM's too. Each verification says what it accepts and one token more;
    # what follows a prompt, or what was computed again, is said without one.
    of_requests = [output.outputs[0].spec_decode_metrics for output in outputs]
    assert sum(len(each.per_step_accepted) for each in of_requests) == verified
    assert sum(sum(each.per_step_accepted) for each in of_requests) == accepted
    for each in of_requests:
        said = len(each.per_step_accepted) + sum(each.per_step_accepted)
        assert 29 - len(engine.preempted) <= said <= 29 + NUM_DRAFTS


def test_prefix_cache(engine: TracedEngine, model: Any) -> None:
    """With every share of a prompt in the prefix cache, and over three turns, drafts propose and
    answers have the tokens of a run that finds nothing there.
    """
    found = set()

    def answered(tokens: list[int]) -> list[int]:
        passes: tuple[list[Any], list[Any]] = [], []
        salted = {"prompt_token_ids": tokens, "cache_salt": f"{len(found)} {tokens}"}
        outputs = []
        for prompt, calls in zip((tokens, salted), passes, strict=True):
            with observed(engine.runner.speculator, "sample_draft", calls):
                outputs += generate(engine, [prompt])
        cached, fresh = outputs
        assert fresh.num_cached_tokens == 0
        found.add(cached.num_cached_tokens)
        kept, expected = (each.outputs[0].spec_decode_metrics for each in outputs)
        assert kept.per_step_accepted == expected.per_step_accepted
        # What is proposed after a part of a prompt is thrown away.
        own, others = ([proposed.tolist() for _, proposed in calls] for calls in passes)
        num_steps = STEPS * len(kept.per_step_accepted)
        assert own[-num_steps:] == others[-num_steps:]
        answer = list(cached.outputs[0].token_ids)
        assert answer == list(fresh.outputs[0].token_ids) == drafts.greedy_tokens(model, tokens, 30)
        return answer

    prompt = prompt_of(100, seed=41)
    generate(engine, [prompt])
    for length in range(8, 101, 8):
        answered(prompt[:length] + prompt_of(7, seed=length))
    for turn in range(3):
        prompt = [*prompt, *answered(prompt), *prompt_of(3, seed=turn)]
    assert found == {0, 16, 32, 48, 64, 80, 96, 128, 160}


def cache_rows(engine: TracedEngine, request_id: str, num_tokens: int) -> dict[str, Tensor]:
    """Return keys and values of a running request's first tokens, by layer."""
    scheduler = engine.scheduler
    tables = scheduler.kv_cache_manager.get_block_ids(request_id)
    layers = engine.runner.vllm_config.compilation_config.static_forward_context
    rows = {}
    groups = scheduler.kv_cache_config.kv_cache_groups
    for table, group in zip(tables, groups, strict=True):
        for name in group.layer_names:
            # [num_blocks, num_kv_heads, block_size, both]
            blocks = layers[name].kv_cache[torch.tensor(table)].transpose(1, 2)
            rows[name] = blocks.flatten(0, 1)[:num_tokens].clone()
    return rows


def cache_while_running(
    engine: TracedEngine, prompt: dict[str, Any], num_tokens: int
) -> tuple[list[int], dict[str, Tensor]]:
    """Return the tokens of a request that has generated ``num_tokens``, and its cache up to the
    last token but one.
    """
    from vllm import SamplingParams

    llm_engine = engine.llm.llm_engine
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True, detokenize=False)
    request_id = llm_engine.add_request("kept", prompt, params)
    while True:
        llm_engine.step()
        (request,) = engine.scheduler.requests.values()
        tokens = list(request.all_token_ids)
        if len(tokens) - len(prompt["prompt_token_ids"]) >= num_tokens:
            rows = cache_rows(engine, request.request_id, len(tokens) - 1)
            llm_engine.abort_request([request_id or "kept"])
            while llm_engine.has_unfinished_requests():
                llm_engine.step()
            return tokens, rows


def test_rejected_rows_leave_nothing(engine: TracedEngine) -> None:
    """After dozens of rejected drafts the KV cache is the same as that of a prompt of the same
    tokens.
    """
    prompt = prompt_of(40, seed=7)
    tokens, kept = cache_while_running(engine, {"prompt_token_ids": prompt}, 40)
    assert len(kept) == drafts.LAYERS + 2
    # Salted, so that nothing is found in the prefix cache.
    fresh = {"prompt_token_ids": tokens, "cache_salt": "fresh"}
    _, expected = cache_while_running(engine, fresh, 1)
    for name, rows in kept.items():
        torch.testing.assert_close(rows, expected[name][: len(rows)], atol=2e-4, rtol=2e-4)


def test_every_pass(engine: TracedEngine, model: Any) -> None:
    """The hidden rows of each draft pass equal those of a forward pass without a cache, and the
    proposals are the tokens that these passes reveal.
    """
    draft = engine.runner.speculator.model
    reference = drafts.random_draft()
    embedding, head = model.get_input_embeddings().weight, model.lm_head.weight
    prompt = prompt_of(90, seed=11)
    passes: list[tuple[Any, Any]] = []
    proposed: list[tuple[Any, Any]] = []
    with (
        observed(draft.model, "forward", passes),
        observed(engine.runner.speculator, "sample_draft", proposed),
    ):
        (output,) = generate(engine, [prompt], max_tokens=8)
    said = prompt + list(output.outputs[0].token_ids)
    known = drafts.features(model, said, reference.target_layer_ids)
    checked = 0
    for number, (_, proposal) in enumerate(proposed):
        (first_ids, positions, *_), _ = passes[number * STEPS]
        anchor = int(positions[0])
        if int(first_ids[0]) != said[anchor : anchor + 1][0] or anchor < len(prompt):
            # A chunk of the prompt, or past the end of what was asked for.
            continue
        block = torch.full((1 + NUM_DRAFTS,), MASK)
        block[0] = said[anchor]
        masked = torch.ones(1, NUM_DRAFTS, dtype=torch.bool)
        for step, count in enumerate(unmask_counts(NUM_DRAFTS, STEPS, "cosine")):
            (ids, *_), hidden = passes[number * STEPS + step]
            assert ids.tolist() == block.tolist()
            with torch.no_grad():
                rows = drafts.block_rows(reference, embedding[block], known[:anchor])
                torch.testing.assert_close(hidden[1:], rows[1:], atol=1e-3, rtol=1e-3)
                logits = without_mask_token(rows[1:] @ head.T, MASK)
            tokens, confidence = likeliest(logits)
            now = revealed(CONFIDENCE, masked, confidence[None], count)[0]
            block[1:][now] = tokens[now]
            masked &= ~now
        assert proposal.flatten().tolist() == block[1:].tolist()
        assert MASK not in proposal
        checked += 1
    assert checked >= 3

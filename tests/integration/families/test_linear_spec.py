"""Tests of ``autoregressive`` and ``linear_spec``, of Nemotron-Labs-Diffusion and Uno.

``autoregressive`` is an ordinary causal model; ``linear_spec`` gives its tokens, several at a time.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.engines.engine import SYNCHRONOUS_OFTEN, TracedEngine, tokens_of
from tests.support.engines.generate import tokens_of_batch
from tests.support.families import makers, nemotron, uno
from tests.support.families import run as loops
from tests.support.families.cases import Wanted
from tests.support.families.makers import SelfDrafting, Uno
from tests.support.families.model import MASK_ID, VOCAB_SIZE, prompt_of
from tests.support.families.run import Run
from tests.support.oracles.frames import EVERY_FIELD, Watched
from vllm_diffusion.metrics import request_metrics

pytestmark = pytest.mark.engine

BLOCK, MAX_MODEL_LEN = 8, 256
DRAFTING, CAUSAL = "linear_spec", "autoregressive"
# Chunks of 80 tokens, and a cache that holds one request of the longest, or two others.
OPTIONS: dict[str, Any] = {
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 80,
    "num_gpu_blocks_override": MAX_MODEL_LEN // 16 + 2,
}
# vLLM's parameters, with ``max_tokens`` as the only end.
params = Wanted(max_tokens=30, strategy=None, threshold=None).sampling_params


def agreeing_model(family: str) -> SelfDrafting:
    """Return a model for which some drafts are right, since its tokens have much in common."""
    model: SelfDrafting = getattr(makers, family)(block_length=BLOCK)
    common = torch.randn(96, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        model.body.model.embed_tokens.weight += 0.5 * common
        for _, up in model.lora.values():
            up *= 0.05
    return model


def sample_of(wanted: Any) -> loops.Sample:
    """Return the sampler of the request's noise, after its filters."""
    keyed = loops.keyed_sample(wanted.seed)
    return lambda logits, draws: keyed(loops.filtered(logits, wanted.top_k, wanted.top_p), draws)


def once(loop: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loop that runs once per request, as engines of both orders get the same requests."""
    runs: dict[Any, Any] = {}

    @wraps(loop)
    def found(model: Any, prompt: Sequence[int], wanted: Any, **options: Any) -> Any:
        asked = (model, tuple(prompt), repr(wanted), *options.items())
        if asked not in runs:
            runs[asked] = loop(model, prompt, wanted, **options)
        return runs[asked]

    return found


@once
def expected(model: Any, prompt: Sequence[int], wanted: Any) -> list[int]:
    """Return the loop's tokens, drawn one after another."""
    run = nemotron.ar_generate(
        model,
        prompt,
        max_new_tokens=wanted.max_tokens,
        temperature=wanted.temperature,
        sample=sample_of(wanted),
    )
    return run.tokens


def all_expected(model: Any, prompts: list[list[int]], wanted: list[Any]) -> list[list[int]]:
    """Return the loop's tokens for each request of a batch."""
    return [expected(model, prompt, one) for prompt, one in zip(prompts, wanted, strict=True)]


@once
def drafting(
    model: Any,
    prompt: Sequence[int],
    wanted: Any,
    block_length: int = BLOCK,
    noise_end: int | None = None,
) -> Run:
    """Return the published loop with LoRA on drafts alone, for some tokens more."""
    common: dict[str, Any] = {
        "max_new_tokens": wanted.max_tokens + 2 * block_length,
        "block_length": block_length,
        "temperature": wanted.temperature,
        "sample": sample_of(wanted),
    }
    if noise_end is not None:
        return uno.generate(model, prompt, **common, mask_token_id=noise_end, seed=wanted.seed)
    # Greedy, as ours are.
    greedy = {"draft_sample": lambda logits, draws: logits.argmax(-1)}
    return nemotron.linear_spec_generate(model, prompt, **common, **greedy, mask_token_id=MASK_ID)


def noise_end(model: SelfDrafting) -> int | None:
    """Return the id that ends Uno's random tokens; ``None`` for a model that drafts from masks."""
    return (model.config["mask_token_id"] or VOCAB_SIZE) if isinstance(model, Uno) else None


def accepted(run: Run) -> list[int]:
    """Return how many tokens each verification of the loop kept, except the last one's."""
    starts = [one.start for one in run.passes if one.kind == "verify"]
    return [b - a for a, b in pairwise(starts)]


@contextmanager
def counting(engine: TracedEngine) -> Iterator[list[int]]:
    """Count the tokens that each verification emits for requests that go on."""
    counts: list[int] = []
    update = engine.scheduler.update_from_output

    def counted(scheduler_output: Any, runner_output: Any) -> Any:
        for req_id, index in runner_output.req_id_to_index.items():
            num_emitted = len((runner_output.sampled_token_ids or [()] * (index + 1))[index])
            if num_emitted and req_id in engine.scheduler.requests:
                counts.append(num_emitted)
        return update(scheduler_output, runner_output)

    engine.scheduler.update_from_output = counted
    try:
        yield counts
    finally:
        engine.scheduler.update_from_output = update


@pytest.fixture(scope="module", params=["nemotron", "uno", "uno_k2"])
def model(request: pytest.FixtureRequest) -> SelfDrafting:
    return agreeing_model(request.param)


def ruled(rule: str, **options: Any) -> dict[str, Any]:
    """Return options of an engine with this rule, and with drafts of :data:`BLOCK` positions."""
    section = {"rule": rule} | ({"draft_length": BLOCK} if rule == DRAFTING else {})
    return OPTIONS | {"additional_config": {"diffusion": section}} | options


# Each with the scheduler's order.
DRAFTS = [(DRAFTING, False), pytest.param((DRAFTING, True), marks=pytest.mark.slow)]
drafts = pytest.mark.parametrize("engine", DRAFTS, indirect=True, ids=str)
causal = pytest.mark.parametrize("engine", [(CAUSAL, False)], indirect=True, ids=str)


@pytest.fixture(scope="module", params=[*DRAFTS, (CAUSAL, False)], ids=str)
def engine(
    request: pytest.FixtureRequest, model: SelfDrafting, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TracedEngine]:
    rule, is_async = request.param
    folder = model.save(tmp_path_factory.mktemp(rule))
    options = ruled(rule, async_scheduling=is_async, **model.options)
    with TracedEngine(folder, **options) as served:
        yield served


def temperature_of(engine: TracedEngine, temperature: float) -> float:
    """Return 0 for the autoregressive mode, whose draws are vLLM's and not the loop's."""
    return temperature * engine.llm.llm_engine.model_config.is_diffusion


def generate(engine: TracedEngine, prompts: list[list[int]], wanted: list[Any]) -> list[Any]:
    """Return the finished completions of one batch."""
    outputs = engine.outputs(prompts, wanted)
    return [output.outputs[0] for output in outputs]


def test_tokens(engine: TracedEngine, model: SelfDrafting) -> None:
    """Chunks, batches, preemptions, temperatures and filters give the causal loop's tokens."""
    lengths = (1, 7, 8, 9, 64, 81, 150, 120)
    prompts = [prompt_of(length, seed=length) for length in lengths]
    kinds = [
        {"temperature": 0.0},
        {"temperature": temperature_of(engine, 0.8)},
        {"temperature": 0.0},
        {"temperature": temperature_of(engine, 1.2), "top_k": 20, "top_p": 0.9},
    ]
    wanted = [params(seed=i, max_tokens=40, **kinds[i % 4]) for i in range(len(lengths))]
    engine.preempted.clear()
    with counting(engine) as found:
        outputs = engine.outputs(prompts, wanted)
    assert tokens_of(outputs) == all_expected(model, prompts, wanted)
    assert engine.preempted
    counts = Counter(found)
    if temperature_of(engine, 1.0):
        # Whole drafts, parts of them, and none of one: Uno's second token is certain too.
        assert min(counts) == (2 if isinstance(model, Uno) else 1)
        assert counts[BLOCK] > 0
        assert len(counts) > 2


@drafts
def test_accepted_counts(engine: TracedEngine, model: SelfDrafting) -> None:
    """As many tokens of each draft are kept as in the loop, with LoRA in the draft alone."""
    differs = 0
    for seed, temperature in ((3, 0.0), (6, 0.8)):
        prompt, wanted = prompt_of(20, seed=seed), params(temperature=temperature, seed=seed)
        end = noise_end(model)
        loop = drafting(model, prompt, wanted, noise_end=end)
        # Which the loop would draft anew where it is a block's first token.
        assert MASK_ID not in loop.tokens
        with counting(engine) as found:
            (completion,) = generate(engine, [prompt], [wanted])
        assert found[:-1] == accepted(loop)[: len(found) - 1]
        plain = drafting(
            lambda ids, visible, **_: model(ids, visible), prompt, wanted, noise_end=end
        )
        differs += accepted(plain) != accepted(loop)
        metrics = request_metrics(completion)
        assert metrics is not None
        assert set(metrics.denoise_steps_per_canvas) == {1}
        # One pass drafts and one verifies, and before them one reads the prompt.
        assert metrics.passes == 1 + 2 * len(found)
    assert differs


@pytest.mark.slow
@drafts
def test_reload(engine: TracedEngine, model: SelfDrafting) -> None:
    """The adapter acts on drafts as before after weights were loaded anew."""
    engine.llm.collective_rpc("reload_weights")
    engine.llm.reset_prefix_cache()
    test_accepted_counts(engine, model)


@drafts
def test_narrow_drafts(engine: TracedEngine, model: SelfDrafting) -> None:
    """Shorter drafts of a request change no token."""
    prompt = prompt_of(20, seed=1)
    wanted = params(extra_args={"diffusion_canvas_length": 3})
    with counting(engine) as found:
        (completion,) = generate(engine, [prompt], [wanted])
    assert list(completion.token_ids) == expected(model, prompt, wanted)
    loop = drafting(model, prompt, wanted, block_length=3, noise_end=noise_end(model))
    assert found[:-1] == accepted(loop)[: len(found) - 1]


def test_end_of_the_model_length(engine: TracedEngine, model: SelfDrafting) -> None:
    """The last drafts are as narrow as the rest of the model's length."""
    prompts = [prompt_of(length, seed=length) for length in (230, 241, 255)]
    wanted = [params(max_tokens=MAX_MODEL_LEN - len(prompt)) for prompt in prompts]
    outputs = engine.outputs(prompts, wanted)
    assert tokens_of(outputs) == all_expected(model, prompts, wanted)


@drafts
def test_end_tokens(engine: TracedEngine, model: SelfDrafting) -> None:
    """An end token ends the answer where the loop ends it, also within an accepted draft."""
    prompt = prompt_of(33, seed=8)
    whole = expected(model, prompt, params(temperature=0.9, seed=2))
    for end in {whole[0], whole[1], whole[9], whole[17]}:
        wanted = params(temperature=0.9, seed=2, stop_token_ids=[end])
        (completion,) = generate(engine, [prompt], [wanted])
        assert list(completion.token_ids) == loops.cut(whole, [end])
        assert completion.finish_reason == "stop"


@drafts
def test_min_tokens_and_biases(engine: TracedEngine, model: SelfDrafting) -> None:
    """No end comes before ``min_tokens``, and a bias reaches every row."""
    prompt = prompt_of(33, seed=11)
    end, favoured = expected(model, prompt, params())[0], 40

    def adjusted(ids: Tensor, visible: Tensor, **_: Any) -> Tensor:
        logits = model(ids, visible)
        logits[:, favoured] += 3.0
        # The row of a position draws the token after it.
        logits[: len(prompt) + 7 - 1, end] = float("-inf")
        return logits

    changes: dict[str, Any] = {"logit_bias": {favoured: 3.0}, "min_tokens": 7}
    lengths = set()
    for seed, temperature in ((0, 0.0), (1, 0.3), (2, 0.7), (3, 1.0)):
        wanted = params(temperature=temperature, seed=seed, stop_token_ids=[end], **changes)
        (completion,) = generate(engine, [prompt], [wanted])
        assert list(completion.token_ids) == loops.cut(expected(adjusted, prompt, wanted), [end])
        lengths.add(len(completion.token_ids))
    # The first position that may end one does.
    assert min(lengths) == 8


@drafts
def test_log_probabilities(engine: TracedEngine, model: SelfDrafting) -> None:
    """The log-probability of a token is that of the causal row that drew it, at temperature 1."""
    prompts = [prompt_of(length, seed=length) for length in (5, 90)]
    wanted = [params(temperature=t, logprobs=3, seed=3) for t in (0.0, 0.8)]
    for prompt, completion in zip(prompts, generate(engine, prompts, wanted), strict=True):
        tokens = list(completion.token_ids)
        ids = torch.tensor([*prompt, *tokens])
        exact = model(ids, loops.causal(len(ids)))[len(prompt) - 1 : -1].log_softmax(-1)
        assert len(completion.logprobs) == len(tokens)
        for token, row, reported in zip(tokens, exact, completion.logprobs, strict=True):
            best = row.topk(3)
            wanted_ids = {token, *best.indices.tolist()}
            assert reported.keys() == wanted_ids
            for token_id in wanted_ids:
                assert reported[token_id].logprob == pytest.approx(float(row[token_id]), abs=2e-4)


@drafts
def test_frames_show_drafts(engine: TracedEngine, model: SelfDrafting) -> None:
    """Each draft is one frame, which begins with the tokens that are emitted of it."""
    prompt = prompt_of(20, seed=6)
    wanted = params(temperature=0.8, seed=6, extra_args=EVERY_FIELD)
    with counting(engine) as counts:
        seen = Watched(engine.llm, [prompt], [wanted])
    completion = seen.outputs[0].outputs[0]
    tokens = expected(model, prompt, wanted)
    assert list(completion.token_ids) == tokens
    drafts, start, steps = seen.canvases(0), 0, []
    assert len(drafts) == len(counts)
    for (frame,), count in zip(drafts, counts, strict=True):
        kept = tokens[start : start + count]
        assert list(frame.token_ids or ())[: len(kept)] == kept
        assert list(frame.answer_token_ids) == kept
        steps += [0] + [1] * (len(kept) - 1)
        start += count
    assert list(completion.diffusion_step_map) == steps
    assert 1 in steps


@causal
def test_what_canvases_do_not_have(engine: TracedEngine, model: SelfDrafting) -> None:
    """Penalties, prompt log-probabilities and grammars work as in vLLM."""
    from vllm.sampling_params import StructuredOutputsParams

    prompt = prompt_of(20, seed=3)
    penalty, said = 2.0, [0] * 320

    def penalised(ids: Tensor, visible: Tensor, **_: Any) -> Tensor:
        return model(ids, visible) - penalty * torch.tensor(said)

    tokens = list(prompt)
    for _ in range(20):
        ids = torch.tensor(tokens)
        tokens.append(int(penalised(ids, loops.causal(len(ids)))[-1].argmax()))
        said[tokens[-1]] += 1
    (found,) = generate(engine, [prompt], [params(frequency_penalty=penalty, max_tokens=20)])
    assert list(found.token_ids) == tokens[len(prompt) :]

    wanted = params(prompt_logprobs=1, max_tokens=1)
    (output,) = engine.outputs([prompt], wanted)
    exact = model(torch.tensor(prompt), loops.causal(len(prompt))).log_softmax(-1)
    for i, reported in enumerate(output.prompt_logprobs[1:]):
        token = prompt[i + 1]
        assert reported[token].logprob == pytest.approx(float(exact[i, token]), abs=2e-4)

    grammar = StructuredOutputsParams(regex=r"[a-f]{3,9} [0-9]{2}")
    wanted = params(structured_outputs=grammar, ignore_eos=False)
    (found,) = generate(engine, [prompt], [wanted])
    text = engine.llm.get_tokenizer().decode(found.token_ids, skip_special_tokens=True)
    assert re.fullmatch(r"[a-f]{3,9} [0-9]{2}", text)


@pytest.mark.parametrize("is_async", SYNCHRONOUS_OFTEN)
def test_way_of_each_request(is_async: bool, tmp_path: Path) -> None:
    """Uno's requests choose to be drafted or not, and get the tokens that they get alone; the next
    turn may choose otherwise, and finds the last one's keys and values.
    """
    model = agreeing_model("uno")
    section = {"rules": "all", "draft_length": BLOCK}
    options = OPTIONS | {"additional_config": {"diffusion": section}, "async_scheduling": is_async}
    options |= {"num_gpu_blocks_override": 128}
    prompts = [prompt_of(length, seed=length) for length in (7, 64, 81, 150, 120)]
    ways = [{"extra_args": {"diffusion_rule": way}} for way in (DRAFTING, CAUSAL)]
    with TracedEngine(model.save(tmp_path), **options) as engine:
        for turn in range(2):
            wanted = [
                params(seed=i, temperature=0.8 * (i % 3), **ways[(i + turn) % 2])
                for i in range(len(prompts))
            ]
            outputs = engine.outputs(prompts, wanted)
            tokens = tokens_of(outputs)
            assert tokens == all_expected(model, prompts, wanted)
            assert turn == 0 or all(output.num_cached_tokens > 0 for output in outputs)
            prompts = [
                (prompt + answer + prompt_of(3, seed=turn))[:200]
                for prompt, answer in zip(prompts, tokens, strict=True)
            ]


def test_rows_of_partly_rotated_heads(tmp_path: Path) -> None:
    """A draft's queries, keys and values are those of a checkpoint with the adapter merged into it,
    whose rows vLLM permutes as it loads them; where it leaves them, as of quantised layers, the
    adapter's rows stay too.
    """
    model = agreeing_model("uno_k2")
    model.save(tmp_path / "own")
    scale = model.alpha / model.lora_config["r"]
    with torch.no_grad():
        for name, (down, up) in model.lora.items():
            model.body.get_submodule(name).weight += scale * up @ down
    model.save(tmp_path / "merged")
    x = torch.randn(8, model.config["hidden_size"], generator=torch.Generator().manual_seed(0))
    found = []
    for name, rule in (("own", DRAFTING), ("merged", CAUSAL)):
        with TracedEngine(tmp_path / name, **ruled(rule, **model.options)) as engine:
            served = engine.runner.model
            if rule == DRAFTING:
                served.draft_adapter.is_draft_row.fill_(True)
            found.append([layer.self_attn.qkv_proj(x)[0] for layer in served.model.layers])
            served.model.layers[0].self_attn.fold_rope_weights = False
            assert served.loaded_rows("model.layers.0.self_attn.q_proj", x) is x
    torch.testing.assert_close(*found)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [DRAFTING, CAUSAL])
def test_two_processes(rule: str, model: SelfDrafting, tmp_path: Path) -> None:
    """Two processes with half of the heads and of the LoRA each give the same tokens."""
    prompts = [prompt_of(length, seed=length) for length in (3, 40, 64, 150)]
    names = ("max_tokens", "temperature", "seed", "ignore_eos")
    hot = 0.8 * (rule == DRAFTING)
    wanted = [params(seed=i, temperature=(i % 2) * hot, max_tokens=40) for i in range(4)]
    folder = model.save(tmp_path)
    requests = [
        {"prompt": prompt, "params": {name: getattr(one, name) for name in names}}
        for prompt, one in zip(prompts, wanted, strict=True)
    ]
    options = ruled(rule, tensor_parallel_size=2, **model.options)
    found = tokens_of_batch(folder, requests, **options)
    assert found == all_expected(model, prompts, wanted)

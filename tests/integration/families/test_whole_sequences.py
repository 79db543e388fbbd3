"""Tests of models whose canvas is the whole sequence: their start, and their use of memory."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.exceptions import VLLMValidationError

from tests.support.engines.engine import TracedEngine, tokens_of
from tests.support.engines.vllm_configs import configure
from tests.support.families import llada, run
from tests.support.families import makers as tiny
from tests.support.families.cases import CASES, Wanted, assert_loops
from tests.support.families.model import END_IDS, MASK_ID, prompt_of
from vllm_diffusion.metrics import request_metrics
from vllm_diffusion.sampling.output_head import OutputHead
from vllm_diffusion.sampling.sampler import DiffusionSampler

pytestmark = pytest.mark.engine


def test_a_start(tmp_path: Path) -> None:
    """A pass holds the longest sequence, and no prefix is cached."""
    config = configure(tiny.llada().save(tmp_path), max_model_len=None)
    assert config.model_config.max_model_len == 1024
    assert config.scheduler_config.max_num_batched_tokens >= 1024
    assert config.model_config.diffusion.spec.length == 1024
    assert not config.cache_config.enable_prefix_caching
    assert config.scheduler_config.max_num_seqs == 8


def test_a_small_pass_shortens_the_model(tmp_path: Path) -> None:
    """A sequence that cannot fit into a pass is refused with the number, as at vLLM's limit."""
    config = configure(tiny.llada().save(tmp_path), max_model_len=None, max_num_batched_tokens=300)
    assert config.model_config.max_model_len == 300
    assert config.model_config.diffusion.spec.length == 300


@pytest.mark.parametrize(("given", "length"), [(None, 2048), (3000, 3000)])
def test_dreams_length(tmp_path: Path, given: int | None, length: int) -> None:
    """Dream's length is that of its README, not that of the model that it was trained from."""
    folder = tiny.dream(max_position_embeddings=4096).save(tmp_path)
    assert configure(folder, max_model_len=given).model_config.max_model_len == length


@pytest.mark.parametrize(
    ("family", "is_asynchronous"),
    [
        pytest.param("llada", False, marks=pytest.mark.slow),
        pytest.param("llada", True, marks=pytest.mark.slow),
        pytest.param("illada", False, marks=pytest.mark.slow),
        ("illada", True),
    ],
)
def test_little_memory(tmp_path: Path, family: str, is_asynchronous: bool) -> None:
    """Six requests in memory for two get the tokens that each gets alone.

    A sequence has all of its memory from its first pass on, or waits. One that grows may lose it,
    and begins its block again.
    """
    case = CASES[family]
    model = case.make()
    lengths = [90, 33, 5, 61, 17, 100]
    prompts = [prompt_of(length, seed=7 * length) for length in lengths]
    wanted = [
        Wanted(max_tokens=64, threshold=0.2, temperature=(i % 2) * 0.8, seed=i)
        for i in range(len(lengths))
    ]
    options = {"max_model_len": 192, "max_num_seqs": 6, "num_gpu_blocks_override": 26}
    options |= {"async_scheduling": is_asynchronous}
    with TracedEngine(model.save(tmp_path), **case.options, **options) as engine:
        outputs = engine.outputs(prompts, [one.sampling_params() for one in wanted])
        assert bool(engine.preempted) == (family == "illada")
    assert_loops(case, model, prompts, wanted, tokens_of(outputs))


@pytest.mark.parametrize(
    ("family", "is_asynchronous"),
    [
        ("llada", False),
        pytest.param("llada", True, marks=pytest.mark.slow),
        pytest.param("illada", False, marks=pytest.mark.slow),
        ("illada", True),
    ],
)
def test_no_room_for_whole_blocks(tmp_path: Path, family: str, is_asynchronous: bool) -> None:
    """An answer up to the model's length has all of its tokens, in a shorter last block."""
    most = 192
    case, model = CASES[family], CASES[family].make()
    loop = replace(case, loop=partial(case.loop, max_length=most))
    # Prompts and answers: whole blocks of 16 fit after the first two only.
    lengths = [(20, 40), (160, 30), (150, 40), (140, 52), (181, 11), (100, 92), (177, 1), (155, 35)]
    settings: list[dict[str, Any]] = [
        {"strategy": "static"},
        {"strategy": "static", "steps": 5},
        {"strategy": "static", "temperature": 0.8},
        {"strategy": "random", "steps": 12},
        {"threshold": 0.2, "temperature": 0.6},
    ]
    # Each length has two settings, and each setting at least three lengths.
    pairs = [(pair, (i + j) % len(settings)) for i, pair in enumerate(lengths) for j in (0, 2)]
    prompts = [prompt_of(length, seed=3 * length) for (length, _), _ in pairs]
    wanted = [Wanted(max_tokens=max_tokens, seed=i, **settings[i]) for (_, max_tokens), i in pairs]
    options = {"max_model_len": most, "max_num_seqs": 8, "async_scheduling": is_asynchronous}
    with TracedEngine(model.save(tmp_path), **case.options, **options) as engine:
        outputs = engine.outputs(prompts, [one.sampling_params() for one in wanted])
        # A request that asks for more than the model's length.
        outputs += engine.outputs(prompts[-1:], [Wanted(max_tokens=500).sampling_params()])
    # It gets what fits.
    prompts.append(prompts[-1])
    wanted.append(Wanted(max_tokens=most - len(prompts[-1])))
    answers = tokens_of(outputs)
    assert_loops(loop, model, prompts, wanted, answers)
    assert [len(tokens) for tokens in answers] == [one.max_tokens for one in wanted]
    assert {output.outputs[0].finish_reason for output in outputs[:-1]} == {"length"}


@pytest.mark.parametrize("family", ["llada", "illada"])
def test_projected_rows_are_counted(tmp_path: Path, monkeypatch: Any, family: str) -> None:
    """The metrics of requests count the rows that the runner selects for the vocabulary, which are
    those of the block that is denoised and not the whole sequence. On a CPU only those of masks
    are projected.
    """
    selected, select = [], DiffusionSampler.select_rows
    projected, project = [], OutputHead.project

    def counted(sampler: DiffusionSampler, hidden: torch.Tensor) -> torch.Tensor:
        rows = select(sampler, hidden)
        selected.append(len(rows))
        return rows

    def counted_products(head: OutputHead, rows: torch.Tensor, tile: slice) -> torch.Tensor:
        projected.append(len(rows))
        return project(head, rows, tile)

    case = CASES[family]
    prompts = [prompt_of(length, seed=length) for length in (40, 9)]
    params = [Wanted(max_tokens=n, seed=n).sampling_params() for n in (32, 48)]
    with TracedEngine(case.make().save(tmp_path), **case.options) as engine:
        monkeypatch.setattr(DiffusionSampler, "select_rows", counted)
        monkeypatch.setattr(OutputHead, "project", counted_products)
        outputs = engine.outputs(prompts, params)
    metrics = [request_metrics(output.outputs[0]) for output in outputs]
    assert sum(one.projected_rows for one in metrics) == sum(selected) > sum(projected) > 0
    assert all(one.projected_rows < one.canvas_rows for one in metrics)


def test_end_tokens_that_are_held_back(tmp_path: Path) -> None:
    """``logits_eos_inf`` and ``confidence_eos_eot_inf`` give the loop's tokens, also mixed."""
    made = tiny.llada(eot_token_id=END_IDS[1])
    with torch.no_grad():
        # So that end tokens are often the likeliest.
        made.body.lm_head.weight[list(END_IDS)] *= 4
    options = [
        {"logits_eos_inf": eos, "confidence_eos_eot_inf": confidence}
        for eos in (0, 1)
        for confidence in (0, 1)
    ]
    asked = [
        (Wanted(max_tokens=48, strategy="static", temperature=heat, seed=i), own)
        for i, heat in enumerate((0.0, 0.8))
        for own in options
    ]
    prompts = [prompt_of(20 + i, seed=i) for i in range(len(asked))]
    params = [
        one.sampling_params(
            extra_args=one.extra_args()
            | {f"diffusion_{name}": value for name, value in own.items()}
        )
        for one, own in asked
    ]
    with TracedEngine(made.save(tmp_path), max_num_seqs=8, **CASES["llada"].options) as engine:
        outputs = engine.outputs(prompts, params)
        # A block that the request names must divide the answer, as in the loop.
        cut = Wanted(max_tokens=40).sampling_params({"diffusion_block_length": 16})
        with pytest.raises(
            VLLMValidationError, match="multiple of diffusion_block_length, 16"
        ) as it:
            engine.outputs(prompts[:1], [cut])
        assert it.value.parameter == "max_tokens"
    answers = []
    for prompt, (one, own), output in zip(prompts, asked, outputs, strict=True):
        loop = llada.generate(
            run.suppress(made, [MASK_ID]),
            prompt,
            steps=48,
            gen_length=48,
            block_length=16,
            temperature=one.temperature,
            mask_id=MASK_ID,
            eos_id=END_IDS[0],
            eot_id=END_IDS[1],
            sample=run.keyed_sample(one.seed),
            **{name: bool(value) for name, value in own.items()},
        )
        assert list(output.outputs[0].token_ids) == loop.tokens, (one, own)
        answers.append((loop.tokens, loop.revealed))
    for i in range(0, len(asked), len(options)):
        plain, last, never, _ = answers[i : i + len(options)]
        assert END_IDS[0] in plain[0]
        assert END_IDS[0] not in never[0]
        assert plain != last


@pytest.mark.parametrize("heat", [0.0, pytest.param(0.8, marks=pytest.mark.slow)])
def test_the_end_of_a_thought(tmp_path: Path, heat: float) -> None:
    """iLLaDA's boost gives the loop's tokens, with and without it in one batch."""
    case, made = CASES["illada"], CASES["illada"].make()
    boosts = [(0.0, 2.0), (30.0, 0.5), (30.0, 3.0), (12.0, 1.0)]
    asked = [
        (Wanted(max_tokens=64, strategy="static", temperature=heat, seed=i), *boost)
        for i, boost in enumerate(boosts)
    ]
    prompts = [prompt_of(20 + i, seed=i) for i in range(len(asked))]
    params = [
        one.sampling_params(
            {"diffusion_end_think_logit_boost": boost, "diffusion_end_think_boost_power": power}
        )
        for one, boost, power in asked
    ]
    with TracedEngine(made.save(tmp_path), max_num_seqs=8, **case.options) as engine:
        outputs = engine.outputs(prompts, params)
        end = engine.llm.get_tokenizer().encode("</think>", add_special_tokens=False)
        boosted = {"diffusion_end_think_logit_boost": 1.0}
        held = boosted | {"diffusion_constrained": True}
        for field, params in (
            ("logit_bias", asked[1][0].sampling_params(boosted, logit_bias={7: 1.0})),
            # The boost is the only list of its slot, so that no constraint would hold.
            ("diffusion_constrained", asked[1][0].sampling_params(held, logprob_token_ids=[7])),
        ):
            with pytest.raises(VLLMValidationError, match=f"{field} (cannot|is not)") as it:
                engine.outputs(prompts[:1], [params])
            assert it.value.parameter == field
    assert len(end) > 1
    for prompt, (one, boost, power), output in zip(prompts, asked, outputs, strict=True):
        loop = llada.var_generate(
            run.suppress(made, [MASK_ID]),
            prompt,
            steps=16,
            gen_length=64,
            block_length=16,
            temperature=one.temperature,
            mask_id=MASK_ID,
            end_think_token_ids=end,
            end_think_logit_boost=boost,
            end_think_boost_power=power,
            uniform=run.keyed_uniform(one.seed),
            sample=run.keyed_sample(one.seed),
        )
        assert list(output.outputs[0].token_ids) == loop.tokens, (one, boost, power)
        assert llada.contains(torch.tensor(loop.tokens), end) == (boost == 30.0)

"""New weights in a running engine, sleep, and requests in flight meanwhile."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from tests.support.checkpoints import SHIPPED
from tests.support.engine import TracedEngine
from tests.support.oracle import Oracle
from vllm_diffusion.cli.checkpoint import shipped_checkpoint
from vllm_diffusion.weights.transfer import check_transfers
from vllm_diffusion.weights.worker_engine import SafetensorsInitInfo, SafetensorsUpdateInfo

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path[:0] = [str(EXAMPLES / "checkpoints"), str(EXAMPLES / "rl")]

from recompute import diffusion_gemma_logprobs, sdar_logprobs  # noqa: E402
from tiny_sdar import generate, load_model  # noqa: E402

pytestmark = pytest.mark.engine

SDAR = shipped_checkpoint("sdar")
OPTIONS: dict[str, Any] = {
    "weight_transfer_config": {"backend": "safetensors"},
    "enable_sleep_mode": True,
}
# "Reverse ...", "What is ...": of several lengths, so that canvases begin within a block.
PROMPTS = [[2, 5, *range(40, 40 + n)] for n in (3, 8, 14)]
NUM_TOKENS = 28


class Trainer:
    """Sends weights to an engine in this process, as a trainer does by HTTP."""

    def __init__(self, engine: TracedEngine, folder: Path) -> None:
        self.llm = engine.llm
        self.folder = folder
        self.num_files = 0

    def write(self, tensors: dict[str, Tensor]) -> Path:
        path = self.folder / f"{self.num_files}.safetensors"
        self.num_files += 1
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
        return path

    def start(self) -> None:
        self.llm.start_weight_update()

    def send(self, path: Path | dict[str, Tensor]) -> None:
        path = self.write(path) if isinstance(path, dict) else path
        self.llm.update_weights({"update_info": {"path": str(path)}})

    def finish(self) -> None:
        self.llm.finish_weight_update()

    def update(self, *parts: Path | dict[str, Tensor]) -> None:
        """All of an update."""
        self.start()
        for part in parts:
            self.send(part)
        self.finish()

    def is_refused(self, part: Path | dict[str, Tensor], *words: str) -> None:
        self.start()
        with pytest.raises(ValueError) as raised:  # noqa: PT011
            self.send(part)
        for word in words:
            assert word in str(raised.value)


def changed_weights(folder: Path, seed: int) -> dict[str, Tensor]:
    """A checkpoint's weights, some of each matrix's sign and size changed."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor * (1 + 0.3 * torch.randn(tensor.shape, generator=generator))
        if tensor.dim() > 1
        else tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }


@contextmanager
def engine_of(checkpoint: Path, **options: Any) -> Iterator[TracedEngine]:
    with TracedEngine(checkpoint, **(OPTIONS | options)) as engine:
        yield engine


@pytest.fixture(scope="module")
def sdar() -> Iterator[TracedEngine]:
    with engine_of(SDAR) as engine:
        yield engine


@pytest.fixture
def trainer(sdar: TracedEngine, tmp_path: Path) -> Iterator[Trainer]:
    """Every test leaves the shipped weights."""
    trainer = Trainer(sdar, tmp_path)
    yield trainer
    trainer.update(SDAR)
    sdar.llm.reset_prefix_cache()


def answers(engine: TracedEngine, **params: Any) -> list[list[int]]:
    outputs = engine.generate(
        PROMPTS, seeds=[1, 2, 3], max_tokens=NUM_TOKENS, ignore_eos=True, **params
    )
    return [list(output.token_ids) for output in outputs]


def fresh_answers(weights: dict[str, Tensor], prompts: list[list[int]]) -> list[list[int]]:
    """Greedy ones by the published loop, over transformers' model with these weights."""
    model = load_model(SDAR)
    model.load_state_dict(weights)
    return [generate(model, prompt, NUM_TOKENS).tokens for prompt in prompts]


def until_end(tokens: list[int]) -> list[int]:
    """As the loop cuts them."""
    from tiny_sdar import GENERATION_CONFIG

    ends = [i for i, token in enumerate(tokens) if token in GENERATION_CONFIG["eos_token_id"]]
    return tokens[: ends[0] + 1] if ends else tokens


def test_updates(sdar: TracedEngine, trainer: Trainer) -> None:
    """Whole or a tensor at a time: tokens are those of an independent loop on the same weights."""
    llm = sdar.llm
    shipped = answers(sdar, temperature=0.0)
    seen = [shipped]
    for seed, one_by_one in ((1, False), (2, True)):
        weights = changed_weights(SDAR, seed)
        parts = [{name: tensor} for name, tensor in weights.items()] if one_by_one else [weights]
        trainer.start()
        for part in parts:
            trainer.send(part)
        # Until it is finished, nothing has changed.
        assert answers(sdar, temperature=0.0) == seen[-1]
        llm.finish_weight_update(weight_version=str(seed))
        assert llm.get_weight_version() == str(seed)
        llm.reset_prefix_cache()
        seen.append(answers(sdar, temperature=0.0))
        found = [until_end(tokens) for tokens in seen[-1]]
        assert found == fresh_answers(weights, PROMPTS)
    assert len({str(one) for one in seen}) == 3
    # A single tensor, in an update of its own; half of a fused layer of the engine's.
    name = "model.layers.1.self_attn.k_proj.weight"
    weights[name] = weights[name].roll(1, dims=0)
    trainer.update({name: weights[name]})
    llm.reset_prefix_cache()
    last = answers(sdar, temperature=0.0)
    assert last != seen[-1]
    assert [until_end(tokens) for tokens in last] == fresh_answers(weights, PROMPTS)


def run_until(llm: Any, is_enough: Callable[[], bool]) -> list[Any]:
    """Steps of the engine; what finished meanwhile."""
    finished = []
    while not is_enough():
        finished += [output for output in llm.llm_engine.step() if output.finished]
    return finished


def enqueue(engine: TracedEngine, **params: Any) -> None:
    engine.llm.enqueue(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS],
        [
            engine.sampling_params(seed=s, max_tokens=NUM_TOKENS, ignore_eos=True, **params)
            for s in (1, 2, 3)
        ],
        use_tqdm=False,
    )


def rest(llm: Any) -> list[list[int]]:
    outputs = run_until(llm, lambda: not llm.llm_engine.has_unfinished_requests())
    outputs.sort(key=lambda output: int(output.request_id.split("-")[0]))
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_bad_updates(sdar: TracedEngine, trainer: Trainer) -> None:
    """Refused in a sentence while requests are in flight, and they do not notice."""
    expected = answers(sdar, temperature=1.0)
    enqueue(sdar, temperature=1.0)
    running = sdar.scheduler.running
    finished = run_until(sdar.llm, lambda: sum(r.num_output_tokens > 0 for r in running) == 3)
    assert not finished
    weights = changed_weights(SDAR, 3)
    name = "model.layers.0.mlp.up_proj.weight"
    trainer.is_refused(weights | {name: weights[name][:-1]}, name, "[383, 128]", "[384, 128]")
    trainer.is_refused({name: weights[name].int()}, name, "I32")
    trainer.is_refused(weights | {name: weights[name] / 0}, name, "not finite")
    trainer.is_refused({"model.layers.9.mlp.up_proj.weight": weights[name]}, "layers.9")
    path = trainer.write(weights)
    path.write_bytes(path.read_bytes()[:-100])
    trainer.is_refused(path, str(path), "truncated")
    trainer.is_refused(path.with_name("missing.safetensors"), "missing.safetensors")
    trainer.is_refused(Path("relative.safetensors"), "update_info.path")
    trainer.start()
    for info, words in (({}, "path='' must be"), ({"path": str(path), "dtype": "F32"}, "'dtype'")):
        with pytest.raises(ValueError, match=f"update_info.*{words}"):
            sdar.llm.update_weights({"update_info": info})
        trainer.start()
    # A trainer that dies leaves its update open; the next one is told so, and takes it over.
    trainer.send(weights)
    with pytest.raises(RuntimeError, match="already active"):
        trainer.start()
    sdar.llm.init_weight_transfer_engine({"init_info": {}})
    trainer.finish()
    assert rest(sdar.llm) == expected


class InPlace(WeightTransferEngine):
    """A transfer that writes as vLLM's do: while it receives."""

    init_info_cls = SafetensorsInitInfo
    update_info_cls = SafetensorsUpdateInfo

    def init_transfer_engine(self, init_info: Any) -> None: ...

    def start_weight_update(self) -> None: ...

    def receive_weights(self, update_info: Any) -> None:
        self.model.load_weights(load_file(update_info.path).items())

    def finish_weight_update(self) -> None: ...

    def shutdown(self) -> None: ...


def test_bad_weights_in_place(
    sdar: TracedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told when the update finishes; requests are refused, those in flight too, until good ones come."""
    registry = dict(WeightTransferEngineFactory._registry) | {"in place": lambda: InPlace}
    monkeypatch.setattr(WeightTransferEngineFactory, "_registry", registry)
    check_transfers()
    trainer = Trainer(sdar, tmp_path)
    worker = sdar.llm.llm_engine.model_executor.driver_worker.worker
    ours = worker.weight_transfer_engine
    config = dataclasses.replace(ours.config, backend="in place")
    in_place = WeightTransferEngineFactory.create_engine(
        config, worker.vllm_config, ours.device, sdar.runner.model
    )
    monkeypatch.setattr(worker, "weight_transfer_engine", in_place)
    expected, good = answers(sdar), load_file(SDAR / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    bad = {name: good[name].clone()}
    bad[name][3, 5] = float("nan")
    enqueue(sdar)
    run_until(sdar.llm, lambda: len(sdar.scheduler.running) == len(PROMPTS))
    trainer.start()
    trainer.send(bad)
    with pytest.raises(ValueError, match=rf"{name} .*not finite.*refused until good weights"):
        trainer.finish()
    assert refused(sdar) == len(PROMPTS)
    for begin_anew in (True, False):
        enqueue(sdar)
        assert refused(sdar) == len(PROMPTS)
        if begin_anew:
            # vLLM's worker takes the update for one that goes on; closing it changes nothing.
            trainer.finish()
            enqueue(sdar)
            assert refused(sdar) == len(PROMPTS)
            trainer.start()
        trainer.send({name: good[name]})
        trainer.finish()
        sdar.llm.reset_prefix_cache()
        assert answers(sdar) == expected
        trainer.start()
        trainer.send(bad)
        with pytest.raises(ValueError, match="not finite"):
            trainer.finish()
    trainer.send({name: good[name]})
    trainer.finish()
    sdar.llm.reset_prefix_cache()
    assert answers(sdar) == expected


def refused(engine: TracedEngine) -> int:
    """Requests that end with an error for which a server answers 503, without a token more."""
    core = engine.llm.llm_engine.engine_core.engine_core
    errors = []
    while core.scheduler.has_unfinished_requests():
        outputs, _ = core.step_fn()
        errors += [one.error for told in outputs.values() for one in told.outputs]
    # What is read of the engine here, its client does not hear.
    client = engine.llm.llm_engine.output_processor
    client.abort_requests(list(client.request_states), internal=True)
    assert all(error.retryable and "not finite" in error.message for error in errors), errors
    return len(errors)


def test_paused_requests_continue(sdar: TracedEngine, trainer: Trainer) -> None:
    """Kept over an update: what was committed stays, the rest is written by the new weights."""
    core = sdar.llm.llm_engine.engine_core.engine_core
    old = answers(sdar, temperature=0.0)
    enqueue(sdar, temperature=0.0)
    running = sdar.scheduler.running
    run_until(sdar.llm, lambda: sum(r.num_output_tokens > 0 for r in running) == 3)
    core.pause_scheduler("keep", clear_cache=True)
    kept = {
        tuple(r.prompt_token_ids): list(r.output_token_ids)
        for r in sdar.scheduler.requests.values()
    }
    assert all(0 < len(tokens) < NUM_TOKENS for tokens in kept.values())
    weights = changed_weights(SDAR, 4)
    trainer.update(weights)
    core.resume_scheduler()
    found = rest(sdar.llm)
    assert found != old
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        before = kept[tuple(prompt)]
        assert tokens[: len(before)] == before
        (behind,) = fresh_answers(weights, [prompt + before])
        assert tokens[len(before) : len(before) + len(behind)] == behind[: NUM_TOKENS - len(before)]


def test_sleep(sdar: TracedEngine, trainer: Trainer) -> None:
    """Memory is given back; level 1 wakes as it was, level 2 with new weights, all of them."""
    llm = sdar.llm
    expected = answers(sdar, temperature=1.0)
    for cache in sdar.runner.kv_caches:
        cache.fill_(7)
    process = psutil.Process()
    held = process.memory_info().rss
    llm.sleep(level=1)
    freed = held - process.memory_info().rss
    assert freed > 0.9 * OPTION_KV_BYTES
    assert llm.wake_up()
    assert answers(sdar, temperature=1.0) == expected

    weights = changed_weights(SDAR, 5)
    llm.sleep(level=2)
    assert all((parameter == 0).all() for parameter in sdar.runner.model.parameters())
    poison(sdar)
    assert not llm.wake_up(tags=["weights"])
    name = "model.norm.weight"
    trainer.start()
    trainer.send({name: weights[name]})
    with pytest.raises(ValueError, match="were not sent.*level 2"):
        trainer.finish()
    trainer.send(weights)
    trainer.finish()
    assert llm.wake_up(tags=["kv_cache"])
    found = [until_end(tokens) for tokens in answers(sdar, temperature=0.0)]
    assert found == fresh_answers(weights, PROMPTS)


# As TracedEngine has it.
OPTION_KV_BYTES = 64 * 1024**2


@torch.inference_mode()
def poison(engine: TracedEngine) -> None:
    """What a GPU's sleep of level 2 does to tensors that are made while the model is loaded.

    vLLM discards them with the weights: the state of canvases and what the sampler writes to.
    """
    seen: set[int] = set()

    def walk(value: Any) -> None:
        if id(value) in seen or isinstance(value, torch.nn.Module):
            return
        seen.add(id(value))
        if isinstance(value, Tensor):
            if value.untyped_storage().data_ptr() not in weights:
                value.fill_(True if value.dtype == torch.bool else 113)
        elif isinstance(value, dict):
            for one in value.values():
                walk(one)
        elif isinstance(value, (list, tuple)):
            for one in value:
                walk(one)
        elif type(value).__module__.startswith("vllm_diffusion"):
            walk(vars(value) if hasattr(value, "__dict__") else None)

    weights = {
        tensor.untyped_storage().data_ptr()
        for tensor in (*engine.runner.model.parameters(), *engine.runner.model.buffers())
    }
    walk(engine.runner.model_state)
    walk(engine.runner.sampler)
    assert len(seen) > 30


def test_sdar_logprobs(sdar: TracedEngine) -> None:
    """A trainer's, from prompt and trace, are the server's: of every token, in its own step."""
    model = load_model(SDAR)
    for params in ({"temperature": 1.0}, {"temperature": 0.6}, {"temperature": 0.0}):
        outputs = sdar.generate(
            PROMPTS,
            seeds=[4, 5, 6],
            max_tokens=NUM_TOKENS,
            logprobs=0,
            extra_args={"diffusion_trace": True, "diffusion_step_map": True},
            **params,
        )
        drawn = sdar_logprobs(
            model,
            PROMPTS,
            [output.diffusion_trace for output in outputs],
            temperature=params["temperature"] or 1.0,
        )
        num_compared = 0
        for answer, place, logprob in zip(
            *(t.tolist() for t in (drawn.answer, drawn.place, drawn.logprob)), strict=True
        ):
            output = outputs[answer]
            if place < len(output.token_ids):
                reported = output.logprobs[place][output.token_ids[place]].logprob
                assert logprob == pytest.approx(reported, abs=2e-4)
                num_compared += 1
        assert num_compared == sum(len(output.token_ids) for output in outputs)


def test_diffusion_gemma(tmp_path: Path) -> None:
    """Encoder and decoder, experts and a tied head follow an update; log-probabilities likewise."""
    from transformers import DiffusionGemmaForBlockDiffusion

    oracle = Oracle(SHIPPED)
    with engine_of(SHIPPED) as engine:
        trainer = Trainer(engine, tmp_path)
        settings = engine.state.spec
        poison_free = answers(engine, temperature=1.0)
        engine.llm.sleep(level=2)
        poison(engine)
        engine.llm.wake_up()
        trainer.update(SHIPPED)
        assert answers(engine, temperature=1.0) == poison_free

        model: DiffusionGemmaForBlockDiffusion = copy.deepcopy(oracle.model)
        generator = torch.Generator().manual_seed(6)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))
        # As a trainer has them: shared tensors once, under the first name that they have.
        trainer.update({name: p.detach() for name, p in model.named_parameters()})
        engine.llm.reset_prefix_cache()
        outputs = engine.generate(
            PROMPTS,
            seeds=[4, 5, 6],
            max_tokens=40,
            logprobs=0,
            temperature=1.0,
            ignore_eos=True,
            extra_args={"diffusion_trace": True, "diffusion_step_map": True},
        )
    assert [list(output.token_ids) for output in outputs] != poison_free
    oracle.model = model
    for seed, prompt, output in zip((4, 5, 6), PROMPTS, outputs, strict=True):
        run = oracle.generate(prompt, seed=seed, max_tokens=40, ignore_eos=True)
        assert list(output.token_ids) == run.tokens
        with torch.no_grad():
            logprobs = diffusion_gemma_logprobs(
                model,
                prompt,
                output.diffusion_trace,
                list(output.diffusion_step_map),
                max_steps=settings.max_denoising_steps,
                t_min=settings.settings["t_min"],
                t_max=settings.settings["t_max"],
            )
        reported = [
            one[token].logprob for one, token in zip(output.logprobs, output.token_ids, strict=True)
        ]
        assert logprobs.tolist() == pytest.approx(reported, abs=1e-3)

"""Tests of new weights in a running engine, of sleep, and of requests in flight meanwhile."""

import dataclasses
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from tests.support.engines.engine import TracedEngine, tokens_of
from tests.support.models.checkpoints import SHIPPED
from tests.support.oracles.oracle import Oracle
from vllm_diffusion.checkpoints import shipped_checkpoint

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path[:0] = [str(EXAMPLES / "checkpoints"), str(EXAMPLES / "rl")]

from recompute import diffusion_gemma_logprobs, sdar_logprobs  # noqa: E402
from tiny_sdar import generate, load_model  # noqa: E402

pytestmark = pytest.mark.engine

SDAR = shipped_checkpoint("sdar")
# "Reverse ...", "What is ...": of several lengths, so that canvases begin within a block.
PROMPTS = [[2, 5, *range(40, 40 + n)] for n in (3, 8, 14)]
NUM_TOKENS = 28
NAME = "model.layers.1.mlp.down_proj.weight"


def changed_weights(folder: Path, seed: int) -> dict[str, Tensor]:
    """Return a checkpoint's weights with changed matrices and layer scalars."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor * (1 + 0.3 * torch.randn(tensor.shape, generator=generator))
        if tensor.dim() > 1
        else tensor * (0.9 if name.endswith("layer_scalar") else 1)
        for name, tensor in load_file(folder / "model.safetensors").items()
    }


def written(folder: Path, weights: dict[str, Tensor], source: Path = SDAR) -> Path:
    """Write a checkpoint with these weights."""
    shutil.copytree(source, folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def reload(engine: TracedEngine, folder: Path) -> None:
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
    engine.llm.reset_prefix_cache()


@pytest.fixture(scope="module")
def engine() -> Iterator[TracedEngine]:
    with TracedEngine(SDAR, enable_sleep_mode=True) as served:
        yield served


@pytest.fixture
def sdar(engine: TracedEngine) -> Iterator[TracedEngine]:
    """Return an engine; every test leaves it with the shipped weights."""
    yield engine
    reload(engine, SDAR)


def answers(engine: TracedEngine, **params: Any) -> list[list[int]]:
    outputs = engine.generate(
        PROMPTS, seeds=[1, 2, 3], max_tokens=NUM_TOKENS, ignore_eos=True, **params
    )
    return [list(output.token_ids) for output in outputs]


def fresh_answers(weights: dict[str, Tensor], prompts: list[list[int]]) -> list[list[int]]:
    """Return the published loop's greedy answers with these weights in transformers' model."""
    model = load_model(SDAR)
    model.load_state_dict(weights)
    return [generate(model, prompt, NUM_TOKENS).tokens for prompt in prompts]


def until_end(tokens: list[int]) -> list[int]:
    """Cut answers as the loop does."""
    from tiny_sdar import GENERATION_CONFIG

    ends = [i for i, token in enumerate(tokens) if token in GENERATION_CONFIG["eos_token_id"]]
    return tokens[: ends[0] + 1] if ends else tokens


def test_reload(sdar: TracedEngine, tmp_path: Path) -> None:
    """After each of several reloads the tokens are those of an independent loop on the weights."""
    seen = [answers(sdar, temperature=0.0)]
    for seed in (1, 2):
        weights = changed_weights(SDAR, seed)
        reload(sdar, written(tmp_path / str(seed), weights))
        seen.append(answers(sdar, temperature=0.0))
        assert [until_end(tokens) for tokens in seen[-1]] == fresh_answers(weights, PROMPTS)
    reload(sdar, SDAR)
    assert answers(sdar, temperature=0.0) == seen[0]
    assert len({str(one) for one in seen}) == 3


def in_flight(engine: TracedEngine, **params: Any) -> None:
    """Begin an answer to each prompt, and stop when each has tokens and none has ended."""
    engine.llm.enqueue(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS],
        [
            engine.sampling_params(seed=s, max_tokens=NUM_TOKENS, ignore_eos=True, **params)
            for s in (1, 2, 3)
        ],
        use_tqdm=False,
    )
    running = engine.scheduler.running
    while sum(request.num_output_tokens > 0 for request in running) < len(PROMPTS):
        assert not any(output.finished for output in engine.llm.llm_engine.step())


def rest(engine: TracedEngine) -> list[list[int]]:
    """Return the answers of the requests in flight."""
    ended = engine.finish()
    return tokens_of(
        [ended[name] for name in sorted(ended, key=lambda name: int(name.split("-")[0]))]
    )


def test_bad_folders(sdar: TracedEngine, tmp_path: Path) -> None:
    """A bad folder is refused in a sentence, and requests in flight do not change."""
    expected = answers(sdar, temperature=1.0)
    in_flight(sdar, temperature=1.0)
    weights = changed_weights(SDAR, 3)
    for value in (float("nan"), float("inf")):
        bad = weights | {NAME: weights[NAME].clone()}
        bad[NAME][3, 5] = value
        folder = written(tmp_path / str(value), bad)
        with pytest.raises(ValueError, match=rf"{folder}: {NAME} holds .*not finite.*Nothing was"):
            reload(sdar, folder)
    damaged = written(tmp_path / "damaged", weights) / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    with pytest.raises(ValueError, match=rf"{damaged} is truncated.*Nothing was loaded"):
        reload(sdar, damaged.parent)
    with pytest.raises(ValueError, match="missing is not a folder.*Nothing was loaded"):
        reload(sdar, tmp_path / "missing")
    assert rest(sdar) == expected
    # An error that is found on the way leaves no layer without tensors.
    misfit = written(tmp_path / "misfit", weights | {NAME: weights[NAME][:, :-1].contiguous()})
    with pytest.raises(Exception, match=r"383|384|shape|size"):
        reload(sdar, misfit)
    assert answers(sdar, temperature=1.0) != expected
    reload(sdar, SDAR)
    assert answers(sdar, temperature=1.0) == expected


def test_paused_requests_continue(sdar: TracedEngine, tmp_path: Path) -> None:
    """After an update, committed tokens of paused requests stay and the new weights go on."""
    core = sdar.llm.llm_engine.engine_core.engine_core
    old = answers(sdar, temperature=0.0)
    in_flight(sdar, temperature=0.0)
    core.pause_scheduler("keep", clear_cache=True)
    kept = {
        tuple(r.prompt_token_ids): list(r.output_token_ids)
        for r in sdar.scheduler.requests.values()
    }
    assert all(0 < len(tokens) < NUM_TOKENS for tokens in kept.values())
    weights = changed_weights(SDAR, 4)
    reload(sdar, written(tmp_path / "new", weights))
    core.resume_scheduler()
    found = rest(sdar)
    assert found != old
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        before = kept[tuple(prompt)]
        assert tokens[: len(before)] == before
        (behind,) = fresh_answers(weights, [prompt + before])
        assert tokens[len(before) : len(before) + len(behind)] == behind[: NUM_TOKENS - len(before)]


def test_sleep(sdar: TracedEngine, tmp_path: Path) -> None:
    """A sleep frees memory; level 1 wakes unchanged, and level 2 needs all new weights."""
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
    reload(sdar, written(tmp_path / "new", weights))
    assert llm.wake_up(tags=["kv_cache"])
    found = [until_end(tokens) for tokens in answers(sdar, temperature=0.0)]
    assert found == fresh_answers(weights, PROMPTS)


# As TracedEngine has it.
OPTION_KV_BYTES = 64 * 1024**2


@torch.inference_mode()
def poison(engine: TracedEngine) -> None:
    """Overwrite what a GPU's sleep of level 2 discards: tensors made while the model is loaded.

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
    """A trainer's log-probabilities from prompt and trace are the server's for every token."""
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
    """Encoder, decoder, experts, the scalars of each and the tied head follow an update."""
    folders = []
    for seed, factor in ((6, 0.8), (7, 1.2)):
        weights = changed_weights(SHIPPED, seed)
        for name in weights:
            if name.endswith("layer_scalar") and "encoder" in name:
                weights[name] = weights[name] * factor
        folders.append(written(tmp_path / str(seed), weights, SHIPPED))
    with TracedEngine(folders[0], enable_sleep_mode=True) as engine:
        settings = engine.state.spec
        before = answers(engine, temperature=1.0)
        engine.llm.sleep(level=2)
        poison(engine)
        engine.llm.wake_up()
        reload(engine, folders[0])
        assert answers(engine, temperature=1.0) == before
        reload(engine, folders[1])
        outputs = engine.generate(
            PROMPTS,
            seeds=[4, 5, 6],
            max_tokens=40,
            logprobs=0,
            temperature=1.0,
            ignore_eos=True,
            extra_args={"diffusion_trace": True, "diffusion_step_map": True},
        )
    assert [list(output.token_ids) for output in outputs] != before
    oracle = Oracle(folders[1])
    for seed, prompt, output in zip((4, 5, 6), PROMPTS, outputs, strict=True):
        run = oracle.generate(prompt, seed=seed, max_tokens=40, ignore_eos=True)
        assert list(output.token_ids) == run.tokens
        with torch.no_grad():
            logprobs = diffusion_gemma_logprobs(
                oracle.model,
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


@dataclasses.dataclass
class Nothing(WeightTransferInitInfo):
    """The settings of the transfer, which has none."""


@dataclasses.dataclass
class Sent(WeightTransferUpdateInfo):
    """Tensors of an update that came by other means."""

    tensors: dict[str, Tensor]


class LikeVllms(WeightTransferEngine[Nothing, Sent]):
    """As much of vLLM's transfers as needs no GPU: parts, and layers that are loaded as wholes.

    Attributes:
        one_by_one: Whether each tensor is a part, as with ``nccl``, or all of them are, as with
            ``ipc``.
    """

    init_info_cls = Nothing
    update_info_cls = Sent
    one_by_one = True

    def init_transfer_engine(self, init_info: Nothing) -> None: ...

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Sent) -> None:
        tensors = list(update_info.tensors.items())
        for part in [[one] for one in tensors] if self.one_by_one else [tensors]:
            self.model.load_weights(part)
        self.num_received = len(tensors)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None: ...


@pytest.mark.parametrize("one_by_one", [True, False], ids=["nccl", "ipc"])
@pytest.mark.parametrize(
    "checkpoint",
    [SDAR, pytest.param(SHIPPED, marks=pytest.mark.slow)],
    ids=["sdar", "diffusion_gemma"],
)
def test_transfers(checkpoint: Path, one_by_one: bool, tmp_path: Path) -> None:
    """Weights that arrive by vLLM's transfers are served, and refused if not finite."""
    good = changed_weights(checkpoint, 4)
    name = max(name for name in good if "mlp.down_proj" in name)
    bad = good | {name: good[name].clone()}
    bad[name][3, 5] = float("nan")
    with TracedEngine(written(tmp_path / "fresh", good, checkpoint)) as engine:
        fresh = answers(engine)
    with TracedEngine(checkpoint) as engine:
        llm, worker = engine.llm, engine.llm.llm_engine.model_executor.driver_worker.worker
        transfer = LikeVllms(None, worker.vllm_config, worker.device, engine.runner.model)
        transfer.one_by_one = one_by_one
        worker.weight_transfer_engine = transfer
        for _ in range(2):
            llm.start_weight_update()
            with pytest.raises(ValueError, match=rf"{name} holds .*not finite"):
                llm.update_weights({"update_info": {"tensors": bad}})
            # A trainer that broadcasts does not wait for a worker that has stopped to listen.
            assert transfer.num_received == len(bad)
            # The engine goes on, and no number that is not finite is in it.
            answers(engine)
            assert all(p.isfinite().all() for p in engine.runner.model.parameters())
            llm.start_weight_update()
            llm.update_weights({"update_info": {"tensors": good}})
            llm.finish_weight_update()
            llm.reset_prefix_cache()
            assert answers(engine) == fresh

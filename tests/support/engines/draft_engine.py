"""An engine with a draft: its options, its requests, its counters, and calls of its parts."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.support.engines.engine import TracedEngine
from tests.support.models import drafts
from tests.support.models.drafts import VOCAB

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples" / "checkpoints"))

from untrained_eagle3 import untrained_eagle3

NUM_DRAFTS = 7
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_model_len": 256,
    "max_num_seqs": 8,
    # Less the places of drafts: prompts are computed in chunks.
    "max_num_batched_tokens": 128,
}


def prompt_of(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB, (length,), generator=generator).tolist()


PROMPTS = [prompt_of(length, seed=length) for length in (1, 2, 31, 33, 64, 81, 100, 150)]


def saved_target(folder: Path, kind: str = "qwen3") -> Path:
    """Return the folder of a random target, saved once."""
    target = folder / f"target-{kind}"
    return target if target.exists() else drafts.save_target(kind, target)


def draft_spec(folder: Path, method: str = "dflash", kind: str = "qwen3") -> dict[str, Any]:
    """``speculative_config`` of a method, with a random draft where it needs one.

    ``draft_model`` drafts with the target itself, so that every draft is right.
    """
    if method == "dflash":
        draft = folder / "draft"
        model = draft if draft.exists() else drafts.save_draft(draft)
        return {"method": method, "model": str(model), "num_speculative_tokens": NUM_DRAFTS}
    if method == "draft_model":
        model = saved_target(folder, kind)
        return {"method": method, "model": str(model), "num_speculative_tokens": 3}
    if method == "eagle3":
        return untrained_eagle3(saved_target(folder, kind), folder / "head", 4)
    lookup = {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    return {"method": "ngram", "num_speculative_tokens": 4, **lookup}


@contextmanager
def serving(
    folder: Path,
    spec: dict[str, Any] | None,
    drafting: dict[str, Any] | None = None,
    kind: str = "qwen3",
    **options: Any,
) -> Iterator[TracedEngine]:
    """Start an engine with a random target, a draft and settings of drafts."""
    if drafting is not None:
        options["additional_config"] = {"drafting": drafting}
    with TracedEngine(
        saved_target(folder, kind),
        **(OPTIONS | {"disable_log_stats": False} | options),
        speculative_config=spec,
    ) as engine:
        yield engine


def assert_greedy(engine: TracedEngine, model: Any, prompts: list[Any] | None = None) -> None:
    """Check that the engine's greedy answers to prompts at once are those of ``transformers``."""
    prompts = PROMPTS if prompts is None else prompts
    for prompt, output in zip(prompts, generate(engine, prompts), strict=True):
        assert list(output.outputs[0].token_ids) == drafts.greedy_tokens(model, prompt, 30)


def generate(engine: TracedEngine, prompts: list[Any], **changes: Any) -> list[Any]:
    """Return the finished requests of one batch; prompts are token ids or what vLLM takes."""
    from vllm import SamplingParams

    options: dict[str, Any] = {
        "max_tokens": 30,
        "temperature": 0.0,
        "ignore_eos": True,
        "detokenize": False,
    }
    return engine.llm.generate(
        [{"prompt_token_ids": each} if isinstance(each, list) else each for each in prompts],
        SamplingParams(**(options | changes)),
        use_tqdm=False,
    )


def metric(engine: TracedEngine, name: str) -> Any:
    (found,) = (m for m in engine.llm.get_metrics() if m.name == f"vllm:spec_decode_{name}")
    return found.values if hasattr(found, "values") else found.value


@contextmanager
def observed(owner: Any, name: str, calls: list[tuple[Any, Any]]) -> Iterator[None]:
    """Note arguments and result of a method's calls."""
    original = getattr(owner, name)

    def noting(*args: Any, **kwargs: Any) -> Any:
        arguments = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
        result = original(*args, **kwargs)
        calls.append((arguments, result.clone()))
        return result

    with mock.patch.object(owner, name, noting):
        yield

"""A masked family through the engine beside its published loop, on the same weights, in one run.

    python benchmarks/bench_families.py
    python benchmarks/bench_families.py --family sdar --requests 1 8 --tokens 64
    python benchmarks/bench_families.py --family sdar --width 1024 --layers 8 --tokens 16
    python benchmarks/bench_families.py --family sdar --profile

Checkpoints with random weights, on this machine; greedy, so that both give the same tokens, which
is checked. The loop is the published one in plain PyTorch, one request after another (each is batch
1 as published), with a KV cache: a call computes the rows behind the longest prefix of whole blocks
that it computed before. The engine gets all requests at once. By default a model has three layers
of width 96, whose passes are host overhead; ``--width`` and ``--layers`` make one whose passes are
arithmetic.

``--profile`` prints where the engine's time goes instead: milliseconds a pass by stage, each
without the stages inside it.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from records import Rows, parser_of
from stages import Stages
from torch import Tensor
from transformers import DynamicCache

from tests.support.counters.row_counts import RowCounter
from tests.support.families.cases import CASES, Wanted, expected
from tests.support.families.model import TinyModel, prompt_of

# Bodies of transformers, which take a cache.
FAMILIES = ("sdar", "sdar-block-32", "stable-diffcoder", "nemotron", "fast-dllm")
REPEATS = 7
HEAD_DIM = 64


class CachedModel:
    """A tiny model that computes only what is behind the whole blocks that it has seen before.

    With a causal context a token's keys and values are final at once; with blocks they are once
    another block has begun.
    """

    def __init__(self, model: TinyModel) -> None:
        self._model = model
        self.block_length = model.block_length
        self.config = model.config
        self._cache = DynamicCache()
        self._known: list[int] = []
        self._causal: Tensor | None = None

    @torch.no_grad()
    def __call__(self, ids: Tensor, visible: Tensor) -> Tensor:
        """[T, V], float32, of which the rows of the cached prefix are zero."""
        length, tokens = len(ids), ids.tolist()
        num_final = self._num_final(visible)
        start = next(
            (i for i, (a, b) in enumerate(zip(self._known, tokens, strict=False)) if a != b),
            min(len(self._known), length),
        )
        start = min(start, num_final, length - 1)
        if not self._is_causal(visible):
            start = start // self.block_length * self.block_length
        self._keep(start)
        bias = torch.zeros(length - start, length).masked_fill(
            ~visible[start:], torch.finfo(torch.float32).min
        )
        logits = self._model.body(
            ids[None, start:],
            bias[None, None],
            torch.arange(start, length)[None],
            # By its place: its name is another since transformers 5.24.
            self._cache,
            use_cache=True,
        ).logits[0]
        self._known = tokens[:num_final]
        self._keep(num_final)
        return torch.cat([logits.new_zeros(start, logits.shape[-1]), logits])

    def _keep(self, num_tokens: int) -> None:
        """Forget the keys and values behind as many."""
        surplus = self._cache.get_seq_length() - num_tokens
        if surplus > 0:
            self._cache.crop(-surplus)

    def _num_final(self, visible: Tensor) -> int:
        """Leading rows whose keys and values will not change."""
        length = len(visible)
        if not self._is_causal(visible):
            return (length - 1) // self.block_length * self.block_length
        sees_ahead = visible.triu(1).any(dim=-1)
        return int(sees_ahead.int().argmax()) if bool(sees_ahead.any()) else length

    @staticmethod
    def _is_causal(visible: Tensor) -> bool:
        """Whether the context is causal, up to a block at its end."""
        return len(visible) > 1 and not bool(visible[0, 1])


def profile(llm: Any, asked: list[Any], params: Any, data: Rows, **columns: Any) -> None:
    """Report where the time of the requests' passes goes."""
    stages, counter = Stages.of(llm), RowCounter(llm)
    for _ in range(REPEATS):
        llm.generate(asked, params, use_tqdm=False)
    found, passes = stages.take(), counter.counts.passes
    total = sum(found.values())
    for stage, seconds in {"a pass": total, **found}.items():
        ms, share = round(1e3 * seconds / passes, 2), round(seconds / total, 2)
        data.add("profile", **columns, stage=stage, ms_a_pass=ms, share=share)


def sizes(width: int | None, layers: int | None) -> dict[str, int]:
    """What a model of that width and depth has otherwise than the tiny one; nothing without
    them.
    """
    changed: dict[str, int] = {}
    if width is not None:
        heads = width // HEAD_DIM
        changed |= {"hidden_size": width, "intermediate_size": 3 * width, "head_dim": HEAD_DIM}
        changed |= {"num_attention_heads": heads, "num_key_value_heads": heads // 2}
    if layers is not None:
        changed["num_hidden_layers"] = layers
    return changed


def measure(name: str, arguments: argparse.Namespace, data: Rows) -> None:
    """Report a row of the table for each number of requests, or the profile of each."""
    from vllm import LLM

    case = CASES[name]
    num_tokens = arguments.tokens
    model = case.make(**sizes(arguments.width, arguments.layers))
    wanted = Wanted(max_tokens=num_tokens, threshold=0.3)
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(
            str(model.save(Path(folder))),
            max_model_len=256,
            max_num_seqs=8,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=64 * 1024**2,
            **case.options,
        )
        for count in arguments.requests:
            prompts = [prompt_of(40 + 9 * i, seed=i) for i in range(count)]
            requests = [{"prompt_token_ids": prompt} for prompt in prompts]
            ours, theirs = [], []
            # The first round warms both up.
            for _ in range(REPEATS + 1):
                began = time.perf_counter()
                outputs = llm.generate(requests, wanted.sampling_params(), use_tqdm=False)
                ours.append(time.perf_counter() - began)
                if arguments.profile:
                    break
                began = time.perf_counter()
                runs = [expected(case, CachedModel(model), p, wanted) for p in prompts]  # type: ignore[arg-type]
                theirs.append(time.perf_counter() - began)
            if arguments.profile:
                params = wanted.sampling_params()
                profile(llm, requests, params, data, family=name, requests=count)
                continue
            for output, run in zip(outputs, runs, strict=True):
                assert list(output.outputs[0].token_ids) == run.tokens, "the tokens differ"
            # The fastest of each: what else the machine does only ever adds.
            seconds = min(ours[1:]), min(theirs[1:])
            rates = [round(count * num_tokens / each) for each in seconds]
            data.add(
                "families",
                family=name,
                requests=count,
                engine_tokens_a_second=rates[0],
                loop_tokens_a_second=rates[1],
                ratio=round(seconds[1] / seconds[0], 2),
            )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--family", action="append", choices=FAMILIES, help="all of them if unset")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--width", type=int, help=f"hidden size, a multiple of {2 * HEAD_DIM}")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--profile", action="store_true", help="where the engine's time goes")
    arguments = parser.parse_args()
    data = Rows(arguments.data)
    for name in arguments.family or FAMILIES:
        measure(name, arguments, data)


if __name__ == "__main__":
    main()

"""With ``suffix``, the answer is the text between a prompt and what follows."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm import SamplingParams

from attention_kernels.noise import Purpose, uniform_tokens
from tests.support.engines.engine import SYNCHRONOUS_OFTEN, TracedEngine
from tests.support.families import makers as tiny
from tests.support.families.cases import EVERY_CASE, expected
from tests.support.families.model import MASK_ID, VOCAB_SIZE, TinyModel, prompt_of

pytestmark = pytest.mark.engine

SUFFIXES = ("a", ", then home", " is all that there is to say about it.", ") and more")


class Followed:
    """A model whose every sequence ends with tokens that a published loop does not know of."""

    def __init__(self, model: TinyModel, suffix: list[int]) -> None:
        self._model, self._suffix = model, torch.tensor(suffix, dtype=torch.long)
        self.block_length = model.block_length

    def __call__(self, ids: Tensor, visible: Tensor) -> Tensor:
        """Return logits [T, V], float32, of the sequence without the tokens that follow."""
        whole = torch.cat([ids, self._suffix])
        assert visible.all()
        return self._model(whole, torch.ones(len(whole), len(whole), dtype=torch.bool))[: len(ids)]


def params(num_tokens: int, suffix: str, **changes: Any) -> SamplingParams:
    """Return parameters of a request for the middle of a text."""
    extra = {"diffusion_suffix": suffix, **changes.pop("extra_args", {})}
    given = {"max_tokens": num_tokens, "ignore_eos": True, "temperature": 0.0, "extra_args": extra}
    return SamplingParams(**(given | changes))


@pytest.mark.parametrize("is_asynchronous", SYNCHRONOUS_OFTEN)
@pytest.mark.parametrize("family", ["llada", "llada-moe", "dream"])
def test_whole_sequences(tmp_path: Path, family: str, is_asynchronous: bool) -> None:
    """In a batch the tokens are those of the published loop over a sequence with the suffix."""
    case = EVERY_CASE[family]
    model = case.make()
    options = {"max_model_len": 192, "max_num_seqs": 8} | case.options
    sizes = [(1, 16), (9, 48), (33, 16), (60, 32), (20, 32)]
    if family == "dream":
        # Its loop has no blocks.
        sizes[2:4] = [(33, 7), (60, 3)]
    # The second suffix is longer than what the model's length leaves, and is cut to that.
    suffixes = (SUFFIXES[0], SUFFIXES[1] * 40, *SUFFIXES[2:])
    most = options["max_model_len"] - sum(sizes[1])
    with TracedEngine(model.save(tmp_path), async_scheduling=is_asynchronous, **options) as engine:
        encode = engine.llm.get_tokenizer().encode
        prompts, asked, sent, wanted = [], [], [], []
        for i, (length, num_tokens) in enumerate(sizes):
            # The last one has no suffix.
            suffix = suffixes[i] if i < len(suffixes) else ""
            ids = encode(suffix, add_special_tokens=False) if suffix else []
            assert (len(ids) > most) == (i == 1)
            ids = ids[:most]
            prompts.append(prompt_of(length, seed=length))
            asked.append(case.wanted(max_tokens=num_tokens, temperature=(i % 2) * 0.7, seed=i))
            sent.append(asked[-1].sampling_params({"diffusion_suffix": suffix}, logprobs=i % 3))
            followed: Any = Followed(model, ids)
            wanted.append(expected(case, followed, prompts[-1], asked[-1]).tokens)
        outputs = engine.outputs(prompts, sent)
    assert [list(output.outputs[0].token_ids) for output in outputs] == wanted
    # Of the answer's tokens, and of none that follow it.
    reported = [output.outputs[0].logprobs for output in outputs]
    assert [[next(iter(each)) for each in rows] for rows in reported] == wanted
    assert all(row.logprob <= 0 for rows in reported for each in rows for row in each.values())
    free = expected(case, model, prompts[1], asked[1]).tokens
    assert free != wanted[1], "what follows changes nothing"


def test_a_canvas(engine: TracedEngine) -> None:
    """A suffix acts as pins at its positions of the request's first canvas."""
    tokenizer, width = engine.llm.get_tokenizer(), 32
    prompt = tokenizer.encode("3, 4, ", add_special_tokens=False)
    suffix = tokenizer.encode(", 6, 7", add_special_tokens=False)
    seed = torch.tensor([5])
    zero = torch.zeros_like(seed)
    canvas = uniform_tokens(seed, zero, zero, width, VOCAB_SIZE, Purpose.INITIAL)[0].tolist()
    canvas[2 : 2 + len(suffix)] = suffix
    pinned = {
        "diffusion_seed_canvas": canvas,
        "diffusion_pinned": list(range(2, 2 + len(suffix))),
    }
    changes = {"seed": 5, "temperature": 1.0, "logprobs": 1}
    asked = [
        params(2, ", 6, 7", **changes),
        params(2, "", extra_args=pinned, **changes),
        params(2, ", 6, 7", n=2, **changes),
    ]
    outputs = engine.outputs([prompt] * len(asked), asked)
    filled, by_pins, twice = (output.outputs for output in outputs)
    assert filled[0].token_ids == by_pins[0].token_ids
    assert filled[0].logprobs == by_pins[0].logprobs
    assert len(twice) == 2
    assert all(len(answer.token_ids) == 2 for answer in twice)


@pytest.mark.parametrize("is_asynchronous", SYNCHRONOUS_OFTEN)
def test_blocks(tmp_path: Path, is_asynchronous: bool) -> None:
    """In a block of SDAR, a suffix acts as pins at its positions after the prompt's tokens."""
    model = tiny.sdar(block_length=16)
    with TracedEngine(model.save(tmp_path), async_scheduling=is_asynchronous) as engine:
        ids = engine.llm.get_tokenizer().encode("(x);", add_special_tokens=False)
        prompts, asked = [], []
        for length in (5, 16, 24):
            given, num_tokens = length % 16, 3
            canvas = [MASK_ID] * 16
            canvas[given + num_tokens : given + num_tokens + len(ids)] = ids
            positions = [given + num_tokens + i for i in range(len(ids))]
            pinned = {"diffusion_seed_canvas": canvas, "diffusion_pinned": positions}
            prompts += [prompt_of(length, seed=length)] * 2
            asked += [params(num_tokens, "(x);"), params(num_tokens, "", extra_args=pinned)]
        tokens = [list(one.outputs[0].token_ids) for one in engine.outputs(prompts, asked)]
    assert tokens[::2] == tokens[1::2]
    assert len({*map(tuple, tokens)}) > 1

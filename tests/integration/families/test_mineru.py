"""MinerU-Diffusion's prompts with pictures give the tokens of the reference loop."""

import importlib
import json
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import pytest
import torch
from torch import Tensor

from tests.support.engines.engine import (
    ASYNCHRONOUS_OFTEN,
    SYNCHRONOUS_OFTEN,
    TracedEngine,
    tokens_of,
)
from tests.support.families import run
from tests.support.families.cases import Wanted
from tests.support.families.mineru import generate
from tests.support.families.mineru_model import IMAGE_ID, MinerU, mineru, num_tokens, picture
from tests.support.families.model import MASK_ID, prompt_of, randomize
from tests.support.models.quantized import EXAMPLES

pytestmark = pytest.mark.engine

Part = Sequence[int] | Any
WANTED = Wanted(max_tokens=40)
OPTIONS: dict[str, Any] = {"max_model_len": 512, "limit_mm_per_prompt": {"image": 4}}


def request(parts: Sequence[Part], **more: Any) -> dict[str, Any]:
    """Return a request of runs of token ids with pictures between them."""
    pictures = [part for part in parts if not isinstance(part, list)]
    ids = [token for part in parts for token in (part if isinstance(part, list) else [IMAGE_ID])]
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": pictures}, **more}


def answers(engine: TracedEngine, prompts: Sequence[Sequence[Part]], params: Any) -> list[Any]:
    """Return the finished ``RequestOutput`` of each prompt, in one batch."""
    return engine.llm.generate([request(parts) for parts in prompts], params, use_tqdm=False)


class Expected(NamedTuple):
    """What the loop does with a prompt.

    Attributes:
        prompt: The prompt as the model gets it.
        tokens: The tokens of the loop.
        logprobs: [num_tokens, vocab_size], float32: of each token's position in the step that
            revealed it.
    """

    prompt: list[int]
    tokens: list[int]
    logprobs: Tensor


def expected(model: MinerU, parts: Sequence[Part]) -> Expected:
    prompt: list[int] = []
    for part in parts:
        prompt += part if isinstance(part, list) else [IMAGE_ID] * num_tokens(part)
    pictures = [part for part in parts if not isinstance(part, list)]
    seeing = run.suppress(model.seeing(pictures), [MASK_ID])
    # Of each denoise step, by the length of its sequence: blocks differ in it.
    steps: dict[int, list[Tensor]] = {}

    def recording(ids: Tensor, visible: Tensor) -> Tensor:
        logits = seeing(ids, visible)
        steps.setdefault(len(ids), []).append(logits)
        return logits

    found = generate(
        recording,
        prompt,
        mask_id=MASK_ID,
        gen_length=WANTED.max_tokens,
        temperature=0,
        confidence_threshold=WANTED.threshold,
    )
    rows = []
    for at, step in enumerate(found.revealed):
        block_end = min((at // model.block_length + 1) * model.block_length, WANTED.max_tokens)
        rows.append(steps[len(prompt) + block_end][step][len(prompt) + at])
    return Expected(prompt, found.tokens, torch.stack(rows).log_softmax(-1))


def assert_logprobs(reported: Sequence[Any], logprobs: Tensor) -> None:
    """Check the log-probability of each reported token against [num_tokens, vocab_size]."""
    for row, each in zip(reported, logprobs.tolist(), strict=True):
        assert {token: one.logprob for token, one in row.items()} == pytest.approx(
            {token: each[token] for token in row}, abs=2e-4
        )


def text(length: int, seed: int) -> list[int]:
    return prompt_of(length, seed=seed)


# Pictures of 15, 4, 70, 24 and 104 tokens.
PROMPTS: list[list[Part]] = [
    [text(9, 1), picture(40, 24, 1), text(12, 2)],
    [picture(40, 24, 1), text(1, 3)],
    [text(3, 4), picture(8, 8, 2), picture(80, 56, 3), text(40, 5), picture(24, 64, 4), text(7, 6)],
    [text(33, 7), picture(80, 56, 3), picture(80, 56, 3), text(2, 8)],
    [text(20, 9), picture(300, 200, 5), text(5, 10)],
]


@pytest.mark.parametrize("is_asynchronous", ASYNCHRONOUS_OFTEN)
def test_log_probabilities_and_a_schema(tmp_path: Path, is_asynchronous: bool) -> None:
    """Prompts with pictures of several sizes get in one batch the tokens that each gets alone, with
    the log-probabilities of the steps that revealed them, also where a pass ends within a picture.

    In the same batch, answers to other pictures are JSON of one schema, with different content.
    """
    from vllm.sampling_params import StructuredOutputsParams

    model = mineru()
    schema = {
        "type": "object",
        "properties": {
            "title": {"type": "string", "pattern": "^[a-z]{6}$"},
            "pages": {"type": "integer", "minimum": 1, "maximum": 99},
        },
        "required": ["title", "pages"],
        "additionalProperties": False,
    }
    held = WANTED.sampling_params(
        max_tokens=96,
        detokenize=True,
        ignore_eos=False,
        structured_outputs=StructuredOutputsParams(json=schema),
    )
    reported = WANTED.sampling_params(logprobs=2)
    # Only their pictures differ.
    pages = [[text(9, 1), picture(40, 24, seed), text(12, 2)] for seed in range(3)]
    options = {"async_scheduling": is_asynchronous, "enable_chunked_prefill": True}
    with TracedEngine(
        model.save(tmp_path), **OPTIONS, **options, max_num_batched_tokens=96
    ) as engine:
        wanted = [*[reported] * len(PROMPTS), *[held] * len(pages)]
        outputs = answers(engine, [*PROMPTS, *pages], wanted)
        tokenizer = engine.llm.get_tokenizer()
    free, constrained = outputs[: len(PROMPTS)], outputs[len(PROMPTS) :]
    for parts, output in zip(PROMPTS, free, strict=True):
        prompt, tokens, logprobs = expected(model, parts)
        assert list(output.prompt_token_ids) == prompt
        assert list(output.outputs[0].token_ids) == tokens
        assert_logprobs(output.outputs[0].logprobs, logprobs)
    # Their texts begin with what the prompt's last bytes leave of a character.
    texts = [
        tokenizer.decode(tokens, skip_special_tokens=True) for tokens in tokens_of(constrained)
    ]
    for answer in texts:
        jsonschema.validate(json.loads(answer), schema)
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("is_asynchronous", SYNCHRONOUS_OFTEN)
def test_pictures_that_share_a_block(tmp_path: Path, is_asynchronous: bool) -> None:
    """A block with the end of a picture and the start of another gets both at once.

    Two requests that each hold a picture in the encoder's cache do not wait for each other.
    """
    model = mineru()
    # A first block of 20 tokens leaves the second prompt the room of its own first block, of 10.
    pictures = [picture(80, 96, seed) for seed in range(4)]
    prompts: list[list[Part]] = [
        [pictures[0], pictures[1], text(36, 1)],
        [pictures[2], pictures[3], text(26, 2)],
    ]
    options = {"async_scheduling": is_asynchronous, "enable_chunked_prefill": True}
    with TracedEngine(
        model.save(tmp_path), **OPTIONS, **options, max_num_batched_tokens=96
    ) as engine:
        longest = num_tokens(pictures[0])
        assert engine.scheduler.encoder_cache_manager.cache_size == 2 * longest + 30
        outputs = answers(engine, prompts, WANTED.sampling_params())
    assert tokens_of(outputs) == [expected(model, parts).tokens for parts in prompts]


@pytest.mark.parametrize("is_asynchronous", ASYNCHRONOUS_OFTEN)
def test_pictures_of_preempted_requests(tmp_path: Path, is_asynchronous: bool) -> None:
    """Preempted requests with pictures return with their tokens.

    They have log-probabilities, a stop string after the first block and a constraint.
    """
    from vllm.sampling_params import StructuredOutputsParams

    model = mineru()
    # The cache holds the longest request, or several others.
    options = {"async_scheduling": is_asynchronous, "num_gpu_blocks_override": 512 // 16 + 1}
    with TracedEngine(model.save(tmp_path), **OPTIONS, **options) as engine:
        tokenizer = engine.llm.get_tokenizer()
        params = [WANTED.sampling_params(logprobs=1) for _ in PROMPTS]
        loops = [expected(model, parts) for parts in PROMPTS]
        stop = tokenizer.decode(loops[0].tokens)[-4:]
        params += [
            WANTED.sampling_params(detokenize=True, stop=[stop]),
            WANTED.sampling_params(
                detokenize=True,
                ignore_eos=False,
                structured_outputs=StructuredOutputsParams(regex="[ab]{9}"),
            ),
        ]
        engine.preempted.clear()
        outputs = answers(engine, [*PROMPTS, *PROMPTS[:2]], params)
        assert engine.preempted
    *whole, stopped, held = [output.outputs[0] for output in outputs]
    for loop, output in zip(loops, whole, strict=True):
        assert list(output.token_ids) == loop.tokens
        assert_logprobs(output.logprobs, loop.logprobs)
    assert stopped.finish_reason == "stop"
    assert stop not in stopped.text
    assert list(stopped.token_ids) == loops[0].tokens
    # Its text begins with what the prompt's last bytes leave of a character.
    assert re.fullmatch("[ab]{9}", tokenizer.decode(held.token_ids, skip_special_tokens=True))


def test_shared_prefixes(tmp_path: Path) -> None:
    """A prefix is shared if remainder and pictures are equal, also within a block."""
    model = mineru()
    first, second = picture(80, 56, 1), picture(80, 56, 2)
    with TracedEngine(model.save(tmp_path), **OPTIONS) as engine:
        size = engine.scheduler.hash_block_size

        def cached(*parts: Part) -> int:
            """Return a prompt's number of cached tokens; check its answer."""
            outputs = answers(engine, [parts], WANTED.sampling_params())
            assert tokens_of(outputs) == [expected(model, parts).tokens]
            return int(outputs[0].num_cached_tokens)

        # Blocks end at 32, 64, ...; the picture begins at 60, in a block that begins before it.
        long = text(60, 1)
        rest = 160 - 60 - num_tokens(first)
        assert cached(long, first, text(rest, 2)) == 0
        assert cached(long, first, text(rest, 3)) == (160 - rest) // 32 * 32 // size * size
        # Only the blocks before the one that the other picture is in.
        assert cached(long, second, text(rest, 2)) == 32 // size * size
        # Another remainder shares nothing.
        assert cached(long, first, text(rest + 1, 2)) == 0


def test_published_ends(tmp_path: Path) -> None:
    """An answer ends with the tokens at which the publisher's loop ends it, though no file of the
    checkpoint names them.
    """
    model = mineru()
    folder = model.save(tmp_path)
    (folder / "generation_config.json").write_text("{}")
    loops = [expected(model, parts).tokens for parts in PROMPTS]
    spare = re.compile(r"<unused\d+>")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    names = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    # Tokens of two answers, under the published names.
    written = [
        token for tokens in loops for token in tokens[:-1] if spare.match(names.get(token, ""))
    ]
    ends = {"<|endoftext|>": written[0], "<|im_end|>": written[-1]}
    assert len(set(ends.values())) == 2
    for file in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / file).read_text()
        for published, token in ends.items():
            text = text.replace(names[token], published)
        (folder / file).write_text(text)
    with TracedEngine(folder, **OPTIONS) as engine:
        ended, whole = (
            answers(engine, PROMPTS, WANTED.sampling_params(ignore_eos=each))
            for each in (False, True)
        )
    cut = [run.cut(tokens, ends.values()) for tokens in loops]
    assert tokens_of(ended) == cut
    assert {tokens[-1] for tokens in cut} >= set(ends.values())
    assert tokens_of(whole) == loops


def test_recipe_of_a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe writes a checkpoint that the engine serves, and that it reads pages with as the
    recipe itself does.
    """
    from vllm import SamplingParams

    monkeypatch.syspath_prepend(EXAMPLES / "checkpoints")
    recipe = importlib.import_module("train_tiny_reader")
    folder, sharp, model = tmp_path / "reader", tmp_path / "sharp", recipe.Reader()
    # Before many steps of training all answers are alike.
    randomize(model, seed=0, sharpness=3.0)
    model.save(sharp)
    short = ["--steps", "1", "--batch-size", "2", "--num-pages", "1"]
    short += ["--init", str(sharp), "--out", str(folder)]
    monkeypatch.setattr(sys, "argv", ["train_tiny_reader.py", *short])
    recipe.main()
    model.load(folder)
    pages = [recipe.draw_page(random.Random(lines), lines) for lines in (1, 2, 3)]
    read = [recipe.read(model.eval(), recipe.Prompts(), page)[0] for page in pages]
    system = {"role": "system", "content": recipe.SYSTEM}
    chats = []
    for page in pages:
        parts = [{"type": "image_pil", "image_pil": page.picture}]
        parts.append({"type": "text", "text": recipe.TASK})
        chats.append([system, {"role": "user", "content": parts}])
    params = SamplingParams(temperature=0, max_tokens=recipe.BLOCK_LENGTH, detokenize=False)
    with TracedEngine(folder, max_model_len=128, limit_mm_per_prompt={"image": 1}) as engine:
        outputs = engine.llm.chat(chats, params, use_tqdm=False)
    assert tokens_of(outputs) == read
    assert len({tuple(tokens) for tokens in read}) > 1

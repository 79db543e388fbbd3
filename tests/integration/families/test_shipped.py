"""The shipped tiny models of masked families answer with their rules and default settings."""

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engines.engine import TracedEngine
from vllm_diffusion.checkpoints import shipped_checkpoint
from vllm_diffusion.metrics import request_metrics

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "checkpoints"
sys.path.insert(0, str(EXAMPLES))

from evaluate import prompt_token_ids  # noqa: E402
from tiny_sdar import BLOCK_LENGTH, generate, load_model  # noqa: E402
from tiny_tasks import evaluation_set, is_correct  # noqa: E402

pytestmark = pytest.mark.engine

MAX_TOKENS = 96
PROMPTS_PER_FAMILY = 8
# What it has learnt (benchmarks/RESULTS.md).
EXAMPLES_ASKED = [
    example
    for family in ("sums", "reverse", "upper", "json", "count", "list")
    for example in evaluation_set(family, PROMPTS_PER_FAMILY, size="few")
]
# Measured: 45 of 48, and 1.19 steps.
MIN_EXACT = 42
MAX_STEPS_PER_BLOCK = 1.5
# Measured: 296 of 300.
NUM_PAGES, MIN_READ = 30, 28


@pytest.fixture(scope="module")
def answers():
    """Return the engine's answers and their prompts, at the settings of the checkpoint."""
    with TracedEngine(shipped_checkpoint("sdar"), max_num_seqs=8) as engine:
        tokenizer = engine.llm.get_tokenizer()
        prompts = [prompt_token_ids(tokenizer, example) for example in EXAMPLES_ASKED]
        sampling: Any = engine.llm.get_default_sampling_params()
        sampling.max_tokens = MAX_TOKENS
        outputs = engine.outputs(prompts, sampling)
        yield prompts, [output.outputs[0] for output in outputs]


def test_exact_answers(answers) -> None:
    """Most held-out questions of the kinds that it has learnt are answered exactly."""
    _, completions = answers
    exact = [
        is_correct(example, completion.text)
        for example, completion in zip(EXAMPLES_ASKED, completions, strict=True)
    ]
    print(f"{sum(exact)} of {len(exact)} exact")
    assert sum(exact) >= MIN_EXACT


def test_steps_per_block(answers) -> None:
    """Blocks of 8 take far fewer than 8 steps, since several tokens are revealed at once."""
    steps = [
        number
        for completion in answers[1]
        for number in request_metrics(completion).denoise_steps_per_canvas
    ]
    print(f"{sum(steps) / len(steps):.2f} steps a block")
    assert max(steps) <= BLOCK_LENGTH
    assert sum(steps) / len(steps) < MAX_STEPS_PER_BLOCK


def test_tokens_of_the_loop(answers) -> None:
    """The tokens are those of the loop that scored the checkpoint in training, without a cache."""
    model = load_model(shipped_checkpoint("sdar"))
    for prompt, completion in list(zip(*answers, strict=True))[::PROMPTS_PER_FAMILY]:
        assert list(completion.token_ids) == generate(model, prompt, MAX_TOKENS).tokens


@torch.no_grad()
def test_passes_of_the_recipe() -> None:
    """A canvas in a padded batch gets the logits that transformers computes for its row alone."""
    import train_tiny_checkpoint as recipe

    model = recipe.DiffusionGemmaForBlockDiffusion.from_pretrained(shipped_checkpoint())
    draw = torch.Generator().manual_seed(0)
    # Longer than the window of sliding layers, and shorter.
    starts, has_signal = torch.tensor([70, 9]), torch.tensor([True, False])
    tokens = torch.randint(60, 300, (2, 80), generator=draw)
    canvas = torch.randint(60, 300, (2, model.config.canvas_length), generator=draw)
    signal = torch.randn(*canvas.shape, recipe.VOCAB_SIZE, generator=draw)
    _, cache = recipe.encode(model, tokens)
    logits = recipe.decode(model, canvas, starts, cache, signal, has_signal)
    for row, start in enumerate(starts):
        alone = model(
            tokens[row, None, :start],
            decoder_input_ids=canvas[row, None],
            self_conditioning_logits=signal[row, None] if has_signal[row] else None,
        )
        torch.testing.assert_close(logits[row], alone.logits[0], atol=1e-4, rtol=0)


def test_pages_are_read() -> None:
    """The reader gives the digits of nearly all pages that it was not trained on."""
    import train_tiny_reader as recipe
    from vllm import SamplingParams

    rng = random.Random("pages that no training draws")
    pages = [recipe.draw_page(rng, 1 + i % 3) for i in range(NUM_PAGES)]
    chats = [
        [
            {"role": "system", "content": recipe.SYSTEM},
            {
                "role": "user",
                "content": [
                    {"type": "image_pil", "image_pil": page.picture},
                    {"type": "text", "text": recipe.TASK},
                ],
            },
        ]
        for page in pages
    ]
    options = {"max_model_len": 128, "max_num_seqs": 8, "limit_mm_per_prompt": {"image": 1}}
    with TracedEngine(shipped_checkpoint("mineru"), **options) as engine:
        params = SamplingParams(temperature=0, max_tokens=recipe.BLOCK_LENGTH)
        outputs = engine.llm.chat(chats, params, use_tqdm=False)
    read = [output.outputs[0].text for output in outputs]
    exact = sum(text == page.text for text, page in zip(read, pages, strict=True))
    print(f"{exact} of {len(pages)} pages exact")
    assert exact >= MIN_READ

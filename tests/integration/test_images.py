"""An image in the prompt attends in both directions, as in ``transformers``."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.test_parity import LOGIT_TOLERANCE, assert_same_steps, denoising
from tests.robustness.requests import image_message
from tests.robustness.requests import picture as data_url
from tests.support.engines.engine import TracedEngine
from tests.support.engines.server import Server, start_server
from tests.support.families.mineru_model import picture
from tests.support.models.checkpoints import SHIPPED, copy_checkpoint, random_checkpoint, randomize
from tests.support.oracles.oracle import Oracle

pytestmark = pytest.mark.engine

CANVAS = 32


class PicturePrompt:
    """A prompt with a random picture, larger than the window.

    Attributes:
        request: What the engine is asked.
        tokens: Of the prompt.
        inputs: What else ``transformers`` makes of it.
    """

    def __init__(self, checkpoint: Path, seed: int, text: str | None = None) -> None:
        from transformers import AutoProcessor

        processor = AutoProcessor.from_pretrained(checkpoint)
        if text is None:
            content = [{"type": "image"}, {"type": "text", "text": "What is in the picture?"}]
            text = processor.apply_chat_template(
                [{"role": "user", "content": content}], add_generation_prompt=True
            )
        image = picture(96, 96, seed)
        self.request = {"prompt": text, "multi_modal_data": {"image": image}}
        self.inputs = processor(
            text=text, images=[image], return_tensors="pt", add_special_tokens=False
        )
        self.tokens: list[int] = self.inputs.pop("input_ids")[0].tolist()
        self.inputs.pop("attention_mask", None)


@pytest.mark.parametrize("attention", ["reference", pytest.param("triton", marks=pytest.mark.slow)])
def test_image_prompt(tmp_path, attention):
    """With an image larger than the window each step has the oracle's logits."""
    checkpoint = random_checkpoint(tmp_path)
    oracle = Oracle(checkpoint)
    params = {"seed": 5, "max_tokens": CANVAS, "ignore_eos": True}
    first_logits = []
    with TracedEngine(
        checkpoint,
        limit_mm_per_prompt={"image": 1, "video": 0, "audio": 0},
        additional_config={"diffusion": {"attention": attention}},
    ) as engine:
        for seed in (1, 2):
            asked = PicturePrompt(checkpoint, seed)
            with engine.recording() as steps:
                (output,) = engine.llm.generate(
                    [asked.request], engine.sampling_params(**params), use_tqdm=False
                )
            assert list(output.prompt_token_ids) == asked.tokens
            expected = oracle.generate(asked.tokens, **params, **asked.inputs)
            ours = denoising(steps)
            assert_same_steps(ours, expected)
            assert list(output.outputs[0].token_ids) == expected.tokens
            first_logits.append(ours[0].logits)
    assert (first_logits[0] - first_logits[1]).abs().max() > 100 * LOGIT_TOLERANCE


def _gemma4(folder: Path) -> Any:
    """Write an autoregressive Gemma 4 whose images are larger than its window, and return it."""
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    copy_checkpoint(folder)
    (folder / "generation_config.json").unlink()
    shipped = json.loads((folder / "config.json").read_text())
    text = {name: value for name, value in shipped["text_config"].items() if name != "model_type"}
    own = {"enable_moe_block": True, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True}
    config = Gemma4Config(
        text_config=text | own | {"num_kv_shared_layers": 0},
        vision_config=shipped["vision_config"],
        audio_config=None,
        boi_token_id=17,
        image_token_id=18,
        eoi_token_id=19,
        eos_token_id=1,
    )
    model = Gemma4ForConditionalGeneration(config).float().eval()
    randomize(model)
    model.save_pretrained(folder)
    return model


def test_image_prompt_of_an_autoregressive_model(tmp_path):
    """Gemma 4's prompt log-probabilities look ahead in windowed layers only."""
    from vllm import SamplingParams

    model = _gemma4(tmp_path)
    text = "<bos>Look: <|image|> What is in the picture, and what is not?"
    with TracedEngine(
        tmp_path, dtype="float32", limit_mm_per_prompt={"image": 1, "video": 0, "audio": 0}
    ) as engine:
        for seed in (1, 2):
            asked = PicturePrompt(tmp_path, seed, text)
            (output,) = engine.llm.generate(
                [asked.request], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False
            )
            assert output.prompt_token_ids == asked.tokens
            prompt = torch.tensor([asked.tokens])
            with torch.no_grad():
                expected = model(prompt, **asked.inputs).logits[0, :-1].log_softmax(-1)
            expected = expected.gather(1, prompt[0, 1:, None])[:, 0]
            ours = [
                row[token].logprob
                for row, token in zip(output.prompt_logprobs[1:], asked.tokens[1:], strict=True)
            ]
            error = (torch.tensor(ours) - expected).abs().max().item()
            assert error <= LOGIT_TOLERANCE, f"log-probabilities differ by {error:.2e}"


# Refused before the picture is processed and after it, where the constraint is read; the first is
# within the picture: the renderer refuses it, which has prepared it by then.
REFUSED: list[dict[str, Any]] = [
    {"truncate_prompt_tokens": 47},
    {"vllm_xargs": {"diffusion_max_steps": 0}, "stream": True},
    {"structured_outputs": {"regex": "(("}},
    {"structured_outputs": {"regex": "(("}, "stream": True},
]


@pytest.fixture(scope="module")
def picture_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run a server whose requests may have one picture."""
    options = ("--limit-mm-per-prompt", '{"image": 1, "video": 0, "audio": 0}')
    log = tmp_path_factory.mktemp("server") / "server.log"
    with start_server(SHIPPED, log, *options) as running:
        yield running


@pytest.mark.slow
def test_picture_of_a_refused_request(picture_server: Server) -> None:
    """The picture of a refused request is answered when it is sent again."""
    for shade, fields in enumerate(REFUSED):
        chat = {"messages": image_message(data_url(shade=shade)), "max_tokens": 4}
        refused = picture_server.post("/v1/chat/completions", {**chat, **fields})
        assert refused.status_code == 400, refused.text
        assert '"error"' in refused.text
        assert "choices" not in refused.text
        for _ in range(2):
            answered = picture_server.post("/v1/chat/completions", chat)
            assert answered.status_code == 200, f"after {fields}: {answered.text}"


@pytest.mark.slow
def test_constraints_that_take_a_moment(picture_server: Server) -> None:
    """Requests with one new picture are all answered, although a constraint of the first takes a
    moment to be read.
    """
    choices = [f"{i} {'word ' * 8}" for i in range(4000)]
    with ThreadPoolExecutor(8) as threads:
        for shade in range(100, 104):
            chat = {"messages": image_message(data_url(shade=shade)), "max_tokens": 2}
            slow = {**chat, "structured_outputs": {"choice": choices[shade % 100 * 900 :][:900]}}
            sent = [threads.submit(picture_server.post, "/v1/chat/completions", slow)]
            sent += [
                threads.submit(picture_server.post, "/v1/chat/completions", chat) for _ in range(7)
            ]
            assert [one.result().status_code for one in sent] == [200] * 8

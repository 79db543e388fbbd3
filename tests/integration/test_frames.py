"""Tests of frames and step maps of the shipped DiffusionGemma: text, order and cost."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

from tests.support.engines.engine import TracedEngine
from tests.support.oracles.frames import EVERY_FIELD, Watched, steps_that_decided
from vllm_diffusion.metrics import request_metrics

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "checkpoints"))

from evaluate import prompt_token_ids
from tiny_tasks import evaluation_set

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def prompts(engine: TracedEngine) -> list[list[int]]:
    """Return short and long prompts, whose answers take one canvas and several."""
    tokenizer = engine.llm.get_tokenizer()
    return [
        prompt_token_ids(tokenizer, example)
        for family in ("sums", "json", "upper")
        for example in evaluation_set(family, 2)
    ]


# What a request may have besides frames.
ASKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "cut": {"max_tokens": 37},
    "two answers": {"n": 2, "temperature": 1.3},
    "stop string": {"stop": [", "]},
    "stop token": {"stop_token_ids": [105]},
    "regex": {"structured_outputs": StructuredOutputsParams(regex="[a-z]{5,12}!")},
    "bad words": {"bad_words": ["a"]},
    "special tokens": {"skip_special_tokens": False, "ignore_eos": True},
    "repetition": {
        "ignore_eos": True,
        "logit_bias": {40: 100.0},
        "repetition_detection": RepetitionDetectionParams(max_pattern_size=2, min_count=3),
    },
    "stop token in the text": {"stop_token_ids": [105], "include_stop_str_in_output": True},
    "log-probabilities": {"logprobs": 2},
}


def params_of(asked: dict[str, Any], extra_args: dict[str, Any]) -> Any:
    options = {"max_tokens": 96, "seed": 3, "skip_special_tokens": True} | asked
    return TracedEngine.sampling_params(**options, extra_args=extra_args)


def test_frames_end_as_the_answer(engine: TracedEngine, prompts: list[list[int]]) -> None:
    """With any options the tokens are the same, and the last frame has the committed text."""
    # Its answer takes several canvases.
    asked = [(prompts[2], one) for one in ASKED.values()]
    unseen, seen = [], []
    # As many as run at once: where others wait, a constrained canvas may give way to them.
    for start in range(0, len(asked), 4):
        part = asked[start : start + 4]
        part_prompts = [prompt for prompt, _ in part]
        unseen += Watched(engine.llm, part_prompts, [params_of(one, {}) for _, one in part]).outputs
        params = [params_of(one, EVERY_FIELD) for _, one in part]
        watched = Watched(engine.llm, part_prompts, params)
        seen += [(watched, i, output) for i, output in enumerate(watched.outputs)]
    num_canvases = []
    for before, (watched, i, output) in zip(unseen, seen, strict=True):
        for expected, completion in zip(before.outputs, output.outputs, strict=True):
            assert completion.token_ids == expected.token_ids
            assert completion.text == expected.text
            assert completion.finish_reason == expected.finish_reason
            canvases = watched.canvases(i, completion.index)
            num_canvases.append(len(canvases))
            assert "".join(frames[-1].text for frames in canvases) == completion.text
            answered = [token for frames in canvases for token in frames[-1].answer_token_ids]
            assert answered == list(completion.token_ids)
            assert all(frame.ends_answer for frame in canvases[-1][-1:])
            for frames in canvases:
                assert all(
                    completion.text.startswith(frames[-1].text, frame.offset) for frame in frames
                )
            replayed = steps_that_decided(canvases, has_mask=False)
            num_tokens = len(completion.token_ids)
            assert list(completion.diffusion_step_map) == replayed[:num_tokens]
            maps = watched.step_maps[i, completion.index]
            assert [step for part in maps for step in part.steps] == replayed[:num_tokens]
            # Of a canvas what each step began from, and what is committed.
            for rows, frames in zip(completion.diffusion_trace, canvases, strict=True):
                assert len(rows) == len(frames) + 1
                assert tuple(rows[-1]) == frames[-1].token_ids
            metrics, usual = request_metrics(completion), request_metrics(expected)
            assert metrics is not None
            assert metrics.denoise_steps_per_canvas == tuple(len(frames) for frames in canvases)
            # Of the prompt the second time less is computed, since it is in the cache.
            assert usual == replace(metrics, passes=usual.passes, encode_rows=usual.encode_rows)
    assert max(num_canvases) >= 3


def test_entropy_and_trace(engine: TracedEngine, prompts: list[list[int]]) -> None:
    """The entropy is in nats, of the pass's logits at the schedule's temperature, and a trace has
    what each pass began from, canvas by canvas.
    """
    with engine.recording() as passes:
        watched = Watched(engine.llm, prompts[2:3], [params_of({}, EVERY_FIELD)])
    (completion,) = watched.outputs[0].outputs
    frames = [frame for canvas in watched.canvases(0) for frame in canvas]
    # An asynchronous pass of a canvas that nobody wanted any more may follow.
    records = [record for record in passes if not record.encoding][: len(frames)]
    traced = [row for rows in completion.diffusion_trace for row in rows[:-1]]
    assert traced == [record.canvas.tolist() for record in records]
    committed = [token for rows in completion.diffusion_trace for token in rows[-1]]
    assert committed[: len(completion.token_ids)] == list(completion.token_ids)
    spec = engine.state.spec
    t_min, t_max = spec.settings["t_min"], spec.settings["t_max"]
    for frame, record in zip(frames, records, strict=True):
        remaining = (frame.total - frame.step + 1) / frame.total
        temperature = t_min + (t_max - t_min) * remaining
        logprobs = (record.logits.double() / temperature).log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).nansum(-1)
        assert frame.entropy == pytest.approx(entropy.tolist(), abs=2e-4)


def test_interval_and_fields(engine: TracedEngine, prompts: list[list[int]]) -> None:
    """Every third step and the last have frames, with the requested fields only."""
    params = params_of({}, {"diffusion_frames": 3, "diffusion_frame_fields": ["kept"]})
    watched = Watched(engine.llm, prompts[:2], [params, params])
    for canvas in (*watched.canvases(0), *watched.canvases(1)):
        assert all(frame.step % 3 == 0 or frame.is_last for frame in canvas)
        assert [frame.is_last for frame in canvas] == [False] * (len(canvas) - 1) + [True]
        assert all(frame.token_ids is None and frame.entropy is None for frame in canvas)
        assert all(frame.kept for frame in canvas)
    assert not watched.step_maps
    for name in ("diffusion_trace", "diffusion_step_map"):
        assert not hasattr(watched.outputs[0].outputs[0], name)


def test_nobody_watches(engine: TracedEngine) -> None:
    """Frames that nobody would see, or for too many requests, are refused."""
    params = params_of({"max_tokens": 4}, {"diffusion_frames": 1})
    with pytest.raises(VLLMValidationError, match=r"vllm_diffusion\.live\.watch") as error:
        engine.outputs([[30, 31]], params)
    assert error.value.parameter == "diffusion_frames"
    with pytest.raises(VLLMValidationError, match="at most 16 answers"):
        Watched(engine.llm, [[30, 31]], [params_of({"n": 17}, {"diffusion_frames": 1})])
    answer = engine.outputs([[30, 31]], params_of({}, {}))
    assert answer[0].finished

"""Tests of the checks of parameters that reach ``vllm.LLM`` without a server's protocol."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from tests.support.engines.admission import Processor, checked, refused, validate
from tests.support.engines.vllm_configs import replan, vllm_config
from tests.support.models.specs import diffusion_gemma_spec
from vllm_diffusion.requests import exclusions, refusals, validation
from vllm_diffusion.requests.arguments import MOST_PREDICTED, arguments_of
from vllm_diffusion.requests.bounds import check_decodable

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logit_bias": {5: float("nan")}}, "logit_bias of token 5 must be between"),
        ({"trace_decode_token_ids": [5]}, "trace_decode_token_ids is not supported"),
    ],
    ids=str,
)
def test_fields_of_no_protocol(fields: dict[str, Any], message: str) -> None:
    """Fields that a protocol would clamp or omit are refused by name."""
    with pytest.raises(VLLMValidationError, match=message):
        validate(SamplingParams(**fields), vllm_config())


@pytest.mark.parametrize("field", ["kv_transfer_params", "ec_transfer_params"])
@pytest.mark.parametrize("value", ["text", 5, ["a"], "x" * 10**6])
def test_transfer_params_that_are_no_mapping(field: str, value: Any) -> None:
    """Transfer parameters that are not a mapping are refused by name."""
    config = vllm_config()
    with refused(field, f"{field} must be a mapping") as raised:
        validate(SamplingParams(extra_args={field: value}), config)
    assert len(str(raised.value)) < 200
    validate(SamplingParams(extra_args={field: {"a": 1}}), config)


@pytest.mark.parametrize(
    ("logprobs", "num_slots", "most"),
    [
        # DiffusionGemma's vocabulary and canvas: 50 GB with 64 requests.
        (-1, 64, 5460),
        (262_144, 64, 5460),
        (5461, 64, 5460),
        (1365, 256, 1364),
    ],
)
def test_logprobs_that_no_memory_holds(logprobs: int, num_slots: int, most: int) -> None:
    """More logprobs than the server's memory holds are refused, and exactly as many are served."""
    config = vllm_config(max_logprobs=-1, max_num_seqs=num_slots)
    replan(config, spec=diffusion_gemma_spec(256))
    config.model_config.model_arch_config.vocab_size = 262_144
    with refused("logprobs", f"may be at most {most} on"):
        validate(SamplingParams(logprobs=logprobs), config)
    validate(SamplingParams(logprobs=most), config)
    assert num_slots * 256 * (1 + most) * 12 <= exclusions.MOST_LOGPROBS_BYTES


def process(processor: Processor, ids: list[int], params: SamplingParams, **more: Any) -> Any:
    """Return the request of the engine for a prompt of these ids."""
    prompt: Any = {"type": "token", "prompt_token_ids": ids, **more}
    return processor.process_inputs("request", prompt, params, ("generate",))


@pytest.mark.parametrize("autoregressive", [False, True])
def test_tokens_that_only_the_tokenizer_has(autoregressive: bool) -> None:
    """A prompt token beyond the model's vocabulary is refused instead of ending the engine."""
    config = vllm_config(max_model_len=64)
    replan(config, spec=None if autoregressive else diffusion_gemma_spec(4))
    most = config.model_config.get_vocab_size()
    process(Processor(config), [1, most - 1], SamplingParams())
    with pytest.raises(VLLMValidationError, match=f"id {most}.*vocabulary of {most} tokens"):
        process(Processor(config), [1, most], SamplingParams())


def processor_of(encode: Any, max_chars_per_token: int = 1) -> Processor:
    """Return the processor of a server with canvases of 8 and a tokenizer."""
    config = vllm_config(max_model_len=64)
    replan(config, spec=diffusion_gemma_spec(8))
    processor = Processor(config)
    processor.renderer.tokenizer = SimpleNamespace(
        encode=encode, max_chars_per_token=max_chars_per_token
    )
    return processor


def letters(text: str, **_: Any) -> list[int]:
    """Return a token for each character."""
    return [5 + ord(character) % 50 for character in text]


@pytest.mark.parametrize(
    ("name", "field"), [("suffix", "suffix"), ("prediction", "diffusion_prediction")]
)
def test_texts_of_tokens_that_only_the_tokenizer_has(name: str, field: str) -> None:
    """An argument whose text has a token beyond the model's vocabulary is refused by its field."""
    processor = processor_of(lambda text, **_: [most], 8)
    most = processor.model_config.get_vocab_size()
    params = SamplingParams(max_tokens=2, extra_args={f"diffusion_{name}": "x"})
    with refused(field, f"id {most}.*vocabulary"):
        validation.admit(params, processor, {"prompt_token_ids": [1]})


@pytest.mark.parametrize(
    ("own", "field"),
    [
        ({"suffix": 5}, "suffix"),
        ({"prediction": 5}, "diffusion_prediction"),
        ({"prediction": [5]}, "diffusion_prediction"),
        ({"prediction": {"content": "a"}}, "prediction"),
        ({"prediction": {"type": "content", "content": [{"type": "text"}]}}, "prediction"),
        ({"prediction": "a" * 10**6}, "diffusion_prediction"),
        ({"prediction": "ab" * MOST_PREDICTED}, "diffusion_prediction"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_texts_that_are_refused(own: dict[str, Any], field: str) -> None:
    """A suffix or a prediction that is malformed or too long is refused by its field."""
    params = SamplingParams(
        max_tokens=2, extra_args={f"diffusion_{name}": value for name, value in own.items()}
    )
    with refused(field):
        validation.admit(params, processor_of(letters, 8), {"prompt_token_ids": [1]})


def test_a_prompt_that_is_too_long_to_be_searched() -> None:
    """A prompt as prediction that has too many tokens is refused by the client's own field."""
    params = SamplingParams(max_tokens=2, extra_args={"diffusion_prediction": "prompt"})
    prompt = {"prompt_token_ids": [1] * (MOST_PREDICTED + 1)}
    with refused("diffusion_prediction", f"has {MOST_PREDICTED + 1} tokens"):
        validation.admit(params, processor_of(letters), prompt)


@pytest.mark.parametrize(
    ("max_tokens", "num_sent", "num_used"), [(3, 4, 4), (3, 5, 5), (3, 6, 5), (7, 10**6, 1)]
)
def test_a_suffix_is_cut_at_its_far_end(max_tokens: int, num_sent: int, num_used: int) -> None:
    """As many of a suffix's first tokens are kept as fit behind the answer, and no more is read."""
    read: list[str] = []
    processor = processor_of(lambda text, **_: read.append(text) or letters(text))
    suffix = "".join(chr(97 + i % 26) for i in range(num_sent))
    params = SamplingParams(max_tokens=max_tokens, extra_args={"diffusion_suffix": suffix})
    for _ in range(2):
        # Several prompts may share their parameters.
        request = process(processor, [1, 2], params)
        kept = arguments_of(request.sampling_params).suffix
        assert kept == tuple(letters(suffix[:num_used]))
    assert len("".join(read)) <= 2 * 8
    for params.max_tokens in (8, None):
        with refused("suffix", r"no room: max_tokens=8"):
            process(processor, [1, 2], params)


def test_a_suffix_is_cut_to_the_models_length() -> None:
    """Near the end of the model's length a canvas has no room of its own beyond it."""
    processor = processor_of(letters)
    params = SamplingParams(max_tokens=2, extra_args={"diffusion_suffix": "a" * 9})
    for num_prompt, num_used in ((10, 6), (58, 4), (61, 1)):
        request = process(processor, [1] * num_prompt, params)
        assert len(arguments_of(request.sampling_params).suffix) == num_used


def test_pictures_of_a_refused_request_are_sent_again() -> None:
    """The pictures of a refused request, which the engine never got, are sent the next time."""
    config = vllm_config(max_model_len=64)
    replan(config, spec=diffusion_gemma_spec(4))
    hashes = {"image": ["a", "b"], "video": ["c"]}
    bad = SamplingParams(extra_args={"diffusion_max_steps": 0})
    for num_prompt, params in ((1, bad), (65, SamplingParams())):
        processor = Processor(config)
        with pytest.raises(VLLMValidationError):
            process(processor, [1] * num_prompt, params, mm_hashes=hashes)
        assert processor.forgotten == ["a", "b", "c"]
    processor = Processor(config)
    process(processor, [1], SamplingParams(), mm_hashes=hashes)
    assert processor.forgotten == []


@pytest.mark.parametrize(
    ("min_tokens", "max_tokens", "most"), [(33, 70, 32), (33, None, 32), (9, 70, None), (9, 8, 8)]
)
def test_min_tokens_of_a_read_only_request(
    min_tokens: int, max_tokens: int | None, most: int | None
) -> None:
    """A read-only request cannot have more ``min_tokens`` than its one canvas."""
    params = SamplingParams(max_tokens=max_tokens, extra_args={"diffusion_read_only": True})
    params.min_tokens = min_tokens
    if most is None:
        checked(params, diffusion_gemma_spec(32))
        assert params.max_tokens == 32
        return
    with refused("min_tokens", f"min_tokens must be at most {most}"):
        checked(params, diffusion_gemma_spec(32))


# By field, what vLLM takes from Python and its engine does not.
UNDECODABLE: dict[str, Any] = {
    "max_tokens": 5.0,
    "min_tokens": 9,
    "ignore_eos": 1,
    "seed": True,
    "n": 1.0,
    "top_k": 2.5,
    "temperature": "hot",
    "stop_token_ids": [1, "a"],
    "allowed_token_ids": ["a"],
    "logit_bias": {"3": 1.0},
    "logprobs": -3,
    "extra_args": ["a"],
}


@pytest.mark.parametrize("field", UNDECODABLE)
def test_what_the_engine_could_not_read(field: str) -> None:
    """A value that the engine cannot decode is refused by name in the client's process."""
    refusals.install()
    params = SamplingParams(max_tokens=8)
    check_decodable(params)
    setattr(params, field, UNDECODABLE[field])
    with refused(field):
        check_decodable(params)

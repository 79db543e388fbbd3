"""Tests of the checks of parameters that reach ``vllm.LLM`` without a server's protocol, and of
what each way of a server takes.
"""

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from tests.support.engines.admission import Processor, checked, refused, validate
from tests.support.engines.vllm_configs import configure, replan, vllm_config
from tests.support.models.specs import diffusion_gemma_spec
from vllm_diffusion.checkpoints import shipped_checkpoint
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


DRAFTS, CAUSAL, DENOISED = "linear_spec", "autoregressive", "entropy_bound"


def choosing(way: str | None, server: dict[str, Any] | None = None, **fields: Any) -> Any:
    """Return checked parameters of a request to a server that offers all ways."""
    settings = {"rules": [DENOISED, DRAFTS, CAUSAL]} if server is None else server
    own = {name: fields.pop(name) for name in list(fields) if name.startswith("diffusion_")}
    if way is not None:
        own["diffusion_rule"] = way
    sampling = SamplingParams(**fields, extra_args=own or None)
    config = vllm_config(additional_config={"diffusion": settings})
    validate(sampling, config)
    return sampling


@pytest.mark.parametrize(
    ("way", "width", "steps"),
    [(None, None, None), (DENOISED, None, None), (DRAFTS, 16, 1), (CAUSAL, 1, 1)],
)
def test_canvases_of_a_way(way: str | None, width: int | None, steps: int | None) -> None:
    """A draft has the server's width, and a canvas of the autoregressive way has one token."""
    arguments = arguments_of(choosing(way, max_tokens=100))
    assert (arguments.canvas_length, arguments.max_steps) == (width, steps)


def test_parameters_of_a_way_that_are_used_again() -> None:
    """Checked parameters are accepted again with the width that was written into them."""
    for way in (DRAFTS, CAUSAL):
        sampling = choosing(way, max_tokens=100)
        width = arguments_of(sampling).canvas_length
        again = choosing(way, max_tokens=100, diffusion_canvas_length=width)
        assert arguments_of(again) == arguments_of(sampling)


def test_default_of_a_server() -> None:
    """A request that chooses no way has that of the setting ``rule``."""
    server = {"rules": [DENOISED, CAUSAL], "rule": CAUSAL}
    assert arguments_of(choosing(None, server, max_tokens=9)).canvas_length == 1
    assert arguments_of(choosing(DENOISED, server, max_tokens=90)).canvas_length is None


@pytest.mark.parametrize("way", [DRAFTS, CAUSAL])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("presence_penalty", 0.5),
        ("frequency_penalty", 0.5),
        ("repetition_penalty", 1.2),
        ("bad_words", ["a"]),
        ("diffusion_max_steps", 4),
        ("diffusion_read_only", True),
        ("diffusion_preset", "fast"),
        ("diffusion_t_min", 0.0),
    ],
)
def test_what_a_way_cannot_honour(way: str, field: str, value: Any) -> None:
    """An argument is refused by name for a way without it, and accepted for denoising."""
    with refused(field, f'choose another diffusion_rule than "{way}"'):
        choosing(way, **{field: value})
    choosing(DENOISED, **{field: value})


@pytest.mark.parametrize(
    ("argument", "value", "field"),
    [
        ("diffusion_prediction", {"type": "content", "content": "a"}, "prediction"),
        ("diffusion_prediction", "a", "diffusion_prediction"),
        ("diffusion_suffix", "a", "suffix"),
    ],
)
def test_fields_of_texts(argument: str, value: Any, field: str) -> None:
    """A refusal names the field in which OpenAI's clients send a text."""
    with refused(field, f"^{field} needs a tokenizer"):
        choosing(DRAFTS, max_tokens=4, **{argument: value})


@pytest.mark.parametrize("way", [DRAFTS, CAUSAL])
def test_structured_outputs_of_a_way(way: str) -> None:
    """A grammar is refused for a way that draws rows before the tokens in front are known, by the
    fields of OpenAI's API and without an object of Python's.
    """
    with refused("structured_outputs", r"\(response_format, tools\)") as raised:
        choosing(way, structured_outputs=StructuredOutputsParams(regex="a+"))
    assert "StructuredOutputsParams" not in str(raised.value)


def test_steering_of_a_single_token() -> None:
    """Settings of drafts are accepted for drafts only, since single tokens are not denoised."""
    fields: dict[str, Any] = {"diffusion_frames": 1, "diffusion_stability_threshold": 0}
    choosing(DRAFTS, **fields)
    for name, value in fields.items():
        with refused(name, "has no effect"):
            choosing(CAUSAL, **{name: value})


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        ({}, "diffusion_rule cannot be chosen on this server"),
        ({"rules": [DENOISED, DRAFTS]}, f"must be one of {DENOISED}, {DRAFTS}; got '{CAUSAL}'"),
        ({"rule": CAUSAL}, "diffusion_rule has no effect here"),
    ],
    ids=str,
)
def test_ways_that_a_server_does_not_offer(server: dict[str, Any], reason: str) -> None:
    """A way that the server does not offer is refused by name, with the offered ones."""
    with refused("diffusion_rule", reason):
        choosing(CAUSAL, server)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            {"rules": [DENOISED, "reveal"]},
            "must list some of entropy_bound, linear_spec, autoregressive",
        ),
        ({"rules": [DENOISED, DENOISED]}, "each once"),
        ({"rules": DENOISED}, 'must be "all" or a list of names'),
        ({"rules": 5}, 'must be "all" or a list of names'),
        ({"rules": [DRAFTS, CAUSAL]}, "must include 'entropy_bound'"),
        ({"rules": [DENOISED, CAUSAL], "rule": DRAFTS}, "must include 'linear_spec'"),
    ],
    ids=str,
)
def test_rules_that_no_server_can_offer(settings: dict[str, Any], reason: str) -> None:
    """A start with an invalid choice of rules names the setting and its allowed values."""
    with pytest.raises(ValueError, match=reason):
        configure(shipped_checkpoint(), additional_config={"diffusion": settings})


@pytest.mark.parametrize("rules", ["all", [DENOISED, DRAFTS, CAUSAL]])
def test_all_ways_of_a_model(rules: Any) -> None:
    """``rules`` may list all ways of the model, whose own is the first; the engine and its workers,
    which are other processes, get them.
    """
    settings = {"rules": rules, "draft_length": 8}
    plan = vllm_config(additional_config={"diffusion": settings}).model_config.diffusion
    spec = pickle.loads(pickle.dumps(plan)).spec
    assert [way.name for way in spec.ways] == [DENOISED, DRAFTS, CAUSAL]
    assert [way.layout.length for way in spec.ways] == [32, 8, 8]
    assert [way.length for way in spec.ways] == [32, 8, 1]

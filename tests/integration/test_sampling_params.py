"""Each sampling parameter acts on a canvas as docs/use/requests.md describes."""

import functools

import pytest
import torch

from attention_kernels.vocab_statistics import LogitAdjustments
from tests.support.engines.engine import TracedEngine
from tests.support.oracles.oracle import Oracle
from vllm_diffusion.metrics import request_metrics

pytestmark = pytest.mark.engine

CANVAS, VOCAB = 32, 320
END_TOKENS = {1, 6, 14}
PROMPT = torch.randint(24, 276, (50,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module")
def engine(checkpoint):
    with TracedEngine(checkpoint, max_num_seqs=6, max_logprobs=-1) as engine:
        yield engine


def tokens_of(engine, *, seed=5, max_tokens=2 * CANVAS, prompt=PROMPT, **params):
    (output,) = engine.generate([prompt], seeds=[seed], max_tokens=max_tokens, **params)
    return list(output.token_ids)


def test_min_tokens(engine):
    """An end token that the model wants everywhere does not come before ``min_tokens``."""
    wants_end = {"logit_bias": {1: 100.0}, "max_tokens": 3 * CANVAS}
    assert tokens_of(engine, **wants_end) == [1]
    for min_tokens in (5, CANVAS, CANVAS + 7):
        tokens = tokens_of(engine, min_tokens=min_tokens, **wants_end)
        assert len(tokens) == min_tokens + 1
        assert not END_TOKENS & set(tokens[:-1])


def test_penalties_count_committed_tokens(engine):
    """Penalties count only committed tokens, so a first canvas has none."""
    params = {"ignore_eos": True, "extra_args": {"diffusion_max_steps": 4}}
    plain = tokens_of(engine, **params)
    penalised = tokens_of(engine, **params, presence_penalty=2.0, frequency_penalty=2.0)
    assert penalised[:CANVAS] == plain[:CANVAS]
    assert penalised[CANVAS:] != plain[CANVAS:]
    # The prompt counts for repetition from the first canvas on.
    assert tokens_of(engine, **params, repetition_penalty=3.0)[:CANVAS] != plain[:CANVAS]


@pytest.mark.parametrize(
    "params",
    [
        {"presence_penalty": 1.3},
        {"frequency_penalty": -0.7},
        {"repetition_penalty": 1.9},
        {"presence_penalty": -2.0, "frequency_penalty": 1.1, "repetition_penalty": 0.6},
    ],
    ids=str,
)
def test_penalties_are_those_of_vllm(engine, params):
    """A canvas's logits equal those of vLLM's own penalties on the same counts."""
    from vllm.model_executor.layers.utils import apply_penalties

    seen = []
    apply = LogitAdjustments.apply

    def recording(self, logits, ids):
        adjusted = apply(self, logits, ids)
        seen.append((logits.clone(), adjusted.clone()))
        return adjusted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LogitAdjustments, "apply", recording)
        tokens = tokens_of(engine, ignore_eos=True, max_tokens=2 * CANVAS, **params)
    # The first pass of the first canvas, and the last pass: the second canvas's encoding.
    for (logits, adjusted), output in ((seen[0], []), (seen[-1], tokens[:CANVAS])):
        rows = len(logits)
        expected = apply_penalties(
            logits.clone(),
            torch.tensor([PROMPT]).expand(rows, -1),
            torch.tensor([output], dtype=torch.int64).reshape(1, -1).expand(rows, -1),
            *(
                torch.full((rows,), params.get(name, neutral))
                for name, neutral in (
                    ("presence_penalty", 0.0),
                    ("frequency_penalty", 0.0),
                    ("repetition_penalty", 1.0),
                )
            ),
        )
        # Presence and frequency are of the output, which is empty at first.
        nothing_yet = not output and "repetition_penalty" not in params
        assert torch.equal(expected, logits) == nothing_yet
        torch.testing.assert_close(adjusted, expected, atol=1e-5, rtol=1e-5)


def test_bad_words(engine):
    """Bad words of one token or more do not occur, not even across two canvases."""
    plain = tokens_of(engine, ignore_eos=True)
    border = plain[CANVAS - 1 : CANVAS + 1]
    words = [[plain[3]], plain[10:13], border]
    params = engine.sampling_params(seed=5, max_tokens=2 * CANVAS, ignore_eos=True)
    params.bad_words = ["set below, as token ids"]
    params._bad_words_token_ids = words
    with pytest.MonkeyPatch.context() as patch:
        # They come as text and are tokenised at the door, where each would get a blank before it.
        patch.setattr(type(params), "update_from_tokenizer", lambda self, tokenizer: None)
        (output,) = engine.outputs([PROMPT], params)
    tokens = list(output.outputs[0].token_ids)
    assert len(tokens) == 2 * CANVAS
    for word in words:
        found = [tokens[i : i + len(word)] for i in range(len(tokens) - len(word) + 1)]
        assert word not in found


def test_short_answers_take_narrow_canvases(engine):
    """A request for five tokens computes five rows per step."""
    (output,) = engine.generate([PROMPT], seeds=[1], max_tokens=5, ignore_eos=True)
    metrics = request_metrics(output)
    assert len(output.token_ids) == 5
    assert metrics.canvas_rows == 5 * sum(metrics.denoise_steps_per_canvas)
    assert output.finish_reason == "length"


def test_prompt_logprobs_are_those_of_the_causal_encoder(engine, checkpoint):
    """Prompt log-probabilities equal those of ``transformers``, whatever is generated after."""
    (output,) = engine.outputs(
        [PROMPT],
        engine.sampling_params(seed=5, prompt_logprobs=0, max_tokens=CANVAS, ignore_eos=True),
    )
    assert len(output.outputs[0].token_ids) == CANVAS
    assert output.prompt_logprobs[0] is None
    ours = [
        entry[token].logprob
        for entry, token in zip(output.prompt_logprobs[1:], PROMPT[1:], strict=True)
    ]
    model = Oracle(checkpoint).model
    with torch.no_grad():
        hidden = model.model.encoder(input_ids=torch.tensor([PROMPT])).last_hidden_state[0]
        logits = hidden @ model.get_input_embeddings().weight.T
        cap = model.config.text_config.final_logit_softcapping
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
    expected = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(ours), expected, atol=1e-3, rtol=0)


def steps_of_a_canvas(engine, **extra_args):
    (output,) = engine.generate(
        [PROMPT], seeds=[5], max_tokens=CANVAS, ignore_eos=True, extra_args=extra_args
    )
    return request_metrics(output).denoise_steps_per_canvas[0]


def test_settings_of_a_request_over_those_of_the_server(engine):
    """A request's tight budget takes all allowed steps, and a wide one few."""

    steps = functools.partial(steps_of_a_canvas, engine)
    assert steps(diffusion_entropy_bound=1e-6) == 16
    wide = {
        "diffusion_entropy_bound": 1e6,
        "diffusion_confidence_threshold": 1e6,
        "diffusion_stability_threshold": 0,
    }
    assert steps(**wide) == 1
    # A cap above the server's is the server's.
    assert steps(diffusion_entropy_bound=1e-6, diffusion_max_steps=400) == 16
    assert steps(diffusion_preset="fast") <= steps(diffusion_preset="quality")
    # The explicit setting comes before the preset.
    assert steps(diffusion_preset="quality", **wide) == 1


def test_temperatures_of_a_request(engine):
    """The request's temperature schedule scales the logits whose entropy decides."""
    low = {"diffusion_t_min": 0.05, "diffusion_t_max": 0.05}
    assert tokens_of(engine, extra_args=low) != tokens_of(engine)
    assert steps_of_a_canvas(engine, **low) <= steps_of_a_canvas(engine)

"""Tests of the default size and order of passes, and of the class of the workers."""

import pytest

from tests.support.models.specs import diffusion_gemma_spec, masked_spec
from vllm_diffusion.decoding.canvas_spec import CanvasSpec
from vllm_diffusion.decoding.layouts import VerifiedDraft, WholeSequence
from vllm_diffusion.decoding.levenshtein import Levenshtein
from vllm_diffusion.decoding.reveal import LinearSpec, Reveal
from vllm_diffusion.decoding.ways import PassOrder
from vllm_diffusion.startup import async_scheduling
from vllm_diffusion.startup.options import choose_worker

pytestmark = pytest.mark.engine

GIB = 2**30


@pytest.mark.parametrize(
    ("device", "host", "steps", "extra", "pays"),
    [
        # 17 passes of 10 ms against 16 of 12.
        (10, 2, 16, 1, True),
        # 3 of 10 against 2 of 12.
        (10, 2, 2, 1, False),
        # The pass that is saved is worth all that the host hides: 5 of 8 against 4 of 10.
        (8, 2, 4, 1, False),
        (8, 2.1, 4, 1, True),
        (10, 2, 2, 0, True),
        (10, 0, 16, 0, False),
    ],
)
def test_a_pass_saved_against_the_host_s_time(monkeypatch, device, host, steps, extra, pays):
    """The comparison of a saved pass with the host's time is right on both sides of its limit."""
    monkeypatch.setattr(async_scheduling, "HOST_MS", host)
    assert async_scheduling.asynchronous_pays(device, steps, extra) is pays


FREE = diffusion_gemma_spec(8)
FIRST_TOKEN = CanvasSpec.of(VerifiedDraft(8), LinearSpec(), 1, {}, mask_token_id=4)
WHOLE = CanvasSpec.of(WholeSequence(8), Reveal(4), 1, {}, mask_token_id=4)
FINAL = masked_spec(8, rule=Levenshtein(4, delete_token_id=5, split_token_id=6))


@pytest.mark.parametrize(
    ("spec", "is_async", "own_attention", "order"),
    [
        # commits, commit_encodes, prompt_with_step, encode_with_step
        (FREE, False, True, PassOrder(False, False, True, True)),
        (FREE, True, True, PassOrder(True, True, True, False)),
        (FREE, False, False, PassOrder(False, False, False, False)),
        (FREE, True, False, PassOrder(True, True, False, False)),
        # A draft is verified by its commit, in every order, and begins with a token of it.
        (FIRST_TOKEN, False, True, PassOrder(True, True, False, False)),
        (FIRST_TOKEN, True, True, PassOrder(True, True, False, False)),
        # The last step mostly leaves nothing to encode.
        (FINAL, False, True, PassOrder(True, False, True, False)),
        (FINAL, True, True, PassOrder(True, False, True, False)),
        # The pass after a step has the same rows, whether that step was the last or not.
        (WHOLE, True, True, PassOrder(False, False, True, False)),
    ],
)
def test_order_of_passes(
    spec: CanvasSpec, is_async: bool, own_attention: bool, order: PassOrder
) -> None:
    """The order is that which each kind of canvas needs."""
    assert PassOrder.of(spec.ways[0], is_async=is_async, own_attention=own_attention) == order


@pytest.mark.parametrize(
    ("is_cpu", "weights", "steps", "chosen"),
    [
        (True, GIB, 16, False),
        (False, 26 * GIB, 16, None),
        # One pass in two would be for the encode alone.
        (False, 26 * GIB, 1, False),
        # As long as 16 times the host's time of a pass.
        (False, 16 * 2.8 * 3.36e9, 16, False),
        (False, 16 * 2.8 * 3.34e9, 16, None),
        # Not on this machine yet.
        (False, 0, 1, None),
    ],
)
def test_choice(monkeypatch, is_cpu, weights, steps, chosen):
    """The asynchronous order is left to vLLM exactly where it pays and can run."""
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: is_cpu)
    assert async_scheduling.choose_async_scheduling(steps, 1, weights) is chosen


OURS = "builtins.dict"


@pytest.mark.parametrize(
    ("given", "chosen"),
    [("auto", OURS), (OURS, OURS), ("collections.OrderedDict", "collections.OrderedDict")],
)
def test_worker_class(given: str, chosen: str) -> None:
    """Workers have our class by default, and a class that derives from it stays."""
    assert choose_worker(given, OURS) == chosen


def test_another_class() -> None:
    """A worker class of another runner is refused with the class to derive from."""
    with pytest.raises(
        ValueError, match="--worker-cls builtins.list .* derive it from builtins.dict"
    ):
        choose_worker("builtins.list", OURS)

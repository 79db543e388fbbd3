"""Which order of passes is chosen where the operator says nothing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.support.specs import diffusion_gemma_spec, masked_spec
from vllm_diffusion.decoding.canvas_spec import CanvasSpec
from vllm_diffusion.decoding.levenshtein import Levenshtein
from vllm_diffusion.decoding.reveal import LinearSpec
from vllm_diffusion.layouts import VerifiedDraft
from vllm_diffusion.startup import passes

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
    """The arithmetic, on both sides of where it turns."""
    monkeypatch.setattr(passes, "HOST_MS", host)
    assert passes.asynchronous_pays(device, steps, extra) is pays


def test_extra_passes():
    """Only where the synchronous order encodes a canvas with the next one's first step."""
    seeded = CanvasSpec(VerifiedDraft(8), LinearSpec(), 1, {}, mask_token_id=4)
    final = masked_spec(8, rule=Levenshtein(4, delete_token_id=5, split_token_id=6))
    assert final.rule.can_finish_kv
    extra = [spec.extra_async_passes() for spec in (diffusion_gemma_spec(8), seeded, final)]
    assert extra == [1, 0, 0]


@pytest.mark.parametrize(
    ("is_cpu", "weights", "max_steps", "given", "fused", "chosen"),
    [
        (True, GIB, 48, None, None, False),
        (True, GIB, 48, True, None, True),
        (False, 26 * GIB, 48, None, None, None),
        (False, 26 * GIB, 48, False, None, False),
        # One pass in two would be for the encode alone.
        (False, 26 * GIB, 1, None, None, False),
        # As long as 16 times the host's time of a pass.
        (False, 16 * 2.8 * 3.36e9, 48, None, None, False),
        (False, 16 * 2.8 * 3.34e9, 48, None, None, None),
        # Not on this machine yet.
        (False, 0, 1, None, None, None),
        (False, GIB, 48, None, True, False),
    ],
)
def test_choice(monkeypatch, is_cpu, weights, max_steps, given, fused, chosen):
    """What vLLM is left to choose is the asynchronous order, where it can run."""
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: is_cpu)
    monkeypatch.setattr(passes, "checkpoint_bytes", lambda model: 2 * weights)
    config = SimpleNamespace(
        additional_config={"diffusion": {} if fused is None else {"fused_encode": fused}},
        scheduler_config=SimpleNamespace(async_scheduling=given),
        model_config=SimpleNamespace(model="a", canvas_spec=diffusion_gemma_spec(256, max_steps)),
        parallel_config=SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=1),
    )
    passes.choose_order(config)  # type: ignore[arg-type]
    assert config.scheduler_config.async_scheduling is chosen

"""The null GPU keeps CUDA's rules: a program that breaks one gets CUDA's error."""

import pytest

BREAKS = "tests.null_gpu.rule_breaks"

# What each program of rule_breaks gets, as CUDA's documentation names it.
ERRORS = {
    "waits_for_the_device": "cudaErrorStreamCaptureUnsupported",
    "leaves_a_stream_unjoined": "cudaErrorStreamCaptureUnjoined",
    "replays_over_freed_memory": "cudaErrorIllegalAddress",
}


@pytest.mark.parametrize(("program", "error"), ERRORS.items())
def test_a_broken_rule(torch_alone, program, error):
    """A program that breaks a rule ends with CUDA's error for it."""
    outcome = torch_alone.run(f"{BREAKS}:{program}", seconds=60)
    assert outcome.error is not None, outcome.value
    assert error in outcome.text()


def test_a_kept_rule(torch_alone):
    """A program that keeps every rule is not refused, and everything is counted."""
    assert torch_alone.run(f"{BREAKS}:keeps_every_rule", seconds=60).checked() == {
        "graphs": 2,
        "kernels_in_graphs": 6,
        "copies_in_graphs": 2,
        # A sum, and the memory that its blocks meet in.
        "kernels": 1,
        "memsets": 1,
        # Of the pinned tensor, and of the sum, which is waited for.
        "copies": 2,
        "waits_for_streams": 1,
        "waits_for_events": 1,
        # The one that is requested, and torch's before a capture.
        "waits_for_the_device": 2,
        "allocations": 4,
    }

"""The null GPU keeps CUDA's rules: a program that breaks one is refused with CUDA's error."""

from __future__ import annotations

import pytest

BREAKS = "tests.null_gpu.rule_breaks"

# What each program of rule_breaks gets, as CUDA's documentation names it.
ERRORS = {
    "waits_for_the_device": "cudaErrorStreamCaptureUnsupported",
    "reads_a_value": "cudaErrorStreamCaptureUnsupported",
    "copies_from_pageable_memory_in_a_capture": "cudaErrorStreamCaptureUnsupported",
    "leaves_a_stream_unjoined": "cudaErrorStreamCaptureUnjoined",
    "waits_for_an_event_from_outside": "cudaErrorStreamCaptureIsolation",
    "replays_over_freed_memory": "cudaErrorIllegalAddress",
    "launches_a_triton_kernel_on_a_host_tensor": "cannot be accessed from Triton",
}


@pytest.mark.parametrize(("program", "error"), ERRORS.items())
def test_a_broken_rule(torch_alone, program, error):
    outcome = torch_alone.run(f"{BREAKS}:{program}", seconds=60)
    assert outcome.error is not None, outcome.value
    assert error in outcome.text()


def test_a_kept_rule(torch_alone):
    """The same things done as CUDA asks for: nothing is refused, and everything counted."""
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
        # The one that is asked for, and torch's before a capture.
        "waits_for_the_device": 2,
        "allocations": 4,
    }


def test_a_replay_reads_its_inputs(torch_alone):
    """As they are by then, and not as they were when it was captured."""
    assert torch_alone.run(f"{BREAKS}:replays_with_other_inputs", seconds=60).checked() == [1, 2]


def test_shared_memory(torch_alone):
    """A kernel that one chip has room for, and another has not."""
    case = f"{BREAKS}:launches_a_triton_kernel_of_128_kib_of_shared_memory"
    torch_alone.run(case, capability="9.0").checked()
    error = torch_alone.run(case, capability="12.0").error
    assert "out of resource: shared memory, Required: 131072, Hardware limit: 101376" in error


def test_memory(torch_alone):
    """It ends at the size that the device claims."""
    outcome = torch_alone.run(f"{BREAKS}:takes_more_memory_than_there_is", seconds=60, gib=2.5)
    assert "OutOfMemoryError: CUDA out of memory" in outcome.error


@pytest.mark.parametrize(
    ("call", "counts"),
    [
        # torch has pinned memory for it.
        ("value", {"copies": 1, "waits_for_streams": 1}),
        ("pageable", {"copies": 1, "pageable_copies": 1, "waits_for_streams": 1}),
        ("pageable, without waiting", {"copies": 1, "pageable_copies": 1}),
        (
            "index",
            {"copies": 1, "pageable_copies": 1, "waits_for_streams": 1, "kernels": 1},
        ),
        ("mask", {"copies": 1, "waits_for_streams": 1, "kernels": 5}),
    ],
)
def test_waits_are_counted(torch_alone, call, counts):
    found = torch_alone.run(f"{BREAKS}:counted", seconds=60, name=call).checked()
    assert found == counts

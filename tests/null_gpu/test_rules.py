"""The null GPU keeps CUDA's rules: a program that breaks one is refused with CUDA's error."""

from __future__ import annotations

import pytest

BREAKS = "tests.null_gpu.rule_breaks"

# What each program of rule_breaks gets, as CUDA's documentation names it.
CAPTURES = {
    "waits_for_its_stream": "cudaErrorStreamCaptureUnsupported",
    "waits_for_the_device": "cudaErrorStreamCaptureUnsupported",
    "reads_a_value": "cudaErrorStreamCaptureUnsupported",
    "allocates_in_a_capture": "cudaErrorStreamCaptureUnsupported",
    "waits_in_another_thread": "cudaErrorStreamCaptureUnsupported",
    "copies_from_pageable_memory_in_a_capture": "cudaErrorStreamCaptureUnsupported",
    "uses_the_default_stream_beside_a_blocking_one": "cudaErrorStreamCaptureImplicit",
    "leaves_a_stream_unjoined": "cudaErrorStreamCaptureUnjoined",
    "waits_for_an_event_from_outside": "cudaErrorStreamCaptureIsolation",
    "waits_for_an_event_of_a_capture": "cudaErrorCapturedEvent",
    "waits_for_an_event_after_its_capture": "cudaErrorCapturedEvent",
    "asks_for_an_event_during_a_capture": "cudaErrorStreamCaptureUnsupported",
    "times_events_that_were_not_recorded": "cudaErrorInvalidResourceHandle",
    "ends_a_capture_in_another_thread": "cudaErrorStreamCaptureWrongThread",
    "ends_a_capture_on_another_stream": "cudaErrorStreamCaptureUnmatched",
    "merges_two_captures": "cudaErrorStreamCaptureMerge",
    "records_on_a_destroyed_stream": "cudaErrorInvalidResourceHandle",
    "waits_for_a_destroyed_event": "cudaErrorInvalidResourceHandle",
}
LAUNCHES = {
    "launches_too_many_threads": "cudaErrorInvalidConfiguration",
    "launches_too_deep_a_block": "cudaErrorInvalidConfiguration",
    "launches_too_tall_a_grid": "cudaErrorInvalidConfiguration",
    "launches_an_empty_grid": "cudaErrorInvalidConfiguration",
    "launches_with_unasked_shared_memory": "cudaErrorInvalidValue",
    "launches_a_triton_kernel_on_a_host_tensor": "cannot be accessed from Triton",
    "has_no_code_for_the_device": "cudaErrorNoKernelImageForDevice",
}
MEMORY = {
    "copies_from_freed_memory": "cudaErrorInvalidValue",
    "copies_past_the_end": "cudaErrorInvalidValue",
    "copies_to_the_device_at_a_host_address": "cudaErrorInvalidValue",
    "frees_twice": "cudaErrorInvalidValue",
    "replays_over_freed_memory": "cudaErrorIllegalAddress",
}


@pytest.mark.parametrize(("program", "error"), (CAPTURES | LAUNCHES | MEMORY).items())
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


def test_another_thread_of_a_local_capture(torch_alone):
    case = f"{BREAKS}:waits_in_another_thread_of_a_local_capture"
    assert torch_alone.run(case, seconds=60).checked() == "captured"


def test_shared_memory(torch_alone):
    """A kernel that one chip has room for, and another has not."""
    case = f"{BREAKS}:launches_a_triton_kernel_of_128_kib_of_shared_memory"
    torch_alone.run(case, capability="9.0").checked()
    error = torch_alone.run(case, capability="12.0").error
    assert "out of resource: shared memory, Required: 131072, Hardware limit: 101376" in error


@pytest.mark.parametrize(
    ("capability", "images", "chosen"),
    [
        ("8.6", [(2, 80)], 80),
        ("8.9", [(2, 80), (2, 86), (2, 90)], 86),
        ("8.6", [(2, 89)], 0),
        ("10.0", [(2, 90)], 0),
        ("10.0", [(2, 90), (1, 90)], 90),
        ("8.0", [(1, 90)], 0),
    ],
)
def test_code_for_the_device(torch_alone, capability, images, chosen):
    """Machine code runs on later chips of its generation, PTX on all later ones."""
    case = f"{BREAKS}:chosen_image"
    assert torch_alone.run(case, capability=capability, images=images).checked() == chosen


def test_libraries_choose_by_their_code(torch_alone):
    """CUB, in torch, has kernels for the chips that it was compiled for, and no others."""
    for capability in ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0"):
        torch_alone.run(f"{BREAKS}:sums", capability=capability).checked()


def test_memory(torch_alone):
    """It ends at the size that the device claims, and comes back."""
    outcome = torch_alone.run(f"{BREAKS}:takes_more_memory_than_there_is", seconds=60, gib=2.5)
    assert "OutOfMemoryError: CUDA out of memory" in outcome.error
    before, taken, after = torch_alone.run(f"{BREAKS}:takes_what_there_is", gib=2.5).checked()
    assert (before, taken, after) == (2048, 1024, 2048)


def test_copies_of_untouched_memory(torch_alone):
    """They take no memory of this machine, which has less than a GPU; other copies are exact."""
    found = torch_alone.run(f"{BREAKS}:copies_what_nothing_has_filled").checked()
    assert found["exact"]
    assert found["grown"] < 32


@pytest.mark.parametrize(
    ("call", "counts"),
    [
        # torch has pinned memory for it.
        ("value", {"copies": 1, "waits_for_streams": 1}),
        ("pageable", {"copies": 1, "pageable_copies": 1, "waits_for_streams": 1}),
        ("pageable, without waiting", {"copies": 1, "pageable_copies": 1}),
        ("pinned", {"copies": 1}),
        (
            "index",
            {"copies": 1, "pageable_copies": 1, "waits_for_streams": 1, "kernels": 1},
        ),
        ("mask", {"copies": 1, "waits_for_streams": 1, "kernels": 5}),
        ("event", {"waits_for_events": 1}),
        ("stream", {"waits_for_streams": 1}),
        ("device", {"waits_for_the_device": 1}),
    ],
)
def test_waits_are_counted(torch_alone, call, counts):
    found = torch_alone.run(f"{BREAKS}:counted", seconds=60, name=call).checked()
    assert found == counts


def test_a_fork_too_late(torch_alone):
    """A process that used the GPU has children that cannot; those of these tests fork before."""
    said = torch_alone.run(f"{BREAKS}:forks_after_it_used_the_gpu", seconds=60).checked()
    assert "cudaErrorInitializationError" in said

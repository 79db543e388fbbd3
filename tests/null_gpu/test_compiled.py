"""Inductor's kernels for a GPU, interpreted on the null GPU's memory, equal eager functions.

With PyTorch 2.11, a search in a slice was compiled as one in the whole tensor; each row then had
the next request's tokens, and only a GPU showed it.
"""

from collections.abc import Iterator

import pytest

from tests.support.null_gpu.processes import NullGpu

CASES = "tests.null_gpu.compiled_cases"


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NullGpu]:
    """A null GPU that computes, of a capability for which vLLM has no CuTe kernels."""
    folder = tmp_path_factory.mktemp("compiled")
    with NullGpu(folder, imports="torch", capability="8.0", interprets=True) as running:
        yield running


@pytest.mark.parametrize(
    "layout",
    [
        "FreeCanvas",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("AlignedBlock", "ShiftedBlock", "VerifiedDraft")
        ),
    ],
)
def test_rows(gpu, layout):
    """Compiled functions lay out the rows that the eager ones do, for each layout."""
    found = gpu.run(f"{CASES}:compare_rows", capability="8.0", layout=layout)
    assert found.checked() == []


@pytest.mark.parametrize("is_masked", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_steps(gpu, is_masked):
    """A compiled step gives the canvases and tokens of the eager one."""
    found = gpu.run(f"{CASES}:compare_steps", capability="8.0", is_masked=is_masked)
    assert found.checked() == []

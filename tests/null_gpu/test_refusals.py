"""A GPU that cannot serve a model is refused in one line before anything is loaded."""

import pytest

from tests.support.engines.commands import run
from tests.support.models.checkpoints import SHIPPED
from tests.support.null_gpu.processes import environment
from vllm_diffusion.cli.server import VLLM_SERVE

pytestmark = pytest.mark.engine


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("device", "sentence"),
    [
        ({"NULL_GPU_CAPABILITY": "7.5"}, "has compute capability 7.5"),
        # The shipped checkpoint has three million bytes of weights in bfloat16.
        pytest.param(
            {"NULL_GPU_CAPABILITY": "8.6", "NULL_GPU_GIB": "0.002"},
            "The weights take 0.0 GiB",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_gpu_that_cannot_serve(tmp_path, device, sentence):
    """The command ends with one line that names why the GPU cannot serve."""
    variables = environment(tmp_path, **device)
    done = run(*VLLM_SERVE, SHIPPED, "--port", "1", status=1, env=variables)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("vllm-diffusion: ")
    assert sentence in last
    assert "Traceback" not in done.stdout + done.stderr

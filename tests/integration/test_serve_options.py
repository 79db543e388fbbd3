"""An option of ``vllm serve`` is refused by name before loading, or changes no token."""

import re
import sys

import pytest

from tests.robustness.serve_options import OPTIONS, configure, explains
from tests.support.engines.commands import run
from tests.support.models.checkpoints import SHIPPED
from vllm_diffusion.checkpoints import shipped_checkpoint
from vllm_diffusion.startup.engine_process import refusal_in
from vllm_diffusion.startup.options import sentences

pytestmark = pytest.mark.engine

# Other values of options that are refused.
BESIDE_REFUSED = [
    options
    for options in (*OPTIONS.served, *OPTIONS.served_with_other_tokens)
    if not OPTIONS.refused.keys().isdisjoint(options.split())
]


@pytest.mark.parametrize("name", OPTIONS.refused)
def test_refused(name: str) -> None:
    """A refused option ends the start with its sentence."""
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        configure(OPTIONS.refused[name])
    line = refusal_in(raised.value)
    assert line is not None, raised.value
    assert explains(sentences()[name], line), line


@pytest.mark.parametrize("options", BESIDE_REFUSED)
def test_not_refused(options: str) -> None:
    """Other values of an option that is refused with some values are served."""
    configure(options)


def test_settings_without_their_switch() -> None:
    """Settings that vLLM would silently drop without their switch are refused."""
    with pytest.raises(ValueError, match="--enable-fault-tolerance needs") as raised:
        configure("--fault-tolerance-config.engine_recovery_timeout_sec 5")
    assert refusal_in(raised.value) is not None


def test_models_that_are_not_ours() -> None:
    """An option that a diffusion model refuses is left to vLLM for other models."""
    from vllm.engine.arg_utils import EngineArgs

    model = str(shipped_checkpoint("qwen3"))
    config = EngineArgs(model=model, model_impl="transformers").create_model_config()
    assert config.architecture.startswith("Transformers")


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_all() -> None:
    """Every option of the table is refused, or served with the same tokens, as the table states."""
    run(sys.executable, "-m", "tests.robustness.serve_options")


@pytest.mark.slow
def test_one_line() -> None:
    """A refusal ends vLLM's command with its sentence instead of a trace."""
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", SHIPPED]
    options = ["--host", "127.0.0.1", "--enable-prompt-embeds"]
    done = run(*command, *options, status=1, timeout=600)
    assert "Traceback" not in done.stderr + done.stdout
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("vllm-diffusion: --enable-prompt-embeds")
    assert re.search(r"leave it out.*\.$", last)


def test_trace_of_others() -> None:
    """vLLM's own refusals keep vLLM's output."""
    with pytest.raises(ValueError, match="Elastic EP is only supported with") as raised:
        configure("--enable-elastic-ep")
    assert refusal_in(raised.value) is None

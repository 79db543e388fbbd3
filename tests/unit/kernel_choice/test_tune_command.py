"""``vllm-diffusion tune``, with processes that stand in for those of a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vllm.platforms import current_platform

from tests.support.commands import refusal_of, status_of
from vllm_diffusion.cli import tune
from vllm_diffusion.cli.checkpoint import shipped_checkpoint
from vllm_diffusion.kernel_choice import process, tuned_file
from vllm_diffusion.kernel_choice.cases import KernelCase
from vllm_diffusion.kernel_choice.process import CannotCheckError, Outcome
from vllm_diffusion.kernel_choice.step_shape import StepShape
from vllm_diffusion.kernel_choice.tuned_file import read_tuned
from vllm_diffusion.kernel_choice.tuning import TIMING_COMMAND

pytestmark = pytest.mark.engine

MODEL = shipped_checkpoint()
# The CPU platform's, by which configurations are made.
IS_CUDA = type(current_platform).is_cuda
OPTIONS = ("--lengths", "100", "300", "--requests", "1", "--max-model-len", "1024")


class StandIn:
    """A process on a GPU that there is none of.

    Attributes:
        wrong: Implementations that are not right.
        times: Microseconds of implementations, by their name; 100 of others.
        problem: Why no process starts; empty where one does.
        asked: Cases that were asked, with the command of their process.
    """

    wrong: tuple[str, ...] = ()
    times: dict[str, float] = {}
    problem = ""
    asked: list[tuple[Any, KernelCase]] = []

    def __init__(
        self, device: str, *, seconds: float, measures: bool = False, command: Any = None
    ) -> None:
        assert measures == (command == TIMING_COMMAND)
        self.command = command

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *args: object) -> None:
        """Nothing was started."""

    def check(self, case: KernelCase) -> Outcome:
        """Answer as a process would."""
        if self.problem:
            raise CannotCheckError(self.problem)
        self.asked.append((self.command, case))
        if self.command is None:
            is_wrong = case.impl in self.wrong
            return Outcome("wrong", "error 1e+00 exceeds 1e-03") if is_wrong else Outcome("right")
        return Outcome("right", microseconds=self.times.get(case.impl, 100.0))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> type[StandIn]:
    """A machine with a GPU, as far as the command can tell; what its processes answer."""
    monkeypatch.setattr(tune, "nvidia_lack", lambda: None)
    monkeypatch.setattr(tuned_file, "gpu_name", lambda device: "NVIDIA H200 9.0")
    monkeypatch.setattr(tune, "quieten", lambda: None)
    configure = tune.diffusion_config

    def configured(*arguments: Any) -> Any:
        monkeypatch.setattr(type(current_platform), "is_cuda", IS_CUDA)
        config = configure(*arguments)
        # From here on; configurations are made by the CPU platform.
        monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
        return config

    monkeypatch.setattr(tune, "diffusion_config", configured)

    class Fresh(StandIn):
        asked: list[tuple[Any, KernelCase]] = []

    monkeypatch.setattr(process, "CheckProcess", Fresh)
    return Fresh


def test_tune(gpu: type[StandIn], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Everything is checked before it is timed, each choice is a line, and the file holds them."""
    gpu.times = {"cute": 80.0, "skip_unlikely false, two streams": 96.0}
    output = tmp_path / "tuned.json"
    assert status_of("tune", MODEL, "--output", output, *OPTIONS) == 0
    commands = [command for command, _ in gpu.asked]
    assert commands == sorted(commands, key=lambda command: command is not None)
    lines = capsys.readouterr().err.splitlines()
    chosen = [line for line in lines if line.startswith(("attention of", "sampler"))]
    assert len(chosen) == 2 * 2 + 1
    for line in chosen[:-1]:
        assert line.endswith("cute, splits up to 8, 20% less time than triton, splits up to 8")
    assert chosen[-1] == ("sampler: skip_unlikely false, one stream; nothing right is 5% faster")
    assert f'"tuned": "{output}"' in lines[-1]
    described, kernels = read_tuned(output)
    assert described.gpu == "NVIDIA H200 9.0"
    assert {impl for phases in kernels.attention.values() for impl in phases.values()} == {"cute"}
    assert (kernels.skip_unlikely, kernels.two_streams) == (False, False)
    figures = json.loads(output.read_text("utf-8"))["microseconds"]
    # Two lengths of one request.
    assert next(iter(figures.values()))["cute, splits up to 8"] == 160.0
    assert figures["sampler"]["skip_unlikely true, one stream"] == 100.0


def test_the_most_requests_are_timed(gpu: type[StandIn], tmp_path: Path) -> None:
    """The sampler also on as many canvases as its largest graph holds, unless the operator says what runs."""
    options = ("--lengths", 100, "--max-model-len", 1024, "--max-num-seqs", 12)
    for requests, slots in ((), {1, 8, 12}), (("--requests", 3), {3}):
        gpu.asked.clear()
        output = tmp_path / "tuned.json"
        assert status_of("tune", MODEL, "--output", output, *requests, *options) == 0
        shapes = [case.shapes[0] for command, case in gpu.asked if command is not None]
        assert {shape.slots for shape in shapes if isinstance(shape, StepShape)} == slots
        output.unlink()


def test_what_is_wrong_is_not_chosen(gpu: type[StandIn], tmp_path: Path) -> None:
    """However fast it is."""
    gpu.times, gpu.wrong = {"cute": 1.0}, ("cute",)
    output = tmp_path / "tuned.json"
    assert status_of("tune", MODEL, "--output", output, *OPTIONS) == 0
    _, kernels = read_tuned(output)
    assert {impl for phases in kernels.attention.values() for impl in phases.values()} == {"triton"}
    assert not any(case.impl == "cute" for command, case in gpu.asked if command is not None)


def test_nothing_right(
    gpu: type[StandIn], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No file is written where there is nothing to write."""
    gpu.wrong = ("triton", "cute")
    output = tmp_path / "tuned.json"
    assert status_of("tune", MODEL, "--output", output, *OPTIONS) == 1
    assert not output.exists()
    assert capsys.readouterr().err.splitlines()[-1].startswith("No kernel was found right")


def test_no_process_on_the_gpu(
    gpu: type[StandIn], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A GPU that another process holds for itself."""
    gpu.problem = "CUDA-capable device(s) is/are busy or unavailable"
    assert status_of("tune", MODEL, "--output", tmp_path / "tuned.json", *OPTIONS) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line == f"No process could use the GPU ({gpu.problem}); stop what else uses it."


@pytest.mark.usefixtures("gpu")
def test_a_file_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was measured for minutes is printed, and can be kept."""
    output = tmp_path / "tuned.json"

    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert status_of("tune", MODEL, "--output", output, *OPTIONS) == 1
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1] == (
        f"{output} cannot be written (No space left on device); it is printed instead."
    )
    printed = captured.out[captured.out.index('{\n "format"') :]
    assert json.loads(printed)["gpu"] == "NVIDIA H200 9.0"


def test_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, before vLLM configures anything."""
    output = tmp_path / "tuned.json"
    assert status_of("tune", MODEL, "--output", output) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "Kernels are tuned on an NVIDIA GPU: this machine has none. Run it where the model is served.\n"
    )
    assert not output.exists()


@pytest.mark.usefixtures("gpu")
def test_refusals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model, a length, an environment and an option of vLLM's with which there is nothing to measure."""
    output = ("--output", tmp_path / "tuned.json")
    autoregressive = shipped_checkpoint("qwen3")
    assert status_of("tune", autoregressive, *output, "--max-model-len", 256) == 1
    assert "is no diffusion model" in capsys.readouterr().err.splitlines()[-1]
    assert status_of("tune", MODEL, *output, "--max-model-len", 8) == 1
    assert "max_model_len" in capsys.readouterr().err.splitlines()[-1]
    words = ("tune", MODEL, *output, "--lengths", 5000, "--max-model-len", 1024)
    assert status_of(*words) == 2
    assert "--lengths: 5000 is above the model's length of 1024" in capsys.readouterr().err
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert status_of("tune", MODEL, *output, *OPTIONS) == 1
    assert "VLLM_BATCH_INVARIANT leaves nothing to tune" in capsys.readouterr().err


def test_output_is_checked_first(capsys: pytest.CaptureFixture[str]) -> None:
    """A file that cannot be written is refused before anything is measured."""
    message = refusal_of(capsys, "tune", MODEL, "--output", "/no/such/folder/tuned.json")
    assert "--output" in message
    assert "--output" in refusal_of(capsys, "tune", MODEL)

"""Tests of the campaign: it is bounded, keeps runs apart and loses no measurement."""

import contextlib
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import campaign
import figures
import machine
import pytest
import records
import report
import results
from campaign import EXPERIMENTS, Experiment

H200 = {"gpu": "NVIDIA H200", "driver": "580.1", "vllm": "0.33.0", "torch": "2.14.0"}
H200 |= {"triton": "3.8.0", "capability": "9.0", "memory_gib": 139.8}
COMMIT = "c" * 40
TINY = "--model vllm_diffusion/checkpoints/tiny_diffusion_gemma --sides ours stock --options="
# Options that make the experiments of a script small enough for a CPU: the last of an option wins.
SMALL = {
    "gpu/check_gpu.py": "",
    "bench_canvas_attention.py": "--requests 1 --contexts 20 --peers cute stock-fa4",
    "bench_serve.py": f"{TINY} --concurrency 1 --rounds 1 --prompts 1 --steps 2 --input-len 16 --output-len 32 --max-model-len 256",
    "gpu/bench_experts.py": "--moe auto --linear auto",
    "gpu/profile_serving.py": "--requests 1",
    "gpu/answers.py": "--prompts 1",
    "bench_decisions.py": "--questions 1 --clients 1 --texts 1 --rounds 1",
}
DECISIONS = ("  decided: ", "  not decided, ", "  tells: ")


class Line(Experiment):
    """An experiment that runs one line of Python and has its rows in the file ``data``."""

    def command(self, data: str, out: str) -> list[str]:
        prepared = f"import sys, os, time, json; data = open(sys.argv[1], 'a'); {self.script}"
        return [sys.executable, "-c", prepared, data]


def line(name: str, code: str, limit: float = 1.0, **changes: float) -> Line:
    words = {"decides": "it is taken", "otherwise": "it is deleted"}
    return Line(name, "whether", code, changes.pop("expected", 0.0), limit, **words, **changes)


def row(value: int) -> str:
    return f"data.write(json.dumps({{'table': 't', 'value': {value}}}) + chr(10)); data.flush()"


def run(folder: Path, *experiments: Experiment, facts: dict = H200, options: tuple = ()) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "describe", None)
        patch.setattr(machine, "described", lambda environment: facts)
        patch.setattr(campaign, "EXPERIMENTS", experiments or EXPERIMENTS)
        return campaign.main(["run", "--out", str(folder), "--commit", COMMIT, *options])


def test_a_broken_step_does_not_keep_the_next_from_running(tmp_path):
    """Steps that fail, are killed or hang do not keep the following ones from running."""
    steps = (
        line("first", row(1)),
        line("fails", f"{row(2)}; sys.exit('no such kernel')"),
        line("dies", "os.kill(os.getpid(), 9)"),
        line("hangs", f"{row(3)}; time.sleep(60)", limit=1 / 60),
        line("last", row(4)),
    )
    assert run(tmp_path, *steps) == 1
    found = results.read(tmp_path)
    states = [found[step.name].state for step in steps]
    assert states == ["done", "failed", "failed", "cut", "done"]
    assert found["fails"].reason == "exit status 1: no such kernel"
    assert found["hangs"].reason == "stopped after 1 seconds"
    rows = [[one["value"] for one in found[step.name].rows] for step in steps]
    assert rows == [[1], [2], [], [3], [4]]


def test_each_result_is_followed_by_what_it_decides(tmp_path, capsys, monkeypatch):
    """A target that is met, missed or not measured prints its numbers and its decision."""
    value = figures.cell("value", table="t")
    wanted = [figures.Figure("time over Triton's", name, (value,), most=(2,)) for name in "abc"]
    monkeypatch.setattr(report, "FIGURES", wanted)
    assert run(tmp_path, line("a", row(1)), line("b", row(3)), line("c", ""), line("d", "")) == 0
    printed = [text.strip() for text in capsys.readouterr().out.splitlines() if text[:2] == "  "]
    assert printed == [
        "time over Triton's: 1; at most 2: met",
        "decided: it is taken",
        "time over Triton's: 3; at most 2: **missed**",
        "decided: it is deleted",
        "not decided, since a target is open: it is taken",
        "tells: it is taken",
    ]


def test_the_experiments_of_flash_attention_4_fit_the_first_call():
    """The first ten minutes check ``cute``, then both kinds of layers, then both servers."""
    first = EXPERIMENTS[:4]
    names = ["cute", "attention-sliding", "attention-full", "serving-cute-32"]
    assert [experiment.name for experiment in first] == names
    assert sum(experiment.expected for experiment in first) <= 9.5
    deciding = {f.experiments.split()[-1] for f in figures.FIGURES if f.target}
    for experiment in EXPERIMENTS:
        assert experiment.decides
        assert bool(experiment.otherwise) == (experiment.name in deciding), experiment.name


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(1500)
def test_a_call_of_ten_minutes_is_rehearsed_on_a_cpu(tmp_path, capsys, monkeypatch):
    """All experiments run with small shapes, write rows at once and print their decisions."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    small = [
        replace(experiment, script=f"{experiment.script} {SMALL[path]}")
        for experiment in EXPERIMENTS
        if (path := experiment.script.split()[0]) in SMALL
    ]
    seen, ended = set(), threading.Event()

    def watch() -> None:
        while not ended.wait(0.1):
            for path in tmp_path.glob("*.jsonl"):
                # It is removed when its experiment has ended.
                with contextlib.suppress(FileNotFoundError):
                    seen.update([path.stem] if records.read(path) else [])

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        status = run(tmp_path, *small, options=("--minutes", "9.5"))
    finally:
        ended.set()
        watching.join()
    printed = capsys.readouterr().out
    assert status == 0, printed
    found = results.read(tmp_path)
    done = [name for name, result in found.items() if result.state == "done"]
    assert {"cute", "attention-sliding", "attention-full"} <= set(done)
    assert all(found[name].rows for name in done)
    assert "cute" in seen
    decided = [line for line in printed.splitlines() if line.startswith(DECISIONS)]
    assert len(decided) == len(found)


def test_another_run_is_never_mixed_in(tmp_path, capsys):
    """A second run into the same folder is refused, and runs copied into one stay apart."""
    one, two = tmp_path / "one", tmp_path / "two"
    assert run(one, line("first", row(1))) == 0
    other = H200 | {"gpu": "NVIDIA B200"}
    for changed in ({"facts": other}, {"options": ("--commit", "d" * 40)}):
        assert run(one, line("second", row(2)), **changed) == 2
        assert "holds results of another run (NVIDIA H200" in capsys.readouterr().err
    run(two, line("second", row(2)), facts=other)
    (two / "second.json").rename(one / "second.json")
    assert [list(found.found) for found in results.read_all([one])] == [["first"], ["second"]]


def test_an_interrupted_campaign_keeps_its_rows(tmp_path):
    """A campaign that is terminated stops its experiment and reports what was measured."""
    pid, out = tmp_path / "pid", tmp_path / "out"
    code = (
        "import sys, pathlib\n"
        "*sys.path[:0], out, body = sys.argv[1:]\n"
        "import test_campaign as tests\n"
        "sys.exit(tests.run(pathlib.Path(out), tests.line('kernels', body)))\n"
    )
    body = f"{row(1)}; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(100)"
    paths = [str(Path(file).parent) for file in (campaign.__file__, __file__)]
    command = [sys.executable, "-c", code, *paths, str(out), body]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        while not (pid.is_file() and pid.read_text()):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.1)
        process.terminate()
        assert b"what was measured is kept" in process.stderr.read()
    assert process.returncode == 130
    assert not Path("/proc", pid.read_text()).exists()
    result = results.read(out)["kernels"]
    assert (result.state, result.reason) == ("cut", "the campaign was ended")
    assert result.rows == [{"table": "t", "value": 1}]

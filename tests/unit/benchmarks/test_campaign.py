"""Tests of the campaign: it is bounded, keeps runs apart and loses no measurement, and its report
has the figures of its rows.
"""

import contextlib
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import campaign
import figures
import machine
import pytest
import records
import report
import results
from campaign import EXPERIMENTS, Experiment
from results import Facts, Origin, Result, Run

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


MEASURED = Origin("a" * 40, H200)


def run_of(
    started: str = "2026-12-01", facts: Facts | None = None, **rows: list[dict[str, Any]]
) -> Run:
    """Return results by experiment, with a dash for each underscore."""
    names = {name.replace("_", "-"): some for name, some in rows.items()}
    found = {
        name: Result(name, "done", "", "python x", MEASURED, started, 3.0, some)
        for name, some in names.items()
    }
    return Run(MEASURED, found, facts or Facts())


def serving(side: str, speed: float, first: float, attention: str) -> list[dict[str, Any]]:
    keys = {"table": "serving", "side": side, "attention": attention, "ms_to_first": first}
    return [keys | {"requests": n, "tokens_a_second": speed * n} for n in (1, 8, 32)]


OURS = serving("ours", 150, 60, "CanvasAttentionBackend")
FA4 = "FLASH_ATTN, FlashAttention 4"
STOCK, TUNED = serving("stock", 100, 50, FA4), serving("tuned", 120, 70, FA4)
ON_TRITON = Facts(stock_attention="TRITON_ATTN")


def lines(table: str, word: str) -> list[str]:
    """Return the rows that contain a word."""
    return [line for line in table.splitlines() if word in line]


def test_document():
    """gpu-figures.md begins with the measurements, and its tables are those of the kept results."""
    page = records.DOCUMENT.read_text(encoding="utf-8")
    runs = results.read_all(sorted(path for path in results.RESULTS.iterdir() if path.is_dir()))
    written = records.with_part(page, "measured", report.measured(runs))
    written = records.with_part(written, "open", report.still_open(runs))
    assert written == page, "run python benchmarks/gpu/campaign.py report --write"
    first_table = page.index("\n|")
    assert page.index("<!-- measured -->") < first_table < page.index("<!-- end of measured -->")


def test_a_ratio_names_its_peer():
    """The peer's back end comes from stock's rows, or from the facts if the rows do not name it."""
    named = run_of(serving_both_32=OURS + STOCK)
    ratio = "| tokens a second over stock's at 1, 8 and 32 requests | 1.5, 1.5, 1.5"
    assert (
        f"; at least 1.5, 1.5, 1.5 of stock with FlashAttention 4: met | 1.13, 1.27, 1.27 | stock, {FA4} |"
        in (lines(report.measured([named]), ratio)[0])
    )
    silent = OURS + serving("stock", 100, 50, "not told")
    told = run_of(serving_both_32=silent, facts=ON_TRITON)
    assert len(lines(report.measured([told]), "| stock, TRITON_ATTN |")) == 3
    with pytest.raises(ValueError, match=r"stock's attention back end; write stock_attention"):
        report.measured([run_of(serving_both_32=silent)])


def test_a_target_of_a_ratio_is_open_without_flash_attention_4():
    """A ratio to stock on another back end neither meets nor misses the target."""
    on_triton = OURS + serving("stock", 100, 50, "TRITON_ATTN")
    table = report.measured([run_of(serving_both_32=on_triton)])
    assert "| 1.5, 1.5, 1.5 |" in table
    target = "at least 1.5, 1.5, 1.5 of stock with FlashAttention 4"
    for stock, is_open in ((on_triton, True), (OURS + STOCK, False)):
        left = report.still_open([run_of(serving_both_32=stock)])
        assert any(target in row for row in lines(left, "`serving-both-32`")) == is_open


def test_figures_are_those_of_the_rows():
    """Ratios are relative to the better stock server, and targets are met or missed by them."""
    kernels = [{"table": "kernels", "state": state} for state in ("right", "WRONG")]
    # What the probe finds of the device is not a kernel.
    probed = {"copied, GB/s": "4216", "bf16 product, TFLOP/s": "694"}
    kernels += [{"table": "probe", "what": what, "found": found} for what, found in probed.items()]
    shape = {"table": "attention", "layer": "sliding", "requests": 1, "context": 1024}
    # A sliding layer with the query's window, which is the one that stock has.
    attention = [shape | {"which": "stock-triton", "anchor": "query", "of_ours": 1.5}]
    run = run_of(
        serving_ours=OURS,
        serving_stock=STOCK,
        serving_tuned=TUNED,
        attention=attention,
        kernels=kernels,
    )
    table = report.measured([run])
    assert (
        "| tokens a second at 1, 8 and 32 requests, over the better stock | 1.25, 1.25, 1.25 |"
        in table
    )
    assert lines(table, "1.2, 1.2, 1.2; at most 1, 1, 1: **missed**")
    assert lines(table, "| 1; at most 0: **missed** |")
    assert lines(table, "| 4,216, 694 | 3,015, 593 |")
    row = lines(table, "attention, sliding layer, requests of 1,024 tokens: 1")[0]
    assert "| 1.5, -, -, -, -, - | 5.89, 1, 1, -, -, - | stock-triton," in row
    left = report.still_open([run])
    assert not lines(left, "`serving-ours`")
    # Its target is missed, which is an answer too.
    assert not lines(left, "`kernels`")
    assert lines(left, "`attention`")[0].endswith("| done, H200, aaaaaaa |")


def test_cute_is_right_only_where_it_ran():
    """A refused FP8 cache leaves ``cute`` right; another refusal or no check leaves it open."""
    (right,) = [figure for figure in figures.FIGURES if figure.experiments == "cute"]
    found, refused = "off by 1e-03", "triton is off by 1e-03; cute refuses: no CUDA"

    def measured(**founds: str) -> list[float | None] | None:
        layers = {"bf16": "attention of 256, cute", "fp8": "attention of 256, fp8 cache, cute"}
        rows = [
            {"table": "kernels", "what": layers[name], "found": text, "state": state}
            for name, (text, state) in founds.items()
        ]
        return right.measured(run_of(cute=rows).found)

    assert measured(bf16=(found, "right"), fp8=(refused, "right")) == [0]
    assert measured(bf16=("off by 3", "WRONG"), fp8=(refused, "right")) == [1]
    assert measured(bf16=(refused, "right"), fp8=(refused, "right")) is None
    assert measured() is None


def test_newest_first_and_each_figure_once():
    """Each figure is the newest on its kind of GPU, and an older run shows only the rest."""
    kernels = [{"table": "kernels", "state": "right"}]
    by_hand = Facts(figures=[{"text": "by hand", "measured": "3", "experiment": "answers"}])
    old = run_of("2026-12-01", by_hand, kernels=kernels, serving_ours=OURS)
    new = run_of("2026-12-02", kernels=kernels)
    rows = report.measured([old, new]).splitlines()[2:]
    assert [row.split("|")[1].strip()[6:16] for row in rows] == ["2026-12-02", *["2026-12-01"] * 2]
    assert "| by hand | 3 |" in rows[-1]
    assert not lines(report.still_open([old, new]), "`answers`")
    assert lines(report.still_open([new]), "`answers`")

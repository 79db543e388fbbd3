"""The campaign: bounded, resumed, never mixed, and rehearsed from its list to its report."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import campaign
import machine
import pytest
import records
import report
import results
from experiments import ALL_MINUTES, EXPERIMENTS, MOST_MINUTES, Experiment
from results import MixedRunsError, Origin, Result

ROOT = Path(__file__).resolve().parents[3]
CPU = {"gpu": None, "driver": None, "torch": "2.14.0", "triton": "3.8.0", "vllm": None}
CPU["why_no_gpu"] = "Found no NVIDIA driver on your system"
H200 = CPU | {"gpu": "NVIDIA H200", "driver": "580.1", "capability": "9.0", "memory_gib": 139.8}
H200 |= {"vllm": "0.33.0"}


def origin(facts: dict[str, Any] = CPU, **changes: Any) -> Origin:
    return replace(Origin("c" * 40, "s" * 16, True, facts), **changes)


def script(name: str, code: str, **changes: Any) -> Experiment:
    """An experiment that runs a line of Python; ``data`` is the file of its rows."""
    prepared = f"import sys, os, time, json; data = open(sys.argv[1], 'a'); {code}"

    class Line(Experiment):
        def command(self, toy: bool, data: str, out: str) -> list[str]:
            return [sys.executable, "-c", prepared, data]

    return Line(name, "whether", "", "", 0.0, 1.0, **changes)


def row(value: int) -> str:
    return f"data.write(json.dumps(dict(table='t', value={value})) + chr(10)); data.flush()"


def run_all(
    folder: Path, experiments: list[Experiment], seconds: float = 60.0, **options: Any
) -> dict[str, Result]:
    started = campaign.Campaign(
        folder,
        options.pop("origin", origin()),
        dict(os.environ),
        time.monotonic() + seconds,
        **options,
    )
    return {result.experiment: result for result in started.run(experiments)}


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_broken_step_does_not_keep_the_next_from_running(tmp_path):
    """One that fails, one that is killed and one that hangs, between two that work."""
    found = run_all(
        tmp_path,
        [
            script("first", row(1)),
            script("fails", f"{row(2)}; sys.exit('no such kernel')"),
            script("dies", "os.kill(os.getpid(), 9)"),
            replace(script("hangs", f"{row(3)}; time.sleep(60)"), limit=1 / 60),
            script("last", row(4)),
        ],
    )
    states = {name: result.state for name, result in found.items()}
    assert list(states.values()) == ["done", "failed", "failed", "timed out", "done"]
    assert found["fails"].reason == "exit status 1: no such kernel"
    assert found["hangs"].reason == "stopped after 1 seconds"
    # What was measured before the end counts.
    values = [[r["value"] for r in result.rows] for result in found.values()]
    assert values == [[1], [2], [], [3], [4]]
    assert results.read(tmp_path) == found


def test_nothing_of_a_stopped_experiment_is_left(tmp_path):
    """A server in a session of its own, which no signal to the experiment reaches."""
    pid_file = tmp_path / "pid"
    code = (
        "import subprocess; p = subprocess.Popen([sys.executable, '-c', 'import signal, time; "
        "signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(100)'], start_new_session=True); "
        f"open({str(pid_file)!r}, 'w').write(str(p.pid)); "
    )
    stopped = replace(script("stopped", code + "time.sleep(100)"), limit=2 / 60)
    found = run_all(tmp_path / "results", [stopped])
    assert found["stopped"].state == "timed out"
    assert not is_running(int(pid_file.read_text()))
    # One that ends by itself and leaves its server behind, too.
    run_all(tmp_path / "results", [script("left", code)])
    assert not is_running(int(pid_file.read_text()))


def test_what_others_started_stays(tmp_path):
    """A process that this one had before is not an experiment's."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as bystander:
        run_all(tmp_path, [script("short", "pass")])
        assert bystander.poll() is None
        bystander.communicate(b"\n")


def test_an_interrupted_run_goes_on(tmp_path):
    """What is settled is not repeated; what was interrupted, cut or not run is."""
    marks = tmp_path / "marks"
    mark = f"open({str(marks)!r}, 'a').write"
    steps = [
        script("done", f"{mark}('d')"),
        script("failed", f"{mark}('f'); sys.exit(1)"),
        script("interrupted", f"{mark}('i')"),
        script("late", f"{mark}('l')"),
    ]
    folder = tmp_path / "results"
    first = run_all(folder, steps[:2])
    begun = replace(first["done"], experiment="interrupted", state="running", reason="interrupted")
    results.write(folder, begun)
    slow = [steps[0], steps[1], replace(steps[2], expected=9.0), steps[3]]
    found = run_all(folder, slow)
    assert found["interrupted"].state == "not run"
    assert "minutes were left of --minutes" in found["interrupted"].reason
    assert marks.read_text() == "dfl"
    run_all(folder, steps)
    assert marks.read_text() == "dfli"
    run_all(folder, steps, again=["failed"])
    assert marks.read_text() == "dflif"
    # So is what got less time than it may take.
    long = script("long", f"{row(1)}; time.sleep(30)")
    assert run_all(folder, [long], seconds=2.0)["long"].state == "cut"
    assert run_all(folder, [script("long", row(2))])["long"].state == "done"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"commit": "d" * 40}, "commit is 'cccc"),
        ({"sources": "t" * 16}, "sources is"),
        ({"toy": False}, "toy is True there and False here"),
        ({"machine": H200}, "gpu is None there and 'NVIDIA H200' here"),
    ],
    ids=["commit", "changed files", "size", "machine"],
)
def test_another_run_is_never_mixed_in(tmp_path, changes, named):
    """Refused where it would be added, and apart where both are reported."""
    ours, theirs = origin(), origin(**changes)
    run_all(tmp_path / "one", [script("probe", row(1))], origin=ours)
    with pytest.raises(MixedRunsError, match=named):
        results.check_origin(tmp_path / "one", theirs)
    results.check_origin(tmp_path / "one", ours)
    run_all(tmp_path / "two", [script("kernels", row(2))], origin=theirs)
    # Copied into one folder by hand.
    (tmp_path / "two" / "kernels.json").rename(tmp_path / "one" / "kernels.json")
    groups = results.read_all([tmp_path / "one"])
    assert sorted(list(found) for _, found in groups) == [["kernels"], ["probe"]]


def test_the_command_refuses_another_commit(tmp_path, capsys, monkeypatch):
    """Before anything runs, in a sentence that names both and the remedy."""
    monkeypatch.setattr(machine, "described", lambda environment: CPU)
    for commit, status in (("a" * 40, 0), ("b" * 40, 2)):
        options = ["run", "--toy", "--stub", "--only", "experts", "--out", str(tmp_path)]
        assert campaign.main([*options, "--commit", commit]) == status
    error = capsys.readouterr().err
    assert "commit is 'aaaa" in error
    assert "name another folder with --out" in error


def test_a_file_that_is_no_result(tmp_path):
    (tmp_path / "probe.json").write_text('{"state": 3')
    with pytest.raises(ValueError, match=r"probe\.json is no result of the campaign"):
        results.read(tmp_path)


OLD_DRIVER = {"driver": "450.80", "why_no_gpu": "The NVIDIA driver on your system is too old"}


@pytest.mark.parametrize(
    ("needs", "facts", "toy", "reason"),
    [
        ({}, CPU, False, "Found no NVIDIA driver on your system (no NVIDIA driver answers)"),
        ({}, CPU | OLD_DRIVER, False, "too old (driver 450.80)"),
        ({"on_gpu_alone": True}, CPU, True, "Found no NVIDIA driver"),
        ({"memory_gib": 200}, H200, False, "NVIDIA H200 has 139.8 GiB, and this needs 200"),
        ({}, H200 | {"capability": "7.5"}, False, "capability 7.5, and this needs 8.0"),
        ({"vllm": True}, CPU, True, "vLLM is not installed"),
        ({"vllm": True, "memory_gib": 100}, H200, False, None),
        ({"memory_gib": 100}, CPU, True, None),
    ],
)
def test_what_is_missing_is_named(needs, facts, toy, reason):
    lacks = script("x", "", **needs).lacks(facts, toy)
    assert lacks is None if reason is None else reason in lacks


def test_vllm_finds_the_entry_points_of_a_bare_checkout(tmp_path):
    """As of an installed package."""
    folder = machine._entry_points(tmp_path)
    code = (
        "import importlib.metadata as m, json\n"
        "found = m.Distribution.discover(name='vllm-diffusion', path=[%r])\n"
        "print(json.dumps(sorted(e.group + e.name for d in found for e in d.entry_points)))\n"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code % str(folder)], capture_output=True, text=True, check=True
    ).stdout
    names = json.loads(printed)
    assert "vllm.general_pluginsvllm_diffusion" in names
    assert "vllm.platform_pluginsvllm_diffusion_cpu" in names


def test_the_list():
    """Bounded one by one and in all; every script is there, every figure's experiment too."""
    names = [experiment.name for experiment in EXPERIMENTS]
    assert len(set(names)) == len(names)
    assert all(e.expected <= e.limit <= MOST_MINUTES for e in EXPERIMENTS)
    assert sum(e.expected for e in EXPERIMENTS) <= ALL_MINUTES
    for experiment in EXPERIMENTS:
        for toy in (False, True):
            assert (ROOT / experiment.command(toy, "data", "out")[1]).is_file()
    wanted = {name for figure in report.FIGURES for name in figure.experiments.split()}
    assert wanted <= set(names)


def test_rows_that_were_cut_off(tmp_path):
    """A line that a kill left half written is no row."""
    path = tmp_path / "rows.jsonl"
    file = records.Rows(path)
    file.add("t", value=1)
    with path.open("a") as opened:
        opened.write('{"table": "t", "val')
    assert records.read(path) == [{"table": "t", "value": 1}]


def test_an_interrupt_ends_the_experiment_with_the_campaign(tmp_path):
    """SIGTERM, as of a machine that is taken back: nothing runs on, and the rest is resumed."""
    pid_file, out = tmp_path / "pid", tmp_path / "results"
    body = (
        "import os, pathlib, time; "
        f"pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid())); time.sleep(100)"
    )
    code = (
        "import sys\n"
        f"sys.path[:0] = [{str(ROOT / 'benchmarks/gpu')!r}]\n"
        "import campaign, experiments\n"
        f"words = [sys.executable, '-c', {body!r}]\n"
        "experiments.Experiment.command = lambda *_: words\n"
        f"sys.exit(campaign.main(['run', '--toy', '--stub', '--out', {str(out)!r}]))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    while not (pid_file.is_file() and pid_file.read_text()):
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"the same command goes on from here" in error
    assert not is_running(int(pid_file.read_text()))
    assert results.read(out)["kernels"].state == "running"


# Experiments that need neither a GPU nor an engine at toy size.
MEASURED = [e for e in EXPERIMENTS if not e.vllm]


def test_scripts_at_toy_size(tmp_path):
    """Each runs to its end without vLLM and writes rows, those of checks all right."""
    # In one process, which imports torch once.
    code = (
        "import json, runpy, sys\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    sys.argv = words\n"
        "    print(*words)\n"
        "    try:\n"
        "        runpy.run_path(words[0], run_name='__main__')\n"
        "    except SystemExit as ended:\n"
        "        assert not ended.code, words\n"
    )
    # The other form of the sampler's script is as slow, and has no more ways through it.
    some = [e for e in MEASURED if e.name != "sampler"]
    data = {experiment.name: tmp_path / experiment.name for experiment in some}
    commands = [e.command(True, str(data[e.name]), str(tmp_path))[1:] for e in some]
    environment = machine.environment(CPU, True, tmp_path)
    environment["PYTHONPATH"] += f"{os.pathsep}{machine.HERE}"
    subprocess.run(
        [sys.executable, "-c", code, json.dumps(commands)], cwd=ROOT, env=environment, check=True
    )
    for name, path in data.items():
        rows = records.read(path)
        assert rows, name
        assert {row.get("state", "right") for row in rows} == {"right"}


def test_rehearsal(tmp_path, capsys, monkeypatch):
    """From the list to the report, without vLLM."""
    monkeypatch.setattr(machine, "described", lambda environment: CPU)
    lacking = [e.name for e in EXPERIMENTS if e not in MEASURED]
    options = ["run", "--toy", "--stub", "--out", str(tmp_path), "--only", *lacking]
    assert campaign.main(options) == 0
    capsys.readouterr()
    assert campaign.main(["report", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    found = results.read(tmp_path)
    assert {name: result.state for name, result in found.items()} == dict.fromkeys(
        lacking, "not run"
    )
    for result in found.values():
        assert result.reason
        assert result.origin.commit == machine.commit()
        assert result.origin.machine == CPU
        # As anybody can type it.
        assert result.command.startswith("python benchmarks/")
        assert str(tmp_path) not in result.command
    # Nothing of it is an answer.
    assert said.count("| open |") == len(report.FIGURES)
    assert "A rehearsal" in said
    assert "| serving-ours | not run | 0.0 | vLLM is not installed |" in said
    assert "| kernels | not run |  | nobody asked for it |" in said


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(1500)
def test_rehearsal_that_serves(tmp_path):
    """All of it with vLLM, as a user runs it; only what times a kernel of GPUs is left out."""
    # As after `git clone`: nothing of the tests' environment.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(ROOT / "benchmarks/gpu/campaign.py"), "run", "--toy"]
    ran = subprocess.run([*command, "--out", str(tmp_path)], env=environment, check=False)
    found = results.read(tmp_path)
    assert ran.returncode == 0, {name: result.log for name, result in found.items()}
    states = {name: result.state for name, result in found.items()}
    assert states == {e.name: "not run" if e.name == "experts" else "done" for e in EXPERIMENTS}
    serving = [row for name, result in found.items() if "serving" in name for row in result.rows]
    assert {row["side"] for row in serving} == {"ours", "stock", "tuned"}
    assert all(row["tokens_a_second"] > 0 for row in serving)

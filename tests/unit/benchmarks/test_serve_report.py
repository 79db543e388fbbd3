"""What bench_serve.sh serves, and how it reads what came back."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
CONFIG = BENCHMARKS / "configs" / "diffusion-gemma-26b-fp8"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


folder = load("serve_folder")
report = load("serve_report")


def run(throughput: float, first: float, **others: Any) -> dict[str, Any]:
    return {
        "output_throughput": throughput,
        "median_ttft_ms": first,
        "failed": 0,
        "completed": 4,
        "num_prompts": 4,
        "median_itl_ms": 34.0,
    } | others


def write_runs(path: Path, **failures: int) -> None:
    runs = {"ours": run(300.0, 50.0), "stock": run(100.0, 40.0), "tuned": run(200.0, 80.0)}
    for side, found in runs.items():
        found["failed"] = failures.get(side, 0)
        (path / f"{side}-1.json").write_text(json.dumps(found))
        (path / f"{side}.log").write_text("INFO Using FLASH_ATTN attention backend out of ...")


def test_rows(tmp_path, monkeypatch, capsys):
    """What the campaign keeps: a row for each side, with the time of a pass where a client is alone."""
    write_runs(tmp_path)
    options = ["serve_report", str(tmp_path), "--steps", "16", "--concurrency", "1"]
    data = tmp_path / "rows.jsonl"
    monkeypatch.setattr("sys.argv", [*options, "--data", str(data)])
    report.main()
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    assert [row["side"] for row in rows] == ["ours", "stock", "tuned"]
    assert [row["tokens_a_second"] for row in rows] == [300.0, 100.0, 200.0]
    assert [row["ms_a_pass"] for row in rows] == [2.125, 2.0, 2.0]
    assert {row["attention"] for row in rows} == {"FLASH_ATTN"}
    assert {(row["table"], row["requests"], row["ms_to_first"]) for row in rows} == {
        ("serving", 1, 50.0),
        ("serving", 1, 40.0),
        ("serving", 1, 80.0),
    }


def test_report(tmp_path, monkeypatch, capsys):
    """Each figure is compared with the stock that is better at it; targets stand beside a GPU's."""
    write_runs(tmp_path)
    options = ["serve_report", str(tmp_path), "--steps", "16", "--concurrency", "1"]
    monkeypatch.setattr("sys.argv", [*options, "--gpu", "NVIDIA H200"])
    report.main()
    text = capsys.readouterr().out
    assert "1.50 x tokens/s, 1.25 x time to first" in text
    assert "targets: at least 1.10, at most 1.00" in text
    assert "ours 2.12 ms, stock 2.00 ms, tuned 2.00 ms" in text
    assert "stock: attention FLASH_ATTN" in text
    monkeypatch.setattr("sys.argv", options)
    report.main()
    assert "target" not in capsys.readouterr().out


def test_report_refuses_failed_requests(tmp_path, monkeypatch):
    """A side that dropped requests has no speed."""
    write_runs(tmp_path, stock=1)
    with pytest.raises(ValueError, match="stock at 1: 1 of 4 requests failed"):
        report.read(tmp_path, "stock", 1)


def test_folder_of_a_config(tmp_path):
    """The 26B config alone becomes a folder with as many words as tokens and a fixed step count."""
    from transformers import AutoConfig, AutoTokenizer

    folder.prepare(CONFIG, tmp_path / "model", steps=16)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    config = AutoConfig.from_pretrained(tmp_path / "model")
    assert len(tokenizer) == config.text_config.vocab_size == 262144
    ids = [5, 262143, 77, 77]
    assert tokenizer(tokenizer.decode(ids)).input_ids == ids
    generation = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert (generation["max_denoising_steps"], generation["stability_threshold"]) == (16, 16)
    assert generation["sampler_config"]["entropy_bound"] == 0.1


def test_folder_needs_a_config(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="has no generation_config.json"):
        folder.prepare(tmp_path, tmp_path / "model", steps=16)

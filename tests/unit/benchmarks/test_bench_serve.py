"""Tests of what bench_serve.py serves, and of how it reads the results."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import bench_serve
import pytest
import serving

SPEEDS = {"ours": (300.0, 50.0), "stock": (100.0, 40.0), "tuned": (200.0, 80.0)}
OURS = "vllm-diffusion serves this model: attention FLASH_ATTN, scheduler canvas_scheduler"
# Passes of a canvas of 16 steps, by the line that our server prints of its order.
ORDERS = {
    "(sync, encode fused with the next canvas)": 16,
    "(sync, encode separate)": 17,
    "(async, encode separate)": 17,
}


def write_run(out: Path, side: str, **changes: Any) -> None:
    """Write what ``vllm bench serve`` leaves of one side at one request, and the server's log."""
    speed, first = SPEEDS[side]
    run = {
        "output_throughput": speed,
        "median_ttft_ms": first,
        "failed": 0,
        "completed": 4,
        "num_prompts": 4,
        "median_itl_ms": 34.0,
    }
    (out / side).mkdir()
    (out / side / "64-1.json").write_text(json.dumps(run | changes))
    log = "INFO Using FLASH_ATTN attention backend out of ...\n"
    (out / f"{side}.log").write_text(log + f"{OURS} {next(iter(ORDERS))}\n" * (side == "ours"))


def test_rows(tmp_path, monkeypatch, capsys):
    """Each side has a row with its ratio to the better stock and a single client's pass time."""

    def ask(_: serving.Sweep, side: serving.Side, *rest: object) -> None:
        write_run(tmp_path, side.name)

    monkeypatch.setattr(serving.Sweep, "serve", lambda *_: nullcontext())
    monkeypatch.setattr(serving.Sweep, "ask", ask)
    monkeypatch.setattr(bench_serve, "prepare", lambda *_: None)
    data = tmp_path / "rows.jsonl"
    options = ["--out", str(tmp_path), "--data", str(data), "--concurrency", "1"]
    options += ["--input-len", "64", "--steps", "16"]
    bench_serve.main(options)
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    assert [row["side"] for row in rows] == ["ours", "stock", "tuned"]
    assert [row["tokens_a_second"] for row in rows] == [300.0, 100.0, 200.0]
    assert [row["ms_to_first"] for row in rows] == [50.0, 40.0, 80.0]
    assert [row["ms_a_pass"] for row in rows] == [2.125, 2.0, 2.0]
    assert {(row["table"], row["requests"], row["attention"]) for row in rows} == {
        ("serving", 1, "FLASH_ATTN")
    }
    text = capsys.readouterr().out
    assert "ours: 1.50 x tokens a second, 1.25 x time to the first token" in text
    assert "| stock | FLASH_ATTN |" in text


def test_passes():
    """A canvas counts a pass for its encoding alone, unless our server shares that pass."""
    found = {order: serving.passes_of(f"INFO 1\n{OURS} {order}\nINFO 2", 16) for order in ORDERS}
    assert found == ORDERS
    assert serving.passes_of("INFO Using FLASH_ATTN attention backend out of ...", 16) == 17


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("Using FLASH_ATTN attention backend out of potential backends: [...].", "FLASH_ATTN"),
        (
            "Using FLASH_ATTN attention backend out of ...\nUsing FlashAttention version 4",
            "FLASH_ATTN, FlashAttention 4",
        ),
        ("Using AttentionBackendEnum.TRITON_ATTN backend.", "TRITON_ATTN"),
        (
            "Using AttentionBackendEnum.CUSTOM backend.\n"
            "serves this model: attention a.CanvasAttentionBackend, b.Other, scheduler canvas",
            "CanvasAttentionBackend, Other",
        ),
        ("INFO", "not told"),
    ],
)
def test_attention_of(log: str, expected: str):
    """The back end is read from every line in which vLLM or this package names it."""
    assert bench_serve.attention_of(log) == expected


def test_failed_requests_are_refused(tmp_path):
    """A side with failed requests or without answers gets no speed, and the log has the reason."""
    write_run(tmp_path, "stock", failed=1)
    with pytest.raises(ValueError, match=r"FLASH_ATTN(?s:.)*stock at 1: 1 of 4 requests failed"):
        serving.Sweep(tmp_path, [(64, 1)], 64, 4).read("stock", (64, 1))
    with pytest.raises(ValueError, match=r"FLASH_ATTN(?s:.)*stock did not answer 8 at once"):
        serving.Sweep(tmp_path, [(64, 8)], 64, 4).read("stock", (64, 8))

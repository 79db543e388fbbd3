"""Puts the folders of the benchmark scripts on the path, since these import one another."""

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "gpu")]

"""Tests of a pass's calls to the driver and host time, against stock's class and baselines."""

import bench_pass_overhead as bench
import pytest

from tests.support.counters import baselines
from tests.support.null_gpu.build import build, missing

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]


def test_baselines_of_a_pass_beside_stock_s_class(tmp_path):
    """A pass takes no more operations than its baseline and fewer than stock's class.

    In units of a small operation, a change is at least twice as many; less may be the machine.
    """
    if (lacks := missing()) is not None:
        pytest.skip(lacks)
    build()
    sides = bench.overhead(tmp_path)
    host = {}
    for n, ours in sides["ours"].items():
        stock = sides["stock"].get(n)
        print(f"\n{n} requests: ours {ours}, stock {stock}")
        for what in ("kernels", "copies", "small_operations") if stock else ():
            assert ours[what] < stock[what]
        host[f"{n} requests"] = {"small_operations": ours["small_operations"]}
    baselines.check("host's time of a pass", host, slack=2.0)

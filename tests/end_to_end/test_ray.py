"""A server whose workers or engines are placed by Ray, on two nodes of it: the same tokens.

Both nodes are on this machine; all that passes between them goes through sockets as between two.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from tests.support.checkpoints import SHIPPED
from tests.support.seeded_requests import answers_alone, answers_together
from tests.support.server import Server, start_server, stop_server

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]


@contextmanager
def _two_nodes(cpus: int) -> Iterator[str]:
    """The address of a cluster, whose second node has an address of its own, as vLLM requires."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus})
    try:
        cluster.add_node(num_cpus=cpus, node_ip_address="127.0.0.2")
        yield cluster.address
    finally:
        cluster.shutdown()


@pytest.mark.parametrize(
    ("options", "cpus"),
    [
        # A node for each worker.
        ("--tensor-parallel-size 2 --distributed-executor-backend ray", 1),
        ("--pipeline-parallel-size 2 --distributed-executor-backend ray", 1),
        # And for each engine with its worker.
        ("--data-parallel-size 2 --data-parallel-size-local 1 --data-parallel-backend ray", 2),
    ],
    ids=["tensor-parallel", "pipeline-parallel", "data-parallel"],
)
def test_tokens(
    options: str, cpus: int, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and together, as one process answers; each node works."""
    # Ray's own 15 gives an engine a thirtieth of a core that anything else wants too.
    monkeypatch.setenv("RAY_worker_niceness", "0")
    expected = answers_alone(server)
    with _two_nodes(cpus) as address:
        running = start_server(
            SHIPPED, tmp_path / "server.log", *options.split(), RAY_ADDRESS=address
        )
        try:
            assert answers_alone(running) == expected
            assert answers_together(running) == expected
            running.wait_until_idle()
            assert _num_nodes_used(address) == 2
        finally:
            stop_server(running)


def _num_nodes_used(address: str) -> int:
    ray.init(address, log_to_driver=False)
    try:
        groups = ray.util.placement_group_table().values()
        return len({node for group in groups for node in group["bundles_to_node_id"].values()})
    finally:
        ray.shutdown()

"""Two nodes, both of them this machine, give one process's tokens.

Without Ray, they are the server's node and one without a server; with Ray, workers and engines are
placed by it. All that passes between them goes through sockets as between two machines.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from tests.support.engines.seeded_requests import answers_alone, check_tokens
from tests.support.engines.server import Server, start_headless, start_server
from tests.support.models.checkpoints import SHIPPED
from vllm_diffusion.cli.server import free_port

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]


@contextmanager
def _two_nodes(options: str, folder: Path) -> Iterator[Server]:
    """Run a server whose other half is a process of another command."""
    port = str(free_port())
    if "data-parallel" in options:
        both = ("--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", port)
        first, second = (), ("--data-parallel-start-rank", "1")
    else:
        both = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port)
        first, second = ("--node-rank", "0"), ("--node-rank", "1")
    words = (*options.split(), *both)
    with (
        start_headless(SHIPPED, folder / "second.log", *words, *second) as other,
        start_server(SHIPPED, folder / "first.log", *words, *first) as running,
    ):
        assert other.process.poll() is None
        yield running
        assert other.process.poll() is None
        assert "Traceback" not in other.log.read_text(errors="replace")


@pytest.mark.parametrize(
    "options",
    [
        "--tensor-parallel-size 2",
        "--data-parallel-size 2 --data-parallel-size-local 1",
    ],
)
def test_tokens(options: str, server: Server, tmp_path: Path) -> None:
    """Two nodes give the tokens of one process, alone and together."""
    expected = answers_alone(server)
    with _two_nodes(options, tmp_path) as running:
        check_tokens(running, expected)


@contextmanager
def _ray_nodes(cpus: int) -> Iterator[str]:
    """Return the address of a Ray cluster whose two nodes have addresses of their own."""
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
        # And for each engine with its worker.
        ("--data-parallel-size 2 --data-parallel-size-local 1 --data-parallel-backend ray", 2),
    ],
    ids=["tensor-parallel", "data-parallel"],
)
def test_tokens_by_ray(
    options: str, cpus: int, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Ray both nodes work and give the tokens of one process, alone and together."""
    # Ray's own 15 gives an engine a thirtieth of a core that anything else wants too.
    monkeypatch.setenv("RAY_worker_niceness", "0")
    expected = answers_alone(server)
    with (
        _ray_nodes(cpus) as address,
        start_server(
            SHIPPED, tmp_path / "server.log", *options.split(), RAY_ADDRESS=address
        ) as running,
    ):
        check_tokens(running, expected)
        assert _num_nodes_used(address) == 2


def _num_nodes_used(address: str) -> int:
    ray.init(address, log_to_driver=False)
    try:
        groups = ray.util.placement_group_table().values()
        return len({node for group in groups for node in group["bundles_to_node_id"].values()})
    finally:
        ray.shutdown()

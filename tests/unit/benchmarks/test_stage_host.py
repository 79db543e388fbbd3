"""Tests that what is staged for an offline GPU host arrives whole, or is refused."""

import random
import zipfile
from pathlib import Path

import stage_host

from tests.support.engines.commands import run

INSTALL = Path(stage_host.__file__).with_name("install_host.sh")
LIMIT = 4096


def staged(folder: Path) -> Path:
    """Return the parts of a wheel with incompressible data and a library that is dropped."""
    wheel, tree, parts = folder / "toy.whl", folder / "tree", folder / "parts"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("humming/__init__.py", "")
        archive.writestr("humming/noise.bin", random.Random(0).randbytes(3 * LIMIT))
        archive.writestr("vllm/_qutlass_C.abi3.so", "of another architecture")
        archive.writestr("toy-1.data/purelib/lmformatenforcer/__init__.py", "")
    stage_host.unpack([wheel], tree)
    stage_host.pack(tree, parts, LIMIT)
    return parts


def test_parts_are_joined_on_the_host(tmp_path):
    """No part exceeds the limit, the unpacked folder has every file except the dropped one, and a
    damaged part ends the installation before anything is unpacked.
    """
    command = ("sh", INSTALL, tmp_path / "parts")
    parts, site = staged(tmp_path), tmp_path / "site"
    sizes = [path.stat().st_size for path in sorted(parts.glob("part-*"))]
    assert len(sizes) >= 3
    assert set(sizes[:-1]) == {LIMIT}
    assert 0 < sizes[-1] <= LIMIT
    said = run(*command, site).stdout
    assert "imports     humming" in said
    assert "imports     lmformatenforcer" in said
    assert "not staged  vllm" in said
    noise = random.Random(0).randbytes(3 * LIMIT)
    assert (site / "humming/noise.bin").read_bytes() == noise
    assert not (site / "vllm").exists()
    assert str(site) in (site / "env.sh").read_text()
    part = parts / "part-01"
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    damaged = tmp_path / "damaged"
    run(*command, damaged, status=1)
    assert not (damaged / "humming").exists()

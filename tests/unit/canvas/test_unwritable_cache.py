"""A compiler that cannot write its files costs speed, and no request."""

import errno
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_diffusion.canvas.compiled import compiled, compiled_by_rows

pytestmark = pytest.mark.engine

WAYS = [compiled, compiled_by_rows]


def failing(error: Exception) -> Any:
    """Return a backend of ``torch.compile`` that raises the error."""

    def backend(graph: Any, inputs: Any) -> Any:
        raise error

    return backend


@pytest.mark.parametrize("compile_it", WAYS)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_unwritable(
    number: int, compile_it: Callable[..., Any], vllm_log: pytest.LogCaptureFixture
) -> None:
    """The function runs uncompiled from then on, once per call, and one warning says why."""
    total = torch.zeros(4)

    def add(values: Tensor) -> Tensor:
        total.add_(values)
        return total * 2

    run = compile_it(add, failing(OSError(number, os.strerror(number), "/cache/file")))
    for i in range(1, 4):
        assert run(torch.ones(4)).tolist() == [2.0 * i] * 4
    (line,) = [line for line in vllm_log.messages if "uncompiled" in line]
    assert os.strerror(number) in line
    assert "TORCHINDUCTOR_CACHE_DIR" in line


@pytest.mark.parametrize("compile_it", WAYS)
def test_other_failures(compile_it: Callable[..., Any]) -> None:
    """Another failure of the compiler is raised as it is, and so is one of what it compiled."""
    run = compile_it(lambda values: values + 1, failing(RuntimeError("a bug")))
    with pytest.raises(Exception, match="a bug"):
        run(torch.ones(4))

    def full(*inputs: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run = compile_it(lambda values: values + 1, lambda graph, inputs: full)
    with pytest.raises(OSError, match="No space left"):
        run(torch.ones(4))

"""Turn on Triton's interpreter in a process that may have imported Triton already.

Triton decides between compiling and interpreting when ``@triton.jit`` decorates a function, and
``import vllm`` imports Triton (through torch) before it asks for a platform. The functions of
Triton's own library that were decorated by then are decorated anew, as interpreted ones.
"""

from __future__ import annotations

import os
import sys
from typing import Any


def enable() -> None:
    """Interpret every Triton kernel of this process and its children. Safe to call twice."""
    os.environ["TRITON_INTERPRET"] = "1"
    if "triton.language" not in sys.modules:
        return
    from triton.language.core import tensor
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    interpreted: dict[int, Any] = {}

    def replace_in(owner: Any) -> None:
        for name, value in list(vars(owner).items()):
            if isinstance(value, JITFunction):
                if id(value) not in interpreted:
                    interpreted[id(value)] = InterpretedFunction(value.fn)
                setattr(owner, name, interpreted[id(value)])

    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("triton."):
            replace_in(module)
    replace_in(tensor)

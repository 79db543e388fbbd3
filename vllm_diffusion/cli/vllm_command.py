"""``vllm``, ready sooner: ``python -m vllm_diffusion.cli.vllm_command serve MODEL``.

Importing vLLM makes a million objects that stay, and Python's collector walks through them again
and again: a quarter of the import's time. So it waits until they are there, and does not look at
them afterwards, when vLLM has it walk through everything several times more, and Python at the end.
"""

import atexit
import gc
import sys

from vllm_diffusion.startup.environment import await_engine_at_shutdown

if __name__ == "__main__":
    gc.disable()
    await_engine_at_shutdown()
    from vllm.entrypoints.cli import main, openai, serve  # noqa: F401

    gc.freeze()
    gc.enable()
    atexit.register(gc.freeze)
    sys.exit(main.main())

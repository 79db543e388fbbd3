"""Commands and options that there were, and what does instead."""

from __future__ import annotations

from collections.abc import Sequence

_NO_THINKING = """give the server --default-chat-template-kwargs '{"enable_thinking": false}'."""
_NO_JUDGE = "servers judge no drafts; `calibrate online` compares before a swap."
_GONE = {
    "tune": "`vllm-diffusion doctor --gpu` checks and times the kernels.",
    "bench-ways": "`bench-drafts` takes the same, with --method for --ways and --concurrency for --requests.",
    "calibrate compare": "`bench-drafts TARGET --method dflash --draft OLD NEW --data RECORDING` compares drafts.",
    "bench-drafts --base-url": "name a target: servers are started here; `vllm bench serve` measures one that runs.",
    "bench-drafts --num-drafts": "name it with the method: --method ngram,num_speculative_tokens=8.",
    "bench-drafts --steps": "name it with the method: --method dflash dflash,steps=2.",
    "bench-drafts --thinking": _NO_THINKING,
    "calibrate collect --thinking": _NO_THINKING,
    "calibrate online --verifications": _NO_JUDGE,
    "swap-draft --roll-back": "swap to the folder of the old draft.",
    "swap-draft --verifications": _NO_JUDGE,
    "swap-draft --wait": "a draft that was taken is served at once, and stays.",
}


def what_is_gone(command_line: Sequence[str]) -> str:
    """Return why a command line is refused that names something of an earlier release; empty if none does."""
    for name, instead in _GONE.items():
        *command, last = name.split()
        if command_line[: len(command)] != command:
            continue
        rest = command_line[len(command) :]
        is_option = last.startswith("-")
        if last in ([word.partition("=")[0] for word in rest] if is_option else rest[:1]):
            return f"argument {last if is_option else 'COMMAND'}: {name} is gone: {instead}"
    return ""

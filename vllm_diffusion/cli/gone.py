"""Commands and options that there were, and what does instead."""

from __future__ import annotations

from collections.abc import Sequence

_NO_JUDGE = "servers judge no drafts; `calibrate online` compares before a swap."
# A command, or options of one.
_GONE = {
    "tune": "`vllm-diffusion doctor --gpu` checks and times the kernels.",
    "bench-ways": "`bench-drafts` takes the same, with --method for --ways and --concurrency for --requests.",
    "calibrate compare": "`bench-drafts TARGET --method dflash --draft OLD NEW --data RECORDING` compares drafts.",
    "calibrate record": "start the server with drafting.record of --additional-config (docs/use/drafts.md).",
    "calibrate extract": "`calibrate train TARGET RECORDING` does it too.",
    "calibrate train --anchors --report-every --revealed-share --seed": "the training has one value of it.",
    "calibrate train --block-size --layers --mask-token-id": (
        "name a draft to start --from; docs/use/draft-training.md has how a new one is trained."
    ),
    "calibrate train --target": "it comes first: `calibrate train TARGET RECORDING`.",
    "calibrate collect --temperature": "answers are drawn as the server does for its other clients.",
    "calibrate online --idle-seconds": "it is 30.",
    "calibrate online --rounds": "end it with Ctrl-C.",
    "calibrate online --steps": "--minutes bounds a round.",
    "calibrate online --verifications": _NO_JUDGE,
    "bench-drafts --base-url": "name a target: servers are started here; `vllm bench serve` measures one that runs.",
    "bench-drafts --num-drafts": "name it with the method: --method ngram,num_speculative_tokens=8.",
    "bench-drafts --steps": "name it with the method: --method dflash dflash,steps=2.",
    "bench-drafts --thinking": """give the server --default-chat-template-kwargs '{"enable_thinking": false}'.""",
    "swap-draft --roll-back": "swap to the folder of the old draft.",
    "swap-draft --verifications": _NO_JUDGE,
    "swap-draft --wait": "a draft that was taken is served at once, and stays.",
}


def what_is_gone(command_line: Sequence[str]) -> str:
    """Return why a command line is refused that names something of an earlier release; empty if
    none does.
    """
    for names, instead in _GONE.items():
        command = [word for word in names.split() if not word.startswith("-")]
        if list(command_line[: len(command)]) != command:
            continue
        options = names.split()[len(command) :]
        if not options:
            return f"argument COMMAND: {names} is gone: {instead}"
        for word in command_line[len(command) :]:
            if (option := word.partition("=")[0]) in options:
                return f"argument {option}: {option} is gone: {instead}"
    return ""

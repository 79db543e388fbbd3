"""Entry points by which one folder of this package adds to another that may not import it."""

from importlib.metadata import EntryPoints, distribution


def own_entry_points(group: str) -> EntryPoints:
    """Entry points of one of this package's own groups.

    Args:
        group: ``"vllm_diffusion.extensions"``, functions that the plugin calls in each process;
            ``"vllm_diffusion.draft_watches"``, what observes the statistics of a draft;
            ``"vllm_diffusion.commands"``, modules with an ``add_parser``;
            ``"vllm_diffusion.cpu_kernels"``, what the CPU platform runs in place of Triton kernels;
            or ``"vllm_diffusion.cpu_checks"``, what it asks of a configuration.
    """
    return distribution("vllm-diffusion").entry_points.select(group=group)

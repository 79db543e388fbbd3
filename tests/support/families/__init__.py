"""What the masked families are tested against: tiny models and their publishers' loops.

``model`` and ``llada2_model`` hold random-weight models with each family's exact blocks; ``sdar``,
``nemotron``, ``llada2``, ``fast_dllm``, ``stable_diffcoder`` and ``dream_reasoner`` the published generation loops;
``published_files`` what was found of the published checkpoints. Everything is float32 on the CPU, for
one request, without a KV cache: whole sequences under a dense mask.
"""

"""What the masked families are tested against: tiny models and their publishers' loops.

``makers`` and ``llada2_model`` hold random-weight models with each family's exact blocks, ``model``
what they share; files named after families hold the published generation loops, with what these
share in ``run``; ``published_files`` what was found of the published checkpoints. Everything is
float32 on the CPU, for one request, without a KV cache: whole sequences under a dense mask.
"""

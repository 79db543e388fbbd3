"""Dream's tokenizer, whose class is code of the published repositories.

They have ``vocab.json`` and ``merges.txt`` and no ``tokenizer.json``; ``transformers`` would run
their ``tokenization_dream.py`` to read them. Source: that file, as found in public copies: Qwen2's
tokenizer by another name.
"""

from transformers import Qwen2Tokenizer


class DreamTokenizer(Qwen2Tokenizer):
    """Qwen2's, by the name in ``tokenizer_config.json``.

    ``transformers`` prefers a class of this name that is registered and not its own to the
    repository's code, with ``--trust-remote-code`` too.
    """

"""Canvas attention by extending FlashAttention-4 (CuTe DSL), for Hopper and Blackwell GPUs."""

"""Blocks of KV cache: who holds them, which are reusable, and the memory they live in."""

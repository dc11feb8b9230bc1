"""Moves KV between vLLM's blocks and pdserve's staging pool: prefill and decode apart."""

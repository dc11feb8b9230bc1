"""KV tiers below vLLM's cache: blocks leave it for host memory and disk, and return."""

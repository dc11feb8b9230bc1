"""The engine core: the child process that schedules, computes and owns the KV cache."""

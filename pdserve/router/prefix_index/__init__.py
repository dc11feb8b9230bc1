"""The prefix index: which blocks each worker holds, by its KV events."""

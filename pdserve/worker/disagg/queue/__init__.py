"""A worker's two clients of the prefill queue: one enqueues prompts, the other claims them."""

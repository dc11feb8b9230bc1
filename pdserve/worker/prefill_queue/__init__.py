"""Both ends of the prefill queue at a worker: prompts handed in, claims taken."""

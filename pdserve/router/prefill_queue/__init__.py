"""The prefill queues of a router: they assign prompts of decode workers to prefill workers."""

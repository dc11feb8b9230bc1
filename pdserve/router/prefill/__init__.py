"""The prefill queues that a router owns."""

"""The worker's side of disaggregated prefill: where to prefill a prompt, and how it is
handed off."""

"""How a worker is chosen among those that may be: one file per policy, found by name."""

"""Orders of operators and planners to one process: drains, and which order is stale."""

"""What operators see of a worker's KV tiers, and what they order."""

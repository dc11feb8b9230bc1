"""`pdserve tier`: what is in KV tiers, and what operators do with it."""

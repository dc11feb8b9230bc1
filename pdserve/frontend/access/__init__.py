"""Who may send requests, and how many: API keys, limits, trusted hosts."""

"""The frontend role: HTTP in, token deltas back, one request's whole life."""

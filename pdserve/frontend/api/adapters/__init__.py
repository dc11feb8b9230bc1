"""Adapters of other APIs: each translates a request to a chat request, and formats its answer."""

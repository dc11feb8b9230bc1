"""Builds traces of requests from their phases, decides which are kept, and exports them."""

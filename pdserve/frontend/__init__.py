"""Serves the HTTP API: accepts requests, dispatches them to workers, streams tokens back."""

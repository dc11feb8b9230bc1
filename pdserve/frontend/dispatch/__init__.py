"""Dispatches requests to workers: routing, worker streams, migration."""

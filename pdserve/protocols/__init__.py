"""Defines the records of the HTTP APIs and their server-sent events, for server and client."""

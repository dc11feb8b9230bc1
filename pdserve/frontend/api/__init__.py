"""Endpoints: what each path and method does."""

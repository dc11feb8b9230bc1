"""Composes the configuration and starts roles."""

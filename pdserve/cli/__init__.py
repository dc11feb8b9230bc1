"""Implements the command line: one module per sub-command."""

"""Resolves the settings of a process from flags, environment and files, in that order."""

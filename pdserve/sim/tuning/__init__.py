"""Proposes values of settings by replays of a trace."""

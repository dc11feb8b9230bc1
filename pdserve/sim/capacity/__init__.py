"""Searches the smallest cluster that keeps an objective, by replaying a trace."""

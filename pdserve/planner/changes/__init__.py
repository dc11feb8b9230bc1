"""Follows each change from the order to its end."""

"""Movers: an engine core's transports, on a given loop or on one of their own."""

"""Reads the limits that the system sets for this process: control groups and memory."""

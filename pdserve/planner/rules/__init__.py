"""The rules by which a planner decides, one in each file."""

"""Predicts the time of prefills, decode steps and remote prefills; learns it from observations."""

"""Predicts how many requests would miss their objectives with another pool of workers."""

"""Reads traces of real services and generates synthetic ones, as one record type."""

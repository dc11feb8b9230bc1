"""Exports traces to a collector by OTLP over HTTP."""

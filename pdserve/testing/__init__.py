"""Provides public fakes and conformance suites."""

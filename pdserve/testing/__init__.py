"""Public fakes and conformance suites."""

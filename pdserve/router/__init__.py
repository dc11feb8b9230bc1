"""The router role: chooses a worker for each request."""

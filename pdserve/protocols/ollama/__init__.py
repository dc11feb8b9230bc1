"""Ollama's API as typed records: requests, and answers with errors."""

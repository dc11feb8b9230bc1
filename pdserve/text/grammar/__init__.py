"""Builds grammars for structured output from requests and compiles them in a child process."""

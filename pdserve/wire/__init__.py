"""Sans-I/O framing of messages."""

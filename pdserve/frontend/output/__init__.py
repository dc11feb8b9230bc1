"""Turns tokens into answers: text, parts, logprobs, streamed or whole."""

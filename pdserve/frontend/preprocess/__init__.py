"""Turns requests into prompts: templates, tokens, sampling parameters, grammars."""

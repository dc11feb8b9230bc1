"""Turns text into tokens and back: templates, tokenizer, incremental detokeniser, stop strings.

Tokenizer.from_card(card)       encode, decode, .detokenizer() per choice
ChatTemplates.from_card(card)   .select(name, tools=...).render(messages, ...)
StopMatcher(stops)              .feed(text) per token, .matched, .flush()
TextPool()                      long work off the event loop
"""

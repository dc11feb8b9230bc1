"""The OpenAI API's schema and its server-sent events, in both directions."""

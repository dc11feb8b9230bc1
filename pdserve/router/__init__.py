"""The router role: answers one question per request, which worker takes it."""

"""Other APIs over the chat path: each a translation to a chat request, and words for the answer."""

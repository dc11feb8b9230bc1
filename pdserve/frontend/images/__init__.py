"""Images of requests: fetched within bounds, checked, and how many tokens they take."""

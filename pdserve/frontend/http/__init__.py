"""HTTP as the API needs it: connections, bodies, answers, server-sent events."""

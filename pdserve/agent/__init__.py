"""The role that starts and stops the workers of one host, for planners (docs/agent.md)."""

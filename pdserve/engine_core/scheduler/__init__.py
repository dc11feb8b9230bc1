"""Plans which tokens of which sequences the next step computes."""

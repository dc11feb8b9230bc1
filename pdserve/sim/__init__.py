"""A virtual world of whole nodes: the product's own code from one seed (docs/simulation.md)."""

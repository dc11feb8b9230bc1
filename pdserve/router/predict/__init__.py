"""How long things will take: a model of time, and how it is learnt from what was observed."""

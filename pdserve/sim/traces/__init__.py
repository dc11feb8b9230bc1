"""Who asks what, and when: traces of real services and generated ones, as one kind of record."""

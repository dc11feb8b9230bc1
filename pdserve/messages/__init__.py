"""Defines the frozen records that travel between components and processes.

Every record is a `msgspec.Struct` encoded as a msgpack array: fields are append-only, new fields
have defaults, unknown trailing fields are skipped by older readers. Each one also decodes with the
plain `msgpack` package.
"""

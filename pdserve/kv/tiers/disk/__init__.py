"""The disk tier: KV blocks in preallocated log segments, which outlive the process.

`index` decides, `files` reads and writes, `recovery` finds what an earlier process left, and
`tier` joins them. docs/tiers.md has the rules.
"""

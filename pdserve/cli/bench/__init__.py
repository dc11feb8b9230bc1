"""`pdserve bench`: load for a server of the OpenAI API, and how it bore it.

`command` reads flags, `workload` makes requests, `arrivals` their moments, `runner` sends them,
`record` is what came of each, `summary` counts, `report` and `plot` show. Only `runner` waits.
"""

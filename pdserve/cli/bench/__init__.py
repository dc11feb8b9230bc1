"""Implements `pdserve bench`: sends load to a server of the OpenAI API and measures it.

`command` reads flags, `workload` makes requests, `arrivals` schedules them, `runner` sends them,
`record` holds one request's result, `summary` computes, `report` and `plot` show. Only `runner`
awaits.
"""

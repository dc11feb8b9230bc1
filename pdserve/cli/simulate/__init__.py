"""Implements `pdserve simulate`: predicts what a cluster would do with a trace.

`command` reads flags and writes files, `report` shows results and progress, `plan` searches how
many workers an SLO needs, `plan_report` shows that.
"""

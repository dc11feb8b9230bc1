"""Grafana boards, Prometheus rules and a scrape configuration for pdserve's metrics.

Tables (`service_board.py`, `alerts.py`, …) and what turns them into files. Nothing here runs in a
server: `pdserve dashboards` writes the files.
"""

"""The dashboards of the chart, one module each.

They are the source of `dashboards/*.json`, of pictures in the docs and of `mmd report`.
"""

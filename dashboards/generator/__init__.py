"""The source of the Grafana dashboards in the folder above. `python3 dashboards/generate.py` writes them.

`panels` makes panels, `board` puts them on a page with its variables, links and annotations, `queries` has the PromQL
that several pages share, `findings` has the texts of findings. Each other module is one dashboard.
"""

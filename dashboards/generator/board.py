"""Pages: variables, links, annotations, and where each panel lies."""

from generator.panels import DATASOURCE

WIDTH = 24
# The oldest Grafana whose features the panels use: tables and plots as of 11.
GRAFANA = "11.2.0"
NAMES = {"stat": "Stat", "timeseries": "Time series", "state-timeline": "State timeline", "heatmap": "Heatmap",
         "bargauge": "Bar gauge", "table": "Table", "xychart": "XY Chart"}
OTHERS = {
    "fleet": ("Fleet and nodes", "Every node and GPU, a row each"),
    "gpu-memory": ("GPU memory", "The GPUs: memory, work, heat, links and errors"),
    "training-job": ("Training job", "One job: why it is slow, steps, phases and memory"),
    "layers": ("Layers and allocations", "One job: the layers that take its memory, and its allocator"),
    "compare-runs": ("Compare runs", "Several jobs side by side"),
    "exporter-health": ("Exporter health", "Whether the daemons themselves read and report everything"),
}


def listed(name, label, series, of, description, *, many=True, sort=1, everything=".+", shown=True):
    """A variable with the values of a label; one that is not shown follows from others."""
    definition = f"label_values({series}, {of})"
    variable = {
        "type": "query", "name": name, "label": label, "description": description, "datasource": DATASOURCE,
        "definition": definition, "query": {"qryType": 1, "query": definition, "refId": name}, "refresh": 2, "regex": "",
        "sort": sort, "hide": 0 if shown else 2, "skipUrlSync": False, "options": [], "multi": many, "includeAll": many,
    }
    if many:
        # "All" is a regular expression, so that thousands of values do not make a query too long.
        variable |= {"allValue": everything, "current": {"selected": True, "text": ["All"], "value": ["$__all"]}}
    else:
        variable["current"] = {}
    return variable


# The jobs of the owners that `owners` selects.
OWNED = 'highwater_job_info{namespace=~"$namespace",user=~"$user"}'


def owners():
    """The variables that select whose the jobs are. A job of a user has no namespace, and the other way round."""
    return [
        listed("namespace", "Namespace", "highwater_job_info", "namespace", "Namespaces of the jobs' pods, where they are known.",
               everything=".*"),
        listed("user", "User", "highwater_job_info", "user", "Users whose jobs are in no known namespace.", everything=".*"),
    ]


def window(series):
    variable = listed("window", "Window", series, "window", "The sliding window of peaks, lows and means. If it is at least "
                      "as long as the scrape interval, no spike is missed.", many=False, sort=3)
    return variable | {"current": {"selected": True, "text": "15s", "value": "15s"}}


def runbooks():
    return {"type": "textbox", "name": "runbooks", "label": "Runbooks below", "query": "", "hide": 0, "skipUrlSync": False,
            "description": "The address of this project's repository or a copy of its documents, ending in /. The paths of "
                           "runbooks are appended to it, as prometheusRule.runbookBase does for alerts.",
            "current": {"selected": True, "text": "", "value": ""}, "options": []}


class Board:
    """A dashboard that is being put together from top to bottom."""

    def __init__(self, name, description, variables, tags=()):
        self.name, self.description, self.tags = name, description, ["highwater", *tags]
        self.title = OTHERS[name][0]
        source = {"type": "datasource", "name": "datasource", "label": "Data source", "query": "prometheus", "refresh": 1,
                  "regex": "", "hide": 0, "multi": False, "includeAll": False, "skipUrlSync": False, "options": [],
                  "current": {}}
        self.variables = [source, *variables]
        self.panels, self.annotations = [], []
        self._y, self._id, self._inside = 0, 0, None

    def _place(self, panel, x, y, w, h):
        self._id += 1
        return {"id": self._id, "gridPos": {"x": x, "y": y, "w": w, "h": h}} | panel

    def row(self, title, *, collapsed=False):
        """Begins a row; the panels of a collapsed one are not queried until it is opened."""
        row = self._place({"type": "row", "title": title, "collapsed": collapsed, "panels": []}, 0, self._y, WIDTH, 1)
        self.panels.append(row)
        self._inside = row["panels"] if collapsed else None
        self._y += 1

    def line(self, height, *cells):
        """Puts panels beside each other. A cell is a width with a panel, or with several that lie below each other."""
        x, placed = 0, []
        for width, *panels in cells:
            for index, panel in enumerate(panels):
                h = height // len(panels)
                placed.append(self._place(panel, x, self._y + index * h, width, h))
            x += width
        assert x <= WIDTH, f"{self.name}: a line is {x} wide"
        (self.panels if self._inside is None else self._inside).extend(placed)
        self._y += height
        return placed

    def tiles(self, *tiles):
        """Four in a line, so that their titles are whole beside Grafana's menu on a page of 1280 pixels."""
        for first in range(0, len(tiles), 4):
            self.line(3, *((6, tile) for tile in tiles[first:first + 4]))

    def annotate(self, name, expr, color, title, text, *, on, enabled=True, step="15s", **more):
        """Marks times on the panels `on` only: on every panel, the marks of many nodes bury the data. Grafana joins events that are at most
        a step apart into a region, so that with a long step a fault each minute is one block."""
        self.annotations.append({
            "name": name, "datasource": DATASOURCE, "enable": enabled, "hide": False, "iconColor": color, "expr": expr,
            "step": step, "titleFormat": title, "textFormat": text, "tagKeys": "",
            "filter": {"exclude": False, "ids": [panel["id"] for panel in on]},
        } | more)

    def _kinds(self):
        return sorted({panel["type"] for panel in self._all() if panel["type"] != "row"})

    def _all(self):
        for panel in self.panels:
            yield panel
            yield from panel.get("panels", [])

    def json(self):
        link = {"type": "link", "icon": "dashboard", "asDropdown": False, "includeVars": True, "keepTime": True,
                "targetBlank": False, "tags": []}
        requires = [{"type": "grafana", "id": "grafana", "name": "Grafana", "version": GRAFANA},
                    {"type": "datasource", "id": "prometheus", "name": "Prometheus", "version": "1.0.0"}]
        requires += [{"type": "panel", "id": kind, "name": NAMES[kind], "version": ""} for kind in self._kinds()]
        return {
            "__requires": requires,
            "uid": f"highwater-{self.name}",
            "title": f"highwater / {self.title}",
            "description": self.description,
            "tags": self.tags,
            "id": None,
            "version": 1,
            "schemaVersion": 39,
            "editable": False,
            "graphTooltip": 1,
            "refresh": "30s",
            "time": {"from": "now-1h", "to": "now"},
            "timepicker": {"refresh_intervals": ["5s", "15s", "30s", "1m", "5m"]},
            "timezone": "browser",
            "fiscalYearStartMonth": 0,
            "weekStart": "",
            "links": [link | {"title": title, "tooltip": tooltip, "url": f"/d/highwater-{name}"}
                      for name, (title, tooltip) in OTHERS.items() if name != self.name],
            "templating": {"list": self.variables},
            "annotations": {"list": self.annotations},
            "panels": self.panels,
        }

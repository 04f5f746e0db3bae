"""Panels: what a Grafana panel of each kind looks like here.

Nothing is green unless it is known to be good. Each panel's lowest threshold is neutral, and a missing value has a
mapping of its own, because Grafana otherwise draws "No data" in the colour of the lowest threshold.
"""

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
GREY = "#7b8087"
GREEN, YELLOW, ORANGE, RED, BLUE = "green", "yellow", "orange", "red", "blue"
FULL = [(0, GREEN), (0.9, YELLOW), (0.97, ORANGE), (0.99, RED)]
NONE_WANTED = [(0, GREEN), (1, RED)]
# Degrees below the slowdown temperature; negative above it.
BELOW_SLOWDOWN = [(-100, RED), (0, ORANGE), (3, YELLOW), (8, GREEN)]
UNKNOWN_INDEX = 99


def query(expr, legend="__auto", *, shape="time_series", instant=False):
    """A query of a panel; `shape` is time_series, table or heatmap."""
    return {
        "datasource": DATASOURCE,
        "editorMode": "code",
        "expr": " ".join(expr.split()),
        "format": shape,
        "instant": instant,
        "range": not instant,
        "legendFormat": legend,
    }


def rows(expr):
    """A query whose result now is rows of a table."""
    return query(expr, shape="table", instant=True)


def thresholds(steps=(), base=GREY):
    """Colours from each value on; below the first one, and for a missing value, the neutral `base`."""
    listed = [{"color": base, "value": None}] + [{"color": color, "value": value} for value, color in steps]
    return {"mode": "absolute", "steps": listed}


def unknown(text="unknown"):
    """The mapping of a missing value."""
    result = {"color": GREY, "index": UNKNOWN_INDEX, "text": text}
    return {"type": "special", "options": {"match": "null+nan", "result": result}}


def words(texts):
    """The mapping of values to texts, or to pairs of text and colour."""
    options = {}
    for index, (value, shown) in enumerate(texts.items()):
        text, color = shown if isinstance(shown, tuple) else (shown, None)
        options[str(value)] = {"index": index, "text": text} | ({"color": color} if color else {})
    return {"type": "value", "options": options}


def otherwise(color):
    """The mapping of every value that no mapping before it has."""
    return {"type": "regex", "options": {"pattern": "(.+)", "result": {"color": color, "index": UNKNOWN_INDEX - 1, "text": "$1"}}}


def _panel(kind, title, description, queries, *, unit, steps=(), base=GREY, mappings=(), missing="unknown", no_value=None,
           interval=None, transformations=(), overrides=(), options=None, custom=None, **defaults):
    for letter, target in zip("ABCDEFGHIJKLMNOPQRSTUVWXYZ", queries):
        target["refId"] = letter
    fields = {"unit": unit, "thresholds": thresholds(steps, base), "mappings": [*mappings, unknown(missing)]}
    fields |= {key: value for key, value in defaults.items() if value is not None}
    if no_value:
        fields["noValue"] = no_value
    if custom:
        fields["custom"] = custom
    panel = {
        "type": kind,
        "title": title,
        "description": description,
        "datasource": DATASOURCE,
        "targets": list(queries),
        "fieldConfig": {"defaults": fields, "overrides": list(overrides)},
        "options": options or {},
    }
    if interval:
        panel["interval"] = interval
    if transformations:
        panel["transformations"] = list(transformations)
    return panel


def tile(title, description, expr, unit="none", steps=(), *, missing="unknown", decimals=None, mappings=()):
    """One number. Grey: not known, or without a judgement."""
    options = {
        "colorMode": "background",
        "graphMode": "none",
        "justifyMode": "center",
        "orientation": "auto",
        "textMode": "value",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    }
    return _panel("stat", title, description, [query(expr, instant=True)], unit=unit, steps=steps, missing=missing,
                  no_value=missing, decimals=decimals, mappings=mappings, color={"mode": "thresholds"}, options=options)


def lines(title, description, queries, unit, *, legend="bottom", calcs=(), minimum=0, maximum=None, fill=0, stack=False,
          steps=(), draw_steps=False, style="line", span=False, interval=None, overrides=(), decimals=None):
    """Curves over time. A legend on the right is a table that scrolls, for panels that have room for many curves."""
    custom = {
        "drawStyle": style,
        "lineWidth": 1,
        "fillOpacity": fill,
        "showPoints": "auto" if span else "never",
        "pointSize": 5,
        "spanNulls": 3_600_000 if span else False,
        "stacking": {"group": "A", "mode": "normal" if stack else "none"},
        "thresholdsStyle": {"mode": "dashed" if draw_steps else "off"},
    }
    shown = {"calcs": list(calcs), "displayMode": "table" if legend == "right" else "list", "placement": legend or "bottom",
             "showLegend": legend is not None} | ({"width": 240} if legend == "right" else {})
    if legend == "right" and len(calcs) == 1 and calcs[0] in WORST:
        shown["sortBy"], shown["sortDesc"] = WORST[calcs[0]]
    return _panel("timeseries", title, description, queries, unit=unit, steps=steps, base="text" if steps else GREY,
                  min=minimum, max=maximum, decimals=decimals, interval=interval, overrides=overrides,
                  color={"mode": "palette-classic"}, custom=custom,
                  options={"legend": shown, "tooltip": {"mode": "multi", "sort": "desc"}})


# How a table of curves is sorted so that the worst is in sight, by what it shows of each.
WORST = {"max": ("Max", True), "min": ("Min", False)}


def dashed(name, color):
    """The override that draws the curve `name` as a limit."""
    return {"matcher": {"id": "byName", "options": name}, "properties": [
        {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [8, 6]}},
        {"id": "color", "value": {"mode": "fixed", "fixedColor": color}}]}


def unlisted(pattern):
    """The override that keeps curves out of the legend, where those of all GPUs would leave no room for the plot. The tooltip has them."""
    hidden = {"legend": True, "tooltip": False, "viz": False}
    return {"matcher": {"id": "byRegexp", "options": pattern}, "properties": [{"id": "custom.hideFrom", "value": hidden}]}


def timeline(title, description, queries, unit="none", steps=(), *, mappings=(), transformations=(), per_page=20,
             legend=False, interval=None):
    """Bars of one state after the other, a row each; further rows are on further pages. A state that is a number has its
    colour from `steps`, because Grafana merges numbers by them before it maps them; one that is a word, from `mappings`."""
    options = {
        "alignValue": "center",
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": legend},
        "mergeValues": True,
        "perPage": per_page,
        "rowHeight": 0.9,
        "showValue": "never",
        "tooltip": {"mode": "single", "sort": "none"},
    }
    return _panel("state-timeline", title, description, queries, unit=unit, steps=steps, mappings=mappings,
                  transformations=transformations, interval=interval, color={"mode": "thresholds"}, custom={"fillOpacity": 80, "lineWidth": 0, "spanNulls": False}, options=options)


def across(label, value="Value"):
    """The transformation of a table over time to one with a column for each value of a label."""
    return {"id": "groupingToMatrix",
            "options": {"columnField": label, "rowField": "Time", "valueField": value, "emptyValue": "null"}}


EVERY_FIELD = {"id": "filterFieldsByName", "options": {"include": {"pattern": ".*"}}}


def heat(title, description, queries, unit, *, low=None, high=None, scheme="Oranges", rows_of=None, decimals=None,
         cell_unit=None, interval=None):
    """A heat map: of a histogram, or of a table with a row for each value of the label `rows_of`. `scheme`: of colours; `None`
    is one colour, the stronger the higher, which in both themes stands out where it is high."""
    cell = cell_unit or unit
    options = {
        "calculate": False,
        "cellGap": 0 if rows_of else 1,
        "cellValues": {"unit": cell} | ({"decimals": decimals} if decimals is not None else {}),
        "color": {"mode": "scheme" if scheme else "opacity", "scheme": scheme or "Oranges", "scale": "linear", "steps": 64, "exponent": 0.5, "fill": "dark-orange",
                  "reverse": False} | ({"min": low} if low is not None else {}) | ({"max": high} if high is not None else {}),
        "exemplars": {"color": "rgba(255,0,255,0.7)"},
        # Of ranks, 0 is a value; of a histogram, an empty bucket.
        "filterValues": {"le": -1e-9 if rows_of else 1e-9},
        "legend": {"show": True},
        "rowsFrame": {"layout": "auto", "value": "value" if rows_of else "events"},
        "showValue": "never",
        "tooltip": {"mode": "single", "showColorScale": True, "yHistogram": False},
        "yAxis": {"axisPlacement": "left", "reverse": bool(rows_of), "unit": "none" if rows_of else unit},
    }
    return _panel("heatmap", title, description, queries, unit=unit, interval=interval, options=options,
                  # Without the second, a table without rows is an error in place of "No data".
                  transformations=[across(rows_of), EVERY_FIELD] if rows_of else [], custom={"scaleDistribution": {"type": "linear"}})


def bars(title, description, expr, unit, legend, steps=(), *, label, maximum=None, decimals=None):
    """A bar for each series, now, the longest first, named by the value of `label`: a single one has no other name."""
    options = {
        "displayMode": "basic",
        "minVizHeight": 20,
        "maxVizHeight": 36,
        "namePlacement": "left",
        "orientation": "horizontal",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "showUnfilled": True,
        "sizing": "manual",
        "valueMode": "text",
        "text": {"titleSize": 13},
        "legend": {"calcs": [], "displayMode": "list", "placement": "bottom", "showLegend": False},
    }
    return _panel("bargauge", title, description, [query(f"sort_desc({expr})", legend, instant=True)], unit=unit, steps=steps,
                  displayName=f"${{__field.labels.{label}}}", base=BLUE if not steps else GREY, min=0, max=maximum, decimals=decimals, color={"mode": "thresholds"},
                  options=options)


def column(name, *, source=None, unit=None, decimals=None, steps=None, mappings=None, missing="n/a", cell=None, link=None,
           width=None, least=None, minimum=None, maximum=None, filtered=False):
    """A column of a table, taken from the label or the query `source`. See `table`. `least`: its width where the page is narrow."""
    return {"filtered": filtered, "name": name, "source": source or name, "unit": unit, "decimals": decimals, "steps": steps,
            "mappings": mappings, "missing": missing, "cell": cell, "link": link, "width": width, "least": least, "min": minimum,
            "max": maximum}


def _cell(kind):
    return {
        "gauge": {"type": "gauge", "mode": "basic", "valueDisplayMode": "text"},
        "text": {"type": "color-text"},
        "wrap": {"type": "auto", "wrapText": True},
        "background": {"type": "color-background", "mode": "basic", "applyToRow": False},
    }[kind]


def _override(column_):
    # A label that a row lacks is no null to Grafana's mappings, so its text is given as well. A blank is no text.
    missing = column_["missing"] or "\u2007"
    properties = [{"id": "mappings", "value": [*(column_["mappings"] or []), unknown(missing)]},
                  {"id": "noValue", "value": missing}]
    if column_["filtered"]:
        properties.append({"id": "custom.filterable", "value": True})
    for key in ("unit", "decimals", "min", "max"):
        if column_[key] is not None:
            properties.append({"id": key, "value": column_[key]})
    if column_["steps"]:
        properties.append({"id": "thresholds", "value": thresholds(column_["steps"])})
    if column_["cell"]:
        properties.append({"id": "custom.cellOptions", "value": _cell(column_["cell"])})
    if column_["cell"] == "gauge" and column_["max"] is None:
        # Of this column alone: the largest number of the whole table may be of bytes.
        properties.append({"id": "fieldMinMax", "value": True})
    if column_["least"]:
        properties.append({"id": "custom.minWidth", "value": column_["least"]})
    if column_["width"]:
        properties.append({"id": "custom.width", "value": column_["width"]})
    if column_["link"]:
        title, url = column_["link"]
        properties.append({"id": "links", "value": [{"title": title, "url": url, "targetBlank": not url.startswith("/d/")}]})
    return {"matcher": {"id": "byName", "options": column_["name"]}, "properties": properties}


def table(title, description, queries, columns, *, hidden=(), sort=None, pages=False):
    """A table of the queries' results, joined on the labels that all of them have. A column's source is a label, or the
    letter of a query. Labels in `hidden` are left out."""
    names = {column_["source"]: column_["name"] for column_ in columns}
    single = len(queries) == 1
    value = {letter: "Value" if single else f"Value #{letter}" for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[:len(queries)]}
    field = {source: value.get(source, source) for source in names}
    left_out = {"Time", "__name__", "job", *hidden, *(set(value.values()) - set(field.values()))}
    transformations = [] if single else [{"id": "merge", "options": {}}]
    transformations.append({
        "id": "organize",
        "options": {
            "excludeByName": {name: True for name in sorted(left_out)},
            "includeByName": {},
            "indexByName": {field[source]: index for index, source in enumerate(names)},
            "renameByName": {field[source]: name for source, name in names.items()},
        },
    })
    options = {"cellHeight": "sm", "showHeader": True,
               "footer": {"show": False, "countRows": False, "fields": "", "reducer": ["sum"], "enablePagination": pages}}
    if sort:
        options["sortBy"] = [{"displayName": sort[0], "desc": sort[1]}]
    # Columns get narrow rather than leave the panel. A filter takes the room of the column's name.
    custom = {"align": "left", "cellOptions": {"type": "auto"}, "filterable": False, "inspect": False, "minWidth": 50}
    return _panel("table", title, description, queries, unit="none", missing="n/a",
                  transformations=transformations, overrides=[_override(column_) for column_ in columns], options=options,
                  custom=custom, color={"mode": "thresholds"})


def matrix(title, description, expr, unit, *, down, across, decimals=None):
    """A table with a row for each value of the label `down` and a column for each of `across`."""
    to_matrix = {"id": "groupingToMatrix",
                 "options": {"columnField": across, "rowField": down, "valueField": "Value", "emptyValue": "null"}}
    corner = f"{down}\\{across}"
    named = {"id": "organize", "options": {"excludeByName": {}, "includeByName": {}, "indexByName": {corner: 0},
                                           "renameByName": {corner: down}}}
    return _panel("table", title, description, [rows(expr)], unit=unit, missing="n/a",
                  decimals=decimals, transformations=[to_matrix, named], custom={"align": "auto", "filterable": False, "minWidth": 70},
                  options={"cellHeight": "sm", "showHeader": True}, color={"mode": "thresholds"})


def plot(title, description, queries, unit, *, x, y, split, x_unit="none"):
    """Points of the query B over those of the query A, at the same times, a curve for each value of the label `split`."""
    transformations = [
        {"id": "merge", "options": {}},
        {"id": "sortBy", "options": {"fields": {}, "sort": [{"field": "Time"}]}},
        {"id": "organize", "options": {"excludeByName": {}, "includeByName": {}, "indexByName": {},
                                       "renameByName": {"Value #A": x, "Value #B": y}}},
        {"id": "partitionByValues", "options": {"fields": [split], "keepFields": False,
                                                "naming": {"asLabels": True}}},
    ]
    options = {
        "mapping": "auto",
        # The first number of each curve is x.
        "series": [{}],
        "legend": {"calcs": [], "displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "single", "sort": "none"},
    }
    custom = {"show": "points+lines", "lineWidth": 1, "pointSize": {"fixed": 3}, "axisLabel": "", "fillOpacity": 40}
    # The fields are named after the curve as well: `Step NAME`.
    overrides = [{"matcher": {"id": "byRegexp", "options": f"/^{name}/"},
                  "properties": [{"id": key, "value": value} for key, value in properties.items()]}
                 for name, properties in [(x, {"unit": x_unit, "custom.axisLabel": x}),
                                          (y, {"unit": unit, "custom.axisLabel": y, "min": 0})]]
    panel = _panel("xychart", title, description, queries, unit=unit, transformations=transformations, options=options,
                   custom=custom, overrides=overrides, color={"mode": "palette-classic"})
    # Without its version, Grafana takes the options for those of before 11.1.
    return panel | {"pluginVersion": "11.2.0"}

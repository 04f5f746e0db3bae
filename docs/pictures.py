#!/usr/bin/env python3
"""Takes pictures of what highwater shows: its dashboards in a real Grafana, the daemon's page and a report.

    python3 docs/pictures.py --out target/pictures --grafana DIR

It starts the demo, a Prometheus with the alert rules that scrapes it, and the Grafana whose home is DIR (with a program
`grafana` in it or in its bin/), waits until there are some minutes of data, and drives Chromium over a pipe. Each
dashboard becomes four pictures: 1600 and 1280 pixels wide, dark and light. It prints what it wrote and fails if a panel
reports an error. Without --grafana it takes no pictures of dashboards. The pictures whose names begin with readme- are for README.md and
docs/: one row of a dashboard, the first screen of the fleet, the daemon's page, `highwater top`, a report that compares two recordings, the stacks of a
memory snapshot and the kernels of a trace. With 1280 x 800 pixels they stay below 250 KB.

--prometheus URL uses a running Prometheus in place of the demo's, to look at other states: a node that is gone, many
nodes, many ranks. --set job=NAME sets a variable of the dashboards.

It needs only Python, and Debian's chromium and prometheus; it is no test, because no Grafana comes with either of the
package registries that the tests use.
"""

import argparse
import contextlib
import fcntl
import html
import json
import os
import pathlib
import pty
import pwd
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import time
import urllib.parse
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from chromium import Browser  # noqa: E402
WIDTHS, THEMES = (1600, 1280), ("dark", "light")
# The window of the pictures for README.md.
SCREEN = (1280, 800)
# Pixels of a row of Grafana's grid with its gap, and of everything above the panels.
GRID_ROW, HEAD = 38, 270
OPEN_ROWS = """document.querySelectorAll('[aria-label="Expand row"]').forEach(row => row.click())"""
CAUGHT = """
(() => {
  const loading = document.querySelectorAll('[aria-label="Panel loading bar"]').length;
  const errors = [...document.querySelectorAll('[data-testid="data-testid Panel status error"]')]
    .map(e => (e.closest('section') || e).getAttribute('data-testid') || 'a panel');
  const panels = document.querySelectorAll('section[data-testid^="data-testid Panel header"]').length;
  return JSON.stringify({loading, errors, panels});
})()
"""


def eventually(what, condition, seconds=60):
    """The first true value of `condition`, which is asked five times a second."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.2)
    raise RuntimeError(f"{what}: not within {seconds} s")


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def answers(url):
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.read() or b"\n"
    except OSError:
        return None


@contextlib.contextmanager
def running(arguments, log, **options):
    with open(log, "wb") as output:
        process = subprocess.Popen([str(a) for a in arguments], stdout=output, stderr=output, **options)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def demo(program, folder):
    address = f"127.0.0.1:{free_port()}"
    with running([program, "demo", "--listen", address], folder / "demo.log"):
        eventually("the demo", lambda: answers(f"http://{address}/metrics"))
        yield address


@contextlib.contextmanager
def prometheus(program, folder, address):
    url = f"http://127.0.0.1:{free_port()}"
    (folder / "prometheus.yml").write_text(
        f"global: {{scrape_interval: 5s, evaluation_interval: 15s}}\nrule_files: ['{ROOT}/dashboards/alerts/*.yaml']\n"
        f"scrape_configs:\n  - {{job_name: highwater, static_configs: [{{targets: ['{address}']}}]}}\n")
    with running([program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/prometheus",
                  f"--web.listen-address={url.removeprefix('http://')}"], folder / "prometheus.log"):
        eventually("Prometheus", lambda: answers(f"{url}/-/ready"))
        yield url


@contextlib.contextmanager
def grafana(home, folder, source):
    """Grafana as an ordinary user on loopback, which shows the dashboards to anybody and contacts nobody."""
    program = next((path for path in (home / "grafana", home / "bin" / "grafana") if path.is_file()), None)
    if not program:
        sys.exit(f"{home} has no program grafana")
    port, data = free_port(), folder / "grafana"
    (data / "provisioning/datasources").mkdir(parents=True)
    (data / "provisioning/dashboards").mkdir()
    (data / "provisioning/datasources/prometheus.yaml").write_text(json.dumps({"apiVersion": 1, "datasources": [
        {"name": "Prometheus", "type": "prometheus", "uid": "prometheus", "access": "proxy", "url": source, "isDefault": True,
         "jsonData": {"timeInterval": "5s"}}]}))
    (data / "provisioning/dashboards/highwater.yaml").write_text(json.dumps({"apiVersion": 1, "providers": [
        {"name": "highwater", "type": "file", "options": {"path": str(data / "dashboards")}}]}))
    (data / "dashboards").mkdir()
    for file in (ROOT / "dashboards").glob("*.json"):
        shutil.copy(file, data / "dashboards")
    environment = {"PATH": os.environ["PATH"], "HOME": str(data)} | {f"GF_{name}": value for name, value in {
        "PATHS_DATA": str(data / "data"), "PATHS_LOGS": str(data / "logs"), "PATHS_PLUGINS": str(data / "plugins"),
        "PATHS_PROVISIONING": str(data / "provisioning"), "SERVER_HTTP_ADDR": "127.0.0.1", "SERVER_HTTP_PORT": str(port),
        "AUTH_ANONYMOUS_ENABLED": "true", "AUTH_ANONYMOUS_ORG_ROLE": "Admin", "ANALYTICS_REPORTING_ENABLED": "false",
        "ANALYTICS_CHECK_FOR_UPDATES": "false", "ANALYTICS_CHECK_FOR_PLUGIN_UPDATES": "false",
        "PLUGINS_PREINSTALL_DISABLED": "true", "NEWS_NEWS_FEED_ENABLED": "false"}.items()}
    options = {"env": environment, "cwd": home}
    if os.geteuid() == 0:
        nobody = pwd.getpwnam("nobody")
        for path in (folder, data, *data.rglob("*")):
            os.chown(path, nobody.pw_uid, nobody.pw_gid)
        options |= {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
    with running([program, "server", f"--homepath={home}"], folder / "grafana.log", **options):
        url = f"http://127.0.0.1:{port}"
        eventually("Grafana", lambda: b"ok" in (answers(f"{url}/api/health") or b""), 180)
        eventually("the dashboards", lambda: len(json.loads(answers(f"{url}/api/search?tag=highwater") or "[]")) >= 5)
        yield url


def dashboards(browser, url, out, names, span, variables, waits):
    """Pictures of the dashboards `names` in the Grafana at `url`; returns the panels that reported errors."""
    broken = []
    for file in sorted((ROOT / "dashboards").glob("*.json")):
        if names and file.stem not in names:
            continue
        panels = json.loads(file.read_text())["panels"]
        inner = sum(max(panel["gridPos"]["h"] for panel in row["panels"]) for row in panels if row.get("panels"))
        height = HEAD + GRID_ROW * (inner + max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels))
        for width in WIDTHS:
            for theme in THEMES:
                wanted = {"from": f"now-{span}", "to": "now", "theme": theme, "refresh": ""} | variables
                browser.open(f"{url}/d/highwater-{file.stem}?{urllib.parse.urlencode(wanted)}", width, height)
                settled(browser, waits)
                browser.evaluate(OPEN_ROWS)
                seen = settled(browser, waits)
                path = out / f"{file.stem}-{width}-{theme}.png"
                browser.picture(path)
                broken += [f"{file.stem}: {error}" for error in seen["errors"]]
                print(f"{path}: {path.stat().st_size // 1024} KiB, {seen['panels']} panels, errors: {seen['errors'] or 'none'}")
    return broken


def why_slow(browser, url, source, out):
    """Why the demo's job is slow, while it is: the row of its dashboard with findings and heat maps."""
    count = urllib.parse.quote('count(highwater_finding_active{training_job="moe-tight"} == 1) > 1')
    found = lambda: json.loads(answers(f"{source}/api/v1/query?query={count}") or "{}").get("data", {}).get("result")
    eventually("findings of moe-tight", found, 90)
    browser.open(f"{url}/d/highwater-training-job?from=now-5m&to=now&theme=dark&var-job=moe-tight&kiosk", SCREEN[0], 1500)
    settled(browser, 60)
    top = browser.evaluate("""[...document.querySelectorAll("button")].find(b => b.textContent.includes("Why is it slow"))"""
                           ".getBoundingClientRect().top")
    save(browser, out / "readme-dashboard.png", {"x": 0, "y": top - 8, "width": SCREEN[0], "height": SCREEN[1], "scale": 1})


def fleet(browser, url, source, out):
    """The first screen of the fleet's dashboard, while the demo has findings."""
    count = urllib.parse.quote('count(highwater_finding_active{severity="critical"} == 1) > 0')
    found = lambda: json.loads(answers(f"{source}/api/v1/query?query={count}") or "{}").get("data", {}).get("result")
    eventually("critical findings", found, 90)
    browser.open(f"{url}/d/highwater-fleet?from=now-5m&to=now&theme=light&kiosk", *SCREEN)
    settled(browser, 60)
    save(browser, out / "readme-fleet.png")


def live_page(browser, address, out):
    """The page of the demo at `address`, while it has findings."""
    # High enough for the incident, the chart and the steps below it.
    browser.open(f"http://{address}/", SCREEN[0], 1000)
    shown = "document.querySelector('.found:not(.ended)')?.innerText.includes('usually') && highwaterChart.findings.length > 1"
    browser.wait(f"globalThis.highwaterChart && {shown}", 90)
    # Some seconds of the fault, so that the curve shows it.
    time.sleep(8)
    save(browser, out / "readme-live.png")


def terminal(browser, program, address, folder, out):
    """`highwater top` beside the demo at `address`, while it has an incident, as a terminal shows it."""
    columns, rows = 112, 26
    person, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    environment = os.environ | {"LC_ALL": "C.UTF-8"}
    shown = b""
    with subprocess.Popen([str(program), "top", f"--via=http://{address}"], stdin=other, stdout=other, env=environment) as top:
        os.close(other)
        frame = lambda: shown.split(b"\x1b[H")[-2].decode() if shown.count(b"\x1b[H") > 1 else ""
        deadline = time.monotonic() + 90
        while "usually" not in frame() and time.monotonic() < deadline:
            shown = (shown + os.read(person, 65536))[-200_000:]
        os.write(person, b"q")
        top.wait()
    os.close(person)
    # Colours, bold, dim and reversed text are all that it uses.
    styles = {"1": "font-weight:bold", "2": "opacity:.65", "7": "background:#e6ebf0;color:#11161c", "32": "color:#58c27d",
              "33": "color:#f2b75c", "1;31": "color:#ff8a80;font-weight:bold"}
    text = html.escape(frame().replace("\x1b[K", "").replace("\x1b[J", "").replace("\r", ""))
    text = re.sub("\x1b\\[([\\d;]+)m", lambda code: "</span>" if code[1] == "0" else f'<span style="{styles[code[1]]}">', text)
    page = folder / "top.html"
    page.write_text(f'<meta charset="utf-8"><body style="margin:0;background:#11161c;color:#e6ebf0"><pre style="margin:12px;font:15px/1.3 '
                    f'monospace">{text}</pre>')
    browser.open(page.as_uri(), 1060, rows * 20 + 24)
    loaded(browser)
    save(browser, out / "readme-top.png")


def report(browser, program, folder, out):
    """A report that compares two recordings of the repository."""
    page = folder / "report.html"
    recordings = [ROOT / "tests/data/h200-findings" / name for name in ("healthy", "growth-oom")]
    subprocess.run([str(program), "report", *map(str, recordings), "-o", str(page)], check=True, stdout=subprocess.DEVNULL)
    browser.open(page.as_uri(), *SCREEN)
    loaded(browser)
    save(browser, out / "readme-report.png")


def of_pytorch(browser, program, folder, out):
    """The stacks of a memory snapshot, and the kernels of a trace."""
    page = folder / "pytorch.html"
    for name, file, shown, top in [
        ("stacks", "torch/mlp_snapshot.pickle.gz", "[...document.querySelectorAll('h3')].find(one => one.textContent === 'By stack')", -300),
        ("kernels", "kineto/ddp_tight_rank0.json.gz", "(highwaterChart.show(0.2003, 0.2023), document.body)", 0),
    ]:
        subprocess.run([str(program), "report", str(ROOT / "tests/data" / file), "-o", str(page)], check=True, stdout=subprocess.DEVNULL)
        browser.open(page.as_uri(), *SCREEN)
        loaded(browser)
        browser.evaluate(f"scrollTo(0, Math.max(0, ({shown}).getBoundingClientRect().top + scrollY + ({top}))); 0")
        loaded(browser)
        save(browser, out / f"readme-{name}.png")


def loaded(browser):
    eventually("the page", lambda: browser.evaluate("document.readyState") == "complete")
    # Two frames later, scripts that draw once the page is there have drawn.
    browser.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def save(browser, path, clip=None):
    browser.picture(path, clip)
    print(f"{path}: {path.stat().st_size // 1024} KiB")


def settled(browser, waits):
    """What the page shows, once it has panels and three looks in a row find none of them loading."""
    quiet, seen, deadline = 0, None, time.monotonic() + waits
    while quiet < 4 and time.monotonic() < deadline:
        time.sleep(0.7)
        now = json.loads(browser.evaluate(CAUGHT) or '{"loading": 1, "errors": [], "panels": 0}')
        quiet = quiet + 1 if now["panels"] and not now["loading"] and now == seen else 0
        seen = now
    return seen


def found(name, *others):
    """The path of a program: one of `others` if it is there, or the machine's own."""
    for path in others:
        if pathlib.Path(path).is_file():
            return path
    path = shutil.which(name)
    return path or sys.exit(f"{name} is not installed")


def options():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for the pictures")
    parser.add_argument("--grafana", type=pathlib.Path, help="Grafana's home")
    parser.add_argument("--highwater", help="the program; by default target/release or target/debug")
    parser.add_argument("--prometheus", help="URL of a Prometheus that runs already")
    parser.add_argument("--minutes", type=float, default=3, help="how many minutes of data to wait for")
    parser.add_argument("--span", default="5m", help="time range of the dashboards")
    parser.add_argument("--only", nargs="*", default=[], help="names of dashboards")
    parser.add_argument("--set", nargs="*", default=["job=moe-tight"], help="variables of the dashboards, NAME=VALUE")
    parser.add_argument("--waits", type=float, default=60, help="seconds that a page may take")
    return parser.parse_args()


def main():
    chosen = options()
    chosen.out.mkdir(parents=True, exist_ok=True)
    if not re.fullmatch(r"\d+[smhd]", chosen.span):
        sys.exit("--span is a number and s, m, h or d")
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        source, address = chosen.prometheus, None
        if not source:
            program = chosen.highwater or found("highwater", ROOT / "target/release/highwater", ROOT / "target/debug/highwater")
            address = stack.enter_context(demo(program, folder))
            scraper = found("prometheus", ROOT / "target/tools/prometheus/usr/bin/prometheus")
            source = stack.enter_context(prometheus(scraper, folder, address))
            time.sleep(60 * chosen.minutes)
        chromium = Browser()
        stack.callback(chromium.close)
        browser = chromium.page()
        if address and not chosen.only:
            live_page(browser, address, chosen.out)
            terminal(browser, program, address, folder, chosen.out)
            report(browser, program, folder, chosen.out)
            of_pytorch(browser, program, folder, chosen.out)
        broken = []
        if chosen.grafana:
            url = stack.enter_context(grafana(chosen.grafana.resolve(), folder, source))
            variables = {f"var-{name}": value for name, value in (pair.split("=", 1) for pair in chosen.set)}
            if address and not chosen.only:
                why_slow(browser, url, source, chosen.out)
                fleet(browser, url, source, chosen.out)
            broken = dashboards(browser, url, chosen.out, chosen.only, chosen.span, variables, chosen.waits)
        if broken:
            sys.exit("\n".join(broken))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""What an honest user's job has of a daemon, alone and beside ten attackers, each a user of its own. Needs root, because it
becomes these users; a machine with `useradd` is not needed.

    cargo build --release && cargo build --release -p nvml-fake
    sudo python3 benches/neighbours/neighbours.py --highwater target/release/highwater --nvml target/release/libnvml_fake.so --minutes 60

The GPUs are those of the fake NVML: GPU 0 is filled and flushed for five seconds of each minute, while the honest job's
allocator retries; then the job marks `oom`. GPU 1 is lost in each minute. Each line of the table is one guarantee; the last
column says whether it holds. The exit status is 1 if one does not.
"""

import argparse
import collections
import http.client
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request

GIB = 1 << 30
HONEST, FIRST_ATTACKER = 61001, 61002
MINUTE = 60.0
TROUBLE = (20.0, 25.0)
OOM_AT = 40.0
LOST = (10.0, 50.0)
TOTAL = 150_754_820_096


def connect(path):
    sender = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sender.connect(path + ".seqpacket")
    return sender


def event(kind, event, job, rank=0, **more):
    return {"event": event, "kind": kind, "job": job, "rank": rank, **more}


def lines(events):
    return "\n".join(json.dumps(one) for one in events).encode()


# The honest user.


def honest(socket_path, log_path, began):
    sender, step, retries = connect(socket_path), 0, 0
    counts = collections.Counter()
    with open(log_path, "w", buffering=1) as log:
        while True:
            at = (time.time() - began) % MINUTE
            step += 1
            events, now = [], time.time_ns()
            for n, (kind, what, name) in enumerate([
                ("step", "begin", None), ("phase", "begin", "forward"), ("phase", "end", "forward"),
                ("phase", "begin", "backward"), ("phase", "end", "backward"), ("step", "end", None),
            ]):
                more = {"name": name} if name else {"step": step}
                # The allocator retries within the step.
                retries += int(TROUBLE[0] <= at < TROUBLE[1])
                memory = {"alloc_retries": retries, "reserved": 60 * GIB, "allocated": 50 * GIB}
                time_ns = now - 90_000_000 + n * 15_000_000
                events.append(event(kind, what, "honest", gpu=0, memory=memory, time_unix_nano=time_ns, **more))
            if OOM_AT <= at < OOM_AT + 0.1:
                events.append({"event": "mark", "name": "oom", "job": "honest", "rank": 0, "time_unix_nano": now})
            events[-1]["answer"] = True
            sender.send(lines(events))
            answer = json.loads(sender.recv(65536))
            counts["sent"] += len(events)
            counts["accepted"] += answer["accepted"]
            counts["steps"] += 1
            for one in events:
                log.write(f"{one['time_unix_nano']}\n")
            print(json.dumps(counts), flush=True)
            time.sleep(max(0.0, 0.1 - (time.time() * 10 % 1) / 10))


# The attackers. Each ends with its standard input.


def invents_findings(socket_path, _):
    sender, step = connect(socket_path), 0
    while True:
        step += 1
        for job in range(32):
            for rank in range(8):
                memory = {"alloc_retries": 5 * step, "reserved": 70 * GIB}
                own = f"invented-{job}-{step // 100}"
                sender.send(lines([event("step", "begin", own, rank, step=step, memory=memory),
                                   event("step", "end", own, rank, step=step, memory=memory)]))
        time.sleep(0.2)


def claims_gpus(socket_path, _):
    sender, step = connect(socket_path), 0
    while True:
        step += 1
        for gpu in (0, 1):
            sender.send(lines([event("step", "begin", "thief", gpu, step=step, gpu=gpu),
                               event("step", "end", "thief", gpu, step=step, gpu=gpu),
                               event("step", "begin", "claims", gpu, step=step, gpu=gpu)]))
        time.sleep(0.015)


def floods(socket_path, _):
    senders = [connect(socket_path) for _ in range(4)]
    message = lines([event("phase", what, "flood", name=f"n{n}") for n in range(20) for what in ("begin", "end")])
    while True:
        begun = time.time()
        for sender in senders:
            for _ in range(5):
                sender.send(message)
        # 80,000 events a second together.
        time.sleep(max(0.0, 0.01 - (time.time() - begun)))


def marks_oom(socket_path, _):
    sender, n = connect(socket_path), 0
    while True:
        n += 1
        sender.send(lines([{"event": "mark", "name": "oom", "job": f"dies-{n % 40}", "rank": 0, "lost": 4294967295}]))
        time.sleep(0.5)


def speaks_for_others(socket_path, _):
    sender, step = connect(socket_path), 0
    while True:
        step += 1
        sender.send(lines([event("step", "begin", "honest", 0, step=step, gpu=0), event("step", "end", "honest", 0, step=step),
                           event("step", "exit", "honest", 0)]))
        time.sleep(0.02)


def request(url, line, body=b"", length=None, own="127.0.0.1", window=None):
    """A connection from the address `own` on which a request was sent, if the daemon took it. Nothing is read of the answer."""
    host, port = url.split("//")[1].split(":")
    head = f"{line} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body) if length is None else length}\r\n\r\n"
    sender = socket.socket()
    if window:
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
    try:
        sender.bind((own, 0))
        sender.connect((host, int(port)))
        sender.send(head.encode() + body)
    except OSError:
        pass
    return sender


def hides(_, url):
    n = 0
    while True:
        n += 1
        body = json.dumps({"event": "mark", "name": "x", "job": f"hidden-{n}"}).encode()
        request(url, "POST /api/v1/annotations", body, own=f"127.{n % 200 + 1}.{n // 200 % 250}.9").close()
        time.sleep(0.005)


def fills_limits(socket_path, _):
    sender, n = connect(socket_path), 0
    long = lambda text: f"{text:x<128}"
    while True:
        n += 1
        for rank in range(8):
            own = {"job": long(f"full-{n % 60}"), "rank": rank}
            events = [event("step", "begin", step=n, **own)]
            events += [event("phase", "begin", name=long(f"phase-{m}"), attributes={"why": "y" * 1000}, **own) for m in range(12)]
            sender.send(lines(events))
            layers = [{"event": "mark", "kind": "layer", "name": long(f"layer-{m}"), **own,
                       "layer": {"direction": "forward", "growth": 1 << 20, "activations": 1 << 20}} for m in range(40)]
            sender.send(lines(layers))
            sender.send(lines([event("phase", "end", name=long(f"phase-{m}"), **own) for m in range(8)]))
        time.sleep(0.05)


def stalls(_, url):
    """Asks for long answers without reading them, and sends half of long bodies."""
    paths = ("/metrics", "/api/v1/timeline?from=0&to=9000000000000000000", "/api/v1/findings?limit=1000")
    half = b'{"event":"mark","name":"' + b"x" * 15_000
    while True:
        held = [request(url, f"GET {paths[n % 3]}", window=4096) if n % 2 else
                request(url, "POST /api/v1/annotations", half, length=1_000_000, window=4096) for n in range(200)]
        time.sleep(3)
        for sender in held:
            sender.close()


def asks_for_captures(_, url):
    """Asks for captures all the time, and for the page of each that there is."""
    def get(path, body=None):
        try:
            with urllib.request.urlopen(url + path, data=body, timeout=60) as answer:
                return answer.read()
        except OSError:
            return b'{"captures": []}'

    while True:
        get("/api/v1/captures", b"{}")
        for one in json.loads(get("/api/v1/captures"))["captures"][:3]:
            get(f"/api/v1/captures/{one['id']}/report")
        time.sleep(1)


def watches(_, url):
    """Reads the live events of forty clients, and opens them again."""
    while True:
        held = [request(url, "GET /api/v1/live") for _ in range(40)]
        until = time.time() + 5
        while time.time() < until:
            for sender in held:
                try:
                    sender.recv(1 << 16, socket.MSG_DONTWAIT)
                except OSError:
                    pass
            time.sleep(0.1)
        for sender in held:
            sender.close()


ROLES = {role.__name__: role for role in (
    invents_findings, claims_gpus, floods, marks_oom, speaks_for_others, hides, fills_limits, stalls, asks_for_captures, watches)}


def become(uid):
    def child():
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    return child


# The measurement.


class Node:
    """A daemon over two GPUs of the fake NVML."""

    def __init__(self, options):
        self.folder = tempfile.mkdtemp(prefix="neighbours-")
        os.chmod(self.folder, 0o755)
        self.library = shutil.copy(options.nvml, f"{self.folder}/libnvml_fake.so")
        self.xids, self.is_lost, self.pids, self.asked, self.cut_off = 0, False, [], 0, []
        self.control()
        self.socket = f"{self.folder}/annotations.sock"
        settings = ["captures.cooldown=20s", "captures.before=10s", "captures.after=3s", f"captures.directory={self.folder}/captures"]
        self.process = subprocess.Popen(
            [options.highwater, "serve", "--nvml-library", self.library, "--listen", "127.0.0.1:0",
             "--annotations-socket", self.socket, *[part for one in settings for part in ("--set", one)]],
            stdout=open(f"{self.folder}/out", "w"), stderr=subprocess.STDOUT, env={**os.environ, "NO_COLOR": "1"})
        self.began = time.time()
        self.url = self.wait_for_url()

    def control(self):
        flush = [{"at_ms": 0, "value": 60 * GIB}]
        for half in range(10):
            at = TROUBLE[0] * 1000 + half * 500
            flush += [{"at_ms": at, "value": TOTAL - (700 << 20)}, {"at_ms": at + 400, "value": 40 * GIB}]
        flush.append({"at_ms": TROUBLE[1] * 1000, "value": 60 * GIB})
        processes = [{"pid": pid, "used": 60 * GIB} for pid in self.pids]
        gpus = [{"uuid": "GPU-a", "used": {"points": flush, "repeat_ms": MINUTE * 1000}, "processes": processes, "utilization": 90},
                {"uuid": "GPU-b", "used": 5 * GIB, "lost": self.is_lost, "utilization": 90}]
        text = json.dumps({"gpus": gpus, "xids": [{"gpu": 1, "xid": 79}] * self.xids})
        with open(f"{self.library}.next", "w") as file:
            file.write(text)
        os.rename(f"{self.library}.next", f"{self.library}.json")

    def wait_for_url(self):
        for _ in range(200):
            text = open(f"{self.folder}/out").read()
            if "listening on http://" in text:
                return "http://" + text.split("listening on http://")[1].split()[0].rstrip("/")
            time.sleep(0.05)
        sys.exit(f"the daemon does not start: {open(f'{self.folder}/out').read()}")

    def get(self, path):
        """The answer, asked for as often as it is cut off or refused; how often that was is counted."""
        for _ in range(20):
            self.asked += 1
            try:
                with urllib.request.urlopen(self.url + path, timeout=60) as answer:
                    return answer.read()
            except (OSError, http.client.HTTPException) as error:
                self.cut_off.append(f"{path.split('?')[0]}: {error!r}")
                time.sleep(0.5)
        sys.exit(f"no answer: {self.cut_off[-3:]}")

    def resident_mib(self):
        status = open(f"/proc/{self.process.pid}/status").read()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024

    def metrics(self, name):
        return sum(float(line.rsplit(" ", 1)[1]) for line in self.get("/metrics").decode().splitlines()
                   if line.split("{")[0].split(" ")[0] == name)

    def memory_mib(self):
        """Resident memory and its part `other`, of one scrape."""
        parts = {}
        for line in self.get("/metrics").decode().splitlines():
            if line.startswith(("highwater_memory_bytes{", "process_resident_memory_bytes ")):
                name, value = line.rsplit(" ", 1)
                parts[name] = float(value) / (1 << 20)
        return parts.get("process_resident_memory_bytes", 0.0), parts.get('highwater_memory_bytes{part="other"}', 0.0), parts

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(20)


def play(options, roles, minutes):
    node = Node(options)
    own = os.path.abspath(__file__)
    log = f"{node.folder}/honest.log"
    open(log, "w").close()
    os.chmod(log, 0o666)
    script = shutil.copy(own, f"{node.folder}/neighbours.py")
    os.chmod(script, 0o644)
    # Other users may not run one below root's home.
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin") or sys.executable
    run = [python, script, "--role"]
    processes = []
    try:
        return measure(node, log, run, roles, minutes, processes)
    finally:
        for process in processes:
            process.kill()
        node.end()
        shutil.rmtree(node.folder, ignore_errors=True)


def measure(node, log, run, roles, minutes, processes):
    with open(f"{node.folder}/counts", "w") as out:
        honest_process = subprocess.Popen([*run, "honest", node.socket, log, str(node.began)], stdout=out,
                                          preexec_fn=become(HONEST))
    processes.append(honest_process)
    node.pids = [honest_process.pid]
    node.control()
    attackers = [subprocess.Popen([*run, role, node.socket, node.url], preexec_fn=become(FIRST_ATTACKER + n), stderr=subprocess.DEVNULL)
                 for n, role in enumerate(roles)]
    processes.extend(attackers)
    findings, captures, most, most_other = {}, {}, (0.0, 0.0, {}), (0.0, 0.0, {})
    until, looked = node.began + minutes * MINUTE, 0.0
    while time.time() < until:
        at = (time.time() - node.began) % MINUTE
        is_lost = LOST[0] <= at < LOST[1]
        if is_lost != node.is_lost:
            node.is_lost = is_lost
            node.xids += int(is_lost)
            node.control()
        if time.time() - looked >= 5:
            looked = time.time()
            memory = node.memory_mib()
            most, most_other = max(most, memory, key=lambda one: one[0]), max(most_other, memory, key=lambda one: one[1])
            for one in json.loads(node.get("/api/v1/findings?limit=1000"))["findings"]:
                if one.get("job") == "honest" and one.get("user") == str(HONEST) or one["finding"] in ("gpu_lost", "xid"):
                    findings[one["id"]] = one
            for one in json.loads(node.get("/api/v1/captures"))["captures"]:
                if one["id"] not in captures and one["state"] == "complete":
                    captures[one["id"]] = rows(node, one)
        time.sleep(0.2)
    resident, dropped = node.resident_mib(), node.metrics("highwater_findings_dropped_total")
    ended = [role for role, attacker in zip(roles, attackers) if attacker.poll() is not None]
    if ended:
        sys.exit(f"attackers that ended by themselves: {ended}")
    honest_process.kill()
    counts = json.loads([line for line in open(f"{node.folder}/counts").read().splitlines() if line.endswith("}")][-1])
    sent = sorted(int(line) for line in open(log).read().split())
    missing, lacking = 0, []
    for name, (begin, end, known) in captures.items():
        # What was sent shortly before the end of a capture may come after it. Events may have the same time.
        within = collections.Counter(at for at in sent if begin <= at <= end - 500_000_000)
        absent = within - known
        missing += absent.total()
        if absent:
            first, last = ((at - begin) / 1e9 for at in (min(absent), max(absent)))
            lacking.append(f"{name}: {absent.total()} of {within.total()}, {first:.1f} to {last:.1f} s of {(end - begin) / 1e9:.1f} s after its begin")
    kinds = collections.Counter(one["finding"] for one in findings.values())
    # Findings and `oom` marks of the job, and losses of the GPU, that some capture covers. The last minute's may still be written.
    ooms = [int((node.began + minute * MINUTE + OOM_AT + 0.2) * 1e9) for minute in range(minutes - 1)]
    found = [one["raised_unix_nano"] for one in findings.values() if one["severity"] != "info"]
    troubles = [at for at in ooms + found if at < (node.began + (minutes - 1) * MINUTE) * 1e9]
    covered = sum(any(begin <= at <= end for begin, end, *_ in captures.values()) for at in troubles)
    return {"counts": counts, "kinds": kinds, "captures": len(captures), "troubles": len(troubles), "covered": covered,
            "missing": missing, "lacking": lacking, "resident": resident, "other": most_other[1], "most": most, "most_other": most_other, "asked": node.asked, "cut_off": node.cut_off, "dropped": dropped, "minutes": minutes}


def rows(node, one):
    """Begin, end, and the times of the honest job's events that a capture has."""
    path = f"{node.folder}/download.sqlite"
    with open(path, "wb") as file:
        file.write(node.get(f"/api/v1/captures/{one['id']}"))
    connection = sqlite3.connect(path)
    begin, end = one["begin_unix_nano"], one["end_unix_nano"]
    query = ("SELECT at_ns FROM annotations JOIN jobs USING (job) WHERE jobs.name = 'honest' AND jobs.user = ?"
             " AND at_ns BETWEEN ? AND ?")
    known = collections.Counter(at for at, in connection.execute(query, (str(HONEST), begin, end - 500_000_000)))
    connection.close()
    os.remove(path)
    return begin, end, known


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--highwater", default="target/release/highwater")
    parser.add_argument("--nvml", default="target/release/libnvml_fake.so")
    parser.add_argument("--minutes", type=int, default=60, help="beside the attackers; alone it is a tenth, 3 at least")
    parser.add_argument("--role", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        role, *rest = options.role
        return honest(rest[0], rest[1], float(rest[2])) if role == "honest" else ROLES[role](*rest)
    if os.geteuid() != 0:
        sys.exit("this needs root: it becomes several users")
    alone = play(options, [], max(3, options.minutes // 10))
    beside = play(options, list(ROLES), options.minutes)
    failed = False

    def row(what, one, other, holds):
        nonlocal failed
        failed |= not holds
        print(f"| {what} | {one} | {other} | {'yes' if holds else 'NO'} |")

    print(f"| | alone, {alone['minutes']} min | beside {len(ROLES)} attackers, {beside['minutes']} min | holds |\n|---|---|---|---|")
    for name in ("sent", "accepted"):
        row(f"events {name}", alone["counts"][name], beside["counts"][name], beside["counts"]["accepted"] == beside["counts"]["sent"])
    row("steps a second", *(f"{one['counts']['steps'] / one['minutes'] / 60:.1f}" for one in (alone, beside)), True)
    for kind in ("allocator_thrash", "low_headroom", "gpu_lost"):
        each = [one["kinds"][kind] / one["minutes"] for one in (alone, beside)]
        row(f"findings `{kind}` a minute", *(f"{one:.2f}" for one in each), each[1] >= 0.9 * each[0] > 0)
    # One finding for as long as it recurs.
    row("findings `xid`", alone["kinds"]["xid"], beside["kinds"]["xid"], min(alone["kinds"]["xid"], beside["kinds"]["xid"]) > 0)
    # An incident is captured the first time and when it gets worse, not each time that it comes back.
    row("troubles of the job and the lost GPU that a capture covers", *(f"{one['covered']} of {one['troubles']}" for one in (alone, beside)),
        beside["covered"] / max(beside["troubles"], 1) >= alone["covered"] / max(alone["troubles"], 1) > 0)
    row("captures", alone["captures"], beside["captures"], True)
    row("events of the job that these lack", alone["missing"], beside["missing"], beside["missing"] == 0)
    row("answers of an honest reader that were cut off or refused", *(f"{len(one['cut_off'])} of {one['asked']}" for one in (alone, beside)),
        not beside["cut_off"])
    row("resident memory at its peak, MiB", f"{alone['resident']:.1f}", f"{beside['resident']:.1f}", beside["resident"] < 158)
    row("of that in no known part (`other`) at its peak, MiB", f"{alone['other']:.1f}", f"{beside['other']:.1f}", beside["other"] <= 8)
    for what in ("most", "most_other"):
        resident, _, parts = beside[what]
        largest = sorted(((mib, name.split('"')[1]) for name, mib in parts.items() if '"' in name), reverse=True)
        print(f"\nparts of {resident:.1f} MiB: " + ", ".join(f"{name} {mib:.1f}" for mib, name in largest if mib >= 0.1))
    print(f"cut off: {beside['cut_off'][:5]}")
    print(f"captures that lack events: {beside['lacking']}")
    print(f"findings dropped: {alone['dropped']:.0f}, {beside['dropped']:.0f}; kinds of the honest user: {dict(alone['kinds'])}, {dict(beside['kinds'])}")
    sys.exit(failed)


if __name__ == "__main__":
    main()

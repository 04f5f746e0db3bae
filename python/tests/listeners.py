"""What the tests put in place of the daemon: sockets and a server that keep what arrives. And the client, as new."""

import contextlib
import http.server
import json
import os
import socket
import tempfile
import threading
import time
import unittest
from pathlib import Path
from unittest import mock

import highwater
from highwater import _gc, _transport

ASK = b'"answer":true'
PYTHON = Path(__file__).resolve().parent.parent
SECONDS = 20


def wait_until(condition, what="a condition", seen=None):
    """Waits for it; fails where it does not come, with what `seen` returns."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come" + (f": {seen()}" if seen else ""))
        time.sleep(0.005)


class Listener:
    """Keeps every message that arrives at a Unix socket, as events. It answers as it is told, and otherwise that it took
    everything; one that does not answer at all is an older daemon's."""

    def __init__(self, path, kind=socket.SOCK_SEQPACKET, answers=()):
        self.path, self.messages, self.ended = path, [], 0
        self.answers = None if answers is None else list(answers)
        self.socket = socket.socket(socket.AF_UNIX, kind)
        self.socket.bind(path + ".seqpacket" if kind == socket.SOCK_SEQPACKET else path)
        self.is_reading = threading.Event()
        self.is_reading.set()
        self.connections = []
        if kind == socket.SOCK_SEQPACKET:
            self.socket.listen()
        thread = threading.Thread(target=self.accept if kind == socket.SOCK_SEQPACKET else self.read, daemon=True)
        thread.start()

    def accept(self):
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            self.connections.append(connection)
            threading.Thread(target=self.read, args=(connection,), daemon=True).start()

    def read(self, connection=None):
        while self.is_reading.wait():
            try:
                message = (connection or self.socket).recv(1 << 17)
            except OSError:
                return
            if not message:
                self.ended += 1
                return
            self.messages.append(message)
            if connection and self.answers is not None and ASK in message:
                taken = {"accepted": len(message.splitlines()), "refused": 0, "refusals": []}
                connection.send(json.dumps(self.answers.pop(0) if self.answers else taken).encode())

    def events(self):
        """All of them, without the question for an answer."""
        events = [json.loads(line) for message in list(self.messages) for line in message.splitlines()]
        return [{name: value for name, value in event.items() if name != "answer"} for event in events]

    def close(self):
        for each in [self.socket, *self.connections]:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


class Server(http.server.ThreadingHTTPServer):
    """Keeps every request, and answers as it is told."""

    def __init__(self):
        self.requests, self.answers = [], []
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                server.requests.append((self.path, dict(self.headers), body))
                taken = (200, {"accepted": len(body.splitlines()), "refused": 0, "refusals": []})
                status, answer = server.answers.pop(0) if server.answers else taken
                text = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_):
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def events(self):
        return [json.loads(line) for _, _, body in list(self.requests) for line in body.splitlines()]


class Case(unittest.TestCase):
    """A client that has marked nothing, in an environment that names a socket in a folder of its own."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.path = os.path.join(folder.name, "annotations.sock")
        environment = {"HIGHWATER_ANNOTATIONS_SOCKET": self.path, "HIGHWATER_JOB": "llama", "PATH": os.environ["PATH"]}
        # A daemon that runs on this machine must see nothing of the tests.
        self.system = os.path.join(folder.name, "system.sock")
        for patch in (
            mock.patch.dict(os.environ, environment, clear=True), mock.patch.object(_transport, "SYSTEM_SOCKET", self.system),
            # Whether the garbage collector runs within a step of a test is chance.
            mock.patch.object(_gc, "LEAST_NS", 10**12),
        ):
            patch.start()
            self.addCleanup(patch.stop)
        self.client = highwater._client
        self.addCleanup(self.reset)
        self.reset()

    def reset(self):
        """The client as it is after import."""
        client = self.client
        client.close()
        client.job = client.rank = client.world_size = client.gpu = client.socket = client.url = client.counters = None
        client.said.clear()
        client.places, client.is_fork = {}, False
        client.forget()

    def listen(self, kind=socket.SOCK_SEQPACKET, path=None, answers=()):
        listener = Listener(path or self.path, kind, answers)
        self.addCleanup(listener.close)
        return listener

    def serve(self):
        server = Server()
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        return server

    def sent(self, listener, count=None, is_whole=True):
        """Every event that has arrived after all has been sent, or once there are `count`; whether all were taken."""
        self.assertEqual(highwater.flush(SECONDS), is_whole, f"the marks were not sent: {highwater.status()}")
        if count is not None:
            wait_until(lambda: len(listener.events()) >= count, f"event {count} of {len(listener.events())}")
        return listener.events()

"""Sends the begins and ends of a job's steps and phases to the daemon, and writes the same events to a local file.

Input: begin, end and mark of a training loop. Output: one JSON object per datagram on the daemon's Unix socket, and
the same object as a line of a local log, with the same `time_unix_nano`, so that an offline comparison starts from
exactly what was sent. If the daemon is away, the job pays for one failed `send` a second and loses events, which are
counted. The local log loses none.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

RECONNECT_NS = 1_000_000_000
"""How long to leave a socket alone after it has refused, nanoseconds."""


class Annotator:
    """One process of one job. `gpu` is an index or a UUID, or None to let the daemon find it."""

    def __init__(
        self,
        identity: dict[str, Any],
        socket_path: Path | None,
        log_path: Path | None,
        counters: Callable[[], dict[str, int] | None],
    ) -> None:
        self._identity = identity
        self._socket_path = socket_path
        self._counters = counters
        self._socket: socket.socket | None = None
        self._retry_at_ns = 0
        self._log: TextIO | None = log_path.open("w") if log_path else None
        self.sent = 0
        self.lost = 0
        self.send_ns: list[int] = []

    @property
    def enabled(self) -> bool:
        """Whether events are sent or logged at all."""
        return self._socket_path is not None or self._log is not None

    def emit(self, event: str, kind: str, name: str | None, step: int) -> None:
        """Sends and logs one event, stamped now."""
        if not self.enabled:
            return
        record = {"event": event, "kind": kind, **self._identity, "step": step, "time_unix_nano": time.time_ns()}
        if name is not None:
            record["name"] = name
        memory = self._counters()
        if memory is not None:
            record["memory"] = memory
        line = json.dumps(record, separators=(",", ":"))
        self._send(line.encode())
        if self._log:
            self._log.write(line + "\n")

    def flush(self) -> None:
        """Flushes the local log."""
        if self._log:
            self._log.flush()

    def close(self) -> None:
        """Closes the socket and the log."""
        self._disconnect()
        if self._log:
            self._log.close()

    def summary(self) -> dict[str, Any]:
        """Events sent and lost, and what one `send` cost, in nanoseconds."""
        ordered = sorted(self.send_ns)
        at = (lambda share: ordered[int(share * (len(ordered) - 1))]) if ordered else (lambda share: None)
        return {"sent": self.sent, "lost": self.lost, "send_p50_ns": at(0.5), "send_p99_ns": at(0.99)}

    def _send(self, payload: bytes) -> None:
        if self._socket_path is None:
            return
        begin = time.perf_counter_ns()
        if self._deliver(payload):
            self.sent += 1
            self.send_ns.append(time.perf_counter_ns() - begin)
        else:
            self.lost += 1

    def _deliver(self, payload: bytes) -> bool:
        if self._socket is None and not self._connect():
            return False
        assert self._socket is not None
        try:
            self._socket.send(payload)
        except OSError:
            self._disconnect()
            return False
        return True

    def _connect(self) -> bool:
        now = time.monotonic_ns()
        if now < self._retry_at_ns:
            return False
        self._retry_at_ns = now + RECONNECT_NS
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        connection.settimeout(0.2)
        try:
            connection.connect(str(self._socket_path))
        except OSError:
            connection.close()
            return False
        self._socket = connection
        return True

    def _disconnect(self) -> None:
        if self._socket:
            self._socket.close()
        self._socket = None

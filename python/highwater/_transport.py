"""The ways to the daemon: its Unix sockets, or HTTP. Used by the sender's thread only, so it may wait, but never for long.

Every way takes one message of several lines, an event each, and says whether it went out.
"""

import errno
import fcntl
import http.client
import json
import os
import resource
import socket
import ssl
import urllib.parse
from typing import List, NamedTuple, Optional, Tuple

from ._tally import MOST_TEXT, Answer, answer, visible

# The datagram socket of a daemon that runs as root.
SYSTEM_SOCKET = "/run/highwater/annotations.sock"

# The daemon takes messages up to 64 KiB on its sockets, and bodies up to 1 MiB over HTTP.
MOST_BYTES = 60 << 10
# How an event asks for an answer to its message, in place of the bracket that it begins with.
ASK = b'{"answer":true,'
MOST_ANSWER_BYTES = 64 << 10
# How long a send waits for a daemon that takes nothing, and again for its answer: what the thread can lose at the end of
# the job.
WAIT_S = 1.0
# The largest token that is read, bytes.
MOST_TOKEN = 4096


class Refused(Exception):
    """The daemon answered, and did not take the message: sending it again would not help."""


class Transport:
    """A way to the daemon. `send` raises OSError where the message did not go out and may be sent again, and Refused where
    it may not."""

    name = ""
    # Whether the daemon has answered. It may have to be tried.
    is_answered = False
    # Whether its end is the end of the rank, so that no event `exit` is needed.
    ends_rank = False
    # Whether it can be used again after a send timed out. An HTTP connection cannot, because its answer is still due.
    outlives_timeouts = True

    def __init__(self) -> None:
        # Answers that came, until they are looked at.
        self.answers: List[Answer] = []

    def send(self, message: bytes) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class Held:
    """A socket that notices when its descriptor was closed and used again. A job may close all descriptors, as programs that
    become daemons do, and open its own files under the same numbers. These must be neither written to nor closed."""

    def __init__(self, held: Optional[socket.socket]) -> None:
        assert held is not None
        self.socket = held
        self.identity = self.known()

    def known(self) -> Optional[Tuple[int, int]]:
        """What the descriptor's number stands for now."""
        try:
            status = os.fstat(self.socket.fileno())
        except OSError:
            return None
        return status.st_dev, status.st_ino

    def is_ours(self) -> bool:
        """Whether the descriptor is still the socket's. If not, detaches it: closing it would close the job's file."""
        is_ours = self.identity is not None and self.known() == self.identity
        if not is_ours:
            self.socket.detach()
        return is_ours

    def check(self) -> None:
        """Raises OSError where its number stands for something else by now."""
        if not self.is_ours():
            raise OSError(errno.EBADF, "the job closed the descriptor")


def _at_high_number(low: socket.socket) -> socket.socket:
    """The socket under a number that programs seldom count on; the socket itself where none is free."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    least = (min(soft, 1024) if soft > 0 else 1024) // 2
    try:
        high = socket.socket(fileno=fcntl.fcntl(low.fileno(), fcntl.F_DUPFD_CLOEXEC, least))
    except OSError:
        return low
    low.close()
    return high


class UnixSocket(Transport):
    """A socket of the daemon, of one kind at one path."""

    def __init__(self, kind: int, path: str) -> None:
        super().__init__()
        self.socket = _at_high_number(socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC))
        self.socket.settimeout(WAIT_S)
        try:
            # Datagrams need no connection; connecting shows whether somebody listens.
            self.socket.connect(path)
        except BaseException:
            self.socket.close()
            raise
        self.held = Held(self.socket)

    def send(self, message: bytes) -> None:
        self.held.check()
        self.socket.send(message)

    def close(self) -> None:
        if self.held.is_ours():
            self.socket.close()


class Seqpacket(UnixSocket):
    """The seqpacket socket: each connection has its own queue, and the daemon sees its end. The daemon answers each message
    that asks for it. If an answer does not come in time, no other is asked for until it does: an older daemon never answers,
    and a busy one must not delay each message."""

    name = "seqpacket"
    ends_rank = True

    def __init__(self, path: str) -> None:
        super().__init__(socket.SOCK_SEQPACKET, path + ".seqpacket")
        self.is_owed = False

    def send(self, message: bytes) -> None:
        if self.is_owed:
            self.receive(socket.MSG_DONTWAIT)
        if self.is_owed:
            return super().send(message)
        super().send(ASK + message[1:])
        self.is_owed = True
        return self.receive(0)

    def receive(self, flags: int) -> None:
        """Takes an answer, if one comes in time."""
        self.held.check()
        try:
            body = self.socket.recv(MOST_ANSWER_BYTES, flags)
        except (BlockingIOError, TimeoutError, socket.timeout):
            return
        if not body:
            raise ConnectionResetError(errno.ECONNRESET, "the daemon closed the connection")
        self.is_owed, self.is_answered = False, True
        known = answer(body)
        if known:
            self.answers.append(known)


class Datagrams(UnixSocket):
    """The datagram socket, for daemons without the other. Nothing can answer."""

    name = "datagram"

    def __init__(self, path: str) -> None:
        super().__init__(socket.SOCK_DGRAM, path)


class Http(Transport):
    """`POST /api/v1/annotations` over a connection that stays open. No proxy is used: the daemon is on this node."""

    name = "http"
    is_answered = True
    outlives_timeouts = False

    def __init__(self, url: str, token: Optional[str]) -> None:
        super().__init__()
        parts = urllib.parse.urlsplit(url if "//" in url else "http://" + url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise Refused("this is not the address of a daemon, such as http://127.0.0.1:10450")
        self.path = parts.path.rstrip("/") + "/api/v1/annotations"
        self.headers = {"Content-Type": "application/x-ndjson"}
        if token:
            self.headers["Authorization"] = "Bearer " + token
        port = parts.port
        self.connection: http.client.HTTPConnection = (
            http.client.HTTPSConnection(parts.hostname, port, timeout=WAIT_S, context=ssl.create_default_context())
            if parts.scheme == "https"
            else http.client.HTTPConnection(parts.hostname, port or 10450, timeout=WAIT_S)
        )
        self.connection.connect()
        self.held = Held(self.connection.sock)

    def check(self) -> None:
        """As of any socket. A connection that was closed after an answer is opened anew."""
        if self.connection.sock is None:
            self.connection.connect()
            self.held = Held(self.connection.sock)
        self.held.check()

    def send(self, message: bytes) -> None:
        self.check()
        try:
            self.connection.request("POST", self.path, message, self.headers)
            response = self.connection.getresponse()
            status, body = response.status, response.read(1 << 20)
        except http.client.HTTPException as error:
            raise OSError(errno.EPROTO, f"no answer that is HTTP: {error!r}") from error
        if status in (429, 503) or (status >= 500):
            raise OSError(errno.EAGAIN, f"the daemon answered {status}")
        known = answer(body)
        if known:
            self.answers.append(known)
        elif status >= 300:
            raise Refused(f"the daemon answered {status}: {_detail(body)}")

    def close(self) -> None:
        if self.connection.sock is not None:
            # Detaches the socket if its descriptor is no longer ours, so that closing it is harmless.
            self.held.is_ours()
        self.connection.close()


def _detail(body: bytes) -> str:
    """What a problem's body says."""
    try:
        problem = json.loads(body)
        return visible(str(problem.get("detail") or problem.get("title")))
    except Exception:
        return visible(body[:MOST_TEXT].decode(errors="replace"))


class Named(NamedTuple):
    """The place that the user names: the path of a socket, or an address."""

    path: Optional[str] = None
    url: Optional[str] = None

    def shown(self) -> str:
        """For people: without the name and password that an address may have."""
        return self.path or (self.url or "").rpartition("@")[2]


def named(path: Optional[str], url: Optional[str]) -> Named:
    """What the user names, by these arguments of `configure`, or else in the environment. Of two at one level, the socket."""
    if path or url:
        return Named(path) if path else Named(None, url)
    path = os.environ.get("HIGHWATER_ANNOTATIONS_SOCKET")
    return Named(path) if path else Named(None, os.environ.get("HIGHWATER_URL") or None)


def found_paths() -> List[str]:
    """Where the daemon's datagram socket may be if nobody names one, the most likely first."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    own = [os.path.join(runtime, "highwater", "annotations.sock")] if runtime else []
    return [SYSTEM_SOCKET, *own]


def token() -> Optional[str]:
    """The token for annotations over TCP, from `HIGHWATER_TOKEN` or the file `HIGHWATER_TOKEN_FILE`."""
    named = os.environ.get("HIGHWATER_TOKEN", "").strip()
    path = os.environ.get("HIGHWATER_TOKEN_FILE")
    if named or not path:
        return named or None
    with open(path, encoding="utf-8") as file:
        text = file.read(MOST_TOKEN + 1)
    if len(text) > MOST_TOKEN:
        raise ValueError(f"HIGHWATER_TOKEN_FILE names a file of more than {MOST_TOKEN} bytes")
    return text.strip()


def open_one(place: Named) -> Tuple[Optional[Transport], str]:
    """Opens the way to the daemon that the user names and no other, or else the first that is found. Returns it with the path
    or address that was opened, or None with what was tried."""
    if place.url:
        try:
            return Http(place.url, token()), place.shown()
        except (OSError, Refused, ValueError, UnicodeDecodeError) as error:
            return None, f"{place.shown()}: {error}"
    tried = []
    for each in [place.path] if place.path else found_paths():
        for way in (Seqpacket, Datagrams):
            try:
                return way(each), each
            except OSError as error:
                tried.append(f"{each}: {error.strerror or error}")
                # The second says the same.
                if error.errno in (errno.EACCES, errno.EPERM):
                    break
    return None, "; ".join(dict.fromkeys(tried))

"""A process that sends all it can, over either Unix socket, until its standard input ends.

Usage: flood.py dgram|seqpacket SOCKET [CONNECTIONS]

With CONNECTIONS it has so many, and sends messages of 64 KiB that are 32,768 events of nonsense each.
"""

import json
import os
import select
import socket
import sys

KINDS = {"dgram": socket.SOCK_DGRAM, "seqpacket": socket.SOCK_SEQPACKET}


def flood_with_nonsense(kind: int, path: str, connections: int) -> None:
    senders = [socket.socket(socket.AF_UNIX, kind) for _ in range(connections)]
    for sender in senders:
        sender.connect(path)
        sender.setblocking(False)
    print("floods", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        for sender in select.select([], senders, [], 1)[1]:
            try:
                sender.send(b"1\n" * 32768)
            except BlockingIOError:
                pass


def main() -> None:
    kind, path, *connections = sys.argv[1:]
    if connections:
        return flood_with_nonsense(KINDS[kind], path, int(connections[0]))
    sender = socket.socket(socket.AF_UNIX, KINDS[kind])
    sender.connect(path)
    job = f"flood-{os.getpid()}"
    events = [json.dumps({"event": event, "name": "x", "job": job}).encode() for event in ("begin", "end")]
    print("floods", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        for _ in range(500):
            for event in events:
                sender.send(event)


if __name__ == "__main__":
    main()

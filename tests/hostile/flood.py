"""A process that sends all it can, over either Unix socket, until its standard input ends.

Usage: flood.py dgram|seqpacket SOCKET
"""

import json
import os
import select
import socket
import sys

KINDS = {"dgram": socket.SOCK_DGRAM, "seqpacket": socket.SOCK_SEQPACKET}


def main() -> None:
    kind, path = sys.argv[1:]
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

"""Runs the client's tests as if on another machine, and fails if one of them looks for a daemon of this one.

Listeners stand where a daemon would be found: below $XDG_RUNTIME_DIR, and, as root, at the system's path, in a mount
namespace of their own. Any connection or datagram that reaches them comes from a test. Arguments go to unittest.
"""

import os
import pathlib
import socket
import subprocess
import sys
import tempfile

PYTHON = pathlib.Path(__file__).resolve().parent.parent
SYSTEM = "/run"
INSIDE = "HIGHWATER_TESTS_ALONE"


class Trap:
    """Both sockets of a daemon, in a folder for runtime files."""

    def __init__(self, runtime):
        path = os.path.join(runtime, "highwater", "annotations.sock")
        os.makedirs(os.path.dirname(path))
        self.datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.datagrams.bind(path)
        self.connections = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.connections.bind(path + ".seqpacket")
        self.connections.listen(128)
        self.path = path

    def caught(self):
        """How many connections and datagrams came."""
        count = 0
        for each, take in ((self.datagrams, self.datagrams.recv), (self.connections, lambda _: self.connections.accept())):
            each.setblocking(False)
            try:
                while True:
                    take(1 << 17)
                    count += 1
            except BlockingIOError:
                pass
        return count


def main():
    if os.geteuid() == 0 and INSIDE not in os.environ:
        command = ["unshare", "--mount", sys.executable, __file__, *sys.argv[1:]]
        return subprocess.run(command, env={**os.environ, INSIDE: "1"}).returncode
    with tempfile.TemporaryDirectory() as folder:
        runtime = os.path.join(folder, "runtime")
        traps = [Trap(runtime)]
        if INSIDE in os.environ:
            subprocess.run(["mount", "-t", "tmpfs", "none", SYSTEM], check=True)
            traps.append(Trap(SYSTEM))
        else:
            print(f"NOT TRIED: only root can put a listener below {SYSTEM}", file=sys.stderr)
        kept = {name: value for name, value in os.environ.items() if name == "HIGHWATER" or not name.startswith("HIGHWATER_")}
        environment = {**kept, "XDG_RUNTIME_DIR": runtime, "HOME": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "unittest", "discover", "-q", "-s", PYTHON / "tests", "-t", PYTHON, *sys.argv[1:]]
        status = subprocess.run(command, env=environment).returncode
        caught = {trap.path: trap.caught() for trap in traps}
    if any(caught.values()):
        print(f"tests connected to the daemon of this machine: {caught}", file=sys.stderr)
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())

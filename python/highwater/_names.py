"""A name for a job that nobody named: one that a person recognises, and that no other run on the node has.

It is the script's name and what tells runs apart: `sweep-4711`, after the process that `ps` and `nvidia-smi` show. Processes
that belong to one run must find the same: the children of a process, and the ranks that one launcher started.
"""

import multiprocessing
import os
import re
import socket
import sys
from typing import Any, Mapping, Optional, Tuple

# The daemon refuses longer names, and names with characters that are not shown: core/src/jobs.
MOST_BYTES = 128
_HIDDEN = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f"
    "\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
# Of a host's name or of an address.
_MOST_PLACE = 64

# What a kernel of a notebook is started as. The name of the notebook is found elsewhere.
_KERNELS = ("ipykernel_launcher", "colab_kernel_launcher", "ipykernel")
# The first word of the command line if there is no script: standard input, `-c`, and what interactive Python has.
_NO_SCRIPT = ("", "-", "-c", "-m")
PYTHON, NOTEBOOK = "python", "notebook"

# The namespaces that a machine begins with (include/linux/proc_ns.h). In any other, process ids begin at 1 again.
_FIRST_PIDS, _FIRST_HOST = "pid:[4026531836]", "uts:[4026531838]"
# The flag of a process that was forked and runs its parent's program (include/linux/sched.h, PF_FORKNOEXEC).
_RUNS_PARENTS_PROGRAM = 0x40
# What multiprocessing starts on behalf of a process, as it stands in the command line.
_OF_MULTIPROCESSING = (b"--multiprocessing-fork", b"multiprocessing.forkserver")
_MOST_GENERATIONS = 64

# The process that imported this module. A child that is forked later has its parent's.
_importer = os.getpid()
_first_process: Optional[int] = None


def guess(known: Mapping[str, str], is_rank: bool) -> str:
    """The name of the job of this process, in this environment; `is_rank`: whether a launcher gave it a rank."""
    return _fitted(base(known), (_run_of_launcher(known) if is_rank else None) or _process(first_process()))


def base(known: Mapping[str, str]) -> str:
    """What a person calls the program: the script, the module, the notebook; `python` if it is none of these."""
    main = sys.modules.get("__main__")
    script = str(sys.argv[0]) if sys.argv else ""
    if _is_kernel(script):
        return _notebook(main, known)
    spec = getattr(main, "__spec__", None)
    # A profiler or debugger that is run by `-m` leaves its own name there, and the script's in the arguments.
    if spec is not None and _is_same(getattr(spec, "origin", None), script) and spec.name not in ("__main__", "__mp_main__"):
        return str(spec.name).removesuffix(".__main__")
    if script in _NO_SCRIPT:
        return PYTHON
    stem = _stem(script)
    return stem if stem not in ("__main__", "", ".", "..") else _folder(script) or PYTHON


def _folder(script: str) -> str:
    """The name of the folder or archive that runs as a program, or of that of its `__main__.py`."""
    try:
        path = os.path.abspath(script)
    except (OSError, ValueError):
        return ""
    return _stem(os.path.dirname(path) if _stem(path) == "__main__" else path)


def _is_kernel(script: str) -> bool:
    stem = _stem(script)
    return stem in _KERNELS or (stem == "__main__" and _stem(os.path.dirname(script)) in _KERNELS)


def _notebook(main: Any, known: Mapping[str, str]) -> str:
    """The notebook's name as Jupyter's server or VS Code gives it to the kernel."""
    path = known.get("JPY_SESSION_NAME") or getattr(main, "__vsc_ipynb_file__", None)
    return (_stem(path) if isinstance(path, str) else "") or NOTEBOOK


def _is_same(origin: Any, script: str) -> bool:
    try:
        return isinstance(origin, str) and os.path.realpath(origin) == os.path.realpath(script)
    except (OSError, ValueError):
        return False


def _stem(path: str) -> str:
    return os.path.splitext(os.path.basename(path.rstrip("/")))[0]


def _run_of_launcher(known: Mapping[str, str]) -> Optional[str]:
    """What only the ranks of one run share: the rendezvous address, the Kubernetes Job, or else the starting process."""
    port, address = known.get("MASTER_PORT"), known.get("MASTER_ADDR", "")
    if port:
        is_here = address in ("", "localhost", "::1") or address.startswith("127.")
        return f"{_container() if is_here else address[:_MOST_PLACE] + '-'}{port}"
    index, host = known.get("JOB_COMPLETION_INDEX"), socket.gethostname()
    if index and host.endswith("-" + index):
        return host[: -len(index) - 1]
    return None if index else _launcher()


def _launcher() -> Optional[str]:
    """The process that started the rank, which is not the parent of a child of the rank."""
    try:
        return _process(_parent_and_flags(first_process())[0])
    except (OSError, ValueError, IndexError):
        return None


def _process(pid: int) -> str:
    return f"{_container()}{pid}"


def _container() -> str:
    """The prefix of a process id or port, which is unique only within a container; empty outside of containers."""
    pids = _namespace("pid")
    if pids == _FIRST_PIDS:
        return ""
    # A container that shares the host's name is told apart by its namespace.
    own = pids[5:-1] if pids and _namespace("uts") == _FIRST_HOST else socket.gethostname()[:_MOST_PLACE]
    return own + "-"


def _namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""


def first_process() -> int:
    """The process that this one's run began with: its parent if it is a child of multiprocessing or was forked, and so on."""
    global _first_process
    if _first_process is None:
        pid = _importer
        parent = multiprocessing.parent_process()
        if parent is not None and parent.pid is not None and pid == os.getpid():
            pid = parent.pid
        _first_process = _first_of(pid)
    return _first_process


def _first_of(pid: int) -> int:
    for _ in range(_MOST_GENERATIONS):
        parent = _parent(pid)
        if parent is None:
            break
        pid = parent
    return pid


def _parent(pid: int) -> Optional[int]:
    """The parent, if this process was forked from it or started by its multiprocessing; None for a program of its own."""
    try:
        parent, flags = _parent_and_flags(pid)
        command, above = _command(pid), _command(parent)
    except (OSError, ValueError, IndexError):
        return None
    # The second condition excludes a process whose parent has ended, and which was given another one.
    is_forked = bool(flags & _RUNS_PARENTS_PROGRAM) and command == above
    return parent if is_forked or any(word in command for word in _OF_MULTIPROCESSING) else None


def _parent_and_flags(pid: int) -> Tuple[int, int]:
    with open(f"/proc/{pid}/stat", "rb") as file:
        # After the command's name, which may have spaces and brackets.
        words = file.read().rpartition(b")")[2].split()
    return int(words[1]), int(words[6])


def _command(pid: int) -> bytes:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read()


def _fitted(text: str, run: str) -> str:
    """Both parts in one name that the daemon takes. The first is cut if it is too long."""
    text, run = _visible(text), _visible(run)
    room = max(MOST_BYTES - len(run.encode()) - 1, 0)
    return f"{text.encode()[:room].decode(errors='ignore') or PYTHON}-{run}"


def _visible(text: str) -> str:
    return "".join(character for character in _HIDDEN.sub("", text) if character.isprintable())

"""Marks on their way from the job to the daemon.

The job's threads append to a queue, which takes a microsecond. A thread of its own turns what is there into JSON and sends
it, 20 times a second while there are marks. It holds the interpreter's lock for some microseconds each time, never while it
waits for the daemon. Everything is bounded: what finds no room is counted, and the next message reports the number.
"""

import atexit
import collections
import logging
import multiprocessing
import os
import queue
import socket
import threading
import time
from typing import Any, Callable, Deque, Dict, List, Optional, Sequence, Set, Tuple, Union

from . import _identity, _transport
from ._encode import dumps
from ._tally import Answer, Status, Tally, visible

# What comes before an event's time, the time, and what comes after it: the pieces of a JSON object that is not closed.
Mark = Tuple[str, int, str]


class Later:
    """Marks whose times are not known yet, such as those of work on a GPU. They keep their place in the queue."""

    def take(self) -> Optional[Sequence[Mark]]:
        """The marks, or None while they are not known. Called on the sender's thread, and not again after it returned
        some."""
        raise NotImplementedError

    def __len__(self) -> int:
        """How many marks it stands for: as many are lost with it."""
        return 1


# Marks that wait, at most: some megabytes, and the marks of several seconds of a fast job.
MOST_WAITING = 1 << 16
# And while there is no daemon: the last ten seconds of a job with ten steps a second. With more, each mark would go to memory
# that is in no cache, which doubles its cost.
MOST_KEPT = 1 << 10
# The longest time that a mark waits to be sent with others: half the period of the daemon's detectors.
PERIOD_S = 0.05
# After this long without marks, the thread sleeps until the next one.
QUIET_S = 0.5
# How long to wait before looking for a daemon again: the first time, and at most.
RETRY_S, MOST_RETRY_S = 0.5, 8.0
# What the end of the job waits at most for the last marks.
EXIT_S = 1.0
# The daemon refuses events of more than 16 KiB. A character takes up to four bytes.
MOST_TEXT = 15 << 8
MOST_EVENT_BYTES = 16 << 10

log = logging.getLogger("highwater")

# What to do about marks that are refused for a reason, where its own text does not say so.
ADVICE = {
    "not_owner": "give this run a name of its own, with HIGHWATER_JOB or highwater.configure(job=…)",
    "over_rate": "mark less often, or raise the daemon's annotations.max_rate",
    "too_many_jobs": "raise the daemon's limit, or give runs that belong together one name",
    "over_budget": "raise the daemon's annotations.max_bytes",
}


class Client:
    """The marks of one process."""

    def __init__(self) -> None:
        # Read by the hot path.
        self.queue: Deque[Union[Mark, Later]] = collections.deque()
        self.asleep = True
        self.room = 0 if os.environ.get("HIGHWATER_DISABLED", "") not in ("", "0") else MOST_WAITING
        # The allocator's counters, as the end of an event's JSON.
        self.counters: Optional[Callable[[], str]] = None
        # Whether PyTorch's allocator itself reports failed allocations.
        self.has_oom_observer = False
        # Set by `configure`; what is None comes from the environment.
        self.job: Optional[str] = None
        self.rank: Optional[int] = None
        self.world_size: Optional[int] = None
        self.mesh: Optional[Dict[str, int]] = None
        self.gpu: Any = None
        # Attributes from which the daemon finds the GPU, in place of the environment's.
        self.places: Dict[str, str] = {}
        self.socket: Optional[str] = None
        self.url: Optional[str] = None
        # What was logged already, by its subject.
        self.said: Set[str] = set()
        self.is_fork = False
        self.forget()

    def forget(self) -> None:
        """Resets everything to a process that has marked nothing: at the begin, and in a forked child, which is a sender with
        a thread and a connection of its own."""
        self.queue.clear()
        self.asleep = True
        # A signal handler may mark while the thread that it interrupts counts.
        self.lock = threading.RLock()
        # Lost since the last message, which reports them.
        self.lost = 0
        self.tally = Tally()
        # Unlike an event, it may be used by a signal handler that interrupts its use.
        self.alarm: "queue.SimpleQueue[None]" = queue.SimpleQueue()
        self.thread: Optional[threading.Thread] = None
        self.sent = threading.Condition()
        self.wanted = 0
        self.flushed = 0
        self.is_closing = False
        self.sender = Sender(self)

    @property
    def is_child(self) -> bool:
        """Whether this is a child that marks for its parent's rank, which continues when the child ends. Asked late, because
        multiprocessing names the parent only after it has imported the program's modules."""
        return self.is_fork or multiprocessing.parent_process() is not None

    # On the job's threads.

    def put(self, head: str, at_ns: int, tail: str = "") -> None:
        """Adds a mark: the text before its time, nanoseconds of Unix time, and the text after it."""
        waiting = self.queue
        if len(waiting) < self.room:
            waiting.append((head, at_ns, tail))
        else:
            self.lose(1)
        if self.asleep:
            self.wake()

    def put_later(self, marks: Later) -> None:
        """Adds marks whose times are not known yet."""
        if len(self.queue) < self.room:
            self.queue.append(marks)
        else:
            self.lose(len(marks))
        if self.asleep:
            self.wake()

    def lose(self, count: int) -> None:
        """Counts marks that found no room."""
        if self.room:
            with self.lock:
                self.lost += count
                self.tally.lost += count

    def wake(self) -> None:
        """Has the thread send what is there soon. Starts it for the first mark."""
        if not self.room:
            return
        try:
            with self.lock:
                if self.thread is None and not self.is_closing:
                    thread = threading.Thread(target=self.sender.run, name="highwater", daemon=True)
                    # Before it starts, so that it is known to a signal handler that marks meanwhile.
                    self.thread = thread
                    try:
                        thread.start()
                    except BaseException:
                        self.thread = None
                        raise
            self.ring()
        except RuntimeError:
            # The interpreter is ending, or no thread can be started now: the next mark tries again.
            pass

    def flush(self, timeout_s: float) -> bool:
        """Waits until everything that was marked so far has been sent; whether it has, and the daemon took it."""
        if self.thread is None:
            return not self.queue and self.tally.flush()
        with self.sent:
            self.wanted += 1
            wanted = self.wanted
            self.wake()
            is_sent = self.sent.wait_for(lambda: self.flushed >= wanted, timeout_s)
            return is_sent and self.tally.flush()

    def close(self) -> None:
        """Sends the last marks, and that the rank has ended. Waits for EXIT_S at most."""
        self.is_closing = True
        thread = self.thread
        if thread is None:
            return
        self.ring()
        if thread.is_alive():
            thread.join(EXIT_S)

    def ring(self) -> None:
        """Ends the thread's wait."""
        if self.alarm.empty():
            self.alarm.put(None)

    def wait(self, timeout_s: Optional[float]) -> None:
        """Waits for `ring`, on the sender's thread."""
        try:
            self.alarm.get(timeout=timeout_s)
            while True:
                self.alarm.get_nowait()
        except queue.Empty:
            pass

    def rank_of_job(self) -> int:
        """The rank as configured, or else as the launcher gave it."""
        return self.rank if self.rank is not None else _identity.of_environment().rank

    def say(self, text: str, is_wanted: bool = True, about: str = "", of_rank: bool = False) -> None:
        """Logs a warning, once for each subject; everything else goes to the debug level. A warning that is not about this
        rank is logged only by the first rank of a node."""
        # Read here: something may be said before anything is sent.
        is_first = about not in self.said and (of_rank or (_identity.of_environment().local_rank or 0) == 0)
        if is_wanted and is_first:
            self.said.add(about)
            log.warning("highwater: %s", text)
        else:
            log.debug("highwater: %s", text)

    def trouble(self, text: str, about: str, is_wanted: bool = True, of_rank: bool = False) -> None:
        """Logs a problem as `say` does, and keeps it for `status`."""
        self.tally.problem = text
        self.say(text, is_wanted, about, of_rank)

    def answered(self, known: Answer) -> None:
        """Counts an answer of the daemon's, and tells the user of each reason for which it refuses marks."""
        self.tally.answered(known)
        for reason, count in known.refused.items():
            detail = known.details.get(reason)
            parts = [f"the daemon refused {count} marks ({reason})" + (f": {detail}" if detail else ""), ADVICE.get(reason)]
            self.trouble("; ".join(part for part in parts if part), f"refused: {reason}", of_rank=True)
        if known.job:
            text = (
                "another process marks for the same job and rank: the daemon keeps this run's marks under the job "
                f"`{known.job}`; give this run a name or a rank of its own, with HIGHWATER_JOB or highwater.configure"
            )
            self.trouble(text, "job", of_rank=True)

    def status(self) -> Status:
        """Where marks go and what became of them. Waits for nothing."""
        sender, tally = self.sender, self.tally
        transport, message = sender.transport, sender.message
        named = _transport.named(self.socket, self.url)
        known = _identity.of_environment()
        return Status(
            daemon=visible(sender.place if transport else named.shown()) or None,
            transport=transport.name if transport else None,
            connected=transport is not None,
            confirmed=True if transport and transport.is_answered else None,
            job=tally.job or self.job or known.job,
            rank=self.rank if self.rank is not None else known.rank,
            accepted=tally.accepted,
            refused=tally.refused.copy(),
            unconfirmed=tally.unanswered + tally.pending,
            lost=tally.lost,
            waiting=len(self.queue) + len(sender.left) + (message.count(b"\n") if message else 0),
            problem=tally.problem,
        )


class Sender:
    """What the thread does: takes marks from the queue, in their order, and sends them."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.transport: Optional[_transport.Transport] = None
        # Where it leads, for people.
        self.place = ""
        # How many lost marks the message that is being sent reports.
        self.reported_lost = 0
        # The place that the user names, to which the transport leads.
        self.named = _transport.Named()
        self.sent_marks = 0
        # A message that is to be sent again, and the marks in it.
        self.message: Optional[bytes] = None
        self.retry_s = RETRY_S
        self.retry_at_s = 0.0
        self.common = ""
        self.first = self.places = ""
        self.configured: Any = None
        # Marks of a `Later` that was ready and did not fit.
        self.left: Deque[Mark] = collections.deque()

    def run(self) -> None:
        client = self.client
        quiet_s = 0.0
        # Or each mark until the first pause would wake this thread.
        client.asleep = False
        while not client.is_closing:
            wanted = client.wanted
            try:
                is_empty = self.send_all()
            except Exception as error:  # A fault of ours is no reason to lose the job's later marks.
                log.debug("highwater: %s", type(error).__name__)
                is_empty = False
            if is_empty and wanted > client.flushed:
                with client.sent:
                    client.flushed = wanted
                    client.sent.notify_all()
            quiet_s = 0.0 if client.queue or not is_empty else quiet_s + PERIOD_S
            if quiet_s < QUIET_S:
                client.wait(PERIOD_S if self.transport else RETRY_S)
            else:
                client.asleep = True
                # A mark that came before the line above did not wake this thread.
                if not client.queue:
                    client.wait(None)
                client.asleep = False
                quiet_s = 0.0
        self.end()

    def end(self) -> None:
        """Sends the last marks, and an event `exit` unless closing the connection ends the rank."""
        try:
            self.retry_at_s = 0.0
            deadline_s = time.monotonic() + EXIT_S / 2
            # Work on a GPU may still have to end.
            while not (is_empty := self.send_all()) and self.transport and time.monotonic() < deadline_s:
                time.sleep(PERIOD_S / 5)
            # The daemon ignores the end of a connection with one mark: a script may run a program for each mark.
            ends_rank = self.transport and self.transport.ends_rank and self.sent_marks > 1
            if is_empty and self.sent_marks and not ends_rank and not self.client.is_child:
                self.client.queue.append(('{"event":"exit","time_unix_nano":', time.time_ns(), ""))
                self.send_all()
            if self.transport:
                self.transport.close()
        except Exception as error:
            log.debug("highwater: %r", error)

    def send_all(self) -> bool:
        """Sends everything that is known; whether nothing is left."""
        while True:
            if self.message is None:
                self.message = self.next_message()
            if self.message is None:
                # What waits for a GPU is not known yet, and is looked at again.
                return not self.client.queue
            if not self.send(self.message):
                if self.transport is None:
                    self.trim()
                return False
            self.message = None

    def send(self, message: bytes) -> bool:
        """Sends one message. Returns False if it must be sent again."""
        self.follow_named()
        if self.transport is None and not self.open():
            return False
        assert self.transport is not None
        try:
            self.transport.send(message)
        except _transport.Refused as error:
            self.give_up(message)
            self.client.trouble(str(error), "daemon")
            return True
        except OSError as error:
            # A timeout means a slow daemon: keep the socket. (socket.timeout is a TimeoutError only since Python 3.10.)
            is_slow = isinstance(error, (TimeoutError, socket.timeout)) and self.transport.outlives_timeouts
            if not is_slow:
                self.close_transport()
            log.debug("highwater: %s", error)
            return False
        except Exception as error:
            # Sending again would not help. The error's text may contain the token, so only its type is logged.
            self.close_transport()
            self.give_up(message)
            self.client.trouble(f"marks cannot be sent: {type(error).__name__}", "daemon")
            return True
        marks = message.count(b"\n")
        self.sent_marks += marks
        self.client.tally.sent(marks, self.transport.is_answered)
        while self.transport.answers:
            self.client.answered(self.transport.answers.pop(0))
        return True

    def give_up(self, message: bytes) -> None:
        """Counts the marks of a message that the daemon never takes. Those that it reported as lost are reported again."""
        self.client.lose(message.count(b"\n"))
        with self.client.lock:
            self.client.lost += self.reported_lost

    def open(self) -> bool:
        """Looks for the daemon, unless it did so a moment ago."""
        now_s = time.monotonic()
        if now_s < self.retry_at_s:
            return False
        self.transport, place = _transport.open_one(self.named)
        if self.transport is None:
            self.retry_at_s = now_s + self.retry_s
            self.retry_s = min(2 * self.retry_s, MOST_RETRY_S)
            # Without a named daemon, its absence is not logged.
            was_named = self.named != _transport.Named()
            self.client.trouble(f"no daemon takes marks ({place}); the job goes on without", "daemon", was_named)
            return False
        self.retry_s, self.place = RETRY_S, place
        # A new daemon knows nothing of this rank.
        self.configured = None
        return True

    def follow_named(self) -> None:
        """Leaves a daemon that was found before the user named another place."""
        named = _transport.named(self.client.socket, self.client.url)
        if named != self.named:
            self.named = named
            self.close_transport()
            self.retry_s, self.retry_at_s = RETRY_S, 0.0

    def close_transport(self) -> None:
        if self.transport:
            self.transport.close()
        self.transport = None

    def trim(self) -> None:
        """Forgets the oldest of what waits, while there is no daemon."""
        waiting, lost = self.client.queue, 0
        while len(waiting) > MOST_KEPT:
            first = waiting.popleft()
            lost += 1 if isinstance(first, tuple) else len(first)
        if lost:
            self.client.lose(lost)

    def next_marks(self) -> Optional[Mark]:
        """The next mark whose time is known."""
        waiting, left = self.client.queue, self.left
        while not left:
            if not waiting:
                return None
            first = waiting[0]
            if isinstance(first, tuple):
                waiting.popleft()
                return first
            try:
                marks: Optional[Sequence[Mark]] = first.take()
            except Exception as error:
                log.debug("highwater: %r", error)
                self.client.lose(len(first))
                marks = []
            if marks is None:
                return None
            waiting.popleft()
            left.extend(marks)
        return left.popleft()

    def next_message(self) -> Optional[bytes]:
        """As many lines as one message holds; None where there is nothing to say."""
        self.prepare()
        self.reported_lost = 0
        lines: List[bytes] = []
        length, places = 0, self.places
        while length < _transport.MOST_BYTES - MOST_EVENT_BYTES:
            mark = self.next_marks()
            if mark is None:
                break
            head, at_ns, tail = mark
            if len(head) + len(tail) > MOST_TEXT:
                self.client.lose(1)
                continue
            # Only the first event of a message has these: a daemon needs them once.
            first = "" if lines else self.first + self.take_lost()
            if places and '"attributes":' not in tail:
                # Not added to an event with attributes of its own: it may already have the maximum.
                first, places = first + places, ""
            line = f"{head}{at_ns}{tail}{first}{self.common}".encode()
            lines.append(line)
            length += len(line)
        return b"".join(lines) or None

    def take_lost(self) -> str:
        with self.client.lock:
            lost, self.client.lost = self.client.lost, 0
        self.reported_lost = lost
        return f',"lost":{min(lost, 2**32 - 1)}' if lost else ""

    def prepare(self) -> None:
        """Builds the fields of every event, and those of a message's first event, if the configuration has changed."""
        client = self.client
        configured = (client.job, client.rank, client.world_size, client.mesh, client.gpu, client.places)
        if configured == self.configured:
            return
        self.configured = configured
        known = _identity.of_environment()
        self.common = f',"job":{dumps(client.job or known.job)},"rank":{client.rank_of_job()}}}\n'
        first: Dict[str, Any] = {}
        world_size = client.world_size or known.world_size
        if world_size:
            first["world_size"] = world_size
        if client.mesh:
            first["mesh"] = client.mesh
        if client.gpu is not None:
            first["gpu"] = client.gpu
        places = {**known.places, **client.places}
        self.places = "," + dumps({"attributes": places})[1:-1] if places else ""
        self.first = "," + dumps(first)[1:-1] if first else ""


client = Client()
atexit.register(client.close)
# What waited in the parents of this process: events of a GPU must not be destroyed in a child, which cannot use the GPU.
_of_parents: List[Any] = []


def _after_fork() -> None:
    """In the child. The parent's connection would not end with the parent while the child has it open."""
    sender = client.sender
    try:
        if sender.transport:
            sender.transport.close()
    except Exception as error:
        log.debug("highwater: %r", error)
    _of_parents.append((list(client.queue), sender))
    client.forget()
    client.is_fork = True
    # What a child would say about the node, its parent has said.
    client.said |= {"", "daemon"}


os.register_at_fork(after_in_child=_after_fork)

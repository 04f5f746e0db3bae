"""Steps and phases as marks: the job's threads give times, the sender's thread gets JSON in the order of the marks."""

from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from .. import _encode
from .._gc import collector
from .._marks import Later, Mark, client
from .clock import Clock, Time

# A mark whose time may not be known yet.
Timed = Tuple[str, Time, str]

_heads: Dict[Tuple[str, str], str] = {}


def head(event: str, name: str) -> str:
    """The begin of a phase's JSON, made once."""
    try:
        return _heads[event, name]
    except KeyError:
        return _heads.setdefault((event, name), _encode.head(event, "phase", name))


class Lane:
    """The latest time that was sent. A mark is never sent with an earlier time than the one before it, because an end before
    its begin would be refused."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.last_ns = 0


class Pending(Later):
    """A mark that waits for the GPU."""

    __slots__ = ("lane", "mark")

    def __init__(self, lane: Lane, mark: Timed) -> None:
        self.lane = lane
        self.mark = mark

    def take(self) -> Optional[Sequence[Mark]]:
        begin, at, tail = self.mark
        known = self.lane.clock.resolve(at)
        if known is None:
            return None
        self.lane.last_ns = known = max(known, self.lane.last_ns)
        return [(begin, known, tail)]


class Timeline:
    """Writes one rank's marks. It knows which phases are open and keeps begins and ends in pairs."""

    def __init__(self, clock: Clock, counters: Callable[[bool], str] = lambda is_step_end: "") -> None:
        self.lane = Lane(clock)
        # The allocator's counters, as the end of an event's JSON; whether it is a step's end.
        self.counters = counters
        # More attributes of a step, for its end.
        self.attributes: Callable[[int], Dict[str, Any]] = lambda number: {}
        # The allocator's highest values, as attributes of a step whose batch size is known.
        self.peaks: Callable[[], Dict[str, int]] = dict
        # The most samples of one pass of this step; 0 is not known.
        self.batch_size = 0
        # Whether this step is not marked, and how many have ended since the last that was, this one included.
        self.is_resting = False
        self.steps = 1
        self.open: List[str] = []
        self.step: Optional[int] = None
        # How long the garbage collector had stopped the process when the step began.
        self.collected_ns = 0
        # Called before each end of a phase (False), or of a step and of what is open in it (True), with the time of the end: to
        # send what else is known by then.
        self.before_end: List[Callable[[bool, Time], None]] = []

    @property
    def clock(self) -> Clock:
        return self.lane.clock

    def use(self, clock: Clock) -> None:
        """Takes another clock for the marks to come."""
        self.lane = Lane(clock)

    def stamp(self, is_anchor: bool = False) -> Optional[Time]:
        return self.lane.clock.stamp(is_anchor=is_anchor)

    def put(self, begin: str, at: Time, tail: str) -> None:
        if isinstance(at, int):
            client.put(begin, at, tail)
        else:
            client.put_later(Pending(self.lane, (begin, at, tail)))

    def begin(self, name: str, at: Optional[Time] = None) -> None:
        at = self.stamp() if at is None else at
        if at is None or name in self.open:
            return
        self.open.append(name)
        self.put(head("begin", name), at, self.counters(False))

    def end(self, name: str, at: Optional[Time] = None) -> None:
        if name not in self.open:
            return
        at = self.stamp() if at is None else at
        if at is None:
            return
        for each in self.before_end:
            each(False, at)
        self.put_end(name, at)

    def put_end(self, name: str, at: Time) -> None:
        self.open.remove(name)
        self.put(head("end", name), at, self.counters(False))

    def begin_step(self, number: int, at: Optional[Time] = None) -> None:
        at = self.stamp(is_anchor=True) if at is None else at
        if at is None:
            return
        self.step, self.batch_size = number, 0
        self.collected_ns = collector.follow()
        self.put(_encode.step_heads(number)[0], at, self.counters(False))

    def end_step(self, at: Optional[Time] = None) -> None:
        number = self.step
        at = self.stamp() if at is None else at
        if number is None or at is None:
            return
        for each in self.before_end:
            each(True, at)
        for name in list(self.open):
            self.put_end(name, at)
        self.step = None
        counters = self.counters(True)
        attributes = self.attributes(number)
        if self.batch_size:
            attributes = {**attributes, **self.peaks()}
        seconds = collector.seconds_since(self.collected_ns)
        if seconds is not None:
            attributes = {**attributes, "gc_seconds": round(seconds, 6)}
        if self.steps > 1:
            attributes = {**attributes, "steps": self.steps}
        if self.batch_size and attributes:
            tail = _encode.attributes({"batch_size": self.batch_size, **attributes})
        elif self.batch_size:
            tail = f',"attributes":{{"batch_size":{self.batch_size}}}'
        else:
            tail = _encode.attributes(attributes) if attributes else ""
        self.put(_encode.step_heads(number)[1], at, tail + counters)

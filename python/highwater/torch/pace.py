"""Which steps are marked, and which of these record their layers: so that a watch costs at most one percent of any step.

Marks of a step cost some tenths of a millisecond of Python, and nothing where the GPU is behind its host. So what they cost is
measured: after some steps that are all marked, every second one is, and the lengths of both kinds are compared. Then one
step in `every` is marked, a power of two. It depends on the numbers of the steps alone, so the ranks of a job mark the same
steps, or one of them some of the other's.
"""

import statistics
import sys
import time
from typing import Callable, Dict, List, Optional

# The third step of a watch records its layers: the optimizer has its state by then.
STEP_WITH_HISTORY = 2
# WARM first steps are all marked; of the TRIAL after them, every second one. A trial comes again after RENEW steps.
WARM, TRIAL, RENEW = 16, 128, 8192
# No trial takes place where steps are longer: what they cost is below one percent.
LONGEST_NS = 100_000_000
# Marks cost little enough if the steps with them are longer by less than this share.
LITTLE = 0.006
# If they do not, as many steps go without as leave no more than this share; and the same of records of layers. What the trial
# finds is too little: a step that is not marked ends with the hooks of the next one being attached again, 0.1 ms.
SHARE, SHARE_OF_RECORDS = 0.0025, 0.0015
# At least one step in this number is marked.
MOST_EVERY = 256
# Steps that take this many times as long as usual have those after them marked, as many as in the warm-up.
SLOW = 2


class Pace:
    """Knows steps by their numbers. It hears of the end of each marked step, and of the last of a row that are not."""

    def __init__(
        self,
        layers_every: int,
        first: int = 0,
        every: Optional[int] = None,
        now: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.layers_every = layers_every
        self.first = first
        # A pace that was asked for has no steps that are all marked, and no trial.
        self.is_fixed = every is not None
        self.every = max(1, every or 1)
        self.now = now
        self.ended_ns: Optional[int] = None
        # What marked steps took and what the others took, nanoseconds, while that is measured.
        self.took: Dict[bool, List[float]] = {True: [], False: []}
        # The first step after those that are all marked, and the first of the next trial.
        self.awake_until = first if self.is_fixed else first + WARM
        self.trial = sys.maxsize if self.is_fixed else self.awake_until
        # How long a step without marks takes, nanoseconds; 0 is not known.
        self.usual_ns = 0.0
        # No step before this one records its layers.
        self.record_from = first

    def is_recorded(self, number: int) -> bool:
        """Whether a step records its layers and what its memory holds."""
        if not self.layers_every:
            return False
        return number == self.first + STEP_WITH_HISTORY or (number % self.layers_every == 0 and number >= self.record_from)

    def next_marked(self, number: int) -> int:
        """The first step from this one on that is marked."""
        every = 1 if number < self.awake_until else 2 if self.is_trial(number) else self.every
        found = multiple(number, every)
        if number < self.trial:
            # The begin of the next trial is a step that is looked at.
            found = min(found, self.trial)
        if self.layers_every:
            found = min(found, multiple(max(number, self.record_from), self.layers_every))
            third = self.first + STEP_WITH_HISTORY
            found = min(found, third) if number <= third else found
        return found

    def is_trial(self, number: int) -> bool:
        return self.trial <= number < self.trial + TRIAL

    def ended(self, number: int, unmarked: int) -> None:
        """A marked step has ended just now, or the last of so many that were not."""
        now_ns = self.now()
        took_ns = None if self.ended_ns is None else (now_ns - self.ended_ns) / max(1, unmarked)
        self.ended_ns = now_ns
        if not unmarked and self.is_recorded(number):
            self.judge_records(number, took_ns)
            took_ns = None
        if not self.is_fixed:
            self.follow(number, not unmarked, took_ns)

    def follow(self, number: int, was_marked: bool, took_ns: Optional[float]) -> None:
        """Adds what a step took, if that is known and usual, and sets the pace where it was the last of some."""
        is_awake = number < self.awake_until
        if took_ns is not None and (is_awake or self.is_trial(number)):
            self.took[was_marked].append(took_ns)
        elif took_ns is not None and not was_marked and took_ns > SLOW * self.usual_ns:
            self.awake_until = number + 1 + WARM
            self.took = {True: [], False: []}
        if is_awake and number + 1 == self.awake_until:
            self.settle()
        elif number + 1 == self.trial + TRIAL:
            self.judge()

    def settle(self) -> None:
        """The end of steps that were all marked. If they took as long as before, the pace stays as it was."""
        length_ns = statistics.median(self.took[True] or [LONGEST_NS])
        self.took = {True: [], False: []}
        if length_ns < SLOW * self.usual_ns:
            return
        self.every, self.usual_ns, self.trial = 1, length_ns, self.awake_until
        if length_ns >= LONGEST_NS:
            self.trial += RENEW

    def judge(self) -> None:
        """The end of a trial."""
        marked, unmarked = self.took[True], self.took[False]
        self.took, self.trial = {True: [], False: []}, self.trial + TRIAL + RENEW
        if not marked or not unmarked:
            return
        self.usual_ns = statistics.median(unmarked)
        cost_ns = statistics.median(marked) - self.usual_ns
        self.every = 1
        while cost_ns > LITTLE * self.usual_ns and cost_ns > self.every * SHARE * self.usual_ns and self.every < MOST_EVERY:
            self.every *= 2

    def judge_records(self, number: int, took_ns: Optional[float]) -> None:
        """Layers were recorded in a step of this length: how many steps go without, if that is more than was asked for."""
        if took_ns is not None and self.usual_ns and number != self.first + STEP_WITH_HISTORY:
            self.record_from = number + 1 + int((took_ns - self.usual_ns) / (SHARE_OF_RECORDS * self.usual_ns))


def multiple(number: int, of: int) -> int:
    """The first multiple from a number on."""
    return -(-number // of) * of

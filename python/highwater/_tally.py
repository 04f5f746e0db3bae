"""What became of this process's marks, as far as the daemon answers."""

import json
from typing import Any, Dict, NamedTuple, Optional, TypedDict

# Reasons that are counted apart, and the length of a text of the daemon's.
MOST_REASONS = 32
MOST_TEXT = 300
OTHER = "other"


class Status(TypedDict):
    """Where this process's marks go, and what became of them."""

    # The socket or the address that marks go to, or that was named and does not take them; None if none was found.
    daemon: Optional[str]
    # `seqpacket`, `datagram` or `http`; None without a connection.
    transport: Optional[str]
    connected: bool
    # True if the daemon answers, so that `accepted` and `refused` are its own words; None if it cannot, as over datagrams.
    confirmed: Optional[bool]
    # The job under which the daemon keeps the marks.
    job: str
    rank: int
    accepted: int
    # How many were refused, by reason: docs/annotations.md has each.
    refused: Dict[str, int]
    # Sent, and not answered.
    unconfirmed: int
    lost: int
    # Not sent yet.
    waiting: int
    problem: Optional[str]


class Answer(NamedTuple):
    """The daemon's answer to one message."""

    accepted: int
    # How many were refused for each reason, and the text of the first of each.
    refused: Dict[str, int]
    details: Dict[str, str]
    # The name under which the daemon keeps the marks, if it is not the one that was sent.
    job: Optional[str] = None


def answer(body: bytes) -> Optional[Answer]:
    """The answer in a body; None if it has none."""
    try:
        known = json.loads(body)
        # Of a batch that was refused as a whole, HTTP has it within a description of the problem.
        known = known.get("annotations", known)
        listed = known.get("refusals") or []
        details = {str(each["reason"]): visible(str(each["detail"])) for each in reversed(listed)}
        refused = known.get("reasons")
        if not isinstance(refused, dict):
            refused = _by_reason(known["refused"], [str(each["reason"]) for each in listed])
        refused = {str(reason): int(count) for reason, count in refused.items() if int(count) > 0}
        job = known.get("job")
        return Answer(int(known["accepted"]), refused, details, visible(job) if isinstance(job, str) else None)
    except Exception:
        return None


def _by_reason(refused: int, listed: Any) -> Dict[str, int]:
    """Of a daemon that does not count by reason: those that it lists, and the rest."""
    counted: Dict[str, int] = {}
    for reason in listed:
        counted[reason] = counted.get(reason, 0) + 1
    counted[OTHER] = counted.get(OTHER, 0) + refused - len(listed)
    return counted


def visible(text: str) -> str:
    """A text that may go to a terminal."""
    return "".join(character if character.isprintable() else "?" for character in text[:MOST_TEXT])


class Tally:
    """Counts marks that were sent, and answers. All but the losses are counted on the sender's thread."""

    def __init__(self) -> None:
        self.accepted = 0
        self.refused: Dict[str, int] = {}
        # Sent to a daemon that answers, whose answer has not come.
        self.pending = 0
        # Sent to one that does not.
        self.unanswered = 0
        self.lost = 0
        self.job: Optional[str] = None
        self.problem: Optional[str] = None
        self.flushed_failures = 0
        self.flushed_pending = 0

    def sent(self, marks: int, is_answered: bool) -> None:
        """Marks went out."""
        if is_answered:
            self.pending += marks
        else:
            self.unanswered += marks

    def answered(self, known: Answer) -> None:
        """An answer came; it may be that to a message before."""
        self.accepted += known.accepted
        for reason, count in known.refused.items():
            key = reason if reason in self.refused or len(self.refused) < MOST_REASONS else OTHER
            self.refused[key] = self.refused.get(key, 0) + count
        marks = known.accepted + sum(known.refused.values())
        pending = min(marks, self.pending)
        self.pending -= pending
        self.unanswered = max(self.unanswered - (marks - pending), 0)
        self.job = known.job

    def flush(self) -> bool:
        """Whether everything since the last call was taken, as far as it can be known."""
        failures, pending = self.lost + sum(self.refused.copy().values()), self.pending
        # Late answers to earlier marks must not hide what was refused since.
        is_whole = failures <= self.flushed_failures and pending <= self.flushed_pending
        self.flushed_failures, self.flushed_pending = failures, pending
        return is_whole

"""Where the job is in its loop: turns what the hooks see into steps and phases.

A step begins with the first batch or the first forward pass after the step before it. It ends when every optimizer has
stepped. Without an optimizer it ends when the next one begins, which is the first batch or forward pass in training mode
after a backward pass. The phase `loss` is what the job does between a forward and the backward pass. Hooks run on several
threads, because autograd has its own, but one after the other.
"""

import threading
from typing import Any, Callable, List, Optional, Set, Tuple

import torch

from . import tensors
from .clock import Time
from .guard import Part, guarded
from .pace import Pace
from .timeline import Timeline

# An optimizer that has stepped this often without another one ends steps on its own.
MOST_ALONE = 64
# After this many changes of the parameters by an optimizer that no hook saw, as in a compiled function, steps end without.
MOST_UNSEEN = 3


def in_backward() -> bool:
    """Whether this thread runs a backward pass, as it does when checkpointed activations are computed again."""
    task = getattr(torch._C, "_current_graph_task_id", None)
    return task is not None and task() != -1


class Loop(Part):
    """Steps and phases of one model."""

    name = "marks of phases"

    def __init__(self, timeline: Timeline, optimizers: int, pace: Pace) -> None:
        self.timeline = timeline
        self.optimizers = optimizers
        # Which steps are marked. While one is not, hooks do nothing, but for those that see evaluation and the step's end.
        self.pace = pace
        self.next_step = pace.first
        self.lock = threading.RLock()
        # The thread of the loop. Batches that another one fetches cost the loop nothing.
        self.thread = threading.get_ident()
        self.in_forward = 0
        self.is_training = True
        self.is_backward = False
        self.backwards = 0
        # The optimizers whose steps have begun and not ended, and whether the latest was given a function that runs the model.
        self.entered: List[int] = []
        self.has_closure = False
        # How often an optimizer has stepped, and how often one did that no hook saw.
        self.optimizer_calls = 0
        self.unseen = 0
        # A number that changes when an optimizer steps.
        self.version: Callable[[], int] = lambda: 0
        self.last_version: Optional[int] = None
        # When a backward pass was called that has not reached the model yet.
        self.called_at: Optional[Time] = None
        self.stepped: Set[int] = set()
        self.steps_alone = 0
        # When the latest evaluation pass ended: the phase `eval` covers a row of them.
        self.eval_end: Optional[Time] = None
        # The next step that is marked.
        self.marked = pace.first
        # `on_rest` are called where steps without marks begin, and where they end. `on_step` is called with the number of the
        # step that begins, and whether a forward pass began it. The others are called after a backward pass or a step.
        self.on_rest: Tuple[Callable[[], None], Callable[[], None]] = (lambda: None, lambda: None)
        self.on_step: List[Callable[[int, bool], None]] = []
        self.on_backward_end: List[Callable[[], None]] = []
        self.on_step_end: List[Callable[[], None]] = []

    def is_evaluation(self) -> bool:
        """Whether the model runs without training. A part of a model may run by itself, outside of its forward pass."""
        return not self.is_training if self.in_forward else not torch.is_grad_enabled()

    def passes_by(self) -> None:
        """A forward pass of a step that is not marked begins."""
        if self.timeline.open:
            with self.lock:
                self.end_eval()

    @guarded
    def now(self) -> Optional[Time]:
        with self.lock:
            return self.timeline.stamp(is_anchor=self.timeline.step is None)

    @guarded
    def data_begin(self, began: Optional[Time] = None) -> None:
        with self.lock:
            if threading.get_ident() != self.thread or self.in_forward or self.is_backward:
                return
            at = self.next_part(is_boundary=True, at=began)
            self.timeline.begin("data", at)

    @guarded
    def data_end(self) -> None:
        with self.lock:
            if threading.get_ident() == self.thread:
                self.timeline.end("data")

    @guarded
    def saw(self, batch: Any) -> None:
        """What the loader gave, or the model was given."""
        with self.lock:
            if threading.get_ident() == self.thread and not self.in_forward:
                self.count_samples(batch)

    def count_samples(self, batch: Any) -> None:
        # Of several passes in a step, the largest decides how much memory it needs.
        self.timeline.batch_size = max(self.timeline.batch_size, tensors.batch_size(batch))

    @guarded
    def forward_begin(self, is_training: bool, inputs: Any = None) -> None:
        with self.lock:
            if in_backward():
                return
            if self.is_backward:
                # It failed: its end was never seen.
                self.backward_end()
            self.in_forward += 1
            if self.in_forward > 1:
                return
            self.is_training = is_training
            if not is_training:
                at = self.timeline.stamp()
                self.timeline.end("loss", at)
                self.timeline.begin("eval", at)
                return
            self.thread = threading.get_ident()
            at = self.next_part(is_boundary=True)
            self.timeline.begin("forward", at)
            if not self.timeline.batch_size:
                self.count_samples(inputs)

    @guarded
    def forward_end(self, is_whole: bool = True) -> None:
        """A forward pass ended, with outputs unless an exception ended it. What follows until the backward pass is the loss."""
        with self.lock:
            if in_backward() or not self.in_forward:
                return
            self.in_forward -= 1
            if self.in_forward:
                return
            if not self.is_training:
                self.eval_end = self.timeline.stamp()
                return
            at = self.timeline.stamp()
            self.timeline.end("forward", at)
            if is_whole:
                self.timeline.begin("loss", at)
            else:
                self.resume_optimizer()

    @guarded
    def backward_called(self) -> None:
        """A backward pass was called. Whether it is one of the model is known once it reaches the model's outputs, after
        the loss's own part and what FSDP gathers."""
        with self.lock:
            self.called_at = None if self.is_backward or in_backward() else self.now()

    @guarded
    def backward_returned(self) -> None:
        if not in_backward():
            self.called_at = None

    @guarded
    def backward_begin(self) -> bool:
        """Begins the phase `backward`. Returns False if this pass began at another output of the model already."""
        with self.lock:
            if self.is_backward:
                return False
            self.in_forward = 0
            self.timeline.end("forward")
            at = self.next_part(is_boundary=False, at=self.called_at)
            self.is_backward = True
            self.timeline.begin("backward", at)
            return True

    @guarded
    def backward_end(self) -> None:
        with self.lock:
            if not self.is_backward:
                return
            self.is_backward = False
            self.backwards += 1
            self.timeline.end("backward")
            for each in self.on_backward_end:
                each()
            self.resume_optimizer()
            if not self.entered and self.has_stepped():
                # Optimizers that step inside the backward pass.
                self.end_step()

    @guarded
    def optimizer_begin(self, which: int, has_closure: bool = False) -> None:
        with self.lock:
            if in_backward():
                return
            if self.is_backward:
                self.backward_end()
            self.in_forward = 0
            self.timeline.end("forward")
            if which in self.entered:
                # An exception ended its last step.
                del self.entered[self.entered.index(which):]
                self.timeline.end("optimizer")
            at = self.next_part(is_boundary=False)
            self.entered.append(which)
            self.has_closure = has_closure
            self.timeline.begin("optimizer", at)

    @guarded
    def optimizer_end(self, which: int) -> None:
        if self.timeline.is_resting:
            self.pass_step(which)
            return
        with self.lock:
            self.note_optimizer(which)
            if in_backward():
                return
            if which in self.entered:
                del self.entered[self.entered.index(which):]
            if self.entered:
                return
            at = self.timeline.stamp()
            if not self.has_stepped() or self.timeline.step is None:
                self.timeline.end("optimizer", at)
            if self.has_stepped():
                # Ends the phase too.
                self.end_step(at)

    @guarded
    def optimizer_skipped(self, which: int) -> None:
        """A GradScaler found gradients that are not finite. The optimizer is done with the step all the same."""
        if self.timeline.is_resting:
            self.pass_step(which)
            return
        with self.lock:
            self.note_optimizer(which)
            if self.has_stepped():
                self.end_step()

    @guarded
    def close(self) -> None:
        """Ends what is open."""
        with self.lock:
            self.end_eval()
            self.end_step()
            for name in list(self.timeline.open):
                self.timeline.end(name)

    def drop(self) -> None:
        """Ends without a mark: for good, and in a child process, where another thread of the parent may have held the lock."""
        self.is_off = True
        self.lock = threading.RLock()
        self.on_step, self.on_backward_end, self.on_step_end = [], [], []

    def note_optimizer(self, which: int) -> None:
        """An optimizer has stepped, or was skipped, which a GradScaler shows by these calls."""
        self.stepped.add(which)
        self.steps_alone += 1
        self.optimizer_calls += 1

    def has_stepped(self) -> bool:
        if not self.optimizers or not self.stepped:
            return False
        return len(self.stepped) >= self.optimizers or self.steps_alone >= MOST_ALONE

    def next_part(self, is_boundary: bool, at: Optional[Time] = None) -> Optional[Time]:
        """Ends what the next phase of training ends, and begins a step if none is open. Returns the time of both."""
        self.end_eval()
        if self.entered:
            self.timeline.end("optimizer")
            if self.has_closure:
                # A closure inside the optimizer's step runs the model again.
                is_boundary = False
            else:
                # An exception ended its step.
                self.entered.clear()
        at = self.timeline.stamp(is_anchor=self.timeline.step is None) if at is None else at
        if is_boundary and self.backwards and self.is_without_optimizer():
            self.end_step(at)
        if self.timeline.step is None:
            self.timeline.begin_step(self.next_step, at)
            if self.timeline.step is not None:
                for each in self.on_step:
                    each(self.next_step, self.in_forward > 0)
        self.timeline.end("loss", at)
        return at

    def is_without_optimizer(self) -> bool:
        """Whether steps end without an optimizer: none was given, or no hook sees its steps."""
        if not self.optimizers:
            return True
        if self.optimizer_calls:
            return False
        version = self.version()
        if self.last_version is not None and version != self.last_version:
            self.unseen += 1
        self.last_version = version
        return self.unseen >= MOST_UNSEEN

    def resume_optimizer(self) -> None:
        if self.entered:
            self.timeline.begin("optimizer")

    def end_eval(self) -> None:
        if "eval" in self.timeline.open:
            self.timeline.end("eval", self.eval_end)
        self.eval_end = None

    def end_step(self, at: Optional[Time] = None) -> None:
        self.backwards = self.steps_alone = 0
        self.entered.clear()
        self.stepped.clear()
        if self.timeline.step is None:
            # None began: it was captured as a CUDA graph.
            return
        self.timeline.end_step(at)
        if self.timeline.step is not None:
            return
        for each in self.on_step_end:
            each()
        self.pace.ended(self.next_step, 0)
        self.next_step += 1
        self.timeline.steps = 1
        # Steps whose ends no optimizer shows are all marked.
        if self.optimizer_calls and not self.has_closure:
            self.marked = self.pace.next_marked(self.next_step)
            if self.marked > self.next_step:
                self.timeline.is_resting = True
                self.on_rest[0]()

    def pass_step(self, which: int) -> None:
        """An optimizer has stepped in a step that is not marked."""
        self.note_optimizer(which)
        if not self.has_stepped():
            return
        self.steps_alone = 0
        self.stepped.clear()
        self.next_step += 1
        self.timeline.steps += 1
        if self.next_step >= self.marked:
            self.pace.ended(self.next_step - 1, self.timeline.steps - 1)
            self.timeline.is_resting = False
            self.on_rest[1]()


def end_of(loop: Loop) -> None:
    """Ends what is open when the model is gone. The garbage collector calls this, so it waits for nobody."""
    lock = loop.lock
    if lock.acquire(blocking=False):
        try:
            loop.close()
            loop.drop()
        finally:
            lock.release()

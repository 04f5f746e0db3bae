"""What the tests of highwater.torch share: a reason to skip them, and events as short words."""

import sys
import unittest

import highwater

from .listeners import Case, wait_until

try:
    import torch
except ImportError:
    torch = None

# Before 2.3, there is only the GradScaler of CUDA, which does nothing on a CPU.
GradScaler = None if torch is None else getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler

needs_torch = unittest.skipIf(torch is None, "PyTorch is not installed: nothing of highwater.torch is tested")


def needs_scaler_of_cpu(test):
    has_one = torch is None or hasattr(torch.amp, "GradScaler")
    return unittest.skipUnless(has_one, "this PyTorch has no GradScaler for a CPU (torch.amp.GradScaler)")(test)


def needs_hooks_that_run(case):
    from highwater.torch.optimizers import runs_hooks

    if not runs_hooks(case.optimizer):
        case.skipTest("another test used torch.compile, after which this PyTorch runs no hooks of optimizers")


def words(events):
    """`+forward -forward` for begin and end, `+0 -0` for steps, `!oom` for a mark; layers are left out."""
    said = []
    for event in events:
        if event.get("kind") == "layer":
            continue
        sign = {"begin": "+", "end": "-", "mark": "!"}.get(event["event"])
        if sign:
            said.append(sign + str(event["step"] if event.get("kind") == "step" else event["name"]))
    return " ".join(said)


def forget_compiled():
    """Layers are off in a process that has compiled something outside of the model, as another test may have."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()


class TorchCase(Case):
    """A daemon that listens, and a small model."""

    def setUp(self):
        super().setUp()
        torch.manual_seed(0)
        self.daemon = self.listen()
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def watch(self, *args, **options):
        import highwater.torch

        handle = highwater.torch.watch(*args, **{"layers_every": 0, **options})
        self.addCleanup(handle.close)
        return handle

    def train(self, model=None):
        loss = (model or self.model)(torch.randn(3, 4)).sum()
        loss.backward()

    def sent(self, listener, count=None):
        """Every event that arrived after all has been sent: a last mark comes behind them."""
        self.last = getattr(self, "last", 0) + 1
        highwater.mark(f"last {self.last}")
        super().sent(listener)
        wait_until(lambda: any(event.get("name") == f"last {self.last}" for event in listener.events()), "the last mark")
        return [event for event in listener.events() if not str(event.get("name")).startswith("last ")]

    def words(self, without=()):
        return " ".join(word for word in words(self.sent(self.daemon)).split() if word[1:] not in without)

    def check_pairs(self):
        """Every end has a begin before it, and what began ended."""
        open_at, events = {}, self.sent(self.daemon)
        for event in sorted(events, key=lambda event: event["time_unix_nano"]):
            key = (event.get("kind"), event.get("name"), event.get("step") if event.get("kind") == "step" else None)
            if event["event"] == "begin":
                self.assertNotIn(key, open_at)
                open_at[key] = event["time_unix_nano"]
            elif event["event"] == "end":
                self.assertGreaterEqual(event["time_unix_nano"], open_at.pop(key))
        self.assertEqual(open_at, {})

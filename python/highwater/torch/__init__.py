"""Marks the steps and phases of a PyTorch job without changing its loop.

    import highwater

    highwater.torch.watch(model, optimizer, dataloader)

Call it once, after the model is wrapped (DistributedDataParallel, fully_shard, torch.compile) and before the first step.
It works for plain models, DataParallel, DDP, FSDP1, FSDP2 and plain torch.distributed, with PyTorch 2.1 or later, and marks

| phase | when |
|---|---|
| `data` | the loop waits for a batch of `dataloader` (or of several, as a list). Without it, no time is called `data` |
| `forward` | the model runs in training mode. Layers have no phases; checkpointed activations belong to `backward` |
| `backward` | from where the loss's gradient reaches the model's outputs, until autograd is done, DDP and FSDP included |
| `optimizer` | `optimizer.step()`, of one optimizer or of a list |
| `comm` | collectives run: the union of their times, gaps below 20 us closed. It overlaps the other phases |
| `eval` | the model runs in `eval()` or without gradients: one phase for a row of passes |

A step begins with the first batch or forward pass after the one before, and ends when every optimizer has stepped: passes
with accumulated gradients belong to one step, and a step that a GradScaler skips ends too. Without an optimizer, a step ends
where the first batch or forward pass after a backward pass begins; so it does if an optimizer steps only inside compiled
functions, where no hook sees it (the first few steps are one then).

On CUDA, all times are the GPU's: events on the current stream, read later, without any synchronisation but one at the start.
On a CPU they are the host's. The allocator's counters go with each begin and end, or only with ends of steps if reading them
each time would cost more than 0.1 % of the step.

One step in `layers_every` (0: none), and the third, records its layers: what each module allocated, kept for the backward pass,
holds as parameters and gathered. Only that step has hooks on modules. Its end has the bytes of parameters, gradients and
optimizer state as attributes, and NCCL's memory by communicator where PyTorch says it. On CUDA, PyTorch records the history
of one step's allocations, from which come its peaks. Models that are compiled have no records; blocks that are compiled one
by one count as layers.

    highwater.torch.checkpoint(model, "advice.json")

has modules run through torch.utils.checkpoint, as `highwater advise FILE --json` named them.

When the allocator finds no memory, a mark `oom` has its counters; with `snapshot_dir`, PyTorch records the history of
allocations, and the mark names a file with the snapshot.

`watch` returns a handle: `close()` removes every hook, and so does leaving it as a context manager. Without it, the watch ends
with the model: nothing else keeps either. In a forked child, a watch of the parent marks nothing. Neither `watch` nor any
hook raises into the job. A part that fails is switched off, with one line in the log. Nothing is recorded while a CUDA graph
is captured.

Limits: close the watch before `torch.jit.script(model)` or `torch.cuda.make_graphed_callables(model)`, which refuse modules
with such hooks. With a DDP model and a PyTorch without hooks of process groups (before 2.15), `comm=True` registers a
communication hook that computes what DDP computes without one, unless the job has one; it costs a pass over each bucket. A
hook that the job registers later takes its place. `Join` with `divide_by_initial_world_size=False` needs `comm=False`. Of
asynchronous collectives on CUDA, those that nobody waits for in Python are not timed, nor are those in compiled graphs.
"""

from .checkpoint import checkpoint
from .profiler import profiler_handler
from .watch import watch

__all__ = ["checkpoint", "profiler_handler", "watch"]

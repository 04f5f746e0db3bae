"""One rank of a distributed job, for test_torch_comm.py: `python -m tests.torch_rank SCENARIO FILE`, with RANK set."""

import gc
import os
import sys
import time
import weakref

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import highwater

RANK = int(os.environ["RANK"])
WORLD_SIZE = int(os.environ["WORLD_SIZE"])


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(10, 10) for _ in range(5)))


def train(net, optimizer, steps=2):
    torch.manual_seed(RANK)
    for _ in range(steps):
        net(torch.randn(3, 10)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def ddp(**options):
    net = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    highwater.torch.watch(net, optimizer, layers_every=1, **options)
    train(net, optimizer)
    return net, optimizer


def ddp_with_our_hook():
    ddp(group_hooks=False)


def ddp_with_another_hook():
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    net, optimizer = ddp(group_hooks=False)
    calls = []

    def hook(state, bucket):
        calls.append(state)
        return default_hooks.allreduce_hook(dist.group.WORLD, bucket)

    net.register_comm_hook("state", hook)
    train(net, optimizer)
    assert calls and set(calls) == {"state"}, calls
    try:
        net.register_comm_hook("state", hook)
        raise AssertionError("a second hook of the job was no error")
    except RuntimeError:
        pass


def same_arithmetic():
    """With and without the hook, bit for bit."""
    for views in (False, True):
        said = []
        for watched in (False, True):
            net = DistributedDataParallel(model(), gradient_as_bucket_view=views)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            if watched:
                highwater.torch.watch(net, optimizer, layers_every=0, group_hooks=False)
            train(net, optimizer)
            # Gradients that are added to, or zeros: they are in the bucket then.
            for number in range(6):
                net(torch.randn(3, 10)).square().sum().backward()
                if number % 2:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=number == 3)
            with net.no_sync():
                net(torch.randn(3, 10)).square().sum().backward()
            net(torch.randn(3, 10)).square().sum().backward()
            said.append(torch.cat([each.detach().flatten() for p in net.parameters() for each in (p, p.grad)]))
        assert torch.equal(*said), views


def gone():
    """DDP's reducer keeps its hook, and the hook no model."""
    for group_hooks in (False, True):
        for closes in (False, True):
            net = DistributedDataParallel(model())
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            handle = highwater.torch.watch(net, optimizer, group_hooks=group_hooks)
            train(net, optimizer)
            if closes:
                handle.close()
            known = weakref.ref(net)
            del net, optimizer, handle
            dist.barrier()
            until_s = time.monotonic() + 10
            while known() is not None and time.monotonic() < until_s:
                # The threads of gloo give free what they had a moment later.
                gc.collect()
                time.sleep(0.01)
            assert known() is None, (group_hooks, closes)


def compiled():
    torch._dynamo.config.optimize_ddp = False
    net = torch.compile(DistributedDataParallel(model()), backend="eager")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    highwater.torch.watch(net, optimizer, layers_every=0, group_hooks=False)
    train(net, optimizer)


def fsdp2():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    net = model()
    for layer in list(net)[::2]:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    highwater.torch.watch(net, optimizer, layers_every=1)
    train(net, optimizer)


def fsdp1():
    from torch.distributed.fsdp import FullyShardedDataParallel

    layers = [FullyShardedDataParallel(layer, device_id=torch.device("cpu")) for layer in model()]
    net = FullyShardedDataParallel(torch.nn.Sequential(*layers), device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    highwater.torch.watch(net, optimizer, layers_every=1)
    train(net, optimizer)


def watched_again():
    """The hook of a watch that was closed serves the next one, and nothing piles up in between."""
    net = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with highwater.torch.watch(net, optimizer, layers_every=0, group_hooks=False) as first:
        train(net, optimizer, 1)
    train(net, optimizer, 1)
    assert first.comm.ops == [], first.comm.ops
    highwater.torch.watch(net, optimizer, layers_every=0, group_hooks=False, start_step=1)
    train(net, optimizer, 1)


def plain(**options):
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    highwater.torch.watch(net, optimizer, layers_every=0, **options)
    for _ in range(2):
        net(torch.randn(3, 10)).sum().backward()
        works = [dist.all_reduce(p.grad, async_op=True) for p in net.parameters()]
        for work in works:
            work.wait()
        total, gathered = torch.ones(4), torch.zeros(8)
        dist.all_reduce(total)
        try:
            dist.all_gather_into_tensor(gathered, total)
        except RuntimeError as error:
            # Before 2.2, gloo has no such gathering.
            if "no support" not in str(error):
                raise
            dist.all_gather(list(gathered.chunk(2)), total)
        assert gathered.tolist() == [2.0] * 8
        dist.broadcast(total, 0)
        dist.barrier()
        (dist.send if RANK == 0 else dist.recv)(total, 1 - RANK)
        other = torch.zeros(4)
        pair = [dist.P2POp(dist.isend, total, 1 - RANK), dist.P2POp(dist.irecv, other, 1 - RANK)]
        for work in dist.batch_isend_irecv(pair):
            work.wait()
        from torch.distributed import _functional_collectives as functional

        functional.wait_tensor(functional.all_reduce(total, "sum", dist.group.WORLD))
        optimizer.step()


def plain_without_group_hooks():
    plain(group_hooks=False)


def closed():
    """What is closed leaves no trace, and the job goes on."""
    own = dist.all_reduce, dist.Work.wait
    net = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with highwater.torch.watch(net, optimizer):
        assert dist.all_reduce is not own[0]
        train(net, optimizer)
    assert (dist.all_reduce, dist.Work.wait) == own
    train(net, optimizer)


class Delay(torch.autograd.Function):
    """Passes everything on, and takes its time in the backward pass."""

    @staticmethod
    def forward(ctx, value, seconds):
        ctx.seconds = seconds
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None


class Delayed(torch.nn.Module):
    """Two layers, between which the backward pass takes `seconds`."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.seconds = torch.nn.Linear(10, 10), torch.nn.Linear(10, 10), 0.0

    def forward(self, value):
        return self.second(Delay.apply(self.first(value), self.seconds))


def late_in_backward():
    """From step 12 on, rank 1 takes 60 ms longer; every rank then takes as long, because they wait for each other."""
    own = Delayed()
    net = DistributedDataParallel(own)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    highwater.torch.watch(net, optimizer)
    for step in range(40):
        own.seconds = 0.06 if RANK == 1 and step >= 12 else 0.005
        train(net, optimizer, 1)


if __name__ == "__main__":
    scenario, path = sys.argv[1:]
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=RANK, world_size=WORLD_SIZE)
    globals()[scenario]()
    if scenario != "plain":
        # A job that forgets it must end well, too. What a model keeps of the group is given free first: as long as it is
        # kept, destroying the group leaves gloo's threads running, and one that then gives tensors free while the
        # interpreter ends makes PyTorch end the process (its issue 190489), also without us.
        gc.collect()
        dist.destroy_process_group()

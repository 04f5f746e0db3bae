"""The training loop of one rank of a recorded job.

Input: a scenario. Output: `annotations_rank<N>.jsonl` and `facts_rank<N>.json` in its folder. All ranks make the
same steps on sequences of the same length, and agree after each step whether the segment is over. The device is
synchronised at the end of each phase, so that a phase holds the time and the memory that it used.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from device_memory import GIB, MIB, open_driver
from events import EventLog
from loader import Loader
from memory import DeviceMemory, PretendedMemory
from scenarios import Scenario, Segment
from train import Transformer

LEAST_SPARE_BYTES = 512 * MIB
"""What a tight segment leaves at least besides one step's need, so that rounding and fragments fit."""


class Training:
    """One rank, from its first allocation to its last step."""

    def __init__(self, scenario: Scenario, folder: Path, rank: int, on_gpu: bool) -> None:
        self.scenario, self.folder, self.rank = scenario, folder, rank
        self.device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
        self.memory = self._open_memory(on_gpu)
        if scenario.gpus > 1:
            dist.init_process_group("nccl" if on_gpu else "gloo", device_id=self.device if on_gpu else None)
        torch.manual_seed(scenario.seed)
        self.model = self._build_model()
        fused = on_gpu and scenario.parallel != "fsdp"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=fused)
        self.over = torch.zeros(1, device=self.device)
        self.lengths = random.Random(scenario.seed)
        self.loader = Loader(lambda: torch.randint(scenario.vocabulary, (scenario.batch, scenario.lengths[-1])))
        self.log = EventLog(folder / f"annotations_rank{rank}.jsonl", rank, self.memory.counters)
        self.step = 0
        self.need_bytes = 0
        self.healthy_compute_s: list[float] = []
        self.extra = ExtraCompute(self.device)
        self.facts: dict[str, Any] = {"rank": rank, "segments": [], "ooms_met": []}

    def run(self) -> None:
        """Runs all segments, or as many as memory allows."""
        self._warm_up()
        self.log.flush()
        need = f"a step needs {self.need_bytes / GIB:.2f} GiB" if self.need_bytes else "its need was not measured"
        print(f"rank {self.rank}: warm after {self.step} steps, {need}", flush=True)
        try:
            for segment in self.scenario.segments:
                self._segment(segment)
        except torch.OutOfMemoryError as error:
            if not self.scenario.ends_in_oom:
                raise
            print(f"rank {self.rank}: out of memory at step {self.step}: {error}", flush=True)
        finally:
            self.log.close()
            self._write_facts()

    def end(self) -> None:
        """Leaves the job."""
        self.loader.close()
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()

    def _warm_up(self) -> None:
        """Runs every length once, so that kernels are loaded and pools have their size. Then measures what one step
        needs, and the second pool takes its memory."""
        lengths = self.scenario.lengths
        for length in (lengths[-1], *lengths, lengths[-1]):
            self._one_step(Segment("warmup"), length, auxiliary=False)
        if "expandable_segments:True" in self.scenario.allocator and not self.memory.expandable():
            raise RuntimeError("PyTorch's allocator made no expandable segments")
        self.extra.calibrate(self.memory)
        if self.scenario.auxiliary_every:
            kept = self.memory.clear_cache()
            self._one_step(Segment("warmup"), lengths[-1], auxiliary=False)
            self.need_bytes = self.memory.peak_reserved() - kept
            self._one_step(Segment("warmup"), lengths[-1], auxiliary=True)

    def _segment(self, segment: Segment) -> None:
        self.log.cfg = segment.cfg
        free_bytes = self._arrange_memory(segment)
        self.loader.seconds = segment.loader_ms / 1e3
        self._prepare_extra(segment)
        self._barrier()
        first, begin = self.step, time.monotonic()
        while not self._is_over(segment, self.step - first, time.monotonic() - begin):
            done = self.step - first
            every = self.scenario.auxiliary_every
            length = self.scenario.lengths[-1] if done == 0 else self.lengths.choice(self.scenario.lengths)
            self._one_step(segment, length, auxiliary=bool(every) and done % every == every - 1)
        self.facts["segments"].append({"cfg": segment.cfg, "first_step": first, "free_bytes": free_bytes})
        print(f"rank {self.rank}: {segment.cfg}: steps {first} to {self.step - 1}", flush=True)

    def _arrange_memory(self, segment: Segment) -> int | None:
        """Sets the size of the ballast for this segment; returns what it leaves free."""
        if self.rank != self.scenario.ballast_rank or (segment.spare is None and segment.free_gib is None):
            return None
        if segment.spare is None:
            free_bytes = self.memory.leave(int((segment.free_gib or 0.0) * GIB))
            if self.scenario.auxiliary_every:
                self.memory.auxiliary(self._auxiliary_bytes())
            return free_bytes
        self.memory.clear_cache()
        spare_bytes = max(LEAST_SPARE_BYTES, int(self.need_bytes * segment.spare))
        return self.memory.leave(self.need_bytes + spare_bytes)

    def _one_step(self, segment: Segment, length: int, auxiliary: bool) -> None:
        step, finish = self.step, self.memory.synchronize
        with self.log.span("step", step, finish, seq=length):
            with self.log.span("data", step, finish):
                batch = self.loader.next()[:, :length].contiguous().to(self.device)
            while not self._passes(segment, batch, auxiliary):
                auxiliary = False
            if self.scenario.parallel == "ddp":
                with self.log.span("comm", step, finish):
                    self._all_reduce_gradients()
            with self.log.span("optimizer", step, finish):
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
        self.log.flush()
        self.step += 1

    def _passes(self, segment: Segment, batch: Tensor, auxiliary: bool) -> bool:
        """Forward and backward pass. False if memory ran out and the ballast was reduced: the pass is tried again."""
        phase = "forward"
        begin = time.perf_counter()
        try:
            with self.log.span("forward", self.step, self.memory.synchronize):
                if auxiliary:
                    self.memory.auxiliary(self._auxiliary_bytes())
                if segment.leak_mib:
                    self.memory.keep(segment.leak_mib * MIB)
                loss = self.model(batch)
                if segment.slow_rank == self.rank:
                    self.extra.run()
            phase = "backward"
            with self.log.span("backward", self.step, self.memory.synchronize):
                loss.backward()
        except torch.OutOfMemoryError:
            self.log.emit("oom", phase, self.step)
            if self.scenario.ends_in_oom or self.scenario.parallel == "fsdp":
                raise
        else:
            if segment.healthy and not auxiliary:
                self.healthy_compute_s.append(time.perf_counter() - begin)
            return True
        # Outside the handler, since the exception holds the tensors of the failed pass.
        loss = None
        self.optimizer.zero_grad(set_to_none=True)
        self.facts["ooms_met"].append({"step": self.step, "phase": phase})
        if not self.memory.relieve(GIB):
            raise RuntimeError(f"out of memory in {phase} of step {self.step}, and no ballast to give way")
        self.log.emit("end", phase, self.step)
        return False

    def _all_reduce_gradients(self) -> None:
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        handles = [dist.all_reduce(gradient, async_op=True) for gradient in gradients]
        for handle in handles:
            handle.wait()
        torch._foreach_div_(gradients, float(self.scenario.gpus))

    def _prepare_extra(self, segment: Segment) -> None:
        if segment.slow_rank == self.rank:
            healthy_s = statistics.median(self.healthy_compute_s)
            self.extra.aim(segment.slow_share * healthy_s)
            self.facts["extra_compute"] = {"healthy_s": healthy_s, "products": self.extra.products}

    def _is_over(self, segment: Segment, done: int, elapsed_s: float) -> bool:
        """Whether the segment is over, agreed by all ranks: one that left alone would leave others waiting."""
        over = segment.steps is not None and done >= segment.steps
        over = over or (segment.seconds is not None and elapsed_s >= segment.seconds)
        if not dist.is_initialized():
            return over
        self.over.fill_(float(over))
        dist.all_reduce(self.over, op=dist.ReduceOp.MAX)
        return bool(self.over.item())

    def _barrier(self) -> None:
        self.memory.synchronize()
        if dist.is_initialized():
            dist.all_reduce(self.over)
            self.memory.synchronize()

    def _auxiliary_bytes(self) -> int:
        return int(self.need_bytes * self.scenario.auxiliary_share)

    def _open_memory(self, on_gpu: bool) -> DeviceMemory | PretendedMemory:
        if not on_gpu:
            return PretendedMemory()
        torch.cuda.set_device(self.device)
        torch.zeros(1, device=self.device)
        driver = open_driver()
        if driver is None:
            raise RuntimeError("libcuda.so.1 cannot be opened")
        return DeviceMemory(self.device, driver)

    def _build_model(self) -> torch.nn.Module:
        """Created on the device: on a CPU its random weights alone would take many seconds."""
        one = self.scenario
        torch.set_default_dtype(torch.bfloat16 if self.device.type == "cuda" else torch.float32)
        with torch.device(self.device):
            model = Transformer(one.layers, one.width, one.heads, one.vocabulary)
        torch.set_default_dtype(torch.float32)
        if one.parallel == "fsdp":
            shard(model.layers, model, self.device.type, one.gpus)
        return model

    def _write_facts(self) -> None:
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        made = {"parameters": parameters, "need_bytes": self.need_bytes, "steps": self.step, **self.memory.facts()}
        path = self.folder / f"facts_rank{self.rank}.json"
        path.write_text(json.dumps({**self.facts, **made, "torch": torch.__version__}))


def shard(layers: Sequence[torch.nn.Module], model: torch.nn.Module, device_type: str, ranks: int) -> None:
    """Shards each layer, and then the rest of the model, over all ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device_type, (ranks,))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


class ExtraCompute:
    """Products of large matrices, which take time and no new memory."""

    def __init__(self, device: torch.device) -> None:
        side = 8192 if device.type == "cuda" else 128
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._left, self._right, self._product = (torch.ones(side, side, device=device, dtype=dtype) for _ in range(3))
        self._seconds_each = 0.0
        self.products = 0

    def calibrate(self, memory: DeviceMemory | PretendedMemory, products: int = 10) -> None:
        """Measures how long one product takes."""
        self.products = products
        self.run()
        memory.synchronize()
        begin = time.perf_counter()
        self.run()
        memory.synchronize()
        self._seconds_each = (time.perf_counter() - begin) / products

    def aim(self, seconds: float) -> None:
        """Sets how long a run takes, approximately."""
        self.products = max(1, round(seconds / self._seconds_each))

    def run(self) -> None:
        """Multiplies, at the device's own pace."""
        for _ in range(self.products):
            torch.mm(self._left, self._right, out=self._product)

"""Marks a job of Hugging Face's Trainer.

    from highwater.huggingface import Highwater

    trainer = transformers.Trainer(..., callbacks=[Highwater()])

The callback calls `highwater.torch.watch` when training begins, with the Trainer's model, optimizer and loader, and closes it
when training ends. Its arguments are those of `watch`. The Trainer gives callbacks its own model and not DDP around it: with
DDP on CUDA, `comm` lacks the reduction of gradients. If training ends with an exception, the watch ends with the process.
"""

from typing import Any

from transformers import TrainerCallback

from ._marks import client


class Highwater(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Watches `Trainer.train`. Never raises into it."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.handle: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        try:
            from .torch import watch

            self.close()
            options = {"start_step": int(state.global_step), **self.options}
            self.handle = watch(known.get("model"), known.get("optimizer"), known.get("train_dataloader"), **options)
        except Exception as error:
            client.say(f"watch is off: {error!r}")

    def on_train_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        self.close()

    def close(self) -> None:
        if self.handle is not None:
            self.handle.close()
        self.handle = None

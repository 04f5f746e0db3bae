"""Marks a job of Lightning.

    from highwater.lightning import Highwater

    trainer = lightning.Trainer(callbacks=[Highwater()])

The callback calls `highwater.torch.watch` when the fit begins, with the strategy's model, optimizers and loaders, and closes
it when the fit ends. Its arguments are those of `watch`.
"""

import functools
import operator
from typing import Any, Dict

from ._marks import client

try:
    from lightning.pytorch.callbacks import Callback
except ImportError:
    from pytorch_lightning.callbacks import Callback  # type: ignore[no-redef, unused-ignore]


class Step:
    """The module's training_step while it is timed. A copy or pickle of the module has its own in this one's place."""

    def __init__(self, module: Any, had: Any, timed: Any) -> None:
        functools.update_wrapper(self, timed)
        self.module = module
        self.had = had
        self.timed = timed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.timed(*args, **kwargs)

    def __reduce__(self) -> Any:
        if self.had is not None:
            return operator.itemgetter(0), ((self.had,),)
        # The copy of the module has nothing of its own yet, so this is the method of its class.
        return getattr, (self.module, "training_step")


class Highwater(Callback):  # type: ignore[misc, unused-ignore]
    """Watches `Trainer.fit`. Never raises into it."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.handle: Any = None
        # The module whose training_step is timed, and its own attribute of that name, if it had one.
        self.module: Any = None
        self.had: Any = None

    def __getstate__(self) -> Dict[str, Any]:
        """A copy or pickle of the trainer watches nothing."""
        return {**self.__dict__, "handle": None, "module": None, "had": None}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        try:
            self.begin(trainer)
        except Exception as error:
            client.say(f"watch is off: {error!r}")

    def begin(self, trainer: Any) -> None:
        from .torch import watch

        self.close()
        loaders = trainer.train_dataloader
        loaders = list(loaders.values()) if isinstance(loaders, dict) else loaders
        model, module = trainer.strategy.model, trainer.lightning_module
        options = {"start_step": trainer.global_step, **self.options}
        self.handle = watch(model, list(trainer.optimizers), loaders, **options)
        self.begin_epoch(trainer)
        if model is module:
            # Without a wrapper of the strategy, Lightning calls training_step and not the module.
            self.module, self.had = module, module.__dict__.get("training_step")
            module.training_step = Step(module, self.had, self.handle.around(module.training_step))

    def begin_epoch(self, trainer: Any) -> None:
        """The first epoch's iterators are older than the watch."""
        fetcher = getattr(trainer.fit_loop, "_data_fetcher", None)
        iterator = getattr(getattr(fetcher, "combined_loader", None), "_iterator", None)
        iterators = getattr(iterator, "iterators", None)
        if isinstance(iterators, list):
            iterators[:] = [self.handle.batches(each) for each in iterators]

    def close(self) -> None:
        if self.handle is not None:
            self.handle.close()
        if self.module is not None:
            if self.had is not None:
                self.module.training_step = self.had
            else:
                self.module.__dict__.pop("training_step", None)
        self.handle = self.module = None

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.close()

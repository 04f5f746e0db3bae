"""The callbacks of Lightning and Hugging Face, and the marks of JAX."""

import contextlib
import copy
import importlib.util
import io
import logging
import os
import unittest
import warnings

from .listeners import Case
from .torch_case import TorchCase, needs_torch, torch, words


def needs(name):
    return unittest.skipIf(importlib.util.find_spec(name) is None, f"{name} is not installed: its callback is not tested")


@needs_torch
@needs("lightning")
class Lightning(TorchCase):
    def test_a_fit(self):
        import lightning

        from highwater.lightning import Highwater

        copies = []

        class Module(lightning.LightningModule):
            def __init__(self, inner):
                super().__init__()
                self.inner = inner

            def training_step(self, batch, index):
                # As callbacks that keep the best or an average do.
                if index and not copies:
                    stored = io.BytesIO()
                    torch.save(self, stored)
                    copies.extend([stored, copy.deepcopy(self)])
                return self.inner(batch).sum()

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)

        # Where a pickle finds it.
        Module.__qualname__, globals()["Module"] = "Module", Module
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        module = Module(self.model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = lightning.Trainer(
                max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
                enable_model_summary=False, callbacks=[Highwater(layers_every=0)], default_root_dir=self.folder,
                # Else it looks for an MPI, which ends the process where it is installed and cannot start.
                plugins=[lightning.fabric.plugins.environments.LightningEnvironment()],
            )
            trainer.fit(module, torch.utils.data.DataLoader(torch.randn(4, 4), batch_size=2))
        said = self.words(("data",)).split()
        self.assertEqual([word for word in said if word[1:].isdigit()], ["+0", "-0", "+1", "-1"])
        self.assertEqual([said.count(word) for word in ("+forward", "-forward", "+backward", "-backward")], [2] * 4)
        self.assertIn("+data", self.words())
        self.assertNotIn("training_step", module.__dict__)
        stored, copied = copies
        self.assertNotIn(b"highwater", stored.getvalue())
        stored.seek(0)
        for each in (copied, torch.load(stored, weights_only=False), copy.deepcopy(copied)):
            self.assertIs(each.training_step.__self__, each)
            self.assertEqual(each.training_step(torch.zeros(1, 4), 0).shape, ())
        self.assertEqual(len(module._forward_hooks), 0)


@needs_torch
@needs("transformers")
@needs("accelerate")
class HuggingFace(TorchCase):
    def test_a_train(self):
        import transformers

        from highwater.huggingface import Highwater

        class Model(torch.nn.Module):
            def __init__(self, inner):
                super().__init__()
                self.inner = inner

            def forward(self, x=None):
                return {"loss": self.inner(x).sum()}

        arguments = transformers.TrainingArguments(
            output_dir=os.path.join(self.folder, "out"), max_steps=2, per_device_train_batch_size=2, report_to=[],
            use_cpu=True, save_strategy="no", disable_tqdm=True, gradient_accumulation_steps=2, logging_strategy="no",
        )
        data = [{"x": torch.randn(4)} for _ in range(8)]
        trainer = transformers.Trainer(Model(self.model), arguments, train_dataset=data, callbacks=[Highwater(layers_every=0)])
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.train()
        said = self.words(("data",)).split()
        self.assertEqual([word for word in said if word[1:].isdigit()], ["+0", "-0", "+1", "-1"])
        self.assertIn("+data", self.words())
        self.assertEqual([said.count(word) for word in ("+forward", "+backward", "+optimizer", "-optimizer")], [4, 4, 2, 2])


@needs("jax")
class Jax(Case):
    def test_steps_and_phases_end_when_the_arrays_are_there(self):
        os.environ["JAX_PLATFORMS"] = "cpu"
        import jax

        import highwater
        from highwater import jax as marks

        daemon = self.listen()

        @jax.jit
        def double(x):
            marks.mark_from_device("halfway", x)
            return x * 2

        with marks.step(3) as step, marks.phase("forward") as forward:
            y = step.ready(forward.ready(double(jax.numpy.ones(4))))
        jax.effects_barrier()
        with self.assertRaises(KeyError), marks.step(4):
            raise KeyError("the job's")
        # What was donated is gone, and its step ends all the same.
        with marks.phase("donated") as phase:
            given = phase.ready((jax.numpy.ones(4), None, 3))[0]
            given.delete()
        highwater.mark("last")
        self.sent(daemon, 10)
        self.assertEqual(float(y.sum()), 8.0)
        said = words(daemon.events()).split()
        wanted = "+3 +forward -forward -3 +4 -4 +donated -donated !last"
        self.assertEqual(" ".join(word for word in said if word[1:] != "halfway"), wanted)
        self.assertIn("!halfway", said)

"""Records of layers, against FairScale's and by hand."""

import json
import unittest
from pathlib import Path

from .torch_case import TorchCase, forget_compiled, needs_torch, torch

try:
    import torchvision
except ImportError:
    torchvision = None

RECORDED = Path(__file__).resolve().parent / "data" / "resnet50_layers.json"


class LayerCase(TorchCase):
    def setUp(self):
        super().setUp()
        forget_compiled()

    def records(self, model, batch, **options):
        optimizer = torch.optim.SGD([*model.parameters(), torch.nn.Parameter(torch.zeros(1))], lr=0.0)
        self.watch(model, optimizer, layers_every=1, **options)
        out = model(batch)
        out = out if isinstance(out, torch.Tensor) else out["y"]
        out.sum().backward()
        optimizer.step()
        return [event for event in self.sent(self.daemon) if event.get("kind") == "layer"]

    def rows(self, records):
        return [
            (event["name"], event["layer"]["direction"], event["layer"]["parameters"], event["layer"]["activations"])
            for event in records
        ]


@needs_torch
class Layers(LayerCase):
    @unittest.skipIf(torchvision is None, "torchvision is not installed: FairScale's resnet50 is not compared")
    def test_resnet50_is_as_fairscale_recorded_it(self):
        torch.set_num_threads(2)
        with torch.device("cpu"):
            model = torchvision.models.resnet50(weights=None)
        records = self.records(model, torch.rand(16, 3, 224, 224))
        wanted = [tuple(row) for row in json.loads(RECORDED.read_text())["records"]]
        self.assertEqual(self.rows(records), wanted)
        forward = [event["layer"] for event in records if event["layer"]["direction"] == "forward"]
        self.assertEqual(len(forward), 158)
        self.assertEqual(sum(layer["activations"] for layer in forward), 1435630080)
        # Nobody knows these on a CPU.
        self.assertFalse(any("memory" in event or "growth" in event["layer"] for event in records))

    def test_a_small_cnn_with_relu_in_place_and_not(self):
        for in_place, activations in ((False, 2 * 64 * 224 * 224 * 4), (True, 0)):
            inner = torch.nn.Sequential(
                torch.nn.Conv2d(3, 64, 3, padding=1, bias=False), torch.nn.BatchNorm2d(64), torch.nn.ReLU(in_place),
                torch.nn.AdaptiveAvgPool2d((1, 1)),
            )
            model = torch.nn.Sequential(
                inner, torch.nn.Flatten(start_dim=1), torch.nn.Sequential(torch.nn.Linear(64, 2), torch.nn.ReLU())
            )
            before = len([event for event in self.sent(self.daemon) if event.get("kind") == "layer"])
            records = self.records(model, torch.rand(2, 3, 224, 224))[before:]
            names = ["0.0", "0.1", "0.2", "0.3", "1", "2.0", "2.1"]
            self.assertEqual([event["name"] for event in records], names + names[::-1])
            layers = [event["layer"] for event in records]
            self.assertEqual(layers[2]["activations"], activations)
            self.assertEqual([layer["parameters"] for layer in layers[:3]], [3 * 3 * 64 * 3 * 4, 64 * 2 * 4, 0])

    def test_records_come_before_the_end_of_their_step_and_only_in_it(self):
        self.watch(self.model, self.optimizer, layers_every=2)
        for _ in range(3):
            self.train()
            self.optimizer.step()
        events = self.sent(self.daemon)
        self.assertEqual([event["step"] for event in events if event.get("kind") == "layer"], [0] * 6 + [2] * 6)
        place = [(event["event"], event.get("kind"), event.get("step")) for event in events]
        self.assertLess(place.index(("mark", "layer", 2)), place.index(("end", "step", 2)))
        self.assertGreater(place.index(("mark", "layer", 2)), place.index(("end", "step", 1)))
        for module in self.model:
            self.assertEqual((len(module._forward_hooks), len(module._forward_pre_hooks)), (0, 0))
        first = [event for event in events if event.get("kind") == "layer"][0]
        self.assertEqual(set(first), {"event", "kind", "name", "time_unix_nano", "step", "layer", "job", "rank"})
        self.assertGreaterEqual(first["layer"].pop("duration_ns"), 0)
        self.assertEqual(first["layer"], {
            "direction": "forward", "activations": 96, "parameters": 160, "gathered": 0, "gathered_sum": 0,
        })

    def test_a_model_of_one_layer_and_with_data_before_it(self):
        model = torch.nn.Linear(4, 2)
        for loader in (None, torch.utils.data.DataLoader([torch.zeros(4)])):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with self.watch(model, optimizer, loader, layers_every=1):
                for batch in loader or [torch.zeros(1, 4)]:
                    model(batch).sum().backward()
                    optimizer.step()
        names = [(event["name"], event["layer"]["direction"]) for event in self.sent(self.daemon) if "layer" in event]
        self.assertEqual(names, [("Linear", "forward"), ("Linear", "backward")] * 2)

    def test_sizes_of_every_type_and_nested_outputs_with_cycles(self):
        class Many(torch.nn.Module):
            def forward(self, x):
                out = {"y": x * 2, "more": ([torch.zeros(3, dtype=torch.int64)], (x, x.view(-1)))}
                out["more"][0].append(torch.zeros(5, dtype=torch.bfloat16))
                out["more"][0].append(torch.zeros(7, dtype=torch.int8))
                out["itself"] = out
                return out

        class Root(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.many = Many()

            def forward(self, x):
                return self.many(x)

        records = self.records(Root(), torch.ones(2, 2, dtype=torch.float64, requires_grad=True))
        wanted = 4 * 8 + 3 * 8 + 5 * 2 + 7
        self.assertEqual(self.rows(records)[0], ("many", "forward", 0, wanted))

    def test_a_fault_of_ours_ends_the_records_and_not_the_job(self):
        from unittest import mock

        import highwater.torch.layers as layers

        with mock.patch.object(layers.tensors, "new_bytes", side_effect=ZeroDivisionError("ours")):
            self.client.said.clear()
            with self.assertLogs("highwater", "WARNING"):
                self.watch(self.model, self.optimizer, layers_every=1)
                self.train()
                self.optimizer.step()
        self.assertEqual(self.words(), "+0 +forward -forward +loss -loss +backward -backward +optimizer -optimizer -0")

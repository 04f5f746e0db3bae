"""The client against sockets that stand in for the daemon's: whatever a job gives it, it neither raises nor waits."""

import asyncio
import gc
import json
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import unittest
from unittest import mock

import highwater
from highwater import _gc, _marks, _tally, _transport

from .listeners import ASK, PYTHON, SECONDS, Case, wait_until


class Unprintable:
    def __str__(self):
        raise RuntimeError("no text")

    __repr__ = __str__


class Tensor:
    """As much of a tensor as the client looks at."""

    def __init__(self, value, is_cuda=False):
        self.value, self.is_cuda = value, is_cuda

    def __int__(self):
        if self.is_cuda:
            raise AssertionError("this waits for the GPU")
        return int(self.value)

    def __str__(self):
        if self.is_cuda:
            raise AssertionError("this waits for the GPU")
        return f"tensor({self.value})"


class Marks(Case):
    """What is sent."""

    def test_an_allocation_that_failed_is_marked_once_where_its_exception_leaves_a_span(self):
        class OutOfMemoryError(RuntimeError):
            """As PyTorch's."""

        daemon = self.listen()
        text = (
            "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.11 GiB of which 15.50 MiB is"
            " free. Of the allocated memory 77.50 GiB is allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but"
            " unallocated."
        )
        jax = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 21474836480 bytes."
        failures = [OutOfMemoryError(text), OutOfMemoryError("no numbers"), RuntimeError(jax)]
        for error in [*failures, RuntimeError("Tried to allocate 1 GiB")]:
            with self.assertRaises(RuntimeError), highwater.step(7), highwater.phase("forward"):
                raise error
        events = self.sent(daemon, 19)
        mib = 1 << 20
        self.assertEqual([event.get("attributes") for event in events if event.get("name") == "oom"], [
            {"requested": 20 * mib, "device_free": 31 * mib // 2, "allocated": 155 * mib * 512, "reserved": 156 * mib * 512},
            None,
            {"requested": 20 << 30},
        ])
        # It is of the phase and step in which it happened.
        self.assertEqual([event["event"] for event in events[:5]], ["begin", "begin", "mark", "end", "end"])

    def test_an_exception_that_holds_a_tensor_of_a_gpu_is_not_read(self):
        read = []

        class Held(Tensor):
            def __str__(self):
                read.append("text")
                return "tensor"

            __repr__ = __str__

        daemon = self.listen()
        with self.assertRaises(ValueError), highwater.phase("forward"):
            raise ValueError(Held(1, is_cuda=True))
        self.sent(daemon, 2)
        self.assertEqual(read, [])

    def test_an_exception_without_a_text_leaves_a_span_as_it_came(self):
        class OutOfMemoryError(RuntimeError):
            __str__ = Unprintable.__str__

        daemon = self.listen()
        with self.assertRaises(OutOfMemoryError), highwater.phase("forward"):
            raise OutOfMemoryError
        self.sent(daemon, 2)

    def test_steps_and_phases_have_their_begin_and_end(self):
        daemon = self.listen()
        with highwater.step(7, lr=0.5):
            with highwater.phase("forward"):
                pass
            with highwater.layer("attention", heads=8):
                pass
        highwater.mark("saved", path="/x")
        events = self.sent(daemon, 7)
        times = [event.pop("time_unix_nano") for event in events]
        self.assertTrue(times == sorted(times) and times[0] > 1e18)
        who = {"job": "llama", "rank": 0}
        self.assertEqual(events, [
            {"event": "begin", "kind": "step", "step": 7, "attributes": {"lr": 0.5}, **who},
            {"event": "begin", "name": "forward", **who},
            {"event": "end", "name": "forward", **who},
            {"event": "begin", "kind": "layer", "name": "attention", "attributes": {"heads": 8}, **who},
            {"event": "end", "kind": "layer", "name": "attention", **who},
            {"event": "end", "kind": "step", "step": 7, **who},
            {"event": "mark", "name": "saved", "attributes": {"path": "/x"}, **who},
        ])

    def test_a_step_says_how_long_the_garbage_collector_stopped_it(self):
        daemon = self.listen()
        for least_ns in (0, 10**12):
            with mock.patch.object(_gc, "LEAST_NS", least_ns):
                with highwater.step(1, lr=0.5):
                    # Not before the step, and not after it.
                    gc.collect()
                gc.collect()
        events = self.sent(daemon, 4)
        seconds = events[1]["attributes"].pop("gc_seconds")
        self.assertTrue(0 < seconds < SECONDS, seconds)
        self.assertEqual([event.get("attributes") for event in events], [{"lr": 0.5}, {}, {"lr": 0.5}, None])

    def test_the_collector_is_followed_from_the_first_step_on_and_once(self):
        collector = _gc.Collector()
        self.addCleanup(lambda: gc.callbacks.remove(collector.on))
        # An end without its begin: the collection in which it was first called.
        collector.on("stop", {})
        self.assertEqual((collector.follow(), collector.follow(), gc.callbacks.count(collector.on)), (0, 0, 1))
        gc.collect()
        first_ns = collector.follow()
        self.assertGreater(first_ns, 0)
        gc.collect()
        with mock.patch.object(_gc, "LEAST_NS", 1):
            self.assertEqual(collector.seconds_since(first_ns), (collector.total_ns - first_ns) / 1e9)
            self.assertIsNone(collector.seconds_since(collector.total_ns))

    def test_decorators_mark_each_call(self):
        daemon = self.listen()

        @highwater.phase("forward")
        def forward(x):
            return x + 1

        @highwater.phase("eval")
        async def evaluate(x):
            await asyncio.sleep(0)
            return x + 2

        @highwater.phase
        def tokenize(x):
            return x + 3

        self.assertEqual((forward(1), forward.__name__, asyncio.run(evaluate(1))), (2, "forward", 3))
        self.assertEqual((tokenize(1), tokenize.__name__), (4, "tokenize"))
        named = [(event["event"], event["name"]) for event in self.sent(daemon, 6)]
        names = ("forward", "eval", "tokenize")
        self.assertEqual(named, [(event, name) for name in names for event in ("begin", "end")])

    def test_what_completion_offers_is_there(self):
        offered = [name for name in dir(highwater) if not name.startswith("_")]
        self.assertEqual(offered, ["Status", "configure", "flush", "layer", "mark", "phase", "status", "step", "torch"])

    def test_the_jobs_own_errors_go_through_and_end_their_phase(self):
        daemon = self.listen()
        with self.assertRaises(KeyError), highwater.phase("forward"):
            raise KeyError("the job's")
        self.assertEqual([event["event"] for event in self.sent(daemon, 2)], ["begin", "end"])

    def test_names_and_numbers_that_json_has_not_and_tensors_do_no_harm(self):
        daemon = self.listen()
        wanted = []
        for number, sent in [
            (Tensor(4), 4), (Tensor(4, is_cuda=True), None), (float("nan"), None), (float("inf"), None), (-1, None),
            ("5", 5), (None, None), (Unprintable(), None), (True, 1), (2.0, 2),
        ]:
            with highwater.step(number):
                pass
            wanted += [sent, sent]
        self.assertEqual([event.get("step") for event in self.sent(daemon, len(wanted))], wanted)
        highwater.mark(
            "a", nan=float("nan"), loss=Tensor(0.25), gpu=Tensor(1, is_cuda=True), huge=2**70, none=None, ok=True, n=3,
            shape=(1, 2), bad=Unprintable(),
        )
        for name in (Unprintable(), 7, [1], 'quoted "name" \n größe'):
            with highwater.phase(name):
                pass
            highwater.mark(name)
        events = self.sent(daemon, len(wanted) + 13)[len(wanted):]
        self.assertEqual(events[0]["attributes"], {
            "nan": "nan", "loss": "tensor(0.25)", "huge": str(2**70), "ok": True, "n": 3, "shape": "(1, 2)",
        })
        names = [event["name"] for event in events[1:]]
        self.assertEqual(names, [name for name in ("Unprintable", "7", "[1]", 'quoted "name" \n größe') for _ in range(3)])

    def test_counters_of_the_allocator_go_with_each_begin_and_end(self):
        daemon = self.listen()
        highwater.configure(counters=lambda: {"allocated": 5, "alloc_retries": 1})
        with highwater.phase("forward", batch=2):
            pass
        highwater.configure(counters=lambda: 1 / 0)
        with highwater.step(1):
            pass
        begin, end, *step = self.sent(daemon, 4)
        self.assertEqual((begin["memory"], begin["attributes"]), ({"allocated": 5, "alloc_retries": 1}, {"batch": 2}))
        self.assertEqual((end["memory"], [each.get("memory") for each in step]), (begin["memory"], [None, None]))

    def test_what_every_event_repeats_is_said_once_a_message(self):
        daemon = self.listen()
        os.environ.update(RANK="3", WORLD_SIZE="8", LOCAL_RANK="1", CUDA_VISIBLE_DEVICES="0,1")
        with highwater.step(1):
            pass
        places = {"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "0,1"}
        first = self.sent(daemon, 2)[0]
        self.assertEqual((first["job"], first["rank"], first["world_size"], first["attributes"]), ("llama", 3, 8, places))
        highwater.configure(job="gpt", rank=5, world_size=9, gpu=["GPU-a", 1])
        highwater.mark("b")
        event = self.sent(daemon, 3)[2]
        self.assertEqual((event["job"], event["rank"], event["world_size"], event["gpu"]), ("gpt", 5, 9, ["GPU-a", 1]))
        for message in daemon.messages:
            events = [json.loads(line) for line in message.splitlines()]
            self.assertTrue(all("world_size" in event for event in events[:1]))
            self.assertFalse([event for event in events[1:] if "world_size" in event or "gpu" in event])

    def test_attributes_of_an_event_and_of_its_place_do_not_meet(self):
        daemon = self.listen()
        os.environ.update(RANK="0", LOCAL_RANK="1", WORLD_SIZE="2")
        with highwater.step(1, lr=1):
            pass
        begin, end = self.sent(daemon, 2)
        self.assertEqual((begin["attributes"], begin["world_size"]), ({"lr": 1}, 2))
        if len(daemon.messages) == 1:
            self.assertEqual(end["attributes"], {"LOCAL_RANK": "1"})
        highwater.mark("b")
        self.assertEqual(self.sent(daemon, 3)[2]["attributes"], {"LOCAL_RANK": "1"})


class Later(Case):
    """Marks whose times become known later."""

    class Pending(_marks.Later):
        def __init__(self, *marks):
            self.marks, self.is_ready, self.asked = marks, False, 0

        def take(self):
            self.asked += 1
            return self.marks if self.is_ready else None

    def test_what_is_not_known_yet_keeps_its_place(self):
        daemon = self.listen()
        pending = self.Pending(*((f'{{"event":"mark","name":"{name}","time_unix_nano":', 5, "") for name in "bc"))
        highwater.mark("a")
        self.client.put_later(pending)
        highwater.mark("d")
        wait_until(lambda: pending.asked > 3, "a second look")
        self.assertEqual([event["name"] for event in daemon.events()], ["a"])
        self.assertFalse(highwater.flush(0.01))
        pending.is_ready = True
        self.assertEqual([event["name"] for event in self.sent(daemon, 4)], ["a", "b", "c", "d"])

    def test_many_at_once_fill_several_messages_in_order(self):
        daemon = self.listen()
        pending = self.Pending(*((f'{{"event":"mark","name":"m{n}","time_unix_nano":', n, "") for n in range(5_000)))
        pending.is_ready = True
        self.client.put_later(pending)
        events = self.sent(daemon, 5_000)
        self.assertEqual([event["time_unix_nano"] for event in events], list(range(5_000)))
        self.assertGreater(len(daemon.messages), 3)
        self.assertTrue(all(len(message) <= 64 << 10 for message in daemon.messages))


class Ways(Case):
    """The ways to the daemon."""

    def test_the_datagram_socket_is_used_where_there_is_no_other(self):
        daemon = self.listen(socket.SOCK_DGRAM)
        highwater.mark("a")
        self.assertEqual([event["name"] for event in self.sent(daemon, 1)], ["a"])

    def test_the_socket_of_a_user_is_found_beside_the_systems(self):
        os.environ["XDG_RUNTIME_DIR"] = self.folder
        del os.environ["HIGHWATER_ANNOTATIONS_SOCKET"]
        own = f"{self.folder}/highwater/annotations.sock"
        self.assertEqual(_transport.found_paths(), [self.system, own])
        os.makedirs(os.path.dirname(own))
        self.path = own
        daemon = self.listen()
        highwater.mark("a")
        self.assertEqual(len(self.sent(daemon, 1)), 1)

    def test_http_is_used_where_an_address_is_named(self):
        server = self.serve()
        del os.environ["HIGHWATER_ANNOTATIONS_SOCKET"]
        os.environ["HIGHWATER_URL"] = server.url + "/"
        with open(f"{self.folder}/token", "w") as file:
            file.write("secret of sixteen\n")
        os.environ["HIGHWATER_TOKEN_FILE"] = f"{self.folder}/token"
        with highwater.phase("forward"):
            pass
        events = self.sent(server, 2)
        path, headers, _ = server.requests[0]
        self.assertEqual([event["event"] for event in events], ["begin", "end"])
        self.assertEqual((path, headers["Authorization"]), ("/api/v1/annotations", "Bearer secret of sixteen"))

    def test_a_refusal_is_told_once_and_nothing_is_sent_twice(self):
        server = self.serve()
        highwater.configure(url=server.url)
        server.answers += [
            (401, {"title": "Unauthorized", "detail": "a token is needed"}),
            (200, {"accepted": 0, "refused": 1, "refusals": [{"index": 0, "reason": "bad_name", "detail": "name: is empty"}]}),
        ]
        with self.assertLogs("highwater", logging.WARNING) as logs:
            highwater.mark("a")
            self.sent(server, 1, is_whole=False)
            highwater.mark("b")
            self.sent(server, 2, is_whole=False)
            highwater.mark("c")
            events = self.sent(server, 3)
        self.assertEqual(logs.output, [
            "WARNING:highwater:highwater: the daemon answered 401: a token is needed",
            "WARNING:highwater:highwater: the daemon refused 1 marks (bad_name): name: is empty",
        ])
        self.assertEqual([(event["name"], event.get("lost")) for event in events], [("a", None), ("b", 1), ("c", None)])

    def test_what_a_message_reports_as_lost_is_reported_again_if_it_is_given_up(self):
        server = self.serve()
        highwater.configure(url=server.url)
        server.answers += [(401, {"title": "Unauthorized", "detail": "a token is needed"})] * 2
        for number, name in enumerate("abc", 1):
            highwater.mark(name)
            events = self.sent(server, number, is_whole=name == "c")
        self.assertEqual([event.get("lost") for event in events], [None, 1, 2])
        self.assertEqual((self.client.lost, highwater.status()["lost"]), (0, 2))

    def test_late_answers_do_not_hide_a_refusal(self):
        tally = _tally.Tally()
        tally.sent(5, True)
        self.assertFalse(tally.flush(), "five have no answer")
        tally.answered(_tally.Answer(5, {}, {}, None))
        tally.sent(5, True)
        tally.answered(_tally.Answer(0, {"over_rate": 5}, {}, None))
        self.assertFalse(tally.flush(), "five were refused since")
        self.assertTrue(tally.flush())

    def test_an_answer_that_asks_for_patience_is_no_loss(self):
        server = self.serve()
        highwater.configure(url=server.url)
        server.answers += [(503, {"title": "busy"}), (429, {})]
        highwater.mark("a")
        wait_until(lambda: len(server.requests) >= 3, "a third try")
        self.assertEqual([(event["name"], event.get("lost")) for event in self.sent(server)], [("a", None)] * 3)

    def test_a_token_may_end_in_a_line_end_and_one_that_no_header_holds_is_told_without_it(self):
        server = self.serve()
        os.environ["HIGHWATER_TOKEN"] = "secret of sixteen\n"
        highwater.configure(url=server.url)
        highwater.mark("a")
        self.sent(server, 1)
        self.assertEqual(server.requests[0][1]["Authorization"], "Bearer secret of sixteen")
        self.reset()
        os.environ["HIGHWATER_TOKEN"] = "secret\nof sixteen"
        highwater.configure(url=server.url)
        with self.assertLogs("highwater", logging.DEBUG) as logs:
            highwater.mark("b")
            self.assertFalse(highwater.flush(SECONDS))
        self.assertEqual(([event.get("name") for event in server.events()], self.client.lost), (["a", None], 1))
        told = [line for line in logs.output if line.startswith("WARNING")]
        self.assertEqual(told, ["WARNING:highwater:highwater: marks cannot be sent: ValueError"])
        self.assertNotIn("secret", "".join(logs.output))

    def test_a_token_file_without_an_end_is_not_read_to_it(self):
        server = self.serve()
        os.environ["HIGHWATER_TOKEN_FILE"] = "/dev/zero"
        highwater.configure(url=server.url)
        with self.assertLogs("highwater", logging.WARNING) as logs:
            highwater.mark("a")
            wait_until(lambda: logs.output, "a line")
        self.assertIn("HIGHWATER_TOKEN_FILE names a file of more than 4096 bytes", logs.output[0])

    def test_what_has_no_text_configures_nothing_and_is_told(self):
        daemon = self.listen()
        with self.assertLogs("highwater", logging.WARNING) as logs:
            highwater.configure(job=Unprintable(), rank=3)
        self.assertIn("configure(job=…): this has no text, and is not used", logs.output[0])
        for mesh in ({Unprintable(): 1}, 7):
            highwater._client.said.clear()
            with self.assertLogs("highwater", logging.WARNING) as logs:
                highwater.configure(mesh=mesh)
            self.assertIn("configure(mesh=…): this has no axes with numbers, and is not used", logs.output[0])
        highwater.mark("a")
        event = self.sent(daemon, 1)[0]
        self.assertEqual((event["job"], event["rank"]), ("llama", 3))

    def test_a_password_in_an_address_is_not_told(self):
        with self.assertLogs("highwater", logging.WARNING) as logs:
            highwater.configure(url="http://user:password@127.0.0.1:1")
            highwater.mark("a")
            wait_until(lambda: logs.output, "a line")
        self.assertIn("127.0.0.1:1", logs.output[0])
        self.assertNotIn("password", logs.output[0])

    def test_what_is_no_address_is_told_and_does_no_harm(self):
        for wrong in ("ftp://x", "http://", "http://[", "http://host:port"):
            self.reset()
            with self.assertLogs("highwater", logging.WARNING) as logs:
                highwater.configure(url=wrong)
                highwater.mark("a")
                wait_until(lambda: logs.output, "a line")
            self.assertIn(wrong, logs.output[0])
            self.assertEqual(len(logs.output), 1)


class Places(Case):
    """Where marks go: a place that the user names beats those that the client finds."""

    def setUp(self):
        super().setUp()
        del os.environ["HIGHWATER_ANNOTATIONS_SOCKET"]
        self.found = self.listen(path=self.system)

    def test_the_socket_of_the_system_is_found_if_nothing_is_named(self):
        highwater.mark("a")
        self.assertEqual([event["name"] for event in self.sent(self.found, 1)], ["a"])

    def test_what_is_named_beats_what_is_found(self):
        server, socket_named = self.serve(), self.listen()
        call, environment = highwater.configure, os.environ.__setitem__
        for mark, name, daemon in [
            ("a", lambda: environment("HIGHWATER_URL", server.url), server),
            ("b", lambda: call(url=server.url), server),
            ("c", lambda: environment("HIGHWATER_ANNOTATIONS_SOCKET", self.path), socket_named),
            ("d", lambda: call(socket=self.path), socket_named),
        ]:
            name()
            highwater.mark(mark)
            self.assertTrue(highwater.flush(SECONDS))
            wait_until(lambda: mark in [event.get("name") for event in daemon.events()], f"{mark} where it belongs")  # noqa: B023
            self.reset()
            for variable in ("HIGHWATER_URL", "HIGHWATER_ANNOTATIONS_SOCKET"):
                os.environ.pop(variable, None)
        self.assertEqual((self.found.connections, self.found.events()), ([], []))

    def test_a_call_beats_the_environment_and_a_socket_an_address(self):
        for call, environment, place in [
            ({"url": "u"}, {"HIGHWATER_ANNOTATIONS_SOCKET": "/e", "HIGHWATER_URL": "v"}, (None, "u")),
            ({"socket": "/c", "url": "u"}, {}, ("/c", None)),
            ({}, {"HIGHWATER_ANNOTATIONS_SOCKET": "/e", "HIGHWATER_URL": "v"}, ("/e", None)),
            ({}, {"HIGHWATER_ANNOTATIONS_SOCKET": "", "HIGHWATER_URL": "v"}, (None, "v")),
            ({}, {"HIGHWATER_URL": ""}, (None, None)),
        ]:
            with mock.patch.dict(os.environ, environment):
                self.assertEqual(_transport.named(call.get("socket"), call.get("url")), place, (call, environment))

    def test_a_named_place_that_is_dead_is_said_once_and_nothing_else_is_tried(self):
        with socket.create_server(("127.0.0.1", 0)) as closed:
            dead = f"http://127.0.0.1:{closed.getsockname()[1]}"
        with mock.patch.object(_marks, "RETRY_S", 0.01), self.assertLogs("highwater", logging.WARNING) as logs:
            highwater.configure(url=dead)
            highwater.mark("a")
            self.assertFalse(highwater.flush(0.2))
            wait_until(lambda: self.client.sender.retry_s > 0.03, "a second try")
        self.assertEqual(len(logs.output), 1, logs.output)
        self.assertIn(dead, logs.output[0])
        self.assertEqual(self.found.connections, [])

    def test_a_place_that_is_named_later_gets_the_marks_from_then_on(self):
        highwater.mark("a")
        self.sent(self.found, 1)
        server = self.serve()
        highwater.configure(url=server.url)
        highwater.mark("b")
        self.assertEqual([event["name"] for event in self.sent(server, 1)], ["b"])
        wait_until(lambda: self.found.ended == 1, "the end of the rank at the first daemon")
        self.assertEqual([event["name"] for event in self.found.events()], ["a"])


class Answers(Case):
    """What the daemon says of the marks, and what the user hears of it."""

    NOT_OWNER = {
        "accepted": 1, "refused": 2, "reasons": {"not_owner": 2},
        "refusals": [{"index": 0, "reason": "not_owner", "detail": "job `llama` belongs to another user or namespace"}],
    }

    def mark(self, count=3):
        """Marks that go in one message."""
        self.client.queue.extend(('{"event":"mark","name":"m","time_unix_nano":', n, "") for n in range(count))
        self.client.wake()

    def test_what_was_taken_is_known(self):
        self.listen()
        self.assertEqual(highwater.status()["connected"], False)
        self.mark()
        self.assertTrue(highwater.flush(SECONDS))
        self.assertEqual(highwater.status(), {
            "daemon": self.path, "transport": "seqpacket", "connected": True, "confirmed": True, "job": "llama", "rank": 0,
            "accepted": 3, "refused": {}, "unconfirmed": 0, "lost": 0, "waiting": 0, "problem": None,
        })

    def test_a_refusal_is_said_once_for_each_reason_with_what_to_do(self):
        over_rate = {"accepted": 0, "refused": 3, "reasons": {"over_rate": 3}, "refusals": []}
        daemon = self.listen(answers=[self.NOT_OWNER, self.NOT_OWNER, over_rate])
        flushed = []
        with self.assertLogs("highwater", logging.WARNING) as logs:
            for _ in range(4):
                self.mark()
                flushed.append(highwater.flush(SECONDS))
        self.assertEqual((flushed, len(daemon.events())), ([False, False, False, True], 12))
        self.assertEqual(len(logs.output), 2, logs.output)
        self.assertIn("refused 2 marks (not_owner): job `llama` belongs to another user or namespace; give this run a name of",
                      logs.output[0])
        self.assertIn("over_rate", logs.output[1])
        status = highwater.status()
        self.assertEqual((status["accepted"], status["refused"]), (5, {"not_owner": 4, "over_rate": 3}))
        self.assertIn("over_rate", status["problem"])

    def test_each_rank_says_what_is_refused_of_its_own(self):
        self.listen(answers=[self.NOT_OWNER])
        os.environ.update(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1")
        with self.assertLogs("highwater", logging.WARNING):
            self.mark()
            self.assertFalse(highwater.flush(SECONDS))

    def test_a_run_that_is_kept_under_another_name_is_told_once(self):
        kept = {"accepted": 1, "refused": 0, "refusals": [], "job": "llama-2"}
        self.listen(answers=[kept, kept])
        with self.assertLogs("highwater", logging.WARNING) as logs:
            for _ in range(2):
                highwater.mark("a")
                self.assertTrue(highwater.flush(SECONDS))
        self.assertEqual((len(logs.output), highwater.status()["job"]), (1, "llama-2"))
        self.assertIn("`llama-2`", logs.output[0])

    def test_a_person_without_logging_sees_a_refusal(self):
        self.listen(answers=[self.NOT_OWNER])
        text = "import highwater; highwater.mark('a'); print(highwater.flush(20), highwater.status()['refused'])"
        command, environment = [sys.executable, "-c", text], {**os.environ, "PYTHONPATH": str(PYTHON)}
        result = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=SECONDS)
        self.assertEqual(result.stdout, "False {'not_owner': 2}\n")
        self.assertEqual(len(result.stderr.splitlines()), 1, result.stderr)

    def test_a_daemon_that_does_not_answer_is_asked_once(self):
        with mock.patch.object(_transport, "WAIT_S", 0.01):
            daemon = self.listen(answers=None)
            for _ in range(3):
                self.mark()
                self.assertTrue(highwater.flush(SECONDS), "it was handed over")
        wait_until(lambda: len(daemon.messages) == 3, "the last message")
        asked = [ASK in message for message in daemon.messages]
        self.assertEqual((asked, len(daemon.events()), len(daemon.connections)), ([True, False, False], 9, 1))
        status = highwater.status()
        self.assertEqual((status["confirmed"], status["accepted"], status["unconfirmed"]), (None, 0, 9))

    def test_an_answer_that_comes_late_counts_and_the_daemon_is_asked_again(self):
        with mock.patch.object(_transport, "WAIT_S", 0.01):
            daemon = self.listen(answers=None)
            self.mark()
            self.assertTrue(highwater.flush(SECONDS))
            daemon.answers = []
            daemon.connections[0].send(json.dumps(self.NOT_OWNER).encode())
            self.client.sender.transport.socket.settimeout(SECONDS)
            self.mark()
            self.assertFalse(highwater.flush(SECONDS), "it confirms a refusal")
        status = highwater.status()
        self.assertEqual((status["accepted"], status["refused"], status["unconfirmed"]), (4, {"not_owner": 2}, 0))
        self.assertTrue(status["confirmed"])

    def test_a_busy_daemon_is_not_waited_for_with_each_message(self):
        daemon = self.listen()
        self.mark()
        self.assertTrue(highwater.flush(SECONDS))
        self.client.sender.transport.socket.settimeout(0.01)
        daemon.answers = None
        for wanted in (False, False):
            self.mark()
            self.assertEqual(highwater.flush(SECONDS), wanted, "whether they were taken is not known")
        wait_until(lambda: len(daemon.messages) == 3, "the last message")
        self.assertEqual([ASK in message for message in daemon.messages], [True, True, False])
        self.assertEqual(highwater.status()["unconfirmed"], 6)

    def test_marks_whose_answer_the_daemon_took_with_it_are_sent_to_the_next_one(self):
        first = self.listen(answers=None)
        self.mark()
        wait_until(lambda: first.messages, "the marks")
        first.close()
        os.unlink(self.path + ".seqpacket")
        second = self.listen()
        self.assertEqual(len(self.sent(second, 3)), 3)

    def test_datagrams_promise_only_that_they_were_handed_over(self):
        self.listen(socket.SOCK_DGRAM)
        self.mark()
        self.assertTrue(highwater.flush(SECONDS))
        status = highwater.status()
        self.assertEqual((status["transport"], status["confirmed"], status["unconfirmed"]), ("datagram", None, 3))

    def test_what_is_no_answer_does_no_harm(self):
        for wrong in ([], 3, {"accepted": "x"}, {"refused": 1}, {"accepted": 1, "refused": 1, "reasons": {"a": "b"}}):
            self.reset()
            daemon = self.listen(answers=[wrong], path=os.path.join(self.folder, f"{len(os.listdir(self.folder))}.sock"))
            highwater.configure(socket=daemon.path)
            highwater.mark("a")
            self.assertFalse(highwater.flush(SECONDS), wrong)
            self.assertEqual(highwater.status()["unconfirmed"], 1)

    def test_http_says_the_same(self):
        server = self.serve()
        # Of a batch that was refused as a whole, and of a daemon that does not count by reason.
        listed = [{"index": n, "reason": "bad_name", "detail": "name: is empty\x1b[2J"} for n in range(2)]
        server.answers += [(400, {"title": "Bad Request", "annotations": {"accepted": 0, "refused": 3, "refusals": listed}})]
        highwater.configure(url=server.url)
        with self.assertLogs("highwater", logging.WARNING) as logs:
            self.mark()
            self.assertFalse(highwater.flush(SECONDS))
        self.assertEqual(highwater.status()["refused"], {"bad_name": 2, "other": 1})
        self.assertEqual(self.client.lost, 0, "the daemon has counted them")
        self.assertNotIn("\x1b", "".join(logs.output))

    def test_a_status_never_raises(self):
        with mock.patch.dict(os.environ, {"HIGHWATER_ANNOTATIONS_SOCKET": "", "HIGHWATER_URL": "http://u:secret@h:1"}):
            self.assertEqual(highwater.status()["daemon"], "h:1")
        os.environ.update(RANK="x", HIGHWATER_JOB="")
        with mock.patch.object(sys, "argv", [3]), mock.patch("os.getcwd", side_effect=OSError):
            self.assertEqual(highwater.status()["rank"], 0)


class Descriptors(Case):
    """A job may close all descriptors, and open files of its own under their numbers."""

    def taken_over(self, number):
        """A file of the job's under the number of a socket of the client."""
        file = os.open(f"{self.folder}/own", os.O_RDWR | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
        self.addCleanup(os.close, number)
        return number

    def check_own(self, number):
        os.write(number, b"own")
        with open(f"{self.folder}/own") as file:
            self.assertEqual(file.read(), "own")

    def test_a_file_that_has_a_sockets_number_gets_nothing_and_stays_open(self):
        for kind in (socket.SOCK_SEQPACKET, socket.SOCK_DGRAM):
            with self.subTest(kind=kind):
                self.reset()
                daemon = self.listen(kind, f"{self.folder}/{kind}")
                highwater.configure(socket=f"{self.folder}/{kind}")
                highwater.mark("a")
                self.sent(daemon, 1)
                number = self.taken_over(self.client.sender.transport.socket.fileno())
                highwater.mark("b")
                events = self.sent(daemon, 2)
                self.assertEqual([(event["name"], event.get("lost")) for event in events], [("a", None), ("b", None)])
                self.assertNotEqual(self.client.sender.transport.socket.fileno(), number)
                self.check_own(number)
                os.unlink(f"{self.folder}/own")

    def test_the_same_over_http(self):
        server = self.serve()
        highwater.configure(url=server.url)
        highwater.mark("a")
        self.sent(server, 1)
        number = self.taken_over(self.client.sender.transport.connection.sock.fileno())
        highwater.mark("b")
        self.assertEqual([event["name"] for event in self.sent(server, 2)], ["a", "b"])
        self.check_own(number)

    def test_the_end_of_the_client_closes_no_file_of_the_job(self):
        for way in ("socket", "http"):
            with self.subTest(way=way):
                self.reset()
                listener = self.serve() if way == "http" else self.listen()
                highwater.configure(url=listener.url if way == "http" else None)
                highwater.mark("a")
                self.sent(listener, 1)
                held = self.client.sender.transport.held
                number = self.taken_over(held.socket.fileno())
                self.client.sender.transport.close()
                del held
                gc.collect()
                self.check_own(number)
                os.unlink(f"{self.folder}/own")

    def test_a_socket_has_a_high_number_that_no_program_inherits(self):
        daemon = self.listen()
        highwater.mark("a")
        self.sent(daemon, 1)
        number = self.client.sender.transport.socket.fileno()
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.assertGreaterEqual(number, min(soft, 1024) // 2)
        self.assertFalse(os.get_inheritable(number))


class Losses(Case):
    """What happens to marks that cannot be sent."""

    def test_a_daemon_that_comes_later_gets_what_waited(self):
        with self.assertLogs("highwater", logging.WARNING) as logs:
            highwater.mark("a")
            wait_until(lambda: logs.output, "a line")
            daemon = self.listen()
            highwater.mark("b")
            events = self.sent(daemon, 2)
        self.assertEqual([(event["name"], event.get("lost")) for event in events], [("a", None), ("b", None)])
        self.assertEqual(len(logs.output), 1)
        self.assertIn("no daemon takes marks", logs.output[0])

    def test_nobody_who_did_not_ask_for_a_daemon_is_told_that_there_is_none(self):
        del os.environ["HIGHWATER_ANNOTATIONS_SOCKET"]
        os.environ["XDG_RUNTIME_DIR"] = self.folder
        with self.assertLogs("highwater", logging.DEBUG) as logs:
            highwater.mark("a")
            wait_until(lambda: self.client.sender.retry_at_s and logs.output, "a try")
        self.assertTrue(all(line.startswith("DEBUG") for line in logs.output), logs.output)

    def test_a_daemon_that_restarts_is_found_again_and_gets_everything(self):
        first = self.listen()
        highwater.mark("a")
        self.sent(first, 1)
        first.close()
        os.unlink(self.path + ".seqpacket")
        highwater.mark("b")
        wait_until(lambda: self.client.sender.transport is None, "the end of the connection")
        second = self.listen()
        highwater.mark("c")
        events = self.sent(second, 2)
        self.assertEqual([(event["name"], event.get("lost")) for event in events], [("b", None), ("c", None)])

    def test_what_waits_is_bounded_and_what_is_lost_is_counted(self):
        wait = _marks.MOST_WAITING
        for n in range(wait + 500):
            self.client.put('{"event":"mark","name":"a","time_unix_nano":', n)
        self.assertLessEqual(len(self.client.queue), wait)
        wait_until(lambda: len(self.client.queue) <= _marks.MOST_KEPT, "room")
        daemon = self.listen()
        self.sent(daemon, is_whole=False)

        def accounted():
            return sum(1 + event.get("lost", 0) for event in daemon.events()) + self.client.lost

        wait_until(lambda: accounted() >= wait + 500, "each mark, or its loss")
        self.assertEqual(accounted(), wait + 500)
        events = daemon.events()
        self.assertEqual(events[-1]["time_unix_nano"], max(event["time_unix_nano"] for event in events))
        self.assertLess(len(events), _marks.MOST_KEPT + 1_000)

    def test_a_mark_that_is_too_long_is_counted_and_the_next_one_says_so(self):
        daemon = self.listen()
        highwater.mark("too long" * 100_000)
        with highwater.step(1, text="größe" * 10_000):
            pass
        events = self.sent(daemon, 1, is_whole=False)
        self.assertEqual([(event["event"], event.get("lost")) for event in events], [("end", 2)])

    def test_a_daemon_that_does_not_read_costs_no_time_and_loses_nothing(self):
        daemon = self.listen()
        daemon.is_reading.clear()
        tried = self.count_slow_sends()
        for n in range(20_000):
            highwater.mark(f"m{n}")
        wait_until(lambda: tried, "a send that took too long")
        daemon.is_reading.set()
        events = self.sent(daemon, 20_000)
        self.assertEqual(len(events), 20_000)
        self.assertEqual([event.get("lost") for event in events if "lost" in event], [])

    def count_slow_sends(self):
        """Has sends give up at once, and returns the list of those that did."""
        tried, send = [], _transport.Seqpacket.send

        def impatient(way, message):
            way.socket.settimeout(0.01)
            try:
                return send(way, message)
            except OSError as error:
                tried.append(error)
                raise

        patch = mock.patch.object(_transport.Seqpacket, "send", impatient)
        patch.start()
        self.addCleanup(patch.stop)
        return tried

    def test_a_fault_of_one_mark_costs_no_other(self):
        class Broken(_marks.Later):
            def take(self):
                raise KeyError("ours")

            def __len__(self):
                return 7

        daemon = self.listen()
        highwater.mark("a")
        self.client.put_later(Broken())
        highwater.mark("b")
        events = self.sent(daemon, 2, is_whole=False)
        self.assertEqual([event["name"] for event in events], ["a", "b"])
        self.assertEqual(sum(event.get("lost", 0) for event in events) + self.client.lost, 7, "all that it stands for")

    def test_nothing_is_sent_where_it_is_turned_off(self):
        daemon = self.listen()
        text = "import highwater\nwith highwater.step(1): pass\nhighwater.mark('a'); print(highwater.flush())"
        out = self.run_python(text, HIGHWATER_DISABLED="1")
        self.assertEqual((out, daemon.events(), daemon.connections), ("True\n", [], []))

    def run_python(self, text, **environment):
        command = [sys.executable, "-W", "error", "-c", text]
        environment = {**os.environ, "PYTHONPATH": str(PYTHON), **environment}
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=SECONDS).stdout


class Processes(Case):
    """Threads, forks, and the end of the job."""

    def run_job(self, text, daemon, **environment):
        command = [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", text]
        environment = {**os.environ, "PYTHONPATH": str(PYTHON), **environment}
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
        self.assertEqual((result.returncode, result.stdout, result.stderr), (0, "", ""))
        return [(event["event"], event.get("name")) for event in daemon.events()]

    def test_threads_do_not_disturb_each_other(self):
        daemon = self.listen()

        def work(n):
            for _ in range(500):
                with highwater.phase(f"phase {n}"):
                    pass

        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        events = self.sent(daemon, 8_000)
        self.assertEqual((len(events), self.client.lost), (8_000, 0))

    def test_a_signals_handler_may_mark(self):
        daemon = self.listen()
        before = signal.signal(signal.SIGALRM, lambda *_: highwater.mark("signal"))
        self.addCleanup(signal.signal, signal.SIGALRM, before)
        self.addCleanup(signal.setitimer, signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        wait_until(lambda: highwater.phase("a").__enter__() and len(daemon.events()) > 1_000, "marks")
        signal.setitimer(signal.ITIMER_REAL, 0)
        self.assertIn("signal", {event["name"] for event in self.sent(daemon)})

    def test_a_child_is_a_sender_of_its_own(self):
        daemon = self.listen()
        highwater.mark("before")
        self.sent(daemon, 1)
        self.client.lose(9)
        child = os.fork()
        if child == 0:
            highwater.mark("child")
            os._exit(0 if highwater.flush(SECONDS) else 1)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)
        highwater.mark("parent")
        events = self.sent(daemon, 3, is_whole=False)
        lost = {event["name"]: event.get("lost") for event in events}
        self.assertEqual(lost, {"before": None, "child": None, "parent": 9})
        self.assertEqual(len(daemon.connections), 2)

    def test_a_child_that_lives_on_does_not_hold_the_parents_connection(self):
        daemon = self.listen()
        text = (
            "import highwater, os, time\nhighwater.mark('a'); highwater.mark('b'); highwater.flush(20)\n"
            "if os.fork() == 0:\n    os.close(0); os.close(1); os.close(2); time.sleep(20); os._exit(0)\n"
        )
        self.run_job(text, daemon)
        wait_until(lambda: daemon.ended == 1, "the end of the parent's connection")

    def test_a_job_that_ends_says_so_and_one_that_marked_nothing_does_not(self):
        for kind, two in [(socket.SOCK_SEQPACKET, []), (socket.SOCK_DGRAM, [("exit", None)])]:
            self.path = os.path.join(self.folder, f"{kind.name}.sock")
            os.environ["HIGHWATER_ANNOTATIONS_SOCKET"] = self.path
            daemon = self.listen(kind)
            self.assertEqual(self.run_job("import highwater", daemon), [])
            self.assertEqual(self.run_job("import highwater; highwater.mark('a')", daemon), [("mark", "a"), ("exit", None)])
            daemon.messages.clear()
            text = "import highwater; highwater.mark('a'); highwater.mark('b')"
            self.assertEqual(self.run_job(text, daemon), [("mark", "a"), ("mark", "b"), *two])
            daemon.messages.clear()
            forks = (
                "import highwater, os, sys\nhighwater.mark('a')\n"
                "if os.fork() == 0: highwater.mark('b'); sys.exit()\nos.wait()"
            )
            self.assertEqual(self.run_job(forks, daemon).count(("exit", None)), 1)

    def test_a_job_without_a_daemon_ends_as_soon_and_says_one_line(self):
        command = [sys.executable, "-c", "import highwater\nfor n in range(1000):\n  with highwater.step(n): pass"]
        for local_rank, lines in (("0", 1), ("1", 0)):
            environment = {**os.environ, "PYTHONPATH": str(PYTHON), "RANK": local_rank, "LOCAL_RANK": local_rank}
            result = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=SECONDS)
            self.assertEqual((len(result.stderr.splitlines()), result.stdout), (lines, ""), result.stderr)

    def test_a_thread_that_cannot_be_started_is_tried_again(self):
        daemon = self.listen()
        with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")):
            highwater.mark("a")
            self.client.close()
            self.client.is_closing = False
        highwater.mark("b")
        self.assertEqual([event["name"] for event in self.sent(daemon, 2)], ["a", "b"])

    def test_what_waits_for_a_gpu_is_not_destroyed_in_a_child(self):
        self.listen()

        class Event(_marks.Later):
            def take(self):
                return None

            def __del__(self):
                os.write(pipe[1], b"x") if os.getpid() != parent else None

        parent, pipe = os.getpid(), os.pipe()
        self.addCleanup(lambda: [os.close(each) for each in pipe])
        self.client.put_later(Event())
        child = os.fork()
        if child == 0:
            gc.collect()
            os._exit(0)
        os.waitpid(child, 0)
        os.set_blocking(pipe[0], False)
        with self.assertRaises(BlockingIOError):
            os.read(pipe[0], 1)

    def test_the_thread_sleeps_while_nothing_is_marked(self):
        daemon = self.listen()
        highwater.mark("a")
        self.sent(daemon, 1)
        wait_until(lambda: self.client.asleep, "sleep")
        highwater.mark("b")
        self.assertEqual(len(self.sent(daemon, 2)), 2)

    def test_the_example_runs_as_it_stands(self):
        daemon = self.listen()
        command = [sys.executable, str(PYTHON / "example.py"), "--gpu", "0", "--steps", "1", "--seconds", "0"]
        subprocess.run(command, env={**os.environ, "PYTHONPATH": str(PYTHON)}, check=True, timeout=SECONDS)
        events = daemon.events()
        self.assertEqual({event["job"] for event in events}, {"example"})
        self.assertEqual(events[0]["gpu"], 0)
        begun = [event.get("name") for event in events if event["event"] == "begin"]
        self.assertEqual(begun, [None, "data", "forward", "backward"])


if __name__ == "__main__":
    unittest.main()

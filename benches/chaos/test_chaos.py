"""What the books of the chaos report."""

import unittest

import chaos

GOOD = """\
highwater_sampler_ticks_due_total 10
highwater_sampler_ticks_taken_total 7
highwater_sampler_ticks_missed_total{cause="late"} 2
highwater_sampler_ticks_missed_total{cause="driver_blocked"} 1
highwater_otlp_produced_total{signal="spans"} 9
highwater_otlp_exported_total{signal="spans"} 4
highwater_otlp_dropped_total{signal="spans",reason="overflow"} 2
highwater_otlp_queued{signal="spans"} 3
highwater_memory_bytes{part="rings"} 100
highwater_memory_bytes{part="other"} 50
process_resident_memory_bytes 150
highwater_annotations_total{outcome="accepted"} 5
highwater_annotations_total{outcome="accepted_out_of_order"} 1
highwater_annotations_total{outcome="malformed"} 2
highwater_annotations_refused_total{sender="uid 1"} 2
highwater_gpu_up{gpu="0",uuid="GPU-0"} 1
highwater_gpu_up{gpu="1",uuid="GPU-1"} 0
highwater_gpu_memory_used_bytes{gpu="0",uuid="GPU-0"} 7
"""


def faults(text: str, before: str = "") -> list:
    """The names of what does not hold in a scrape."""
    books = chaos.Books(tell=lambda *_, **__: None)
    books.of_scrape(chaos.Scrape(text), chaos.Scrape(before) if before else None)
    return [what for what, found in books.faults.items() if found]


class Chaos(unittest.TestCase):
    """Books that balance, and books that do not."""

    def test_books_that_balance(self) -> None:
        self.assertEqual(faults(GOOD, GOOD), [])

    def test_each_fault_is_found(self) -> None:
        for old, new, what in [
            ('cause="late"} 2', 'cause="late"} 3', "ticks due"),
            ('highwater_otlp_queued{signal="spans"} 3', 'highwater_otlp_queued{signal="spans"} 2', "OTLP spans"),
            ("process_resident_memory_bytes 150", "process_resident_memory_bytes 151", "parts of memory"),
            ("highwater_gpu_memory_used_bytes{gpu=\"0\",uuid=\"GPU-0\"} 7", "highwater_gpu_memory_used_bytes{gpu=\"1\",uuid=\"GPU-1\"} 7", "a GPU that is down"),
        ]:
            with self.subTest(what):
                self.assertEqual([found[: len(what)] for found in faults(GOOD.replace(old, new))], [what])
        fell = GOOD.replace('outcome="accepted"} 5', 'outcome="accepted"} 4')
        self.assertEqual(faults(fell, GOOD), ["no counter falls"])
        large = GOOD.replace('"other"} 50', '"other"} 9000000').replace("_bytes 150", "_bytes 9000100")
        self.assertEqual(faults(large), ["memory in `other` at most 8 MiB"])

    def test_points_are_counted_in_a_request(self) -> None:
        def field(number: int, content: bytes) -> bytes:
            return bytes([number << 3 | 2, len(content)]) + content

        gauge = field(5, field(1, b"\x21" + bytes(8)) + field(1, b""))
        sum_ = field(7, field(1, b"") + bytes([2 << 3, 1]))
        metrics = field(2, field(1, b"name") + gauge) + field(2, sum_)
        self.assertEqual(chaos.count_points(field(1, field(2, metrics))), 3)
        self.assertEqual(chaos.count_spans(field(1, field(2, field(2, b"") + field(2, b"") + field(1, b"")))), 2)

    def test_what_each_daemon_delivered_is_counted_apart(self) -> None:
        def span(name: bytes) -> bytes:
            return bytes([10, 4 + len(name), 18, 2 + len(name), 18, len(name)]) + name

        receiver = chaos.Receiver()
        self.addCleanup(receiver.server_close)
        self.addCleanup(receiver.shutdown)
        for request in [span(b"a"), span(b"b"), span(b"b")]:
            receiver.take("/v1/traces", request)
        self.assertEqual((receiver.delivered["spans"], receiver.points["spans"], receiver.again), (2, 2, 1))
        # Accepted before the first daemon was killed, and still queued.
        receiver.next_daemon()
        for request in [span(b"b"), span(b"c"), span(b"b")]:
            receiver.take("/v1/traces", request)
        self.assertEqual((receiver.delivered["spans"], receiver.points["spans"], receiver.again), (2, 3, 3))


if __name__ == "__main__":
    unittest.main()

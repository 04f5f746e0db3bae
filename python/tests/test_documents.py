"""Every block of Python in the documents runs, and marks what it is there for."""

import ast
import re
import unittest
from unittest import mock

import highwater

from .listeners import PYTHON, Case

ROOT = PYTHON.parent
DOCUMENTS = [PYTHON / "README.md", ROOT / "README.md", ROOT / "docs/python.md"]


def blocks(path):
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)


@unittest.skipUnless(DOCUMENTS[2].exists(), "the package's tests run without the repository's documents")
class Documents(Case):
    def test_every_block_that_needs_no_framework_marks_its_steps(self):
        daemon = self.listen()
        for path in DOCUMENTS:
            found = [block for block in blocks(path) if "torch" not in block]
            self.assertTrue(found, f"{path} shows nothing")
            for block in found:
                before = len(daemon.events())
                exec(compile(block, str(path), "exec"), {"batches": [1, 2], "model": mock.MagicMock()})
                self.assertTrue(highwater.flush(20))
                events = self.sent(daemon, before + 12)[before:]
                names = [event.get("name") for event in events if event["event"] == "begin"]
                self.assertEqual(names, [None, "forward", "backward"] * 2, path)

    def test_what_became_of_the_marks_is_as_documented(self):
        block = re.search(r"^```pycon\n(.*?)^```", DOCUMENTS[2].read_text(), re.DOTALL | re.MULTILINE)[1]
        said, _, shown = block.removeprefix(">>> highwater.flush()\n").partition("False\n>>> highwater.status()\n")
        status = ast.literal_eval(shown.replace("\n", ""))
        detail = "job `train` belongs to another user or namespace"
        refusals = [{"index": 0, "reason": "not_owner", "detail": detail}]
        self.listen(answers=[{"accepted": 0, "refused": 240, "reasons": {"not_owner": 240}, "refusals": refusals}])
        highwater.configure(job="train")
        with self.assertLogs("highwater", "WARNING") as logs:
            highwater.mark("a")
            self.assertFalse(highwater.flush(20))
        self.assertEqual(logs.records[0].getMessage(), said.strip().replace("\n", " "))
        real = highwater.status()
        self.assertTrue(real["problem"].startswith(status["problem"].rstrip("…")))
        self.assertEqual({**real, "daemon": status["daemon"], "problem": status["problem"]}, status)


if __name__ == "__main__":
    unittest.main()

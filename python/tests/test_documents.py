"""Every block of Python in the documents runs, and marks what it is there for."""

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


if __name__ == "__main__":
    unittest.main()

"""A real Chromium, driven over its debugging pipe, for scripts that measure pages or take pictures of them."""

import base64
import json
import os
import subprocess
import tempfile
import time


class Browser:
    """Chromium over --remote-debugging-pipe: messages of JSON that end in a zero byte, on descriptors 3 and 4."""

    def __init__(self, program="chromium"):
        to_child, self._out = os.pipe()
        self._in, from_child = os.pipe()
        # The descriptors are moved out of the way first, so that dup2 cannot overwrite one that it still needs.
        high_in, high_out = (os.dup(fd) for fd in (to_child, from_child))
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        arguments = [program, "--headless=new", "--no-first-run", "--hide-scrollbars", "--disable-gpu",
                     "--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update",
                     "--enable-precise-memory-info", f"--user-data-dir={self._folder.name}", "--remote-debugging-pipe"]
        if os.geteuid() == 0:
            arguments.append("--no-sandbox")

        def descriptors():
            os.dup2(high_in, 3)
            os.dup2(high_out, 4)

        self.process = subprocess.Popen(arguments, preexec_fn=descriptors, close_fds=False, stdout=subprocess.DEVNULL,
                                        stderr=subprocess.DEVNULL)
        for fd in (to_child, from_child, high_in, high_out):
            os.close(fd)
        self._rest, self._number = b"", 0

    def call(self, method, parameters=None, session=None):
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters or {}}
        if session:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _receive(self):
        while b"\0" not in self._rest:
            read = os.read(self._in, 1 << 20)
            if not read:
                raise RuntimeError("Chromium has ended")
            self._rest += read
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)

    def page(self):
        """A page with a profile of its own, as of another user."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        return Page(self, self.call("Target.createTarget", {"url": "about:blank", "browserContextId": context})["targetId"])

    def close(self):
        self.call("Browser.close")
        self.process.wait()


class Page:
    """One page of a browser."""

    def __init__(self, browser, target):
        self._browser, self._target = browser, target
        self._session = browser.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        self.call("Page.enable")

    def call(self, method, parameters=None):
        return self._browser.call(method, parameters, self._session)

    def open(self, url, width, height, theme="light"):
        self.call("Emulation.setDeviceMetricsOverride",
                  {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False})
        self.call("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": theme}]})
        self.call("Page.navigate", {"url": url})

    def evaluate(self, script):
        answer = self.call("Runtime.evaluate", {"expression": script, "returnByValue": True, "awaitPromise": True})
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"].get("description", script))
        return answer["result"].get("value")

    def wait(self, script, seconds=60):
        """The first value of an expression that is true, asked twenty times a second."""
        deadline = time.monotonic() + seconds
        while not (value := self.evaluate(script)):
            if time.monotonic() > deadline:
                raise RuntimeError(f"not within {seconds} s: {script}")
            time.sleep(0.05)
        return value

    def picture(self, path, clip=None):
        options = {"format": "png"} | ({"clip": clip} if clip else {})
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", options)["data"]))

    def close(self):
        self._browser.call("Target.closeTarget", {"targetId": self._target})

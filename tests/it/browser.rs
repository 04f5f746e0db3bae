//! A real Chromium, driven over its debugging pipe.

use crate::tools;
use serde_json::{Value, json};
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use tempfile::TempDir;

/// A browser with one page.
pub struct Browser {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    session: Option<String>,
    last_id: u64,
    /// Errors that the page reported: exceptions, and what its content security policy refused.
    pub errors: Vec<String>,
    _profile: TempDir,
}

/// A theme of the page's reader.
#[derive(Clone, Copy)]
pub enum Theme {
    Light,
    Dark,
}

impl Browser {
    /// Starts it and opens an empty page. `None` if there is no Chromium.
    pub fn start() -> Option<Self> {
        let program = tools::find("chromium")?;
        let profile = tempfile::tempdir().expect("a folder");
        // Chromium reads commands from descriptor 3 and writes to 4.
        let mut command = Command::new("sh");
        command
            .args(["-c", "exec \"$@\" 3<&0 4>&1 </dev/null >/dev/null 2>/dev/null", "sh"])
            .arg(program)
            .args(["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"])
            .args(["--disable-quic", "--disable-background-networking", "--disable-component-update", "--disable-sync"])
            // In a container, /dev/shm may be too small for it.
            .arg("--disable-dev-shm-usage")
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = command.spawn().expect("chromium starts");
        let input = child.stdin.take().expect("a pipe");
        let output = BufReader::new(child.stdout.take().expect("a pipe"));
        let (session, errors) = (None, Vec::new());
        let mut browser = Self { child, input, output, session, last_id: 0, errors, _profile: profile };
        let target = browser.call("Target.createTarget", json!({ "url": "about:blank" }))["targetId"].clone();
        let attached = browser.call("Target.attachToTarget", json!({ "targetId": target, "flatten": true }));
        browser.session = Some(attached["sessionId"].as_str().expect("a session").to_owned());
        for domain in ["Page.enable", "Runtime.enable", "Log.enable"] {
            browser.call(domain, json!({}));
        }
        Some(browser)
    }

    /// Calls a method of the protocol and returns its result.
    pub fn call(&mut self, method: &str, parameters: Value) -> Value {
        self.try_call(method, parameters).unwrap_or_else(|error| panic!("{method}: {error}"))
    }

    fn try_call(&mut self, method: &str, parameters: Value) -> Result<Value, Value> {
        self.last_id += 1;
        let mut request = json!({ "id": self.last_id, "method": method, "params": parameters });
        if let Some(session) = &self.session {
            request["sessionId"] = json!(session);
        }
        self.input.write_all(format!("{request}\0").as_bytes()).expect("chromium reads");
        loop {
            let message = self.read();
            if message["id"] == self.last_id {
                let error = &message["error"];
                return if error.is_null() { Ok(message["result"].clone()) } else { Err(error.clone()) };
            }
            self.note(&message);
        }
    }

    fn read(&mut self) -> Value {
        let mut bytes = Vec::new();
        self.output.read_until(0, &mut bytes).expect("chromium answers");
        assert_eq!(bytes.pop(), Some(0), "chromium has ended");
        serde_json::from_slice(&bytes).expect("JSON")
    }

    fn note(&mut self, event: &Value) {
        match event["method"].as_str() {
            Some("Runtime.exceptionThrown") => {
                self.errors.push(event["params"]["exceptionDetails"].to_string());
            }
            Some("Log.entryAdded") if event["params"]["entry"]["level"] == "error" => {
                self.errors.push(event["params"]["entry"].to_string());
            }
            _ => {}
        }
    }

    /// Sets the size of the page, pixels, and its reader's theme.
    pub fn appear(&mut self, width: u32, height: u32, theme: Theme) {
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
        self.call("Emulation.setDeviceMetricsOverride", size);
        let value = match theme {
            Theme::Light => "light",
            Theme::Dark => "dark",
        };
        let features = json!({ "features": [{ "name": "prefers-color-scheme", "value": value }] });
        self.call("Emulation.setEmulatedMedia", features);
    }

    /// Opens an address and waits until `ready`, an expression of JavaScript, is true.
    pub fn visit(&mut self, url: &str, ready: &str) {
        self.call("Page.navigate", json!({ "url": url }));
        self.wait(ready);
    }

    /// Opens a file and waits until `ready`, an expression of JavaScript, is true.
    pub fn open(&mut self, path: &Path, ready: &str) {
        self.visit(&format!("file://{}", path.display()), ready);
    }

    /// Waits until what was asked for is painted.
    pub fn painted(&mut self) {
        self.value("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))");
    }

    /// What an accessibility checker finds in the page, from its script.
    pub fn check_access(&mut self, axe: &str) -> Vec<String> {
        self.value(&format!("{axe}; 0"));
        let found = self.value(
            "axe.run().then(({ violations }) => violations.map(({ id, impact, nodes }) =>
                `${impact} ${id}: ${nodes.map(({ html }) => html).slice(0, 3)}`))",
        );
        serde_json::from_value(found).expect("a list")
    }

    /// Keeps a picture of the window, to be looked at.
    pub fn keep(&mut self, name: &str) {
        let pictures = tools::root().join("target/pictures");
        std::fs::create_dir_all(&pictures).expect("a folder");
        std::fs::write(pictures.join(format!("{name}.png")), self.picture()).expect("written");
    }

    /// Waits until an expression is true.
    pub fn wait(&mut self, expression: &str) {
        crate::process::eventually(std::time::Duration::from_secs(60), expression, || {
            match self.evaluate(expression) {
                Ok(value) => (value == json!(true)).then_some(()),
                // The page that was there before is just left.
                Err(error) if error["message"].as_str().is_some_and(|text| text.contains("navigated")) => None,
                Err(error) => panic!("{expression}: {error}"),
            }
        });
    }

    /// The value of an expression, awaited.
    pub fn value(&mut self, expression: &str) -> Value {
        self.evaluate(expression).unwrap_or_else(|error| panic!("{expression}: {error}"))
    }

    fn evaluate(&mut self, expression: &str) -> Result<Value, Value> {
        let parameters = json!({ "expression": expression, "awaitPromise": true, "returnByValue": true });
        let answer = self.try_call("Runtime.evaluate", parameters)?;
        assert!(answer["exceptionDetails"].is_null(), "{expression}: {}", answer["exceptionDetails"]);
        Ok(answer["result"]["value"].clone())
    }

    /// Presses and releases a key.
    pub fn press(&mut self, key: &str) {
        let text = if key.chars().count() == 1 { key } else { "" };
        for kind in ["keyDown", "keyUp"] {
            let mut event = json!({ "type": kind, "key": key });
            if kind == "keyDown" && !text.is_empty() {
                event["text"] = json!(text);
            }
            self.call("Input.dispatchKeyEvent", event);
        }
    }

    /// Moves the pointer, pixels of the window.
    pub fn point(&mut self, x: f64, y: f64) {
        self.call("Input.dispatchMouseEvent", json!({ "type": "mouseMoved", "x": x, "y": y }));
    }

    /// A picture of the window, PNG.
    pub fn click(&mut self, x: f64, y: f64) {
        for (kind, clicks) in [("mouseMoved", 0), ("mousePressed", 1), ("mouseReleased", 1)] {
            let event = json!({ "type": kind, "x": x, "y": y, "button": "left", "clickCount": clicks });
            self.call("Input.dispatchMouseEvent", event);
        }
    }

    pub fn picture(&mut self) -> Vec<u8> {
        use base64::Engine as _;
        let answer = self.call("Page.captureScreenshot", json!({ "format": "png" }));
        let data = answer["data"].as_str().expect("a picture");
        base64::engine::general_purpose::STANDARD.decode(data).expect("base64")
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

//! What the live page and the pages of reports share: the chart with its curves and lanes, the graphs of layers, the
//! style, and the document around them.
//!
//! Enters: a script, a body and data. Leaves: one HTML document that needs no other file. Invariants: text from outside
//! is data only, so it can end no element; the content security policy allows only this document's own script and style,
//! by their hashes, and no connection except to the document's own server, and only if the page asks for that. Absent on
//! purpose: where the data come from.

use crate::html::escape;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;

const TEMPLATE: &str = include_str!("page.html");
const STYLE: &str = include_str!("style.css");

/// The scripts that every page needs before its own. Once in the program, however many pages there are.
const SHARED: [&str; 14] = [
    include_str!("format.js"),
    include_str!("elements.js"),
    include_str!("curve.js"),
    include_str!("activity.js"),
    include_str!("breakdown.js"),
    include_str!("lanes.js"),
    include_str!("step.js"),
    include_str!("layout.js"),
    include_str!("chart.js"),
    include_str!("canvas.js"),
    include_str!("paint.js"),
    include_str!("overview.js"),
    include_str!("controls.js"),
    include_str!("layers.js"),
];

/// A page.
pub struct Page<'a> {
    /// Its title, as text.
    pub title: &'a str,
    /// The body's HTML, without anything from outside.
    pub body: &'a str,
    /// Its own scripts, which follow the shared ones in one function.
    pub scripts: &'a [&'a str],
    /// What the script finds in the element `data`.
    pub data: &'a Value,
    /// Whether the script may connect to the server that the page comes from.
    pub connects: bool,
}

/// A page as it is sent.
pub struct Document {
    /// The document. It has the policy in a `meta` element, so that a saved copy keeps it.
    pub html: String,
    /// Its content security policy.
    pub policy: String,
}

impl Page<'_> {
    /// The document.
    pub fn document(&self) -> Document {
        let parts = ["(() => {\n"].into_iter().chain(SHARED).chain(self.scripts.iter().copied()).chain(["})();\n"]);
        let script: String = parts.collect();
        let policy = self.policy(&script);
        Document { html: self.html(&script, &policy), policy }
    }

    fn html(&self, script: &str, policy: &str) -> String {
        // In a script element, only `<` can begin markup.
        let data = self.data.to_string().replace('<', "\\u003c");
        let mut page = String::with_capacity(TEMPLATE.len() + STYLE.len() + script.len() + data.len());
        let mut rest = TEMPLATE;
        while let Some((before, after)) = rest.split_once('{') {
            let (name, after) = after.split_once('}').unwrap_or((after, ""));
            page.push_str(before);
            match name {
                "title" => page.push_str(&escape(self.title)),
                "policy" => page.push_str(policy),
                "style" => page.push_str(STYLE),
                "body" => page.push_str(self.body),
                "script" => page.push_str(script),
                "data" => page.push_str(&data),
                "version" => page.push_str(env!("CARGO_PKG_VERSION")),
                _ => {}
            }
            rest = after;
        }
        page.push_str(rest);
        page
    }

    fn policy(&self, script: &str) -> String {
        let (script, style) = (hash(script), hash(STYLE));
        let connect = if self.connects { "connect-src 'self'; " } else { "" };
        format!(
            "default-src 'none'; script-src 'sha256-{script}'; style-src 'sha256-{style}'; {connect}img-src data:; \
             base-uri 'none'; form-action 'none'"
        )
    }
}

/// The SHA-256 of an element's content, as a content security policy names it.
fn hash(content: &str) -> String {
    STANDARD.encode(ring::digest::digest(&ring::digest::SHA256, content.as_bytes()))
}

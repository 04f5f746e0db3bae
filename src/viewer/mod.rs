//! What the live page and the pages of reports share: the chart with its curves and lanes, the style, and the document
//! around them.
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

/// The scripts that every page needs before its own.
macro_rules! script {
    ($($own:literal),+) => {
        concat!(
            "(() => {\n",
            include_str!("../viewer/format.js"),
            include_str!("../viewer/elements.js"),
            include_str!("../viewer/curve.js"),
            include_str!("../viewer/lanes.js"),
            include_str!("../viewer/chart.js"),
            include_str!("../viewer/paint.js"),
            include_str!("../viewer/controls.js"),
            $(include_str!($own),)+
            "})();\n"
        )
    };
}
pub(crate) use script;

/// A page.
pub(crate) struct Page<'a> {
    /// Its title, as text.
    pub title: &'a str,
    /// The body's HTML, without anything from outside.
    pub body: &'a str,
    /// Its script, made by [`script!`].
    pub script: &'a str,
    /// What the script finds in the element `data`.
    pub data: &'a Value,
    /// Whether the script may connect to the server that the page comes from.
    pub connects: bool,
}

impl Page<'_> {
    /// The document, with this as the [policy](Self::policy) that it names.
    pub fn html(&self, policy: &str) -> String {
        // In a script element only `<` can begin anything else than data.
        let data = self.data.to_string().replace('<', "\\u003c");
        let mut page = String::with_capacity(TEMPLATE.len() + STYLE.len() + self.script.len() + data.len());
        let mut rest = TEMPLATE;
        while let Some((before, after)) = rest.split_once('{') {
            let (name, after) = after.split_once('}').unwrap_or((after, ""));
            page.push_str(before);
            match name {
                "title" => page.push_str(&escape(self.title)),
                "policy" => page.push_str(policy),
                "style" => page.push_str(STYLE),
                "body" => page.push_str(self.body),
                "script" => page.push_str(self.script),
                "data" => page.push_str(&data),
                "version" => page.push_str(env!("CARGO_PKG_VERSION")),
                _ => {}
            }
            rest = after;
        }
        page.push_str(rest);
        page
    }

    /// Its content security policy.
    pub fn policy(&self) -> String {
        let (script, style) = (hash(self.script), hash(STYLE));
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

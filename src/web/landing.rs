//! `/`: the daemon's state, and links.

use super::Site;
use crate::html::escape;
use axum::extract::State;
use axum::response::Html;
use std::fmt::Write as _;

const HEAD: &str = include_str!("landing.html");

/// The page.
pub(super) async fn page(State(site): State<Site>) -> Html<String> {
    let mut state = String::new();
    match (site.known().slot.node(), site.known().slot.trouble()) {
        (Some(node), _) => {
            let _ = write!(state, "<p>Reading <code>{}</code>.</p><ul>", escape(&node.source.description()));
            for gpu in node.gpus.iter() {
                let name = gpu.device.name.as_deref().unwrap_or("GPU");
                let index = escape(&gpu.device.index);
                let _ = write!(
                    state,
                    "<li><a href=\"/api/v1/gpus/{index}/memory\">GPU {index}</a> {} <code>{}</code></li>",
                    escape(name),
                    escape(&gpu.device.uuid)
                );
            }
            for gpu in node.source.skipped() {
                let (index, reason) = (escape(&gpu.index), escape(&gpu.reason));
                let _ = write!(state, "<li class=\"trouble\">GPU {index} cannot be opened: {reason}</li>");
            }
            state.push_str("</ul>");
        }
        (None, Some(trouble)) => {
            let _ = write!(state, "<p class=\"trouble\">No GPUs: {}</p>", escape(&trouble.message));
        }
        (None, None) => state.push_str("<p>Starting.</p>"),
    }
    state.push_str(&findings(&site));
    Html(HEAD.replace("{version}", env!("CARGO_PKG_VERSION")).replace("{state}", &state))
}

/// The active findings, as text.
fn findings(site: &Site) -> String {
    let board = site.known().findings.board();
    let items = board.active().map(|finding| {
        let (severity, text) = (finding.sign.severity.label(), &finding.sign.text);
        format!("<li><b>{severity}</b> {} {}</li>", escape(&text.what), escape(&text.why))
    });
    let items: String = items.collect();
    if items.is_empty() { items } else { format!("<p>Found:</p><ul>{items}</ul>") }
}

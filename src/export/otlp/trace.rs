//! IDs of traces and spans, derived so that processes that never communicate agree on them.
//!
//! The trace ID of a step is derived from job, run and step number, so all ranks of the step share it on every node. The ID
//! of a step's span is derived from trace, job, rank and step number, so a phase's parent is known before the step has
//! ended. A W3C `traceparent` takes precedence over the derived trace and parent.

use opentelemetry::Context;
use opentelemetry::propagation::{Extractor, TextMapPropagator as _};
use opentelemetry::trace::{SpanContext, SpanId, TraceContextExt as _, TraceFlags, TraceId, TraceState};
use opentelemetry_sdk::propagation::TraceContextPropagator;

/// The ID of the trace that these parts name.
#[must_use]
pub fn trace_of(parts: &[&str]) -> TraceId {
    TraceId::from(u128::from(hash(parts, 0)) << 64 | u128::from(hash(parts, 1)))
}

/// The ID of the span that these parts name in a trace.
#[must_use]
pub fn span_of(trace: TraceId, parts: &[&str]) -> SpanId {
    let trace = trace.to_string();
    let mut all = vec![trace.as_str()];
    all.extend(parts);
    SpanId::from(hash(&all, 2))
}

/// The context of one of our spans.
#[must_use]
pub fn own(trace: TraceId, span: SpanId) -> SpanContext {
    SpanContext::new(trace, span, TraceFlags::SAMPLED, false, TraceState::NONE)
}

/// Reads `00-TRACE-SPAN-FLAGS`; `None` if the text has another form, or one of its IDs is all zeros.
#[must_use]
pub fn traceparent(text: &str) -> Option<SpanContext> {
    let text = text.trim();
    if !is_well_formed(text) {
        return None;
    }
    let context = TraceContextPropagator::new().extract_with_context(&Context::new(), &Traceparent(text));
    Some(context.span().span_context().clone()).filter(SpanContext::is_valid)
}

/// Whether the parts have the lengths and digits that W3C requires. The propagator also accepts shorter parts and
/// signs.
fn is_well_formed(text: &str) -> bool {
    let is_hex = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte));
    let parts: Vec<&str> = text.split('-').collect();
    let lengths = [2, 32, 16, 2];
    // Later versions may have more parts; this one may not.
    (parts.len() == lengths.len() || parts.len() > lengths.len() && parts[0] != "00")
        && parts.iter().zip(lengths).all(|(part, length)| part.len() == length && is_hex(part))
}

/// The carrier that the propagator reads.
struct Traceparent<'a>(&'a str);

impl Extractor for Traceparent<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        (key == "traceparent").then_some(self.0)
    }

    fn keys(&self) -> Vec<&str> {
        vec!["traceparent"]
    }
}

/// FNV-1a over the parts and their lengths, with a final mix that spreads every bit. It must never change, because two
/// versions of the daemon must agree. Never 0, which is not an ID.
fn hash(parts: &[&str], seed: u64) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325 ^ seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut add = |bytes: &[u8]| {
        for byte in bytes {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    };
    for part in parts {
        add(&(part.len() as u64).to_le_bytes());
        add(part.as_bytes());
    }
    hash = (hash ^ hash >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    hash = (hash ^ hash >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    (hash ^ hash >> 31).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn ids_are_fixed_for_good_and_apart() {
        let trace = trace_of(&["job", "run", "7"]);
        assert_eq!(trace.to_string(), "2967ce842303c23da06fbf76ec6c3fed");
        assert_ne!(trace_of(&["job", "run", "7"]), trace_of(&["job", "run7", ""]));
        let ids: HashSet<_> = (0..100_000).map(|step| trace_of(&["job", "", &step.to_string()])).collect();
        assert_eq!(ids.len(), 100_000);
        let spans: HashSet<_> = (0..100_000).map(|rank| span_of(trace, &[&rank.to_string()])).collect();
        assert_eq!(spans.len(), 100_000);
    }

    #[test]
    fn traceparents_are_read_as_w3c_has_them() {
        let read = traceparent("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01").expect("valid");
        assert_eq!(read.trace_id().to_string(), "0af7651916cd43dd8448eb211c80319c");
        assert_eq!(read.span_id().to_string(), "b7ad6b7169203331");
        assert!(read.is_remote());
        assert!(traceparent("01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more").is_some());
        for bad in [
            "",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
            "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more",
            "00-0af7-b7ad-01",
            "00-+af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-",
            "00-é-é-01",
        ] {
            assert_eq!(traceparent(bad), None, "{bad}");
        }
    }
}

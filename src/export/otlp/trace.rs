//! Identities of traces and spans, derived so that processes that never talk to each other agree.
//!
//! Every rank of a step, on every node, has the trace of (job, run, step); the step's span is that of (trace, rank), so
//! that phases know their parent before it has ended. A W3C `traceparent` goes before all of it.

/// Who a span belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TraceId(pub [u8; 16]);

/// Which span.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SpanId(pub [u8; 8]);

/// A trace and the span in it that others hang from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parent {
    /// The trace.
    pub trace: TraceId,
    /// The span.
    pub span: SpanId,
}

impl TraceId {
    /// The trace that these parts name.
    #[must_use]
    pub fn of(parts: &[&str]) -> Self {
        let (mut id, high, low) = ([0; 16], hash(parts, 0), hash(parts, 1));
        id[..8].copy_from_slice(&high.to_be_bytes());
        id[8..].copy_from_slice(&low.to_be_bytes());
        Self(id)
    }
}

impl SpanId {
    /// The span of a trace that these parts name.
    #[must_use]
    pub fn of(trace: TraceId, parts: &[&str]) -> Self {
        let trace = hex(&trace.0);
        let mut all = vec![trace.as_str()];
        all.extend(parts);
        Self(hash(&all, 2).to_be_bytes())
    }
}

/// Reads `00-TRACE-SPAN-FLAGS`; `None` where it is not that, or one of its ids is all zeros.
#[must_use]
pub fn traceparent(text: &str) -> Option<Parent> {
    let mut parts = text.trim().split('-');
    let (version, trace, span, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
    let is_hex = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte));
    if version.len() != 2 || version == "ff" || flags.len() != 2 || !is_hex(version) || !is_hex(flags) {
        return None;
    }
    // Later versions may say more; this one may not.
    if version == "00" && parts.next().is_some() {
        return None;
    }
    let (trace, span) = (unhex::<16>(trace)?, unhex::<8>(span)?);
    (trace != [0; 16] && span != [0; 8]).then_some(Parent { trace: TraceId(trace), span: SpanId(span) })
}

fn unhex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let digits: Vec<u8> = text
        .chars()
        .map(|digit| digit.to_digit(16).filter(|_| !digit.is_ascii_uppercase()))
        .map(|digit| digit.map(|digit| digit as u8))
        .collect::<Option<_>>()?;
    let bytes: Vec<u8> = digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect();
    if digits.len() == 2 * N { bytes.try_into().ok() } else { None }
}

/// Lower-case hexadecimal.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a String does not fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// FNV-1a with a finish that spreads every bit, over parts with their lengths: fixed for good, since two versions of the
/// daemon must agree. Never 0, which is no id.
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
        let trace = TraceId::of(&["job", "run", "7"]);
        assert_eq!(hex(&trace.0), "2967ce842303c23da06fbf76ec6c3fed");
        assert_ne!(TraceId::of(&["job", "run", "7"]), TraceId::of(&["job", "run7", ""]));
        let ids: HashSet<_> = (0..100_000).map(|step| TraceId::of(&["job", "", &step.to_string()])).collect();
        assert_eq!(ids.len(), 100_000);
        let spans: HashSet<_> = (0..100_000).map(|rank| SpanId::of(trace, &[&rank.to_string()])).collect();
        assert_eq!(spans.len(), 100_000);
    }

    #[test]
    fn traceparents_are_read_as_w3c_has_them() {
        let read = traceparent("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01").expect("valid");
        assert_eq!(hex(&read.trace.0), "0af7651916cd43dd8448eb211c80319c");
        assert_eq!(hex(&read.span.0), "b7ad6b7169203331");
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
            "00-é-é-01",
        ] {
            assert_eq!(traceparent(bad), None, "{bad}");
        }
    }
}

//! The answer of an OTLP receiver, over HTTP and gRPC.

use super::reply::{self, LONGEST_WAIT, Reply};
use super::stats::Signal;
use highwater_core::fuzzing::{Numbers, parts};
use tonic::{Code, Status};

/// Reads the input as an answer: three bytes of status, then the header `Retry-After` or gRPC's message, and the body or
/// gRPC's details.
pub fn otlp_reply(data: &[u8]) {
    let mut numbers = Numbers(data);
    let (kind, status) = (numbers.byte(), numbers.short());
    let mut parts = parts(numbers.0);
    let (text, body) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    let signal = if kind & 1 == 0 { Signal::Metrics } else { Signal::Spans };
    if kind & 2 == 0 {
        let details = bytes::Bytes::copy_from_slice(body);
        let code = Code::from_i32(i32::from(status % 20));
        check(&reply::of_grpc(&Status::with_details(code, String::from_utf8_lossy(text), details)));
        return;
    }
    let builder = http::Response::builder().status(status).header(http::header::RETRY_AFTER, text);
    if let Ok(response) = builder.body(()) {
        check(&reply::of_http(signal, &response.into_parts().0, body));
    }
}

fn check(reply: &Reply) {
    let (after, text) = match reply {
        Reply::Taken { message, .. } => (None, message),
        Reply::Refused(why) => (None, why),
        Reply::Retry { after, why } => (*after, why),
    };
    assert!(after.is_none_or(|after| after <= LONGEST_WAIT), "{reply:?}");
    assert!(!text.chars().any(char::is_control), "{reply:?}");
}

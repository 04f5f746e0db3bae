//! The meaning of a receiver's response: the protocol's table of statuses, and how long to wait.

use super::stats::Signal;
use highwater_engine::dial::printable;
use highwater_engine::grpc::describe;
use http_body_util::LengthLimitError;
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceResponse;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceResponse;
use prost::Message;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tonic::{Code, Status};

/// The most that is read of a response, bytes. Three lanes that read one each at the same time stay below 4 MiB. A
/// genuine response has a number and a sentence.
pub const MOST_RESPONSE_BYTES: usize = 1 << 20;
/// The longest wait that a receiver can impose.
pub const LONGEST_WAIT: Duration = Duration::from_secs(300);

/// The outcome of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// It was accepted, except `rejected` of its points. The receiver's message may be empty.
    Taken {
        /// Points that were refused.
        rejected: u64,
        /// Why, or a warning.
        message: String,
    },
    /// It will never be accepted.
    Refused(String),
    /// It was not accepted, but may be later.
    Retry {
        /// How long the receiver asks to wait.
        after: Option<Duration>,
        /// What went wrong.
        why: String,
    },
}

/// The meaning of an HTTP response.
pub(super) fn of_http(signal: Signal, head: &http::response::Parts, body: &[u8]) -> Reply {
    match head.status.as_u16() {
        200..=299 => of_success(signal, body),
        429 | 502 | 503 | 504 => {
            let after = head.headers.get(http::header::RETRY_AFTER).and_then(|value| value.to_str().ok());
            Reply::Retry { after: after.and_then(retry_after), why: format!("HTTP {}", head.status) }
        }
        _ => Reply::Refused(format!("HTTP {}: {}", head.status, printable(&String::from_utf8_lossy(body)))),
    }
}

/// The meaning of the body of a successful response. A body that cannot be decoded reports no rejection.
pub(super) fn of_success(signal: Signal, body: &[u8]) -> Reply {
    let (rejected, message) = match signal {
        Signal::Metrics | Signal::Raw => {
            let partial = ExportMetricsServiceResponse::decode(body).ok().and_then(|answer| answer.partial_success);
            partial.map(|partial| (partial.rejected_data_points, partial.error_message))
        }
        Signal::Spans => {
            let partial = ExportTraceServiceResponse::decode(body).ok().and_then(|answer| answer.partial_success);
            partial.map(|partial| (partial.rejected_spans, partial.error_message))
        }
    }
    .unwrap_or_default();
    Reply::Taken { rejected: u64::try_from(rejected).unwrap_or(0), message: printable(&message) }
}

/// The meaning of a gRPC status.
pub(super) fn of_grpc(status: &Status) -> Reply {
    let why = describe(status);
    // The client's own errors are statuses too; those of the connection have a cause. An answer that is too long would
    // be too long at the next attempt, so it is not retried.
    if has_cause::<LengthLimitError>(status) {
        return Reply::Refused("gRPC: the answer is longer than the limit".into());
    }
    if std::error::Error::source(status).is_some() {
        return Reply::Retry { after: None, why };
    }
    let after = retry_delay(status.details());
    match status.code() {
        Code::OutOfRange if status.message().contains("decoded message length too large") => Reply::Refused(why),
        Code::ResourceExhausted if after.is_none() => Reply::Refused(why),
        Code::Cancelled
        | Code::DeadlineExceeded
        | Code::Aborted
        | Code::OutOfRange
        | Code::Unavailable
        | Code::DataLoss
        | Code::ResourceExhausted => Reply::Retry { after, why },
        _ => Reply::Refused(why),
    }
}

/// `google.rpc.Status`, of which only the details matter.
#[derive(Clone, PartialEq, Message)]
struct RpcStatus {
    #[prost(message, repeated, tag = "3")]
    details: Vec<Any>,
}

#[derive(Clone, PartialEq, Message)]
struct Any {
    #[prost(string, tag = "1")]
    type_url: String,
    #[prost(bytes = "vec", tag = "2")]
    value: Vec<u8>,
}

/// `google.rpc.RetryInfo`.
#[derive(Clone, PartialEq, Message)]
struct RetryInfo {
    #[prost(message, optional, tag = "1")]
    retry_delay: Option<ProtoDuration>,
}

#[derive(Clone, PartialEq, Message)]
struct ProtoDuration {
    #[prost(int64, tag = "1")]
    seconds: i64,
    #[prost(int32, tag = "2")]
    nanos: i32,
}

fn retry_delay(details: &[u8]) -> Option<Duration> {
    let status = RpcStatus::decode(details).ok()?;
    let info = status.details.into_iter().find(|any| any.type_url.ends_with("/google.rpc.RetryInfo"))?;
    let delay = RetryInfo::decode(info.value.as_slice()).ok()?.retry_delay.unwrap_or_default();
    let seconds = u64::try_from(delay.seconds).unwrap_or(0);
    let nanos = u32::try_from(delay.nanos).unwrap_or(0).min(999_999_999);
    Some(Duration::new(seconds, nanos).min(LONGEST_WAIT))
}

/// `Retry-After`: seconds, or a date.
fn retry_after(value: &str) -> Option<Duration> {
    let wait = match value.trim().parse::<u64>() {
        Ok(seconds) => Duration::from_secs(seconds),
        Err(_) => http_date(value.trim())?.duration_since(SystemTime::now()).unwrap_or_default(),
    };
    Some(wait.min(LONGEST_WAIT))
}

/// A date in HTTP's current form: `Sun, 06 Nov 1994 08:49:37 GMT`.
fn http_date(text: &str) -> Option<SystemTime> {
    const MONTHS: [&str; 12] = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let parts: Vec<&str> = text.split(' ').collect();
    let [_, day, month, year, time, "GMT"] = parts.as_slice() else { return None };
    let (day, year): (u64, u64) = (day.parse().ok()?, year.parse().ok()?);
    let month = MONTHS.iter().position(|name| name == month)? as u64 + 1;
    let mut clock = time.split(':').map(|part| part.parse::<u64>().ok());
    let (hour, minute, second) = (clock.next()??, clock.next()??, clock.next()??);
    if !(1970..=9999).contains(&year) || !(1..=31).contains(&day) || hour > 23 || minute > 59 || second > 60 {
        return None;
    }
    // Days since 1970, in a calendar whose years begin in March, so that leap days come last.
    let (y, m) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = (y * 365 + y / 4 - y / 100 + y / 400 + (m * 153 + 2) / 5 + day).checked_sub(719_469)?;
    Some(UNIX_EPOCH + Duration::from_secs(days * 86_400 + hour * 3_600 + minute * 60 + second))
}

fn has_cause<E: std::error::Error + 'static>(error: &(dyn std::error::Error + 'static)) -> bool {
    std::iter::successors(Some(error), |error| error.source()).any(|error| error.is::<E>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_are_read_in_every_form_and_bounded() {
        assert_eq!(retry_after(" 7 "), Some(Duration::from_secs(7)));
        assert_eq!(retry_after("999999999"), Some(LONGEST_WAIT));
        assert_eq!(retry_after("soon"), None);
        assert_eq!(retry_after("Sun, 06 Nov 1994 08:49:37 GMT"), Some(Duration::ZERO));
        let known = UNIX_EPOCH + Duration::from_secs(784_111_777);
        assert_eq!(http_date("Sun, 06 Nov 1994 08:49:37 GMT"), Some(known));
        assert_eq!(http_date("Thu, 29 Feb 2024 00:00:00 GMT"), Some(UNIX_EPOCH + Duration::from_secs(1_709_164_800)));
        assert_eq!(http_date("Thu, 01 Jan 1970 00:00:00 GMT"), Some(UNIX_EPOCH));
        for bad in ["", "x", "Sun, 06 Nov 1994 08:49:37", "Sun, 99 Nov 1994 08:49:37 GMT", "a, 1 Foo 2024 1:1:1 GMT"] {
            assert_eq!(http_date(bad), None, "{bad}");
        }
    }

    #[test]
    fn retry_info_is_found_and_broken_details_are_none() {
        let value = RetryInfo { retry_delay: Some(ProtoDuration { seconds: 3, nanos: 500_000_000 }) }.encode_to_vec();
        let any = Any { type_url: "type.googleapis.com/google.rpc.RetryInfo".into(), value };
        let details = RpcStatus { details: vec![any] }.encode_to_vec();
        assert_eq!(retry_delay(&details), Some(Duration::from_millis(3_500)));
        assert_eq!(retry_delay(&[0xff; 40]), None);
        let exhausted = |details: Vec<u8>| of_grpc(&Status::with_details(Code::ResourceExhausted, "", details.into()));
        assert!(matches!(exhausted(details), Reply::Retry { after: Some(_), .. }));
        assert!(matches!(exhausted(Vec::new()), Reply::Refused(_)));
    }

    proptest::proptest! {
        #[test]
        fn nothing_that_a_receiver_sends_panics(body: Vec<u8>, date: String) {
            let _ = (of_success(Signal::Metrics, &body), of_success(Signal::Spans, &body), retry_delay(&body));
            let _ = retry_after(&date);
        }
    }
}

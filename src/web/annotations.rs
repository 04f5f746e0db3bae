//! `POST /api/v1/annotations`.

use super::json::Json;
use super::problem::Problem;
use super::sender::{Peer, sender};
use super::serve::in_time;
use axum::Extension;
use axum::body::{Body, HttpBody as _};
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use highwater_core::jobs::{Refusal, Sender};
use highwater_engine::intake::{Answer, Batch, Intake};
use http_body_util::BodyExt as _;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

/// The longest body, bytes: some 5,000 events.
pub const MOST_BODY_BYTES: usize = 1 << 20;
/// How much of a longer body is still read and discarded: a client that is cut off while it writes never sees the
/// reason.
const MOST_FORGOTTEN_BYTES: usize = 32 << 20;

/// The sender if the server does not know the client's address, which it always does: an owner like any other.
const UNKNOWN: Sender = Sender { address: Some(IpAddr::V4(Ipv4Addr::UNSPECIFIED)), ..Sender::DAEMON };

/// The state of the endpoint for annotations over TCP.
#[derive(Clone)]
pub struct Door {
    /// The intake that takes the events.
    pub intake: Arc<Intake>,
    /// Who may send them.
    pub access: Access,
}

/// Who may send annotations over TCP, and request captures.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Access {
    /// Any client that can connect: the address is loopback.
    Open,
    /// Any client with one of these tokens.
    Tokens(Arc<Tokens>),
    /// No client: the address is not loopback and no token is set.
    Closed,
}

/// The tokens that give access.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Tokens {
    /// That of all clients.
    pub of_all: Option<Box<str>>,
    /// Kubernetes namespaces, each with its token.
    pub of_namespaces: Vec<(Arc<str>, Box<str>)>,
}

/// Whom a token names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Holder {
    /// Nobody in particular, or no token is needed.
    Anyone,
    /// Someone of this Kubernetes namespace.
    Namespace(Arc<str>),
}

impl Tokens {
    /// Whose token this is. The time that it takes does not depend on which it is.
    fn holder(&self, given: &str) -> Option<Holder> {
        let of_all = self.of_all.iter().map(|token| (Holder::Anyone, token));
        let of_namespaces = self.of_namespaces.iter().map(|(name, token)| (Holder::Namespace(Arc::clone(name)), token));
        let is_it = |token: &str| same(given.as_bytes(), token.as_bytes());
        of_all.chain(of_namespaces).fold(None, |found, (holder, token)| if is_it(token) { Some(holder) } else { found })
    }
}

/// Takes a batch. 200 if at least one event was accepted or none was sent, 400 if all were refused; both report the
/// refused events.
#[cfg_attr(test, utoipa::path(post, path = "/api/v1/annotations", tag = "annotations",
    request_body(description = "An event, an array of events, or one event per line; docs/annotations.md has their fields.",
        content((serde_json::Value = "application/json"), (String = "application/x-ndjson"))),
    responses((status = 200, description = "At least one event was accepted, or none was sent.", body = serde_json::Value),
        (status = 400, description = "All events were refused.", body = super::problem::Body),
        (status = 401, body = super::problem::Body), (status = 403, body = super::problem::Body),
        (status = 408, body = super::problem::Body), (status = 413, body = super::problem::Body))))]
pub async fn post(State(door): State<Door>, peer: Option<Extension<Peer>>, headers: HeaderMap, body: Body) -> Response {
    let holder = match door.access.check(&headers, "annotations") {
        Ok(holder) => holder,
        Err(problem) => return problem.into_response(),
    };
    let mut sender = peer.map_or(UNKNOWN, |Extension(peer)| sender(&peer));
    if let Holder::Namespace(namespace) = holder {
        sender.namespace = Some(namespace);
    }
    let answer = match in_time(take(&door.intake, &sender, body)).await {
        Err(problem) => return problem.into_response(),
        Ok(Ok(Some(answer))) => answer,
        Ok(Ok(None)) => {
            door.intake.refuse_unread(&Refusal::TooLarge { limit: MOST_BODY_BYTES }, &sender);
            let detail = format!(
                "the body is longer than {MOST_BODY_BYTES} bytes; if it declared no length, the events before \
                 the limit were taken; send smaller batches"
            );
            return Problem::new(StatusCode::PAYLOAD_TOO_LARGE, detail).into_response();
        }
        Ok(Err(error)) => {
            let detail = format!("the body did not arrive completely: {error}");
            return Problem::new(StatusCode::BAD_REQUEST, detail).into_response();
        }
    };
    if answer.accepted > 0 || answer.refused == 0 {
        return Json(answer).into_response();
    }
    let detail = answer.refusals.first().map_or_else(String::new, |first| first.detail.clone());
    Problem::new(StatusCode::BAD_REQUEST, detail).with("annotations", &answer).into_response()
}

/// Takes events while the body arrives; `None` if it is too long.
async fn take(intake: &Intake, sender: &Sender, mut body: Body) -> Result<Option<Answer>, axum::Error> {
    let (mut batch, mut length) = (Batch::begin(intake, sender), 0);
    // If the declared length is too long, no event is taken.
    let is_declared_too_long = body.size_hint().lower() > MOST_BODY_BYTES as u64;
    while let Some(frame) = body.frame().await.transpose()? {
        let Ok(data) = frame.into_data() else { continue };
        let is_whole = length == 0 && body.is_end_stream();
        length += data.len();
        if length > MOST_FORGOTTEN_BYTES {
            break;
        }
        match length {
            _ if is_whole && length <= MOST_BODY_BYTES => batch.push_whole(&data),
            ..=MOST_BODY_BYTES if !is_declared_too_long => batch.push(&data),
            _ => {}
        }
        // Yields between two pieces, because scrapes run on the same threads.
        tokio::task::yield_now().await;
    }
    Ok((length <= MOST_BODY_BYTES).then(|| batch.end()))
}

impl Access {
    /// Whether a token is set and a request with these headers has it.
    #[must_use]
    pub fn has_token(&self, headers: &HeaderMap) -> bool {
        matches!(self, Access::Tokens(tokens) if tokens.holder(bearer(headers)).is_some())
    }

    /// Who may write by a request with these headers. `what` is what it writes, for the error.
    ///
    /// # Errors
    /// Why not.
    pub fn check(&self, headers: &HeaderMap, what: &str) -> Result<Holder, Problem> {
        // Browsers send the page's origin, and jobs do not. Without this check any web page could write to loopback.
        if headers.contains_key(header::ORIGIN) {
            return Err(Problem::new(StatusCode::FORBIDDEN, format!("{what} are not accepted from web pages")));
        }
        let tokens = match self {
            Access::Open => return Ok(Holder::Anyone),
            Access::Closed => {
                let detail = format!(
                    "{what} over TCP are refused on an address that is not loopback unless `annotations.token_file` \
                     or `annotations.namespace_tokens` is set; the Unix socket takes annotations"
                );
                return Err(Problem::new(StatusCode::FORBIDDEN, detail));
            }
            Access::Tokens(tokens) => tokens,
        };
        tokens.holder(bearer(headers)).ok_or_else(|| {
            let detail = format!(
                "{what} need `Authorization: Bearer <token>` with the token of `annotations.token_file`, or one of \
                 `annotations.namespace_tokens`"
            );
            Problem::new(StatusCode::UNAUTHORIZED, detail)
        })
    }
}

/// The token of a request, empty if it has none. The scheme is case-insensitive (RFC 9110, 11.1).
fn bearer(headers: &HeaderMap) -> &str {
    let given = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    match given.and_then(|value| value.split_once(' ')) {
        Some((scheme, token)) if scheme.eq_ignore_ascii_case("bearer") => token.trim(),
        _ => "",
    }
}

/// Compares in a time that does not reveal where two tokens differ.
fn same(left: &[u8], right: &[u8]) -> bool {
    left.len() == right.len() && left.iter().zip(right).fold(0, |differ, (left, right)| differ | (left ^ right)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;
    use highwater_core::clock::Manual;
    use highwater_core::jobs::Limits;

    #[test]
    fn the_scheme_of_a_token_is_written_in_any_case() {
        let access = Access::Tokens(Arc::new(Tokens { of_all: Some("0123456789abcdef".into()), ..Tokens::default() }));
        let takes = |text: &str| {
            let value = HeaderValue::from_str(text).expect("a header");
            let headers = HeaderMap::from_iter([(header::AUTHORIZATION, value)]);
            assert_eq!(access.check(&headers, "annotations").is_ok(), access.has_token(&headers), "{text}");
            access.has_token(&headers)
        };
        for good in ["Bearer 0123456789abcdef", "bearer 0123456789abcdef", "BEARER  0123456789abcdef"] {
            assert!(takes(good), "{good}");
        }
        for bad in ["Basic 0123456789abcdef", "Bearer", "Bearer ", "Bearer0123456789abcdef", "Bearer 0123456789abcdeF"]
        {
            assert!(!takes(bad), "{bad}");
        }
        assert!(!access.has_token(&HeaderMap::new()) && !Access::Open.has_token(&HeaderMap::new()));
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_does_not_come_is_not_waited_for() {
        let clock = Arc::new(Manual::at(0));
        let intake = Arc::new(Intake::new(Limits::default(), clock, Arc::default()));
        let door = Door { intake, access: Access::Open };
        let never = Body::from_stream(futures_util::stream::pending::<Result<Vec<u8>, std::io::Error>>());
        let answer = post(State(door), None, HeaderMap::new(), never).await;
        assert_eq!(answer.status(), StatusCode::REQUEST_TIMEOUT);
    }
}

//! Checks every request before its handler: its `Host`, the rate of requests, and its user.
//!
//! Leaves: the handler's answer, or a problem, with the configured headers. A bearer token gives access only to
//! annotations and requests for captures, and does so without a user. Absent on purpose: probes at their own listener,
//! which are not checked.

use super::counts::{HttpStats, LogLimiter, Refused};
use super::guard::{Entry, Guard, Rules};
use super::hosts::Hosts;
use super::problem::Problem;
use super::sender::Peer;
use crate::web::annotations::Access;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

/// The paths that accept the annotations' token.
pub(super) const TAKE_TOKENS: [&str; 2] = ["/api/v1/annotations", "/api/v1/captures"];

/// The state of the checks.
pub struct Gate {
    /// The names that requests may have in `Host`.
    pub hosts: Hosts,
    /// The web configuration, if there is one.
    pub guard: Option<Arc<Guard>>,
    /// Who may send annotations.
    pub access: Access,
    /// Counts the refused requests.
    pub stats: Arc<HttpStats>,
    /// Limits the log lines about refused users.
    pub refusals: Refusals,
}

/// The rate limit of log lines about refused users.
#[derive(Debug, Default)]
pub struct Refusals(LogLimiter);

/// Passes a request on, or answers it.
pub(super) async fn pass(State(gate): State<Arc<Gate>>, request: Request, next: Next) -> Response {
    let peer = request.extensions().get::<Peer>().cloned();
    let local = peer.as_ref().map(|peer| peer.local.ip());
    let host = gate.hosts.check(request.headers(), request.uri(), local).err();
    let misdirected = host.map(|host| (Refused::Host, misdirected(&host).into_response()));
    let Some(guard) = &gate.guard else {
        return match misdirected {
            None => next.run(request).await,
            Some((reason, answer)) => gate.refuse(reason, answer),
        };
    };
    // Extracted first: the request cannot be borrowed across an await.
    let given = if gate.is_job(&request) { Given::Token } else { given(request.headers()) };
    let rules = guard.rules().await;
    let refused = if misdirected.is_some() {
        misdirected
    } else if let Err(wait) = rules.take() {
        Some((Refused::Rate, too_many(wait.as_secs_f64())))
    } else {
        gate.denial(&rules, given, peer).await
    };
    let mut answer = match refused {
        None => next.run(request).await,
        Some((reason, answer)) => gate.refuse(reason, answer),
    };
    for (name, value) in &rules.headers {
        answer.headers_mut().insert(name.clone(), value.clone());
    }
    answer
}

impl Gate {
    fn refuse(&self, reason: Refused, answer: Response) -> Response {
        self.stats.refuse(reason);
        answer
    }

    /// Why the sender of this request has no access, or `None` if it has.
    async fn denial(&self, rules: &Rules, given: Given, peer: Option<Peer>) -> Option<(Refused, Response)> {
        let address = peer.map_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED), |peer| peer.peer.ip());
        let entry = match given {
            Given::Token => Entry::Open,
            _ if !rules.has_users() => Entry::Open,
            Given::Password(user, password) => rules.check(&user, &password, address).await,
            Given::Nothing => Entry::Closed,
        };
        match entry {
            Entry::Open => None,
            Entry::Busy => Some((Refused::Busy, busy())),
            Entry::Closed => {
                if let Some(since) = self.refusals.0.due() {
                    tracing::warn!(last = %address, "{since} requests had no valid user and password");
                }
                Some((Refused::Credentials, unauthorized()))
            }
        }
    }

    /// Whether it has the annotations' token and uses an endpoint that accepts it.
    fn is_job(&self, request: &Request) -> bool {
        let takes_tokens = request.method() == Method::POST && TAKE_TOKENS.contains(&request.uri().path());
        takes_tokens && self.access.has_token(request.headers())
    }
}

/// The credentials of a request.
#[derive(Debug, PartialEq, Eq)]
enum Given {
    /// The annotations' token, at an endpoint that accepts it.
    Token,
    /// A user and a password.
    Password(String, Vec<u8>),
    Nothing,
}

fn given(headers: &HeaderMap) -> Given {
    credentials(headers).map_or(Given::Nothing, |(user, password)| Given::Password(user, password))
}

/// User and password of basic authentication, whose scheme is case-insensitive.
fn credentials(headers: &HeaderMap) -> Option<(String, Vec<u8>)> {
    let (scheme, encoded) = headers.get(header::AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let decoded = STANDARD.decode(encoded.trim()).ok()?;
    let colon = decoded.iter().position(|byte| *byte == b':')?;
    let (user, password) = decoded.split_at(colon);
    Some((String::from_utf8(user.to_vec()).ok()?, password.get(1..)?.to_vec()))
}

fn misdirected(host: &str) -> Problem {
    let host: String = host.chars().take(100).collect();
    let detail = format!("`{host}` is not a name of this daemon; add it to the setting `web.hosts`");
    Problem::new(StatusCode::MISDIRECTED_REQUEST, detail)
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "some seconds, rounded up")]
fn too_many(wait_s: f64) -> Response {
    let detail = "more requests than `rate_limit` of the web configuration file allows";
    let problem = Problem::new(StatusCode::TOO_MANY_REQUESTS, detail);
    ([(header::RETRY_AFTER, (wait_s.ceil() as u64).max(1).to_string())], problem).into_response()
}

fn busy() -> Response {
    let problem = Problem::new(StatusCode::SERVICE_UNAVAILABLE, "too many passwords are being checked; ask again");
    ([(header::RETRY_AFTER, "1")], problem).into_response()
}

fn unauthorized() -> Response {
    let problem =
        Problem::new(StatusCode::UNAUTHORIZED, "a user and a password of the web configuration file are needed");
    let challenge = HeaderValue::from_static("Basic realm=\"highwater\", charset=\"UTF-8\"");
    ([(header::WWW_AUTHENTICATE, challenge)], problem).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_are_read_whatever_the_case_of_their_scheme() {
        let of = |text: &str| {
            let value = HeaderValue::from_str(text).expect("a header");
            credentials(&HeaderMap::from_iter([(header::AUTHORIZATION, value)]))
        };
        // alice:a:b
        let expected = Some(("alice".to_owned(), b"a:b".to_vec()));
        assert_eq!(of("Basic YWxpY2U6YTpi"), expected);
        assert_eq!(of("bAsIc  YWxpY2U6YTpi"), expected);
        for bad in ["Basic", "Basic !", "Bearer YWxpY2U6YTpi", "Basic YWxpY2U=", "BasicYWxpY2U6YTpi"] {
            assert_eq!(of(bad), None, "{bad}");
        }
    }
}

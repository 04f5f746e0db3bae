//! Reads and checks the exporters' common web configuration file, as Prometheus's exporter toolkit defines it.
//!
//! Enters: YAML. Leaves: the configuration, or every fault at once, each with its key. Invariant: a key or a value that
//! is not supported is an error with its name, never ignored. docs/web-config.md lists the supported ones. Absent on
//! purpose: the files that it names, which `tls` reads.

use super::section::{Section, table};
use super::tls_section::{self, TlsSection};
use axum::http::{HeaderName, HeaderValue};
use highwater_core::units::parse_duration_ns;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

/// The highest cost of a password's hash: one check takes about a second. Each further step doubles it.
const MOST_COST: u32 = 14;
/// The headers that answers can be given, with the allowed values if those are fixed.
const HEADERS: [(&str, &[&str]); 5] = [
    ("Content-Security-Policy", &[]),
    ("Strict-Transport-Security", &[]),
    ("X-Content-Type-Options", &["nosniff"]),
    ("X-Frame-Options", &["deny", "sameorigin"]),
    ("X-XSS-Protection", &[]),
];

/// The contents of the file.
#[derive(Default)]
pub(super) struct File {
    pub tls: Option<TlsSection>,
    /// Headers of every answer.
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// Users and the bcrypt hashes of their passwords.
    pub users: BTreeMap<String, String>,
    pub rate: Option<Rate>,
}

/// `rate_limit`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rate {
    pub interval: Duration,
    pub burst: u32,
}

/// Parses `text`; relative paths in it are below `folder`.
pub(super) fn parse(text: &str, folder: &Path) -> Result<File, Vec<String>> {
    let mut faults = Vec::new();
    let file = {
        let table = table(text).map_err(|fault| vec![fault])?;
        let mut root = Section { name: String::new(), table, faults: &mut faults };
        let rate = root.section("rate_limit").and_then(rate);
        let users = root.section("basic_auth_users").map(users).unwrap_or_default();
        let headers = root.section("http_server_config").map(http).unwrap_or_default();
        let tls = root.section("tls_server_config").and_then(|section| tls_section::read(section, folder));
        root.finish();
        File { tls, headers, users, rate }
    };
    if faults.is_empty() { Ok(file) } else { Err(faults) }
}

fn rate(mut section: Section<'_>) -> Option<Rate> {
    let interval = section.text("interval").unwrap_or_else(|| "0s".to_owned());
    let interval = if interval == "0" { Ok(0) } else { parse_duration_ns(&interval) };
    let interval = match interval {
        Ok(interval_ns) => Duration::from_nanos(interval_ns.unsigned_abs()),
        Err(error) => {
            section.fault("interval", error);
            Duration::ZERO
        }
    };
    let burst = section.text("burst").unwrap_or_else(|| "0".to_owned());
    let burst = burst.parse().unwrap_or_else(|_| {
        section.fault("burst", "is not a whole number");
        1
    });
    if burst == 0 && !interval.is_zero() {
        section.fault("burst", "is 0, so that no request would ever be answered");
    }
    section.finish();
    (!interval.is_zero()).then_some(Rate { interval, burst })
}

fn users(mut section: Section<'_>) -> BTreeMap<String, String> {
    let mut users = BTreeMap::new();
    for name in section.keys() {
        let hash = section.text(&name).unwrap_or_default();
        // Never with the value: a password in place of its hash would be logged.
        match hash.parse::<bcrypt::HashParts>() {
            Ok(parts) if parts.get_cost() > MOST_COST => {
                let cost = parts.get_cost();
                section.fault(&name, format!("a hash of cost {cost} takes too long to check; at most {MOST_COST}"));
            }
            Ok(_) => {
                users.insert(name, hash);
            }
            Err(_) => section.fault(&name, "is not a bcrypt hash; `htpasswd -nBC 10 USER` makes one"),
        }
    }
    section.finish();
    users
}

fn http(mut section: Section<'_>) -> Vec<(HeaderName, HeaderValue)> {
    if section.boolean("http2") == Some(true) {
        section.fault("http2", "HTTP/2 is not supported; set it to false, or leave it out");
    }
    let headers = section.section("headers").map(headers).unwrap_or_default();
    section.finish();
    headers
}

fn headers(mut section: Section<'_>) -> Vec<(HeaderName, HeaderValue)> {
    let mut headers = Vec::new();
    for (name, allowed) in HEADERS {
        let Some(text) = section.text(name) else { continue };
        if !allowed.is_empty() && !allowed.contains(&&*text) {
            section.fault(name, format!("`{text}` is none of {}", allowed.join(", ")));
        }
        match (HeaderName::from_bytes(name.as_bytes()), HeaderValue::from_str(&text)) {
            (Ok(name), Ok(value)) => headers.push((name, value)),
            _ => section.fault(name, "cannot be sent as a header"),
        }
    }
    section.finish();
    headers
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::web::guard::tls_section::{Clients, Pem};

    fn faults(text: &str) -> String {
        parse(text, Path::new("/etc")).err().unwrap_or_default().join("\n")
    }

    #[test]
    fn everything_that_is_supported_is_read() {
        let text = "
tls_server_config:
  cert_file: own.pem
  key_file: /keys/own.key
  client_auth_type: RequireAndVerifyClientCert
  client_ca_file: ca.pem
  client_allowed_sans: [prometheus.example, 10.0.0.1]
  min_version: TLS12
  max_version: TLS13
  cipher_suites: [TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256, TLS_AES_128_GCM_SHA256]
  prefer_server_cipher_suites: false
  curve_preferences: [CurveP384, X25519]
http_server_config:
  http2: false
  headers:
    X-Frame-Options: deny
    Strict-Transport-Security: max-age=1
basic_auth_users:
  alice: $2y$10$mDwo.lAisC94iLAyP81MCesa29IzH37oigHC/42V2pdJlUprsJPze
  bob.of.example: $2y$10$hLqFl9jSjoAAy95Z/zw8Ye8wkdMBM8c5Bn1ptYqP/AXyV0.oy0S8m
rate_limit: {interval: 250ms, burst: 20}
";
        let file = parse(text, Path::new("/etc")).unwrap_or_else(|faults| panic!("{faults:?}"));
        let tls = file.tls.expect("TLS");
        assert_eq!(tls.certificate, Pem::File("/etc/own.pem".into()));
        assert_eq!(tls.key, Pem::File("/keys/own.key".into()));
        assert!(matches!(&tls.clients, Clients::Required(Pem::File(path)) if path == Path::new("/etc/ca.pem")));
        assert_eq!((tls.names.len(), tls.versions.len(), tls.suites.len(), tls.groups.len()), (2, 2, 4, 2));
        assert!(!tls.is_server_order);
        assert_eq!(file.headers.len(), 2);
        assert_eq!(file.users.keys().collect::<Vec<_>>(), ["alice", "bob.of.example"]);
        assert_eq!(file.rate, Some(Rate { interval: Duration::from_millis(250), burst: 20 }));
    }

    #[test]
    fn nothing_is_asked_for_by_a_file_without_keys() {
        for text in ["", "# nothing\n", "tls_server_config: {}\n", "rate_limit: {interval: 0}\n"] {
            let file = parse(text, Path::new("/etc")).unwrap_or_else(|faults| panic!("{text}: {faults:?}"));
            assert!(file.tls.is_none() && file.users.is_empty() && file.rate.is_none() && file.headers.is_empty());
        }
    }

    #[test]
    fn what_is_not_supported_is_refused_by_name_and_all_of_it_at_once() {
        let text = "
tls_server_config:
  cert_file: a
  client_auth_type: RequestClientCert
  client_allowed_sans: ['spiffe://x']
  min_version: TLS10
  cipher_suites: [TLS_RSA_WITH_AES_128_CBC_SHA]
  curve_preferences: [CurveP521]
  sessions: 1
http_server_config: {http2: true, headers: {X-Frame-Options: maybe, Server: x}}
basic_auth_users: {alice: secret, bob: $2y$16$mDwo.lAisC94iLAyP81MCesa29IzH37oigHC/42V2pdJlUprsJPze}
rate_limit: {interval: 1s, burst: 0}
web: 1
";
        expect_test::expect![[r#"
            rate_limit.burst: is 0, so that no request would ever be answered
            basic_auth_users.alice: is not a bcrypt hash; `htpasswd -nBC 10 USER` makes one
            basic_auth_users.bob: a hash of cost 16 takes too long to check; at most 14
            http_server_config.http2: HTTP/2 is not supported; set it to false, or leave it out
            http_server_config.headers.X-Frame-Options: `maybe` is none of deny, sameorigin
            http_server_config.headers.Server: is not supported
            tls_server_config.key_file: is not set, and TLS needs it
            tls_server_config.client_auth_type: `RequestClientCert` is not supported, because it verifies nothing; NoClientCert, VerifyClientCertIfGiven and RequireAndVerifyClientCert are
            tls_server_config.client_allowed_sans: `spiffe://x` is not supported; DNS names and IP addresses are
            tls_server_config.min_version: `TLS10` is not supported; TLS12 and TLS13 are
            tls_server_config.cipher_suites: `TLS_RSA_WITH_AES_128_CBC_SHA` is not supported; these are: TLS_AES_256_GCM_SHA384, TLS_AES_128_GCM_SHA256, TLS_CHACHA20_POLY1305_SHA256, TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384, TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256, TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256, TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384, TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256, TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256
            tls_server_config.curve_preferences: `CurveP521` is not supported; X25519, CurveP256 and CurveP384 are
            tls_server_config.sessions: is not supported
            web: is not supported"#]]
        .assert_eq(&faults(text));
    }

    #[test]
    fn texts_that_would_grow_are_refused_unparsed() {
        assert_eq!(faults("a: &a [1]\nb: [*a, *a]\n"), "line 1: anchors and aliases are not supported");
        assert_eq!(faults("a: [&a 1]\n"), "line 1: anchors and aliases are not supported");
        let deep = format!("a:\n  {}x\n", "- ".repeat(100_000));
        assert_eq!(faults(&deep), "line 2: too many sequences inside one another");
        assert!(!faults(&"[".repeat(100_000)).is_empty());
        assert!(!faults("a: [1\n").is_empty() && !faults("- 1\n").is_empty());
    }
}

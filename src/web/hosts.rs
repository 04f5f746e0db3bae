//! The daemon's names: checks the `Host` of requests, against DNS rebinding.
//!
//! A web page may make its own host name resolve to 127.0.0.1, and then read everything that a daemon there serves, as
//! if it came from the page's own origin. The browser sends that name in `Host`. An address in `Host` is harmless: a
//! page has an address for its host only if it was served from that address.

use axum::http::{HeaderMap, Uri, header};
use std::net::{IpAddr, Ipv6Addr};

/// The names that requests may have in `Host`, beside addresses, `localhost` and the machine's name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Hosts {
    /// No others on connections to a loopback address; any on others, because the names of Services and pods are
    /// unknown.
    #[default]
    OnLoopback,
    /// These, on every connection.
    Named(Vec<String>),
    /// Any.
    Any,
}

impl Hosts {
    /// Parses the setting: names with commas between, or `*` for any.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(text: &str) -> Result<Self, String> {
        let names: Vec<_> = text.split(',').map(str::trim).filter(|name| !name.is_empty()).map(plain).collect();
        match names.iter().find(|name| name.contains(['*', ':', '/', ' '])) {
            _ if names.is_empty() => Ok(Self::OnLoopback),
            _ if names == ["*"] => Ok(Self::Any),
            Some(name) => Err(format!("`{name}` is neither a host name without a port nor a single `*`")),
            None => Ok(Self::Named(names)),
        }
    }

    /// Whether a request that came to `local` may have this head. `Err` contains the refused host.
    pub(super) fn check(&self, headers: &HeaderMap, uri: &Uri, local: Option<IpAddr>) -> Result<(), String> {
        let named: &[String] = match self {
            Self::Any => return Ok(()),
            Self::OnLoopback if !local.is_none_or(|local| local.to_canonical().is_loopback()) => return Ok(()),
            Self::OnLoopback => &[],
            Self::Named(named) => named,
        };
        let given =
            headers.get_all(header::HOST).iter().map(|host| String::from_utf8_lossy(host.as_bytes()).into_owned());
        // Browsers always send a host, so a request without one passes.
        for host in given.chain(uri.authority().map(ToString::to_string)) {
            let name = without_port(&host);
            if !is_address(name) && !is_own(&plain(name)) && !named.contains(&plain(name)) {
                return Err(host);
            }
        }
        Ok(())
    }
}

fn plain(name: &str) -> String {
    name.trim_end_matches('.').to_ascii_lowercase()
}

fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) && !name.ends_with(':') => name,
        _ => host,
    }
}

fn is_address(name: &str) -> bool {
    let bracketed = name.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    match bracketed {
        Some(inner) => inner.parse::<Ipv6Addr>().is_ok(),
        None => name.parse::<IpAddr>().is_ok(),
    }
}

fn is_own(name: &str) -> bool {
    name == "localhost" || rustix::system::uname().nodename().to_str().is_ok_and(|own| plain(own) == name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;
    use std::net::Ipv4Addr;

    const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
    const POD: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 7));

    fn takes(hosts: &Hosts, host: &str, local: IpAddr) -> bool {
        let headers = HeaderMap::from_iter([(header::HOST, HeaderValue::from_str(host).expect("a header"))]);
        hosts.check(&headers, &Uri::from_static("/metrics"), Some(local)).is_ok()
    }

    #[test]
    fn on_loopback_a_name_must_be_the_machines() {
        let own = rustix::system::uname().nodename().to_str().expect("a name").to_owned();
        let good = ["localhost", "LOCALHOST:10450", "localhost.", "127.0.0.1:10450", "[::1]:10450", "::1", &own];
        for host in good {
            assert!(takes(&Hosts::OnLoopback, host, LOOPBACK), "{host}");
        }
        for host in
            ["evil.example", "evil.example:10450", "localhost.evil.example", "127.0.0.1.evil.example", "[::1", ""]
        {
            assert!(!takes(&Hosts::OnLoopback, host, LOOPBACK), "{host}");
            assert!(!takes(&Hosts::OnLoopback, host, IpAddr::V6(Ipv4Addr::LOCALHOST.to_ipv6_mapped())), "{host}");
            assert!(takes(&Hosts::OnLoopback, host, POD), "{host}: the names of a pod are not known");
        }
    }

    #[test]
    fn every_host_of_a_request_counts() {
        let mut headers = HeaderMap::from_iter([(header::HOST, HeaderValue::from_static("localhost"))]);
        let absolute = Uri::from_static("http://evil.example/metrics");
        assert_eq!(Hosts::OnLoopback.check(&headers, &absolute, Some(LOOPBACK)), Err("evil.example".to_owned()));
        headers.append(header::HOST, HeaderValue::from_static("evil.example"));
        assert!(Hosts::OnLoopback.check(&headers, &Uri::from_static("/"), Some(LOOPBACK)).is_err());
        assert!(Hosts::OnLoopback.check(&HeaderMap::new(), &Uri::from_static("/"), Some(LOOPBACK)).is_ok());
    }

    #[test]
    fn listed_names_are_the_only_ones() {
        let hosts = Hosts::parse("gpu-1.example , Proxy.").expect("names");
        for local in [LOOPBACK, POD] {
            assert!(takes(&hosts, "gpu-1.example:443", local) && takes(&hosts, "proxy", local));
            assert!(takes(&hosts, "10.0.0.7:10450", local) && !takes(&hosts, "evil.example", local));
        }
        assert!(takes(&Hosts::parse("*").expect("any"), "evil.example", LOOPBACK));
        assert_eq!(Hosts::parse(""), Ok(Hosts::OnLoopback));
        for bad in ["*,a", "*.example", "a:80", "http://a"] {
            assert!(Hosts::parse(bad).is_err(), "{bad}");
        }
    }
}

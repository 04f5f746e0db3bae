//! `tls_server_config` of the web configuration file: certificates, versions, suites and curves.

use super::section::Section;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use tokio_rustls::rustls::crypto::SupportedKxGroup;
use tokio_rustls::rustls::crypto::ring::{ALL_CIPHER_SUITES, DEFAULT_KX_GROUPS, kx_group};
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::{SupportedCipherSuite, SupportedProtocolVersion, version};

/// `tls_server_config`.
pub(super) struct TlsSection {
    pub certificate: Pem,
    pub key: Pem,
    pub clients: Clients,
    /// Names of which a client's certificate must have one; any if empty.
    pub names: Vec<ServerName<'static>>,
    pub versions: Vec<&'static SupportedProtocolVersion>,
    pub suites: Vec<SupportedCipherSuite>,
    pub groups: Vec<&'static dyn SupportedKxGroup>,
    pub is_server_order: bool,
}

/// The source of a PEM text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Pem {
    Inline(String),
    File(PathBuf),
}

/// Which client certificates are requested.
pub(super) enum Clients {
    None,
    /// Verified if the client sends one.
    IfGiven(Pem),
    Required(Pem),
}

/// Reads `tls_server_config`; relative paths in it are below `folder`.
pub(super) fn read(mut section: Section<'_>, folder: &Path) -> Option<TlsSection> {
    if section.table.is_empty() {
        return None;
    }
    let certificate = pem(&mut section, "cert", folder);
    let key = pem(&mut section, "key", folder);
    for (name, pem) in [("cert_file", &certificate), ("key_file", &key)] {
        if pem.is_none() {
            section.fault(name, "is not set, and TLS needs it");
        }
    }
    let clients = clients(&mut section, folder);
    let names = section.list("client_allowed_sans", allowed_name);
    if !names.is_empty() && !matches!(clients, Clients::Required(_)) {
        section.fault("client_allowed_sans", "needs client_auth_type RequireAndVerifyClientCert");
    }
    let versions = versions(&mut section);
    let suites = suites(section.list("cipher_suites", suite));
    let groups = section.list("curve_preferences", group);
    let groups = if groups.is_empty() { DEFAULT_KX_GROUPS.to_vec() } else { groups };
    let is_server_order = section.boolean("prefer_server_cipher_suites").unwrap_or(true);
    section.finish();
    Some(TlsSection { certificate: certificate?, key: key?, clients, names, versions, suites, groups, is_server_order })
}

/// The PEM given inline as `key`, or in a file as `key_file`.
fn pem(section: &mut Section<'_>, key: &str, folder: &Path) -> Option<Pem> {
    let file_key = format!("{key}_file");
    match (section.text(key), section.text(&file_key)) {
        (Some(_), Some(_)) => {
            section.fault(key, format!("is set, and so is {file_key}"));
            None
        }
        (Some(text), None) => Some(Pem::Inline(text)),
        (None, path) => path.map(|path| Pem::File(folder.join(path))),
    }
}

fn clients(section: &mut Section<'_>, folder: &Path) -> Clients {
    let authority = pem(section, "client_ca", folder);
    let kind = section.text("client_auth_type").unwrap_or_else(|| "NoClientCert".to_owned());
    match (&*kind, authority) {
        ("NoClientCert", None) => return Clients::None,
        ("VerifyClientCertIfGiven", Some(authority)) => return Clients::IfGiven(authority),
        ("RequireAndVerifyClientCert", Some(authority)) => return Clients::Required(authority),
        ("NoClientCert", Some(_)) => section.fault("client_ca_file", "is set, and client_auth_type is not"),
        ("VerifyClientCertIfGiven" | "RequireAndVerifyClientCert", None) => {
            section.fault("client_ca_file", format!("is not set, and client_auth_type {kind} needs it"));
        }
        _ => {
            let known = "NoClientCert, VerifyClientCertIfGiven and RequireAndVerifyClientCert";
            section.fault(
                "client_auth_type",
                format!("`{kind}` is not supported, because it verifies nothing; {known} are"),
            );
        }
    }
    Clients::None
}

fn allowed_name(text: &str) -> Result<ServerName<'static>, String> {
    if let Ok(address) = text.parse::<IpAddr>() {
        return Ok(ServerName::from(address));
    }
    let problem = |_| format!("`{text}` is not supported; DNS names and IP addresses are");
    ServerName::try_from(text.to_owned()).map_err(problem)
}

fn versions(section: &mut Section<'_>) -> Vec<&'static SupportedProtocolVersion> {
    let mut number = |key: &str, default: &str| {
        let text = section.text(key).unwrap_or_else(|| default.to_owned());
        match &*text {
            "TLS12" => 12,
            "TLS13" => 13,
            _ => {
                section.fault(key, format!("`{text}` is not supported; TLS12 and TLS13 are"));
                13
            }
        }
    };
    let (least, most) = (number("min_version", "TLS12"), number("max_version", "TLS13"));
    if least > most {
        section.fault("max_version", "is below min_version");
    }
    let all = [(12, &version::TLS12), (13, &version::TLS13)];
    all.into_iter().filter(|(number, _)| (least..=most).contains(number)).map(|(_, version)| version).collect()
}

/// A suite by its name in Go.
fn suite(name: &str) -> Result<SupportedCipherSuite, String> {
    let called = |suite: &SupportedCipherSuite| format!("{:?}", suite.suite()).replace("TLS13_", "TLS_");
    let found = ALL_CIPHER_SUITES.iter().find(|suite| called(suite) == name);
    let supported = || ALL_CIPHER_SUITES.iter().map(called).collect::<Vec<_>>().join(", ");
    found.copied().ok_or_else(|| format!("`{name}` is not supported; these are: {}", supported()))
}

/// All suites of TLS 1.3, which cannot be chosen, and the listed ones of TLS 1.2.
fn suites(listed: Vec<SupportedCipherSuite>) -> Vec<SupportedCipherSuite> {
    if listed.is_empty() {
        return ALL_CIPHER_SUITES.to_vec();
    }
    let of_13 = ALL_CIPHER_SUITES.iter().copied().filter(|suite| suite.tls13().is_some());
    of_13.chain(listed.into_iter().filter(|suite| suite.tls13().is_none())).collect()
}

/// A curve by its name in Go.
fn group(name: &str) -> Result<&'static dyn SupportedKxGroup, String> {
    match name {
        "X25519" => Ok(kx_group::X25519),
        "CurveP256" => Ok(kx_group::SECP256R1),
        "CurveP384" => Ok(kx_group::SECP384R1),
        _ => Err(format!("`{name}` is not supported; X25519, CurveP256 and CurveP384 are")),
    }
}

//! What TLS to a receiver trusts and presents: certificates from files, or the system's authorities.
//!
//! Enters: the endpoint's TLS settings. Leaves: rustls's configuration, with ring as its only provider.

use super::settings::Tls;
use std::path::Path;
use std::sync::Arc;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{ClientConfig, RootCertStore, crypto};

/// The TLS configuration: with the given certificate authorities, or else the system's.
///
/// # Errors
/// What is wrong, with the path of the file if one is at fault.
pub(super) fn tls_config(tls: &Tls, is_http2: bool) -> Result<ClientConfig, String> {
    let provider = Arc::new(crypto::ring::default_provider());
    let versions = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let trusting = versions.map_err(|error| error.to_string())?.with_root_certificates(roots(tls)?);
    let mut config = match (&tls.client_certificate, &tls.client_key) {
        (Some(certificate), Some(key)) => {
            let private = PrivateKeyDer::from_pem_file(key).map_err(|error| format!("{}: {error}", key.display()))?;
            let chain = certificates(certificate)?;
            trusting.with_client_auth_cert(chain, private).map_err(|error| error.to_string())?
        }
        (None, None) => trusting.with_no_client_auth(),
        _ => return Err("a client certificate needs its key, and the key its certificate".into()),
    };
    config.alpn_protocols = vec![if is_http2 { b"h2".to_vec() } else { b"http/1.1".to_vec() }];
    Ok(config)
}

fn roots(tls: &Tls) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    if let Some(path) = &tls.certificate {
        for certificate in certificates(path)? {
            roots.add(certificate).map_err(|error| format!("{}: {error}", path.display()))?;
        }
    } else {
        let found = rustls_native_certs::load_native_certs();
        // A system's store has some certificates that no verifier accepts. The others are enough.
        roots.add_parsable_certificates(found.certs);
    }
    if roots.is_empty() {
        return Err("there are no certificate authorities to trust; set OTEL_EXPORTER_OTLP_CERTIFICATE".into());
    }
    Ok(roots)
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let problem = |error| format!("{}: {error}", path.display());
    CertificateDer::pem_file_iter(path).map_err(problem)?.collect::<Result<_, _>>().map_err(problem)
}

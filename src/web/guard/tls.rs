//! TLS as configured in the web configuration file: rustls's configuration, with ring as its only provider.

use super::text::read;
use super::tls_section::{Clients, Pem, TlsSection};
use std::path::PathBuf;
use std::sync::Arc;
use tokio_rustls::rustls::client::danger::HandshakeSignatureValid;
use tokio_rustls::rustls::client::verify_server_name;
use tokio_rustls::rustls::crypto::{self, CryptoProvider};
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use tokio_rustls::rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use tokio_rustls::rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use tokio_rustls::rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, RootCertStore, ServerConfig, SignatureScheme,
};

impl TlsSection {
    /// The files that it names.
    pub(super) fn files(&self) -> impl Iterator<Item = PathBuf> {
        let authority = match &self.clients {
            Clients::None => None,
            Clients::IfGiven(pem) | Clients::Required(pem) => Some(pem),
        };
        let all = [Some(&self.certificate), Some(&self.key), authority];
        all.into_iter().flatten().filter_map(|pem| if let Pem::File(path) = pem { Some(path.clone()) } else { None })
    }
}

/// Reads the files of `tls` and builds a configuration from them.
///
/// # Errors
/// What is wrong, with its key and its file.
pub(super) fn config(tls: &TlsSection) -> Result<ServerConfig, String> {
    let default = crypto::ring::default_provider();
    let provider = CryptoProvider { cipher_suites: tls.suites.clone(), kx_groups: tls.groups.clone(), ..default };
    let provider = Arc::new(provider);
    let fault = |error: Error| format!("tls_server_config: {error}");
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider));
    let builder = builder.with_protocol_versions(&tls.versions).map_err(fault)?;
    let builder = match clients(tls, provider)? {
        None => builder.with_no_client_auth(),
        Some(verifier) => builder.with_client_cert_verifier(verifier),
    };
    let chain = certificates("cert", &tls.certificate)?;
    let key = parsed("key", &tls.key, |bytes| PrivateKeyDer::from_pem_slice(bytes).map_err(|error| error.to_string()))?;
    // Refused if the two do not match, for example while both are being replaced.
    let mut config = builder.with_single_cert(chain, key).map_err(fault)?;
    config.ignore_client_order = tls.is_server_order;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}

fn clients(tls: &TlsSection, provider: Arc<CryptoProvider>) -> Result<Option<Arc<dyn ClientCertVerifier>>, String> {
    let (authority, is_required) = match &tls.clients {
        Clients::None => return Ok(None),
        Clients::IfGiven(authority) => (authority, false),
        Clients::Required(authority) => (authority, true),
    };
    let mut roots = RootCertStore::empty();
    for certificate in certificates("client_ca", authority)? {
        roots.add(certificate).map_err(|error| format!("tls_server_config.client_ca: {error}"))?;
    }
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
    let verifier = if is_required { verifier } else { verifier.allow_unauthenticated() };
    let verifier = verifier.build().map_err(|error| format!("tls_server_config.client_ca: {error}"))?;
    if tls.names.is_empty() {
        return Ok(Some(verifier));
    }
    Ok(Some(Arc::new(Named { verifier, names: tls.names.clone() })))
}

fn certificates(key: &str, pem: &Pem) -> Result<Vec<CertificateDer<'static>>, String> {
    parsed(key, pem, |bytes| {
        let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(bytes).collect();
        match all {
            Ok(all) if all.is_empty() => Err("has no certificate".to_owned()),
            Ok(all) => Ok(all),
            Err(error) => Err(error.to_string()),
        }
    })
}

/// The result of `parse` on the text of `key`, or on the file of `key_file`.
fn parsed<T>(key: &str, pem: &Pem, parse: impl Fn(&[u8]) -> Result<T, String>) -> Result<T, String> {
    match pem {
        Pem::Inline(text) => parse(text.as_bytes()).map_err(|problem| format!("tls_server_config.{key}: {problem}")),
        Pem::File(path) => read(path)
            .and_then(|text| parse(text.as_bytes()))
            .map_err(|problem| format!("tls_server_config.{key}_file: {}: {problem}", path.display())),
    }
}

/// Accepts clients with a valid certificate that has one of these names.
#[derive(Debug)]
struct Named {
    verifier: Arc<dyn ClientCertVerifier>,
    names: Vec<ServerName<'static>>,
}

impl ClientCertVerifier for Named {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.verifier.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.verifier.verify_client_cert(certificate, intermediates, now)?;
        let parsed = ParsedCertificate::try_from(certificate)?;
        if self.names.iter().any(|name| verify_server_name(&parsed, name).is_ok()) {
            return Ok(verified);
        }
        Err(CertificateError::ApplicationVerificationFailure.into())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verifier.verify_tls12_signature(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verifier.verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.verifier.supported_verify_schemes()
    }
}

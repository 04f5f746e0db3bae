//! A certificate authority that only one test trusts, and certificates that it issued.

use rcgen::{
    BasicConstraints, Certificate, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, IsCa, KeyPair,
};
use std::path::{Path, PathBuf};

/// The authority.
pub struct Authority(CertifiedIssuer<'static, KeyPair>);

/// The PEM files of one party.
pub struct Files {
    /// The authority's certificate.
    pub authority: PathBuf,
    /// The party's own.
    pub certificate: PathBuf,
    /// Its key.
    pub key: PathBuf,
}

impl Authority {
    pub fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).expect("names");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key");
        Self(CertifiedIssuer::self_signed(params, key).expect("a certificate"))
    }

    /// Its own certificate.
    pub fn certificate(&self) -> &Certificate {
        self.0.as_ref()
    }

    /// A certificate for `name`, which may be an address, and its key.
    pub fn issue(&self, name: &str) -> (Certificate, KeyPair) {
        let key = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::new(vec![name.to_owned()]).expect("a name");
        // OpenSSL takes a certificate that has the same name as its authority for self-signed.
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, name);
        (params.signed_by(&key, &self.0).expect("signed"), key)
    }

    /// Writes its certificate, and one for `name` with its key, into `folder`.
    pub fn write(&self, folder: &Path, name: &str) -> Files {
        let (certificate, key) = self.issue(name);
        let texts = [("ca.pem", self.0.pem()), ("own.pem", certificate.pem()), ("own.key", key.serialize_pem())];
        let [authority, certificate, key] = texts.map(|(file, text)| {
            let path = folder.join(format!("{name}-{file}"));
            std::fs::write(&path, text).expect("written");
            path
        });
        Files { authority, certificate, key }
    }
}

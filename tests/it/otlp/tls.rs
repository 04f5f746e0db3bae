//! TLS with an authority that only this receiver uses, and certificates on both sides.

use super::bench::Bench;
use super::collector::Collector;
use super::wire::{GPUS, settings};
use crate::authority::Authority;
use highwater::export::otlp::settings::Keys;
use highwater::export::otlp::{Attempt, Signal};
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;
use tokio::time::sleep;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{RootCertStore, ServerConfig};

/// The configuration of the server `collector`, which requires client certificates of this authority.
fn server(authority: &Authority) -> ServerConfig {
    let (certificate, key) = authority.issue("collector");
    let mut roots = RootCertStore::empty();
    roots.add(authority.certificate().der().clone()).expect("a root");
    let provider = Arc::new(default_provider());
    let clients = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider));
    let builder = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let builder = builder.expect("versions").with_client_cert_verifier(clients.build().expect("a verifier"));
    let chain: Vec<CertificateDer> = vec![certificate.der().clone()];
    let key = PrivateKeyDer::try_from(key.serialize_der()).expect("a key");
    let mut config = builder.with_single_cert(chain, key).expect("a certificate");
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    config
}

fn paths(authority: &Authority, folder: &TempDir) -> [String; 3] {
    let files = authority.write(folder.path(), "highwater");
    [files.authority, files.certificate, files.key].map(|path| path.display().to_string())
}

async fn attempts(protocol: &str, variables: &[(&str, &str)], server: ServerConfig) -> (u64, u64, usize) {
    let collector = Collector::in_memory_with_tls(server);
    let mut all = vec![
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "https://collector:4317"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", protocol),
        ("OTEL_METRIC_EXPORT_INTERVAL", "10000"),
    ];
    all.extend(variables);
    let bench = Bench::start(GPUS, settings(&all, Keys::default()), Arc::new(collector.clone()));
    sleep(Duration::from_secs(11)).await;
    let of = |attempt| bench.stats.attempts(Signal::Metrics, attempt);
    (of(Attempt::Sent), of(Attempt::Failed), collector.received(|received| received.metrics.len()))
}

#[tokio::test(start_paused = true)]
async fn both_sides_show_certificates_and_strangers_get_nothing() {
    let (folder, authority, stranger) = (TempDir::new().expect("a folder"), Authority::new(), Authority::new());
    let [ca, own, key] = paths(&authority, &folder);
    let other = TempDir::new().expect("a folder");
    let [other_ca, ..] = paths(&stranger, &other);
    for protocol in ["http/protobuf", "grpc"] {
        let with = [
            ("OTEL_EXPORTER_OTLP_CERTIFICATE", ca.as_str()),
            ("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", own.as_str()),
            ("OTEL_EXPORTER_OTLP_CLIENT_KEY", key.as_str()),
        ];
        assert_eq!(attempts(protocol, &with, server(&authority)).await, (1, 0, 1), "{protocol}");
        let (sent, failed, received) = attempts(protocol, &with[..1], server(&authority)).await;
        assert!(sent == 0 && failed > 0 && received == 0, "{protocol}: without a certificate of our own");
        let untrusted = [("OTEL_EXPORTER_OTLP_CERTIFICATE", other_ca.as_str()), with[1], with[2]];
        let (sent, failed, received) = attempts(protocol, &untrusted, server(&authority)).await;
        assert!(sent == 0 && failed > 0 && received == 0, "{protocol}: an authority that is not trusted");
    }
}

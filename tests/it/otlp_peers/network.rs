//! A real collector behind TLS, behind compression, and behind a network that loses connections.

use super::*;
use crate::authority::Authority;
use crate::relay::Relay;

const TOKEN: (&str, &str) = ("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=a%20b");

/// The daemon trusts the authority that signed the collector's certificate, and presents one of its own. A daemon that
/// presents none, or does not trust the authority, delivers nothing. Everything is compressed.
#[test]
#[ignore = "needs a peer: make test-peers"]
fn inside_tls_of_an_own_authority_and_packed_a_collector_takes_all_signals() {
    let Some(program) = tools::find("otelcol") else { return };
    let folder = TempDir::new().expect("a temporary directory");
    let authority = Authority::new();
    let shown = authority.write(folder.path(), "highwater");
    let stranger = Authority::new().write(folder.path(), "stranger");
    let collector = Collector::start_secured(&program, authority.write(folder.path(), "127.0.0.1"));
    let path = |path: &std::path::Path| path.display().to_string();
    let (ca, certificate, key) = (path(&shown.authority), path(&shown.certificate), path(&shown.key));
    let trusting = ("OTEL_EXPORTER_OTLP_CERTIFICATE", ca.as_str());
    let showing =
        [("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", certificate.as_str()), ("OTEL_EXPORTER_OTLP_CLIENT_KEY", &key)];
    for protocol in [Protocol::Grpc, Protocol::Http] {
        let [name, endpoint] = collector.environment(protocol);
        let common = [(name.0, name.1.as_str()), (endpoint.0, &endpoint.1), packed("gzip"), TOKEN];
        let start = |variables: &[(&str, &str)]| {
            pushing_with(&["--source", "sim", "--set", "otlp.raw=always"], &[&common, variables].concat())
        };
        let before = (collector.points().len(), collector.spans().len());
        let other = path(&stranger.authority);
        for refused in [&[trusting][..], &[("OTEL_EXPORTER_OTLP_CERTIFICATE", &*other), showing[0], showing[1]]] {
            let daemon = start(refused);
            let failed = "highwater_otlp_attempts_total{signal=\"metrics\",outcome=\"failed\"}";
            eventually(DELIVERED_WITHIN, "two attempts", || (own_if_there(&daemon, failed)? >= 2.0).then_some(()));
            daemon.kill();
        }
        assert_eq!((collector.points().len(), collector.spans().len()), before, "{protocol:?}: strangers");
        let daemon = start(&[trusting, showing[0], showing[1]]);
        eventually(DELIVERED_WITHIN, "all signals", || {
            let metrics = collector.points().into_iter().skip(before.0).map(|point| point.metric);
            let metrics: BTreeSet<String> = metrics.collect();
            let both = ["hw.gpu.memory.usage", "highwater.gpu.memory.raw"].iter().all(|name| metrics.contains(*name));
            (both && collector.spans().len() > before.1).then_some(())
        });
        nothing_was_refused(&daemon);
        let exported = own(&daemon, "highwater_otlp_exported_total{signal=\"metrics\"}");
        assert!(exported > 0.0, "{protocol:?}");
    }
}

/// Over both protocols a collector accepts compressed requests, and at most a third of their size is on the wire.
#[test]
#[ignore = "needs a peer: make test-peers"]
fn packed_requests_are_taken_and_small() {
    let Some(program) = tools::find("otelcol") else { return };
    let collector = Collector::start(&program);
    for protocol in [Protocol::Grpc, Protocol::Http] {
        let share = |compression: &'static str| {
            let relay = Relay::to(collector.port(protocol));
            let [name, endpoint] = collector.environment_through(protocol, relay.port());
            let environment = [(name.0, &*name.1), (endpoint.0, &*endpoint.1), packed(compression)];
            let daemon = pushing_with(&["--source", "sim"], &environment);
            let sent = "highwater_otlp_sent_bytes_total{signal=\"metrics\"}";
            eventually(DELIVERED_WITHIN, "200 kB of metrics", || {
                (own_if_there(&daemon, sent)? >= 200_000.0).then_some(())
            });
            nothing_was_refused(&daemon);
            let (sent, on_wire) = (signals(&daemon, "sent_bytes_total"), relay.sent_bytes());
            assert_eq!(signals(&daemon, "dropped_total"), 0.0, "{protocol:?} {compression}");
            on_wire as f64 / sent
        };
        let (plain, packed) = (share("none"), share("gzip"));
        assert!((0.9..1.5).contains(&plain) && packed < 0.34, "{protocol:?}: {plain} plain, {packed} packed");
    }
}

/// A network that loses everything, as when a firewall forgets its connections or a receiver's machine is gone: the
/// daemon gets no notification, and no earlier connection works again.
#[test]
#[ignore = "needs a peer: make test-peers"]
fn after_a_network_that_lost_its_connections_every_point_is_there() {
    let Some(program) = tools::find("otelcol") else { return };
    for protocol in [Protocol::Grpc, Protocol::Http] {
        let collector = Collector::start(&program);
        let relay = Relay::to(collector.port(protocol));
        let [name, endpoint] = collector.environment_through(protocol, relay.port());
        let environment = [(name.0, &*name.1), (endpoint.0, &*endpoint.1), ("OTEL_EXPORTER_OTLP_TIMEOUT", "1500")];
        let daemon = pushing_with(&["--source", "sim", "--set", "otlp.raw=always"], &environment);
        let snapshots = || -> Vec<i64> {
            let points = collector.points_named("hw.gpu.memory.usage").into_iter();
            points.map(|point| point.time_ns).collect::<BTreeSet<_>>().into_iter().collect()
        };
        eventually(DELIVERED_WITHIN, "three exports", || (snapshots().len() >= 3).then_some(()));
        let connections = relay.connections();
        relay.lose();
        let failed = "highwater_otlp_attempts_total{signal=\"metrics\",outcome=\"failed\"}";
        eventually(DELIVERED_WITHIN, "two attempts that fail", || (own(&daemon, failed) >= 2.0).then_some(()));
        relay.heal();
        let healed_ns = now_ns();
        eventually(DELIVERED_WITHIN, &format!("{protocol:?}: exports after the outage"), || {
            snapshots().last().is_some_and(|time_ns| *time_ns > healed_ns).then_some(())
        });
        assert!(relay.connections() > connections, "{protocol:?}: a new connection");
        let times = snapshots();
        let widest = times.windows(2).map(|two| two[1] - two[0]).max().expect("several");
        assert!(widest < 3_000 * MILLISECOND_NS, "{protocol:?}: {widest} ns between two exports");
        nothing_was_refused(&daemon);
    }
}

fn packed(compression: &str) -> (&str, &str) {
    ("OTEL_EXPORTER_OTLP_COMPRESSION", compression)
}

/// The sum over signals of one of the exporter's own metrics.
fn signals(daemon: &Daemon, name: &str) -> f64 {
    let samples = exposition(&daemon.get("/metrics"));
    samples.iter().filter(|((known, _), _)| known == &format!("highwater_otlp_{name}")).map(|(_, value)| value).sum()
}

use super::*;
use expect_test::expect;

fn resolved(endpoint: Option<&str>, variables: &[(&str, &str)]) -> Result<Option<OtlpSettings>, Vec<EnvironmentFault>> {
    let variables: Vec<_> = variables.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
    resolve(&Keys { endpoint: endpoint.map(str::to_owned), ..Keys::default() }, &variables)
}

fn uris(endpoint: Option<&str>, variables: &[(&str, &str)]) -> (Option<String>, Option<String>) {
    let settings = resolved(endpoint, variables).expect("valid").expect("an endpoint");
    let uri = |endpoint: Option<Endpoint>| endpoint.map(|endpoint| endpoint.uri.to_string());
    (uri(settings.metrics), uri(settings.traces))
}

#[track_caller]
fn both(found: (Option<String>, Option<String>), metrics: &str, traces: &str) {
    assert_eq!(found, (Some(metrics.into()), Some(traces.into())));
}

const GENERAL: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";
const METRICS: &str = "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT";
const PROTOCOL: &str = "OTEL_EXPORTER_OTLP_PROTOCOL";

#[test]
fn nothing_is_exported_where_no_endpoint_is_set() {
    assert_eq!(resolved(None, &[]), Ok(None));
    assert_eq!(resolved(None, &[(GENERAL, ""), ("OTEL_EXPORTER_OTLP_TIMEOUT", "nonsense")]), Ok(None));
    // They may be meant for other programs.
    let others = [(PROTOCOL, "http/json"), ("OTEL_METRICS_EXPORTER", "prometheus")];
    assert_eq!(resolved(None, &others), Ok(None));
    assert_eq!(resolved(Some("http://a:1"), &[("OTEL_SDK_DISABLED", "true")]), Ok(None));
    let none = [("OTEL_METRICS_EXPORTER", "none"), ("OTEL_TRACES_EXPORTER", "none")];
    assert_eq!(resolved(Some("http://a:1"), &none), Ok(None));
}

#[test]
fn general_endpoints_get_a_path_and_those_of_one_signal_do_not() {
    both(uris(None, &[(GENERAL, "http://a:4318")]), "http://a:4318/v1/metrics", "http://a:4318/v1/traces");
    both(uris(Some("https://a/otlp/"), &[]), "https://a/otlp/v1/metrics", "https://a/otlp/v1/traces");
    let own = [(GENERAL, "http://a:4318"), (METRICS, "http://b:9090/api/v1/otlp/v1/metrics")];
    both(uris(None, &own), "http://b:9090/api/v1/otlp/v1/metrics", "http://a:4318/v1/traces");
    assert_eq!(uris(None, &[(METRICS, "http://b:1")]), (Some("http://b:1/".into()), None));
    both(
        uris(Some("http://key:1"), &[(GENERAL, "http://a:4318")]),
        "http://key:1/v1/metrics",
        "http://key:1/v1/traces",
    );
}

#[test]
fn grpc_needs_no_path_and_no_scheme() {
    both(uris(None, &[(GENERAL, "http://a:4317"), (PROTOCOL, "grpc")]), "http://a:4317/", "http://a:4317/");
    both(uris(None, &[(GENERAL, "a:4317"), (PROTOCOL, "grpc")]), "https://a:4317/", "https://a:4317/");
    let insecure = [(GENERAL, "a:4317"), (PROTOCOL, "grpc"), ("OTEL_EXPORTER_OTLP_INSECURE", "true")];
    both(uris(None, &insecure), "http://a:4317/", "http://a:4317/");
    let mixed = [(GENERAL, "http://a:1"), ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")];
    both(uris(None, &mixed), "http://a:1/v1/metrics", "http://a:1/");
}

#[test]
fn every_standard_variable_is_obeyed_and_that_of_a_signal_goes_first() {
    let settings = resolved(
        None,
        &[
            (GENERAL, "https://a"),
            ("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip"),
            ("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "none"),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "2500"),
            ("OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", "700"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "api-key=a%20b,x=1"),
            ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "y=2"),
            ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/ca.pem"),
            ("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", "/own.pem"),
            ("OTEL_EXPORTER_OTLP_CLIENT_KEY", "/own.key"),
            ("OTEL_METRIC_EXPORT_INTERVAL", "10000"),
            ("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "Delta"),
            ("OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION", "explicit_bucket_histogram"),
            ("OTEL_SERVICE_NAME", "mine"),
            ("OTEL_RESOURCE_ATTRIBUTES", "service.name=other,service.instance.id=i%2C1,deployment.environment.name=x"),
        ],
    );
    let settings = settings.expect("valid").expect("an endpoint");
    let (metrics, traces) = (settings.metrics.expect("set"), settings.traces.expect("set"));
    assert_eq!((metrics.gzip, traces.gzip), (true, false));
    assert_eq!((metrics.timeout.as_millis(), traces.timeout.as_millis()), (700, 2500));
    let header = |endpoint: &Endpoint| {
        let pairs = endpoint.headers.iter().map(|(name, value)| format!("{name}={}", value.to_str().expect("text")));
        pairs.collect::<Vec<_>>().join(",")
    };
    assert_eq!((header(&metrics).as_str(), header(&traces).as_str()), ("api-key=a b,x=1", "y=2"));
    assert_eq!(metrics.tls.certificate, Some("/ca.pem".into()));
    assert_eq!(
        (metrics.tls.client_certificate, metrics.tls.client_key),
        (Some("/own.pem".into()), Some("/own.key".into()))
    );
    assert!(settings.explicit_histograms);
    assert_eq!((settings.interval_ns, settings.temporality), (10_000_000_000, Temporality::Delta));
    let of = |wanted: &str| settings.resource.iter().find(|(name, _)| name == wanted).map(|(_, value)| value.as_str());
    assert_eq!(of("service.name"), Some("mine"));
    assert_eq!(of("service.instance.id"), Some("i,1"));
    assert_eq!(of("deployment.environment.name"), Some("x"));
    assert!(of("host.name").is_some() && of("service.version").is_some() && of("k8s.node.name").is_none());
    assert!(!format!("{:?}", metrics.headers).contains("a b"), "credentials are not printed");
}

#[test]
fn exporters_are_ours_or_none() {
    assert_eq!(uris(Some("http://a:1"), &[("OTEL_TRACES_EXPORTER", "none")]).1, None);
    let list = [("OTEL_METRICS_EXPORTER", "prometheus, otlp"), ("OTEL_TRACES_EXPORTER", "otlp")];
    both(uris(Some("http://a:1"), &list), "http://a:1/v1/metrics", "http://a:1/v1/traces");
    let faults = resolved(Some("http://a:1"), &[("OTEL_METRICS_EXPORTER", "prometheus")]).expect_err("not ours");
    assert_eq!(faults[0].variable, "OTEL_METRICS_EXPORTER");
    let unread = [("OTEL_TRACES_EXPORTER", "none"), ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "nonsense")];
    assert_eq!(uris(Some("http://a:1"), &unread).1, None, "what is left out is not looked at");
}

#[test]
fn credentials_in_an_address_are_a_fault_that_does_not_print_them() {
    for address in ["http://me:secret@a:4318", "me:secret@a:4318"] {
        let faults = resolved(None, &[(GENERAL, address), (PROTOCOL, "grpc")]).expect_err("not sent");
        let message = faults[0].to_string();
        assert!(message.contains("OTEL_EXPORTER_OTLP_HEADERS") && !message.contains("secret"), "{message}");
    }
    assert!(resolved(None, &[(GENERAL, "http://a:4318/x@y")]).is_ok());
}

#[test]
fn a_pod_shows_its_own_identity() {
    let pod = [(GENERAL, "http://a"), ("KUBERNETES_SERVICE_HOST", "10.0.0.1"), ("NODE_NAME", "n"), ("POD_NAME", "p")];
    let settings = resolved(None, &pod).expect("valid").expect("an endpoint");
    assert!(settings.resource.contains(&("k8s.node.name".into(), "n".into())));
    assert!(settings.resource.contains(&("k8s.pod.name".into(), "p".into())));
}

#[test]
fn every_fault_is_reported_with_its_variable() {
    let faults = resolved(
        None,
        &[
            (GENERAL, "ftp://a"),
            (METRICS, "http://a"),
            (PROTOCOL, "carrier pigeon"),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "10s"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "secret=%zz"),
            ("OTEL_METRIC_EXPORT_INTERVAL", "0"),
            ("OTEL_RESOURCE_ATTRIBUTES", "novalue"),
        ],
    );
    let mut faults: Vec<String> = faults.expect_err("faults").iter().map(EnvironmentFault::to_string).collect();
    faults.sort();
    expect![[r#"
        environment variable OTEL_EXPORTER_OTLP_ENDPOINT: `ftp://a` is not http://HOST:PORT or https://HOST:PORT
        environment variable OTEL_EXPORTER_OTLP_HEADERS: `secret` is not percent-encoded
        environment variable OTEL_EXPORTER_OTLP_PROTOCOL: `carrier pigeon` is neither grpc nor http/protobuf
        environment variable OTEL_EXPORTER_OTLP_TIMEOUT: `10s` is not a number of milliseconds
        environment variable OTEL_METRIC_EXPORT_INTERVAL: `0` is not between 100 and 3600000 milliseconds
        environment variable OTEL_RESOURCE_ATTRIBUTES: `novalue` has no `=`"#]]
    .assert_eq(&faults.join("\n"));
}

#[test]
fn the_keys_values_are_read() {
    assert_eq!(spans("1/50"), Ok(Spans::OneIn(50)));
    assert_eq!(spans("slow:p99.5"), Ok(Spans::Slow(0.995)));
    for bad in ["", "1/0", "some", "slow:p0", "slow:p100", "slow:95"] {
        assert!(spans(bad).is_err(), "{bad}");
    }
    assert_eq!(raw("always"), Ok(Raw::Always));
    assert_eq!(raw("findings"), Ok(Raw::Findings));
    assert_eq!(spans("findings"), Ok(Spans::Findings));
    assert!(raw("sometimes").is_err());
}

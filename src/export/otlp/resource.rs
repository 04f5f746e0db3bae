//! The attributes of the resource, which identify the exporter: from the standard variables and the host.
//!
//! The SDK's detectors are not used: they read the process's environment by themselves, which no test can set safely,
//! and leave `OTEL_RESOURCE_ATTRIBUTES` percent-encoded.

use super::environment::Environment;
use crate::machine::host_name;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, InstrumentationScope, KeyValue};
use opentelemetry_proto::tonic::resource::v1::Resource;

/// Variables that pods get from the downward API, and their attribute names.
const KUBERNETES: [(&str, &str); 3] =
    [("NODE_NAME", "k8s.node.name"), ("POD_NAME", "k8s.pod.name"), ("POD_NAMESPACE", "k8s.namespace.name")];

/// Variables besides `OTEL_*` that are read.
pub(super) const VARIABLES: [&str; 4] = ["KUBERNETES_SERVICE_HOST", "NODE_NAME", "POD_NAME", "POD_NAMESPACE"];

/// The attributes of the resource. Those that the user sets take precedence over those that are detected.
pub(super) fn detect(environment: &mut Environment) -> Vec<(String, String)> {
    let mut attributes: Vec<(String, String)> = Vec::new();
    if let Some(name) = environment.get("OTEL_SERVICE_NAME") {
        attributes.push(("service.name".into(), name.into()));
    }
    let given = environment.read("OTEL_RESOURCE_ATTRIBUTES", attributes_of).unwrap_or_default();
    let host = host_name();
    let mut found = vec![("service.name", Some("highwater".to_owned()))];
    found.push(("service.version", Some(env!("CARGO_PKG_VERSION").to_owned())));
    found.push(("service.instance.id", host.clone()));
    found.push(("host.name", host));
    if environment.get("KUBERNETES_SERVICE_HOST").is_some() {
        let of = |variable| environment.get(variable).map(str::to_owned);
        found.extend(KUBERNETES.map(|(variable, name)| (name, of(variable))));
    }
    let found = found.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?)));
    for (name, value) in given.into_iter().chain(found) {
        if !attributes.iter().any(|(known, _)| *known == name) {
            attributes.push((name, value));
        }
    }
    attributes
}

fn attributes_of(text: &str) -> Result<Vec<(String, String)>, String> {
    let pair = |pair: &str| {
        let (name, value) = pair.split_once('=').ok_or_else(|| format!("`{pair}` has no `=`"))?;
        let decode = |text: &str| percent_decode(text.trim()).ok_or_else(|| format!("`{pair}` is not percent-encoded"));
        Ok((decode(name)?, decode(value)?))
    };
    // The last value of a name counts.
    let mut pairs: Vec<(String, String)> =
        text.split(',').filter(|text| !text.trim().is_empty()).map(pair).collect::<Result<_, String>>()?;
    pairs.reverse();
    Ok(pairs)
}

/// Undoes percent-encoding; `None` if it is malformed or not UTF-8.
pub(super) fn percent_decode(text: &str) -> Option<String> {
    let mut bytes = text.bytes();
    let mut decoded = Vec::with_capacity(text.len());
    while let Some(byte) = bytes.next() {
        decoded.push(match byte {
            b'%' => {
                let mut digit = || char::from(bytes.next()?).to_digit(16);
                u8::try_from(digit()? * 16 + digit()?).ok()?
            }
            other => other,
        });
    }
    String::from_utf8(decoded).ok()
}

/// A resource with these attributes.
pub(super) fn resource<'a>(attributes: impl IntoIterator<Item = &'a (String, String)>) -> Resource {
    let attributes = attributes.into_iter().map(|(name, value)| text(name, value)).collect();
    Resource { attributes, ..Resource::default() }
}

/// The same resource for the SDK.
pub(super) fn sdk_resource(attributes: &[(String, String)]) -> opentelemetry_sdk::Resource {
    let attributes = attributes.iter().map(|(name, value)| opentelemetry::KeyValue::new(name.clone(), value.clone()));
    opentelemetry_sdk::Resource::builder_empty().with_attributes(attributes).build()
}

/// The instrumentation scope of spans.
pub(super) fn instrumentation() -> opentelemetry::InstrumentationScope {
    opentelemetry::InstrumentationScope::builder("highwater").with_version(env!("CARGO_PKG_VERSION")).build()
}

/// The instrumentation scope of points, which is the same.
pub(super) fn scope() -> InstrumentationScope {
    (instrumentation(), None).into()
}

/// An attribute with any value.
pub(super) fn attribute(name: &str, value: Value) -> KeyValue {
    KeyValue { key: name.into(), value: Some(AnyValue { value: Some(value) }), ..KeyValue::default() }
}

/// An attribute with a text.
pub(super) fn text(name: &str, value: &str) -> KeyValue {
    attribute(name, Value::StringValue(value.into()))
}

//! The API's own description: it names what is served, and what is served is as it says.

use crate::daemon::Daemon;
use crate::process::eventually;
use serde_json::{Map, Value};
use std::time::Duration;

/// What is wrong with a value by its schema: OpenAPI 3.1's, as far as this API uses it. Members that the schema does not
/// name are wrong too.
fn faults(value: &Value, schema: &Value, all: &Value, place: &str) -> Vec<String> {
    if let Some(name) = schema["$ref"].as_str().and_then(|name| name.strip_prefix("#/components/schemas/")) {
        let named = &all["components"]["schemas"][name];
        return if named.is_object() { faults(value, named, all, place) } else { vec![format!("{place}: no {name}")] };
    }
    for key in ["oneOf", "anyOf"] {
        if let Some(choices) = schema[key].as_array() {
            let fits = choices.iter().any(|choice| faults(value, choice, all, place).is_empty());
            return if fits { Vec::new() } else { vec![format!("{place}: {value} is none of {schema}")] };
        }
    }
    let types: Vec<&str> = match &schema["type"] {
        Value::String(one) => vec![one],
        Value::Array(several) => several.iter().filter_map(Value::as_str).collect(),
        // Anything.
        _ => return Vec::new(),
    };
    let actual = match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_f64() => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    if !(types.contains(&actual) || actual == "integer" && types.contains(&"number")) {
        return vec![format!("{place}: {value} is no {types:?}")];
    }
    match value {
        Value::Array(items) => {
            let item = |(at, item)| faults(item, &schema["items"], all, &format!("{place}[{at}]"));
            items.iter().enumerate().flat_map(item).collect()
        }
        Value::Object(members) => object_faults(members, schema, all, place),
        _ => Vec::new(),
    }
}

fn object_faults(members: &Map<String, Value>, schema: &Value, all: &Value, place: &str) -> Vec<String> {
    let mut found = Vec::new();
    for required in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        if !members.contains_key(required) {
            found.push(format!("{place}: no {required}"));
        }
    }
    for (name, member) in members {
        let place = format!("{place}.{name}");
        match schema["properties"].get(name) {
            Some(property) => found.extend(faults(member, property, all, &place)),
            None if schema["additionalProperties"].is_object() => {
                found.extend(faults(member, &schema["additionalProperties"], all, &place));
            }
            None => found.push(format!("{place}: is not described")),
        }
    }
    found
}

/// A demo of which everything can be asked: phases, findings, a capture.
fn demo() -> (Daemon, Value) {
    let daemon = Daemon::start(&["demo", "--set", "captures.after=1s"]).ready();
    let list = |path: &str, name: &str| {
        let (status, body) = daemon.ask(path);
        let value: Value = serde_json::from_str(&body).ok()?;
        (status == 200 && value[name].as_array().is_some_and(|list| !list.is_empty())).then_some(value)
    };
    let within = Duration::from_secs(60);
    eventually(within, "a finding", || list("/api/v1/findings", "findings"));
    eventually(within, "a phase", || list("/api/v1/jobs/llama-ddp/phases", "phases"));
    let capture = eventually(within, "a capture", || {
        let captures = list("/api/v1/captures", "captures")?;
        captures["captures"].as_array()?.iter().find(|capture| capture["state"] == "complete").cloned()
    });
    (daemon, capture["id"].clone())
}

#[test]
fn answers_are_as_described() {
    let (daemon, capture) = demo();
    let all: Value = serde_json::from_str(&daemon.get("/api/v1/openapi.json")).expect("JSON");
    assert!(all["openapi"].as_str().is_some_and(|version| version.starts_with("3.1.")), "{}", all["openapi"]);
    let gpus: Value = serde_json::from_str(&daemon.get("/api/v1/gpus")).expect("JSON");
    let uuid = gpus["gpus"][0]["uuid"].as_str().expect("a UUID");
    let (mut checked, mut described) = (0, Vec::new());
    for (path, methods) in all["paths"].as_object().expect("paths") {
        for (method, operation) in methods.as_object().expect("methods") {
            described.push(format!("{method} {path}"));
            assert!(operation["summary"].as_str().is_some_and(|summary| summary.len() > 10), "{method} {path}");
            let response = &operation["responses"]["200"]["content"]["application/json"]["schema"];
            if method != "get" || response.is_null() {
                continue;
            }
            let request = path.replace("{gpu}", "0").replace("{job}", "llama-ddp");
            let request = request.replace("{id}", capture.as_str().expect("a name"));
            let query = match path.as_str() {
                "/api/v1/timeline" => "?from=0&to=9000000000000000000".to_owned(),
                "/api/v1/captures/{id}/memory" => format!("?gpu={uuid}"),
                _ => String::new(),
            };
            let answer: Value = serde_json::from_str(&daemon.get(&format!("{request}{query}"))).expect("JSON");
            let found = faults(&answer, response, &all, path);
            assert!(found.is_empty(), "{found:#?}");
            checked += 1;
        }
    }
    assert_eq!(
        described,
        [
            "post /api/v1/annotations",
            "get /api/v1/captures",
            "post /api/v1/captures",
            "get /api/v1/captures/{id}",
            "get /api/v1/captures/{id}/memory",
            "get /api/v1/captures/{id}/report",
            "get /api/v1/findings",
            "get /api/v1/gpus",
            "get /api/v1/gpus/{gpu}/activity",
            "get /api/v1/gpus/{gpu}/breakdown",
            "get /api/v1/gpus/{gpu}/memory",
            "get /api/v1/incidents",
            "get /api/v1/jobs",
            "get /api/v1/jobs/{job}",
            "get /api/v1/jobs/{job}/advice",
            "get /api/v1/jobs/{job}/layers",
            "get /api/v1/jobs/{job}/phases",
            "get /api/v1/live",
            "get /api/v1/timeline",
        ]
    );
    assert_eq!(checked, 14);
    // An error is a problem, as described.
    let (status, body) = daemon.ask("/api/v1/gpus/99/memory");
    let problem: Value = serde_json::from_str(&body).expect("JSON");
    let schema =
        &all["paths"]["/api/v1/gpus/{gpu}/memory"]["get"]["responses"]["404"]["content"]["application/json"]["schema"];
    assert_eq!((status, faults(&problem, schema, &all, "404")), (404, Vec::new()));
}

/// The checker itself must be able to find something.
#[test]
fn what_is_not_described_is_a_fault() {
    let all = serde_json::json!({ "components": { "schemas": { "One": {
        "type": "object", "required": ["a"], "properties": { "a": { "type": ["integer", "null"] } } } } } });
    let one = serde_json::json!({ "$ref": "#/components/schemas/One" });
    let found = |value: Value| faults(&value, &one, &all, "it").len();
    assert_eq!(found(serde_json::json!({ "a": 1 })), 0);
    assert_eq!(found(serde_json::json!({ "a": null })), 0);
    assert_eq!(found(serde_json::json!({ "a": "1" })), 1);
    assert_eq!(found(serde_json::json!({ "a": 1.5 })), 1);
    assert_eq!(found(serde_json::json!({})), 1);
    assert_eq!(found(serde_json::json!({ "a": 1, "b": 2 })), 1);
}

//! Builds the image from the repository's Dockerfile with a real builder, and runs it.
//!
//! The base image is made from Debian's packages; `make test-peers` puts it into target/tools/containers. Both targets
//! are built with the program that cargo has just built: `prebuilt` has it in the context, and `image` has a builder
//! whose cargo installs it. So two parts of the Dockerfile are NOT covered: that its own builder compiles, because
//! compiling everything again would take longer than all other tests together; and the default base images, because
//! there is no registry to pull them from.

use crate::authority::Authority;
use crate::buildah::{Buildah, Container};
use crate::daemon::{agent, answer};
use crate::process::{Process, eventually};
use crate::tools;
use serde_json::json;
use std::time::Duration;
use tempfile::TempDir;

const IMAGE: &str = "localhost/highwater-test:latest";
/// The result of the target `image`, and the builder that stands in for Rust's.
const FROM_SOURCE: &str = "localhost/highwater-test:from-source";
const BUILDER: &str = "localhost/highwater-test-builder:latest";
/// The stand-in's cargo: the arguments that it accepts, and what it does.
const CARGO: &str = r#"#!/bin/sh
[ "$*" = "build --release --locked --bin highwater" ] && install -D -m 0755 /usr/lib/highwater target/release/highwater
"#;

#[test]
#[ignore = "needs a peer: make test-peers"]
fn the_image_is_built_and_runs_as_nobody() {
    let Some(buildah) = Buildah::find() else { return };
    let image = buildah.build("prebuilt", &["--build-arg", "VERSION=1.2.3", "--build-arg", "REVISION=abc"], IMAGE);

    let config = buildah.json(&["inspect", "--type", "image", IMAGE])["OCIv1"]["config"].clone();
    assert_eq!(config["User"], "65534:65534");
    assert_eq!(config["ExposedPorts"], json!({"10450/tcp": {}, "10451/tcp": {}, "10452/tcp": {}}));
    assert_eq!((&config["Entrypoint"], &config["Cmd"]), (&json!(["/usr/local/bin/highwater"]), &json!(["serve"])));
    assert_eq!(config["Labels"]["org.opencontainers.image.licenses"], "Apache-2.0");
    let label = |name: &str| config["Labels"][format!("org.opencontainers.image.{name}")].clone();
    assert_eq!([label("version"), label("revision")], ["1.2.3", "abc"]);

    let container = image.container();
    let version = buildah.output(&["run", &container.id, "--", "/usr/local/bin/highwater", "--version"]);
    assert_eq!(version.trim(), format!("highwater {}", env!("CARGO_PKG_VERSION")));
    answers_while_it_runs(&buildah, &container, &[]);
}

/// Without authorities the daemon refuses to start with an endpoint on `https://`.
#[test]
#[ignore = "needs a peer: make test-peers"]
fn the_image_from_source_trusts_whom_its_builder_trusts() {
    let Some(buildah) = Buildah::find() else { return };
    let context = TempDir::new().expect("a temporary directory");
    let authority = Authority::new().write(context.path(), "anybody").authority;
    let dockerfile = format!(
        "FROM {}\nCOPY --chmod=0755 cargo /usr/local/bin/cargo\nCOPY highwater /usr/lib/highwater\n\
         COPY {} /etc/ssl/certs/ca-certificates.crt\n",
        buildah.base,
        authority.file_name().expect("a file").to_string_lossy(),
    );
    std::fs::write(context.path().join("Dockerfile"), dockerfile).expect("written");
    std::fs::write(context.path().join("cargo"), CARGO).expect("written");
    std::fs::copy(env!("CARGO_BIN_EXE_highwater"), context.path().join("highwater")).expect("copied");
    let _builder = buildah.build_in(context.path(), &[], BUILDER);
    let image = buildah.build("image", &["--build-arg", &format!("BUILDER={BUILDER}")], FROM_SOURCE);

    let container = image.container();
    let trusted = buildah.output(&["run", &container.id, "--", "cat", "/etc/ssl/certs/ca-certificates.crt"]);
    assert_eq!(trusted, std::fs::read_to_string(authority).expect("readable"));
    answers_while_it_runs(&buildah, &container, &["--env", "OTEL_EXPORTER_OTLP_ENDPOINT=https://127.0.0.1:9"]);
}

/// With chroot isolation the container shares this machine's network, so the request goes to this machine's loopback.
fn answers_while_it_runs(buildah: &Buildah, container: &Container<'_>, environment: &[&str]) {
    let mut command = buildah.command(&["run"]);
    command.args(environment).args([&container.id, "--", "/usr/local/bin/highwater"]);
    command.args(["serve", "--source", "sim", "--listen", "127.0.0.1:0"]);
    let mut daemon = Process::start(command);
    let base = daemon.wait_for(Duration::from_secs(30), "line `listening on`", |line| {
        let address = line.split_once("listening on ")?.1;
        Some(address.split_whitespace().next()?.trim_end_matches('/').to_owned())
    });
    let get = |path: &str| answer(agent().get(format!("{base}{path}")).call(), path);
    assert_eq!(get("/healthz").0, 200, "{}", daemon.printed());
    eventually(Duration::from_secs(10), "readings in /metrics", || {
        let (status, metrics) = get("/metrics");
        (status == 200 && metrics.contains("highwater_gpu_memory_used_bytes{")).then_some(())
    });
    daemon.terminate();
}

#[test]
fn the_builder_is_the_pinned_compiler() {
    let dockerfile = std::fs::read_to_string(tools::root().join("Dockerfile")).expect("readable");
    let version = tools::pinned("RUST_VERSION");
    assert!(dockerfile.contains(&format!("ARG BUILDER=rust:{version}-bookworm@")), "{version}");
}

/// A tag can be moved to other content.
#[test]
fn every_base_image_is_pinned_by_digest() {
    let dockerfile = std::fs::read_to_string(tools::root().join("Dockerfile")).expect("readable");
    let stages: Vec<_> = dockerfile.lines().filter_map(|line| line.split_once(" AS ")).map(|(_, name)| name).collect();
    let arguments: Vec<_> = dockerfile.lines().filter_map(|line| line.strip_prefix("ARG ")?.split_once('=')).collect();
    let froms = dockerfile.lines().filter_map(|line| line.strip_prefix("FROM ")?.split_whitespace().next());
    let bases: Vec<_> = froms
        .filter(|from| !stages.contains(from))
        .map(|from| {
            let name = from.strip_prefix("${").and_then(|rest| rest.strip_suffix('}'));
            let given = name.and_then(|name| arguments.iter().find(|(argument, _)| *argument == name));
            given.map_or(from, |(_, image)| *image)
        })
        .collect();
    assert_eq!(bases.len(), 2, "{bases:?}");
    for base in bases {
        let digest = base.split_once("@sha256:").map(|(_, digest)| digest).expect(base);
        assert!(digest.len() == 64 && digest.bytes().all(|byte| byte.is_ascii_hexdigit()), "{base}");
    }
}

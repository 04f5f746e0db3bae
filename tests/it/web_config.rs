//! Access control: TLS, passwords, request rates and host names, as clients of the daemon see them.

use crate::authority::{Authority, Files};
use crate::daemon::{Daemon, agent, answer, command};
use crate::process::eventually;
use crate::scraper::Scraper;
use crate::tools;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

const SOON: Duration = Duration::from_secs(30);
/// A user whose password is `wonder`, hashed at bcrypt's lowest cost.
fn alice() -> String {
    let hash = bcrypt::hash_with_salt("wonder", 4, [7; 16]).expect("a hash");
    format!("basic_auth_users: {{alice: {hash}}}\n")
}

/// A folder with a web configuration file.
struct Config(tempfile::TempDir);

impl Config {
    fn new(text: &str) -> Self {
        let config = Self(tempfile::tempdir().expect("a temporary folder"));
        config.write(text);
        config
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("web.yaml")
    }

    /// Renames a new file over the old one, as people replace files.
    fn write(&self, text: &str) {
        let next = self.0.path().join("next.yaml");
        std::fs::write(&next, text).expect("written");
        std::fs::rename(next, self.path()).expect("replaced");
    }

    fn start(&self, arguments: &[&str]) -> Daemon {
        let setting = format!("web.config_file={}", self.path().display());
        let all = [&["serve", "--source", "sim:spike", "--set", &setting], arguments].concat();
        Daemon::start(&all)
    }
}

/// One answer: its status, and its whole text, head and body.
#[derive(Debug)]
struct Answer {
    status: u16,
    text: String,
}

/// Sends a request with curl, which has its own TLS. `None` if curl gets no answer at all, as when TLS fails.
fn curl(curl: &Path, arguments: &[&str]) -> Option<Answer> {
    let output = Command::new(curl).args(["-sS", "-i", "--max-time", "10", "--http1.1"]).args(arguments).output();
    let output = output.expect("curl runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let status = text.split_whitespace().nth(1)?.parse().ok()?;
    output.status.success().then_some(Answer { status, text })
}

fn tls(files: &Files, more: &str) -> String {
    format!(
        "tls_server_config:\n  cert_file: {}\n  key_file: {}\n{more}",
        files.certificate.display(),
        files.key.display()
    )
}

#[test]
fn a_client_with_tls_is_served_and_one_without_is_not() {
    let Some(program) = tools::find("curl") else { return };
    let folder = tempfile::tempdir().expect("a temporary folder");
    let files = Authority::new().write(folder.path(), "127.0.0.1");
    let config =
        Config::new(&tls(&files, "  min_version: TLS13\nhttp_server_config:\n  headers: {X-Frame-Options: deny}\n"));
    let daemon = config.start(&["--set", "health.listen=127.0.0.1:0"]);
    let (address, authority) = (daemon.address().to_owned(), files.authority.display().to_string());
    let url = format!("https://{address}/metrics");
    let answer = curl(&program, &["--cacert", &authority, &url]).expect("TLS");
    assert!(answer.status == 200 && answer.text.contains("highwater_build_info"), "{answer:?}");
    assert!(answer.text.to_lowercase().contains("x-frame-options: deny"), "{answer:?}");
    let answer = curl(&program, &["--cacert", &authority, "-H", "Host: evil.example", &url]).expect("TLS");
    assert!(answer.status == 421 && answer.text.to_lowercase().contains("x-frame-options: deny"), "{answer:?}");
    assert!(curl(&program, &[&url]).is_none(), "the authority is not trusted by default");
    assert!(curl(&program, &["--cacert", &authority, "--tls-max", "1.2", &url]).is_none(), "TLS 1.2 is off");
    assert!(curl(&program, &[&format!("http://{address}/metrics")]).is_none(), "nothing is served without TLS");
    let health = format!("http://{}/healthz", daemon.address_of("serving probes"));
    assert_eq!(curl(&program, &[&health]).expect("an answer").status, 200, "except probes");
    let failed = curl(&program, &["--cacert", &authority, &url]).expect("TLS").text;
    assert!(
        failed.contains(r#"highwater_http_connections_total{listener="http",outcome="handshake_failed"}"#),
        "{failed}"
    );
}

#[test]
fn a_client_without_a_certificate_of_the_right_name_is_refused() {
    let Some(program) = tools::find("curl") else { return };
    let folder = tempfile::tempdir().expect("a temporary folder");
    let authority = Authority::new();
    let files = authority.write(folder.path(), "127.0.0.1");
    let (good, other) =
        (authority.write(folder.path(), "prometheus.example"), authority.write(folder.path(), "other.example"));
    let more = format!(
        "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: {}\n  client_allowed_sans: [prometheus.example]\n",
        files.authority.display()
    );
    let daemon = Config::new(&tls(&files, &more));
    let daemon = daemon.start(&[]);
    let url = format!("https://{}/healthz", daemon.address());
    let ask = |client: Option<&Files>| {
        let path = |path: &Path| path.display().to_string();
        let own = client.map(|files| (path(&files.certificate), path(&files.key)));
        let authority = path(&files.authority);
        let mut arguments = vec!["--cacert", &authority, &url];
        if let Some((certificate, key)) = &own {
            arguments.extend(["--cert", certificate, "--key", key]);
        }
        curl(&program, &arguments).map(|answer| answer.status)
    };
    assert_eq!([ask(Some(&good)), ask(Some(&other)), ask(None)], [Some(200), None, None]);
}

#[test]
fn a_certificate_that_is_replaced_is_used_and_a_broken_one_is_not() {
    let Some(program) = tools::find("curl") else { return };
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (first, second) = (Authority::new(), Authority::new());
    let files = first.write(folder.path(), "127.0.0.1");
    let config = Config::new(&tls(&files, ""));
    let daemon = config.start(&[]);
    let url = format!("https://{}/metrics", daemon.address());
    let trusts = |authority: &Path| curl(&program, &["--cacert", &authority.display().to_string(), &url]);
    assert_eq!(trusts(&files.authority).expect("TLS").status, 200);
    // First the certificate alone. It does not match the old key, so nothing changes.
    let old = folder.path().join("old.pem");
    std::fs::copy(&files.authority, &old).expect("copied");
    let (certificate, key) = second.issue("127.0.0.1");
    std::fs::write(&files.certificate, certificate.pem()).expect("written");
    eventually(SOON, "a refused configuration", || {
        let metrics = trusts(&old).expect("the old certificate still works").text;
        (!metrics.contains(r#"highwater_web_config_reads_total{outcome="refused"} 0"#)).then_some(())
    });
    // The line is written after the refusal is counted.
    let is_logged = || daemon.printed().contains("the previous one stays in force").then_some(());
    eventually(SOON, "the line about it", is_logged);
    std::fs::write(&files.key, key.serialize_pem()).expect("written");
    let new = folder.path().join("new.pem");
    std::fs::write(&new, second.certificate().pem()).expect("written");
    eventually(SOON, "the new certificate", || trusts(&new).filter(|answer| answer.status == 200));
    assert!(trusts(&old).is_none(), "the old one is gone");
    // The configuration file may become invalid too. TLS stays on while the daemon runs.
    config.write("tls_server_config: {cert_file: /nope}\n");
    eventually(SOON, "a line about it", || daemon.printed().contains("cannot use the web configuration").then_some(()));
    assert_eq!(trusts(&new).expect("TLS stays on").status, 200);
}

#[test]
fn a_wrong_password_is_refused_and_a_new_one_is_taken() {
    let Some(program) = tools::find("curl") else { return };
    let config = Config::new(&alice());
    let daemon = config.start(&["--set", "health.listen=127.0.0.1:0"]);
    let url = format!("http://{}/metrics", daemon.address());
    let ask = |user: &str| curl(&program, &["-u", user, &url]).expect("an answer");
    for wrong in ["alice:wander", "carol:wonder", ":", "alice:"] {
        let answer = ask(wrong);
        assert_eq!(answer.status, 401, "{wrong}: {answer:?}");
        assert!(answer.text.to_lowercase().contains("www-authenticate: basic realm="), "{answer:?}");
    }
    assert_eq!(curl(&program, &[&url]).expect("an answer").status, 401);
    let answer = ask("alice:wonder");
    assert_eq!(answer.status, 200);
    assert!(answer.text.contains(r#"highwater_http_requests_refused_total{reason="credentials"} 5"#), "{answer:?}");
    let health = format!("http://{}/readyz", daemon.address_of("serving probes"));
    eventually(SOON, "probes need none", || curl(&program, &[&health]).filter(|answer| answer.status == 200));
    config.write(&alice().replace("alice", "bob"));
    eventually(SOON, "the new user", || (ask("bob:wonder").status == 200).then_some(()));
    assert_eq!(ask("alice:wonder").status, 401, "the removed user");
}

/// A job has a token and no user. The token gives access to annotations only.
#[test]
fn a_token_opens_annotations_and_nothing_else() {
    let Some(program) = tools::find("curl") else { return };
    let config = Config::new(&alice());
    let token = config.0.path().join("token");
    std::fs::write(&token, "secret-secret-secret").expect("written");
    let daemon = config.start(&["--set", &format!("annotations.token_file={}", token.display())]);
    let (good, bad) = ("Authorization: bEaReR secret-secret-secret", "Authorization: Bearer secret-secret-secreT");
    let url = |path: &str| format!("http://{}{path}", daemon.address());
    let event = r#"{"event":"begin","name":"mine","job":"me","gpu":0}"#;
    let post = |arguments: &[&str]| {
        let url = url("/api/v1/annotations");
        let all = [&["-d", event, &*url], arguments].concat();
        curl(&program, &all).expect("an answer").status
    };
    assert_eq!([post(&["-H", good]), post(&["-H", bad]), post(&[])], [200, 401, 401]);
    assert_eq!(post(&["-u", "alice:wonder"]), 401, "a user who may read may not write");
    let get = |path: &str| curl(&program, &["-H", good, &url(path)]).expect("an answer").status;
    assert_eq!([get("/metrics"), get("/api/v1/captures"), get("/api/v1/annotations")], [401, 401, 401]);
}

#[test]
fn more_requests_than_the_rate_are_answered_when_to_come_again() {
    let Some(program) = tools::find("curl") else { return };
    let config = Config::new("rate_limit: {interval: 1h, burst: 3}\n");
    let daemon = config.start(&[]);
    let ask = || curl(&program, &[&format!("http://{}/healthz", daemon.address())]).expect("an answer");
    let answers: Vec<_> = (0..5).map(|_| ask()).collect();
    let statuses: Vec<_> = answers.iter().map(|answer| answer.status).collect();
    assert_eq!(statuses, [200, 200, 200, 429, 429]);
    assert!(answers[4].text.to_lowercase().contains("retry-after: 3"), "{answers:?}");
}

/// A web page can have a name that resolves to this machine.
#[test]
fn a_name_that_is_not_the_daemons_is_misdirected() {
    let Some(program) = tools::find("curl") else { return };
    let daemon = Daemon::start(&["serve", "--source", "sim:spike", "--set", "web.hosts=gpu-1.example"]);
    let plain = Daemon::start(&["serve", "--source", "sim:spike"]);
    let ask = |daemon: &Daemon, host: &str| {
        let url = format!("http://{}/healthz", daemon.address());
        curl(&program, &["-H", &format!("Host: {host}"), &url]).expect("an answer")
    };
    for host in ["evil.example", "evil.example:10450"] {
        let answer = ask(&plain, host);
        assert!(answer.status == 421 && answer.text.contains("web.hosts"), "{answer:?}");
        assert_eq!(ask(&daemon, host).status, 421);
    }
    assert_eq!([ask(&plain, "localhost").status, ask(&plain, "127.0.0.1:1").status], [200, 200]);
    assert_eq!([ask(&daemon, "gpu-1.example").status, ask(&plain, "gpu-1.example").status], [200, 421]);
}

/// Passwords are checked one at a time, off the threads that answer.
#[test]
fn a_flood_of_wrong_passwords_keeps_nobody_waiting() {
    let Some(program) = tools::find("curl") else { return };
    // The highest cost that is accepted: about a second for each guess.
    let hash = bcrypt::hash_with_salt("wonder", 4, [7; 16]).expect("a hash").to_string().replace("$04$", "$14$");
    let config = Config::new(&format!("{}  bob: {hash}\n", alice().replace(": {alice", ":\n  alice").replace('}', "")));
    let daemon = config.start(&["--set", "health.listen=127.0.0.1:0"]);
    let url = format!("http://{}/metrics", daemon.address());
    let ask = |user: &str| curl(&program, &["-u", user, &url]).expect("an answer");
    assert_eq!(ask("alice:wonder").status, 200, "and she is known from now on");
    let mut guesses: Vec<_> = (0..40).map(|number| guess(&program, &url, &format!("bob:{number}"))).collect();
    let busy = r#"highwater_http_requests_refused_total{reason="busy"} 0"#;
    eventually(SOON, "guesses that are refused as busy", || {
        let answer = ask("alice:wonder");
        (answer.status == 200 && !answer.text.contains(busy)).then_some(())
    });
    let mut slowest = Duration::ZERO;
    for number in 0..100 {
        let path = if number % 2 == 0 {
            url.clone()
        } else {
            format!("http://{}/healthz", daemon.address_of("serving probes"))
        };
        let begun = Instant::now();
        assert_eq!(curl(&program, &["-u", "alice:wonder", &path]).expect("an answer").status, 200);
        slowest = slowest.max(begun.elapsed());
    }
    let printed = format!("\n    100 of 100 answered among guesses, the slowest in {slowest:?} with curl's start\n");
    let _ = std::io::Write::write_all(&mut std::io::stderr(), printed.as_bytes());
    assert!(slowest < Duration::from_secs(1), "{slowest:?}");
    guesses.iter_mut().for_each(|guess| {
        // It may already have ended.
        let _ = guess.kill();
        guess.wait().expect("our child");
    });
}

/// Starts a guess.
fn guess(curl: &Path, url: &str, user: &str) -> std::process::Child {
    let mut command = Command::new(curl);
    command.args(["-s", "-o", "/dev/null", "--retry", "100", "--retry-delay", "0", "-u", user, url]);
    command.spawn().expect("curl runs")
}

/// Jobs have their own port. It serves nothing to readers, and the readers' port accepts no annotations.
#[test]
fn annotations_are_taken_at_their_own_listener_alone() {
    let daemon = Daemon::start(&["serve", "--source", "sim:spike", "--set", "annotations.listen=127.0.0.1:0"]).ready();
    let event = serde_json::json!({"event": "mark", "name": "here", "job": "me", "gpu": 0});
    let (status, body) = daemon.post("/api/v1/annotations", &event);
    assert!(status == 403 && body.contains("annotations.listen"), "{status} {body}");
    assert_eq!(daemon.post("/api/v1/captures", &serde_json::json!({})).0, 403);
    assert_eq!(daemon.ask("/api/v1/captures").0, 200, "captures can still be listed");
    let address = daemon.address_of("taking annotations over TCP");
    let url = |path: &str| format!("http://{address}{path}");
    let (status, body) = answer(agent().post(url("/api/v1/annotations")).send_json(&event), "annotations");
    assert_eq!(status, 200, "{body}");
    assert!(daemon.get("/api/v1/jobs").contains("\"me\""));
    for path in ["/metrics", "/healthz", "/api/v1/jobs"] {
        assert_eq!(answer(agent().get(url(path)).call(), path).0, 404, "{path}");
    }
    assert!(daemon.metrics().contains(r#"highwater_http_open_connections{listener="annotations"}"#));
}

/// At startup and with `--check-config` alike.
#[test]
fn what_is_not_supported_is_refused_by_name() {
    let config =
        Config::new("tls_server_config: {cert_file: nope.pem, key_file: nope.key, min_version: TLS11}\nusers: {}\n");
    let setting = format!("web.config_file={}", config.path().display());
    for check in [&["--check-config"][..], &[]] {
        let mut command = command();
        command.args(["serve", "--source", "sim:spike", "--listen", "127.0.0.1:0", "--annotations-socket", "none"]);
        let output = command.args(["--set", &setting]).args(check).output().expect("it runs");
        let printed = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{printed}");
        assert!(printed.contains("web.yaml: tls_server_config.min_version: `TLS11` is not supported"), "{printed}");
        assert!(printed.contains("web.yaml: users: is not supported"), "{printed}");
    }
}

/// Prometheus's own settings match those of this file.
#[test]
#[ignore = "needs a peer: make test-peers"]
fn prometheus_scrapes_with_tls_and_a_password() {
    let Some(program) = tools::find("prometheus") else { return };
    let folder = tempfile::tempdir().expect("a temporary folder");
    let files = Authority::new().write(folder.path(), "127.0.0.1");
    let daemon = Config::new(&tls(&files, &alice()));
    let daemon = daemon.start(&[]);
    let more = format!(
        "    scheme: https\n    tls_config: {{ca_file: {:?}}}\n    basic_auth: {{username: alice, password: wonder}}\n",
        files.authority
    );
    let scraper = Scraper::with(&program, &daemon, &more);
    scraper.wait_for_scrapes(1, 2);
    assert!(scraper.query("up == 0").is_empty());
    assert!(!scraper.query("highwater_gpu_info").is_empty());
}

//! Clients that open connections and misuse them. Nobody else must wait for an answer because of them.

use crate::crowd::Crowd;
use crate::daemon::{Daemon, agent, answer};
use crate::process::eventually;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// The shortest timeout that the kubelet has for a probe.
const PROBE_WITHIN: Duration = Duration::from_secs(1);
/// More probes would measure nothing else.
const PROBES: usize = 100;
const CROWD: usize = 10_000;

/// Sends a hundred requests, each over its own connection. Each must be answered within a probe's timeout plus the time that
/// the daemon waited for a CPU meanwhile. Prints the longest time that one took.
fn probe(daemon: &Daemon, addresses: &[(&str, &str)], among: &str) {
    let before = daemon.waited();
    let took = (0..PROBES).map(|number| {
        let (address, path) = addresses[number % addresses.len()];
        let begun = Instant::now();
        let (status, body) = answer(agent().get(format!("http://{address}{path}")).call(), path);
        assert_eq!(status, 200, "probe {number} of {path} among {among}: {body}");
        begun.elapsed()
    });
    let longest = took.max().expect("there are probes");
    // Threads that have ended take what they waited with them.
    let waited = daemon.waited().saturating_sub(before);
    say(&format!("{PROBES} of {PROBES} probes answered among {among}, the slowest in {longest:?}"));
    assert!(longest < PROBE_WITHIN + waited, "a probe among {among} took {longest:?}; the daemon waited {waited:?}");
}

/// Prints past the test harness's capture, so that people see the figures.
fn say(what: &str) {
    let _ = std::io::Write::write_all(&mut std::io::stderr(), format!("\n    {what}\n").as_bytes());
}

fn metric(metrics: &str, series: &str) -> u64 {
    let line = metrics.lines().find_map(|line| line.strip_prefix(series)).unwrap_or_else(|| panic!("no {series}"));
    line.trim().parse().unwrap_or_else(|_| panic!("{series}: {line}"))
}

#[test]
fn probes_are_answered_among_520_idle_connections() {
    let daemon = Daemon::start(&["serve", "--source", "sim", "--set", "health.listen=127.0.0.1:0"]).ready();
    let address = daemon.address().to_owned();
    let mut idle: Vec<_> = (0..520).map(|_| TcpStream::connect(&address).expect("it listens")).collect();
    probe(&daemon, &[(&address, "/healthz"), (&address, "/metrics")], "520 idle connections");
    let metrics = daemon.metrics();
    let evicted = metric(&metrics, r#"highwater_http_connections_total{listener="http",outcome="evicted"}"#);
    // 520 and those of the probes, less the 256 slots, and less those that were closed after their answer.
    assert!(evicted >= 520 - 256, "{evicted}");
    let log = daemon.printed();
    assert_eq!(log.matches("every connection slot is taken").count(), 1, "one line a minute: {log}");
    // Each connection is closed: the first at once, the last after its three seconds.
    for (number, stream) in idle.iter_mut().enumerate() {
        stream.set_read_timeout(Some(Duration::from_secs(30))).expect("a timeout");
        let read = read_once(stream, &mut [0]);
        assert!(matches!(&read, Ok(0)) || read.as_ref().is_err_and(is_reset), "{number}: {read:?}");
    }
}

/// Reads what there is, at most for the stream's timeout. A read that has one is interrupted if this process is stopped or
/// frozen meanwhile, as by a container's host.
fn read_once(stream: &mut TcpStream, buffer: &mut [u8]) -> std::io::Result<usize> {
    loop {
        match stream.read(buffer) {
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            read => return read,
        }
    }
}

fn is_reset(error: &std::io::Error) -> bool {
    error.kind() == std::io::ErrorKind::ConnectionReset
}

#[test]
fn probes_are_answered_among_ten_thousand_bad_clients() {
    let daemon = Daemon::start(&["serve", "--source", "sim", "--set", "health.listen=127.0.0.1:0"]).ready();
    let (address, health) = (daemon.address().to_owned(), daemon.address_of("serving probes"));
    let crowd = Crowd::gather(&address, CROWD);
    if crowd.size < CROWD {
        say(&format!("*** ONLY {} of {CROWD} connections could be opened: see `ulimit -Hn`", crowd.size));
    }
    let among = format!("{} clients that are idle, stop in a head, drip, or hold a body open", crowd.size);
    probe(&daemon, &[(&address, "/healthz"), (&address, "/metrics")], &among);
    probe(&daemon, &[(&health, "/healthz"), (&health, "/readyz")], &format!("{among}, at the health listener"));
    let metrics = daemon.metrics();
    let open = metric(&metrics, r#"highwater_http_open_connections{listener="http"}"#);
    assert!(open <= 257, "{open}");
    assert_eq!(metric(&metrics, r#"highwater_http_accept_failures_total{listener="http"}"#), 0);
    say(&format!("open files {}, resident bytes {}", metric(&metrics, "process_open_fds"), metrics_bytes(&metrics)));
    drop(crowd);
}

fn metrics_bytes(metrics: &str) -> u64 {
    metric(metrics, "process_resident_memory_bytes")
}

/// The health listener has its own slots. A client that fills them delays neither the kubelet nor a scrape.
#[test]
fn the_health_listener_serves_probes_alone_and_gives_way_likewise() {
    let daemon = Daemon::start(&["serve", "--source", "sim", "--set", "health.listen=127.0.0.1:0"]).ready();
    let health = daemon.address_of("serving probes");
    let _idle: Vec<_> = (0..200).map(|_| TcpStream::connect(&health).expect("it listens")).collect();
    probe(
        &daemon,
        &[(&health, "/healthz"), (daemon.address(), "/metrics")],
        "200 idle connections at the health listener",
    );
    let (status, body) = answer(agent().get(format!("http://{health}/metrics")).call(), "/metrics");
    assert_eq!(status, 404, "{body}");
}

/// With fewer file descriptors than slots, the daemon closes a connection instead of waiting for a client to leave.
#[test]
fn it_serves_when_it_has_no_file_descriptors_left() {
    let daemon = Daemon::start_limited(&["serve", "--source", "sim"], 64).ready();
    let open = metric(&daemon.metrics(), "process_open_fds");
    drop(daemon);
    // The count itself took two descriptors, so there is room for two connections, while there are slots for four.
    let daemon = Daemon::start_limited(&["serve", "--source", "sim"], open);
    let address = daemon.address().to_owned();
    let _idle: Vec<_> = (0..20).map(|_| TcpStream::connect(&address).expect("it listens")).collect();
    probe(&daemon, &[(&address, "/healthz")], "20 idle connections with no descriptors left");
    eventually(Duration::from_secs(20), "a failure that is counted", || {
        let metrics = daemon.metrics();
        (metric(&metrics, r#"highwater_http_accept_failures_total{listener="http"}"#) > 0).then_some(())
    });
    let log = daemon.printed();
    assert_eq!(log.matches("connections could not be accepted").count(), 1, "one line a minute: {log}");
}

/// A kept-alive connection may be silent for 20 seconds. Once it begins a request, it has three.
#[test]
fn a_request_that_is_begun_and_never_finished_is_cut_off() {
    let daemon = Daemon::start(&["serve", "--source", "sim"]);
    let mut stream = TcpStream::connect(daemon.address()).expect("it listens");
    stream.set_read_timeout(Some(Duration::from_secs(15))).expect("a timeout");
    stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n").expect("sent");
    let mut answered = [0; 1024];
    let length = read_once(&mut stream, &mut answered).expect("answered");
    assert!(answered[..length].starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&answered));
    stream.write_all(b"GET / HT").expect("sent");
    // The connection must be closed: a timeout of the read matches neither case.
    let read = read_once(&mut stream, &mut answered);
    assert!(matches!(read, Ok(0)) || read.as_ref().is_err_and(is_reset), "{read:?}");
    let ended = r#"highwater_http_connections_total{listener="http",outcome="timed_out"}"#;
    assert_eq!(metric(&daemon.metrics(), ended), 1);
}

//! A real daemon, and clients that send it annotations as fast as they can.

use highwater::capture;
use highwater::config::{Settings, SourceSpec};
use highwater::daemon::{Daemon, start};
use highwater_core::jobs::Outcome;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Longer than any operation here takes on any machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// One event of one rank, as a job sends it.
pub fn event(event: &str, rank: usize) -> String {
    format!(
        r#"{{"event":"{event}","name":"forward","job":"sender","rank":{rank},"gpu":0,"step":1234,"memory":{{"allocated":12345678901,"reserved":23456789012,"alloc_retries":0}}}}"#
    )
}

/// A daemon with its own port and socket.
pub struct Server {
    runtime: tokio::runtime::Runtime,
    daemon: Option<Daemon>,
    socket: PathBuf,
    _folder: TempDir,
}

impl Server {
    /// Starts a daemon over the GPUs of this shipped scenario.
    pub fn start(scenario: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = folder.path().join("annotations.sock");
        let settings = Settings {
            source: SourceSpec::Sim(Some(scenario.into())),
            listen: "127.0.0.1:0".parse().expect("an address"),
            annotations_socket: Some(socket.clone()),
            captures: capture::CaptureSettings {
                directory: Some(folder.path().join("captures")),
                ..capture::CaptureSettings::default()
            },
            ..Settings::default()
        };
        let runtime = highwater::cli::serve::runtime().expect("a runtime");
        let daemon = runtime.block_on(start(settings)).expect("a daemon");
        while daemon.site.snapshots.state.slot.node().is_none() {
            thread::yield_now();
        }
        Self { runtime, daemon: Some(daemon), socket, _folder: folder }
    }

    fn daemon(&self) -> &Daemon {
        self.daemon.as_ref().expect("it runs until it is dropped")
    }

    fn taken(&self) -> u64 {
        let counts = &self.daemon().site.intake.counts;
        [Outcome::Accepted, Outcome::AcceptedOutOfOrder, Outcome::AcceptedWithoutGpu]
            .map(|o| counts.get(o))
            .iter()
            .sum()
    }

    /// Returns ticks due, ticks missed and captures written over this time. If `is_asked`, captures are written one
    /// after the other.
    pub fn ticks_capturing(&self, is_asked: bool, lasting: Duration) -> (u64, u64, u64) {
        let recorder = &self.daemon().site.recorder;
        let written = || recorder.stats().expect("it is on").outcome(capture::Outcome::Complete);
        let (before, begun, already) = (self.ticks(), Instant::now(), written());
        while begun.elapsed() < lasting {
            if is_asked {
                // Refused while the previous capture is still being written.
                let _ = recorder.ask(capture::Request { after_ns: Some(0), ..capture::Request::default() });
            }
            thread::sleep(Duration::from_millis(50));
        }
        let after = self.ticks();
        (after.0 - before.0, after.1 - before.1, written() - already)
    }

    /// Ticks due and missed so far.
    fn ticks(&self) -> (u64, u64) {
        let node = self.daemon().site.snapshots.state.slot.node().expect("a simulated node");
        let missed = node.ticks.missed_late.load(Relaxed) + node.ticks.missed_driver.load(Relaxed);
        (node.ticks.due.load(Relaxed), missed)
    }

    /// Ticks due and missed over this time, while this many scrapers scrape at once every second.
    pub fn ticks_under(&self, scrapers: usize, lasting: Duration) -> (u64, u64) {
        let (address, before) = (self.daemon().address, self.ticks());
        thread::scope(|scope| {
            for _ in 0..scrapers {
                scope.spawn(move || {
                    // A real scraper runs on another host, so here its work must give way to the sampler.
                    highwater_engine::thread::stand_back();
                    let begun = Instant::now();
                    while begun.elapsed() < lasting {
                        scrape(address);
                        thread::sleep(
                            Duration::from_secs(1) - Duration::from_nanos(begun.elapsed().subsec_nanos().into()),
                        );
                    }
                });
            }
            thread::sleep(lasting);
        });
        let after = self.ticks();
        (after.0 - before.0, after.1 - before.1)
    }

    /// Events per second over HTTP, one event per request, over this many kept-alive connections.
    pub fn over_http(&self, events: usize, connections: usize) -> f64 {
        let (address, begun) = (self.daemon().address, Instant::now());
        thread::scope(|scope| {
            for rank in 0..connections {
                scope.spawn(move || {
                    let mut stream = TcpStream::connect(address).expect("it listens");
                    stream.set_nodelay(true).expect("an open socket");
                    let mut answers = BufReader::new(stream.try_clone().expect("an open socket"));
                    for n in 0..events / connections {
                        let body = event(if n % 2 == 0 { "begin" } else { "end" }, rank);
                        let request = format!(
                            "POST /api/v1/annotations HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n{body}",
                            body.len()
                        );
                        stream.write_all(request.as_bytes()).expect("sent");
                        skip_answer(&mut answers);
                    }
                });
            }
        });
        events as f64 / begun.elapsed().as_secs_f64()
    }

    /// Events per second over the socket, one per datagram: as one sender sent them, and as the daemon accepted them.
    pub fn over_socket(&self, events: usize) -> (f64, f64) {
        let (before, begun) = (self.taken(), Instant::now());
        let socket = UnixDatagram::unbound().expect("a socket");
        socket.connect(&self.socket).expect("it listens");
        let pair = [event("begin", 9), event("end", 9)];
        for n in 0..events {
            socket.send(pair[n % 2].as_bytes()).expect("sent");
        }
        let sent = events as f64 / begun.elapsed().as_secs_f64();
        while self.taken() - before < events as u64 {
            assert!(begun.elapsed() < PATIENCE, "{} of {events} taken", self.taken() - before);
            thread::yield_now();
        }
        (sent, events as f64 / begun.elapsed().as_secs_f64())
    }
}

fn scrape(address: std::net::SocketAddr) {
    let mut stream = TcpStream::connect(address).expect("it listens");
    stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").expect("sent");
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).expect("an answer");
    assert!(answer.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&answer));
}

fn skip_answer(answers: &mut BufReader<TcpStream>) {
    let (mut line, mut length) = (String::new(), 0);
    loop {
        line.clear();
        assert!(answers.read_line(&mut line).expect("an answer") > 0, "the connection was closed");
        assert!(!line.starts_with("HTTP/1.1 4"), "{line}");
        if let Some(value) = line.strip_prefix("content-length: ") {
            length = value.trim().parse().expect("a length");
        }
        if line == "\r\n" {
            break;
        }
    }
    let mut body = vec![0; length];
    answers.read_exact(&mut body).expect("a body");
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(daemon) = self.daemon.take() {
            self.runtime.block_on(daemon.stop());
        }
    }
}

//! A network between a daemon and a receiver. It counts what it carries, and can drop everything silently.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::thread;

/// A relay on a port of its own.
pub struct Relay {
    port: u16,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    loses: AtomicBool,
    /// Rises with each loss. A connection from before a loss stays dead, as if a firewall had forgotten it.
    losses: AtomicU64,
    sent_bytes: AtomicU64,
    connections: AtomicU64,
}

impl Relay {
    /// A relay to a port of this host.
    pub fn to(port: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let relay = Self { port: listener.local_addr().expect("bound").port(), state: Arc::default() };
        let state = Arc::clone(&relay.state);
        // The thread ends with the test's process.
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                state.connections.fetch_add(1, SeqCst);
                carry(stream, port, &state);
            }
        });
        relay
    }

    /// The port that it listens on.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Drops everything from now on, without an error on either side.
    pub fn lose(&self) {
        self.state.loses.store(true, SeqCst);
        self.state.losses.fetch_add(1, SeqCst);
    }

    /// New connections work again; those from before are dead.
    pub fn heal(&self) {
        self.state.loses.store(false, SeqCst);
    }

    /// Bytes that were carried to the receiver.
    pub fn sent_bytes(&self) -> u64 {
        self.state.sent_bytes.load(SeqCst)
    }

    /// Connections that were made.
    pub fn connections(&self) -> u64 {
        self.state.connections.load(SeqCst)
    }
}

fn carry(stream: TcpStream, port: u16, state: &Arc<State>) {
    let born = state.losses.load(SeqCst);
    let target = if state.loses.load(SeqCst) { None } else { TcpStream::connect(("127.0.0.1", port)).ok() };
    // A missing receiver refuses the connection; a network that loses everything keeps it.
    if target.is_none() && !state.loses.load(SeqCst) {
        return;
    }
    let back = target.as_ref().map(|target| (target.try_clone(), stream.try_clone()));
    if let Some((Ok(from), Ok(to))) = back {
        let state = Arc::clone(state);
        thread::spawn(move || copy(from, Some(to), |_| (), || state.losses.load(SeqCst) == born));
    }
    let state = Arc::clone(state);
    thread::spawn(move || {
        let count = |bytes| {
            state.sent_bytes.fetch_add(bytes, SeqCst);
        };
        copy(stream, target, count, || state.losses.load(SeqCst) == born);
    });
}

/// Carries bytes until one side ends; discards them once the connection is dead.
fn copy(mut from: TcpStream, mut to: Option<TcpStream>, count: impl Fn(u64), lives: impl Fn() -> bool) {
    let mut buffer = vec![0; 64 << 10];
    loop {
        let read = match from.read(&mut buffer) {
            Ok(0) => break,
            Ok(read) => read,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(_) => break,
        };
        if let Some(to) = to.as_mut().filter(|_| lives()) {
            count(read as u64);
            if to.write_all(&buffer[..read]).is_err() {
                break;
            }
        }
    }
    if let Some(to) = to.filter(|_| lives()) {
        // The other side may have ended first; then there is nothing to shut down.
        let _ = to.shutdown(Shutdown::Both);
    }
}

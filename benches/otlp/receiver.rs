//! An OTLP/HTTP receiver that accepts everything, stores nothing, and counts the bytes of its connections.

use std::io::{BufReader, Read, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;

/// The receiver; it ends with the process.
pub struct Receiver {
    port: u16,
    bytes: Arc<AtomicU64>,
}

impl Receiver {
    /// Starts a receiver on a port of this host.
    pub fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let receiver = Self { port: listener.local_addr().expect("bound").port(), bytes: Arc::default() };
        let bytes = Arc::clone(&receiver.bytes);
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let bytes = Arc::clone(&bytes);
                thread::spawn(move || serve(&stream, &bytes));
            }
        });
        receiver
    }

    /// The port that it listens on.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Bytes received, headers included.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }
}

/// Answers requests until the client closes the connection.
fn serve(stream: &TcpStream, bytes: &AtomicU64) {
    let mut reader = BufReader::new(Counted { stream, bytes });
    while let Some(length) = head(&mut reader) {
        let body = std::io::copy(&mut reader.by_ref().take(length), &mut std::io::sink());
        let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n";
        if body.is_err() || (&mut &*stream).write_all(answer).is_err() {
            return;
        }
    }
}

/// Reads a request's head. Returns the length of the body, or `None` at the end of the stream.
fn head(reader: &mut impl std::io::BufRead) -> Option<u64> {
    let mut length = 0;
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).ok()? == 0 {
            return None;
        }
        let line = line.trim_end().to_ascii_lowercase();
        if line.is_empty() {
            return Some(length);
        }
        if let Some(value) = line.strip_prefix("content-length:") {
            length = value.trim().parse().ok()?;
        }
    }
}

struct Counted<'a> {
    stream: &'a TcpStream,
    bytes: &'a AtomicU64,
}

impl Read for Counted<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let read = (&mut &*self.stream).read(buffer)?;
        self.bytes.fetch_add(read as u64, Relaxed);
        Ok(read)
    }
}

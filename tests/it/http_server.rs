//! A small HTTP server for one test. It passes each request to a function and answers with what the function returns.
//!
//! It serves one request per connection, which is enough for a scrape and a webhook. It ends when dropped.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// How long a client may take to send its request.
const REQUEST_WITHIN: Duration = Duration::from_secs(10);

/// A running server.
pub struct HttpServer {
    address: SocketAddr,
    ending: Arc<AtomicBool>,
    accepting: Option<JoinHandle<()>>,
}

impl HttpServer {
    /// Listens on a free loopback port. `answer` gets the path and the body of each request and returns plain text.
    pub fn start(answer: impl Fn(&str, &str) -> String + Send + 'static) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        let address = listener.local_addr().expect("it listens");
        let ending = Arc::new(AtomicBool::new(false));
        let is_ending = Arc::clone(&ending);
        let accepting = std::thread::spawn(move || {
            for connection in listener.incoming() {
                if is_ending.load(Ordering::Acquire) {
                    return;
                }
                // A client that disconnects midway asks again, and the test waits for the result.
                let _ = connection.and_then(|connection| serve(connection, &answer));
            }
        });
        Self { address, ending, accepting: Some(accepting) }
    }

    /// `127.0.0.1:PORT`.
    pub fn address(&self) -> String {
        self.address.to_string()
    }
}

impl Drop for HttpServer {
    fn drop(&mut self) {
        self.ending.store(true, Ordering::Release);
        // The connection only wakes the thread.
        let _ = TcpStream::connect(self.address);
        if let Some(accepting) = self.accepting.take() {
            assert!(accepting.join().is_ok() || std::thread::panicking(), "the test's server panicked");
        }
    }
}

fn serve(mut connection: TcpStream, answer: &impl Fn(&str, &str) -> String) -> std::io::Result<()> {
    connection.set_read_timeout(Some(REQUEST_WITHIN))?;
    let mut reader = BufReader::new(connection.try_clone()?);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let path = line.split_whitespace().nth(1).unwrap_or_default().to_owned();
    let mut length = 0;
    loop {
        line.clear();
        reader.read_line(&mut line)?;
        let header = line.trim_end();
        if header.is_empty() {
            break;
        }
        if let Some((name, value)) = header.split_once(':')
            && name.eq_ignore_ascii_case("content-length")
        {
            length = value.trim().parse().unwrap_or(0);
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    let text = answer(&path, &String::from_utf8_lossy(&body));
    write!(
        connection,
        "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{text}",
        text.len()
    )
}

//! A crowd of bad clients: a separate process that holds thousands of connections and misuses all of them.
//!
//! It is this test program again, run with [`CLIENT`] alone, because one process may not open enough files for both
//! sides of the test. It ends when its standard input ends, and uses loopback only.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io::{BufRead as _, BufReader, ErrorKind, Lines, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The test that is the client.
const CLIENT: &str = "crowd::the_client";
/// The variables that turn the test into a client: the address, and the number of connections.
const VARIABLES: [&str; 2] = ["CROWD_ADDRESS", "CROWD_SIZE"];
/// Files that the client opens besides its connections.
const OTHER_FILES: u64 = 64;
/// Timeout of one connection attempt. The kernel drops a client if its queue is full.
const CONNECT_WITHIN: Duration = Duration::from_millis(300);
/// How many closed connections it replaces, per second and in all.
const ANEW_EACH_SECOND: usize = 400;
const ANEW: usize = 12_000;

/// A running crowd, gone when dropped.
pub struct Crowd {
    child: Child,
    stdin: Option<ChildStdin>,
    // Kept open: the child's harness prints at its end, and fails if nothing reads the pipe.
    _stdout: Lines<BufReader<ChildStdout>>,
    /// How many connections it could open.
    pub size: usize,
}

impl Crowd {
    /// Connects `wanted` bad clients to `address`, or as many as the system lets one process have, and returns once all
    /// have been tried.
    pub fn gather(address: &str, wanted: usize) -> Self {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.args([CLIENT, "--exact", "--ignored", "--nocapture"]);
        command.env(VARIABLES[0], address).env(VARIABLES[1], wanted.to_string());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().expect("it starts");
        let stdin = child.stdin.take();
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let printed =
            lines.by_ref().map_while(Result::ok).find_map(|line| Some(line.split_once("crowd of ")?.1.to_owned()));
        let size = printed.and_then(|size| size.trim().parse().ok()).expect("it prints its size");
        Self { child, stdin, _stdout: lines, size }
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        drop(self.stdin.take());
        let ended = self.child.wait().expect("our child");
        assert!(ended.success() || std::thread::panicking(), "the crowd failed: {ended}");
    }
}

/// How a client keeps its connection open. It depends on the client's number.
#[derive(Clone, Copy)]
enum Manner {
    Idle,
    HalfAHead,
    Drip,
    BodyHeldOpen,
}

impl Manner {
    fn of(number: usize) -> Self {
        [Self::Idle, Self::HalfAHead, Self::Drip, Self::BodyHeldOpen][number % 4]
    }

    fn begin(self) -> &'static [u8] {
        match self {
            Self::Idle => b"",
            Self::HalfAHead => b"GET /metrics HTTP/1.1\r\nHost: local",
            Self::Drip => b"GET / HTTP/1.1\r\nX: ",
            Self::BodyHeldOpen => {
                b"POST /api/v1/annotations HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n["
            }
        }
    }
}

fn connect(address: SocketAddr, number: usize) -> Option<TcpStream> {
    let mut stream = TcpStream::connect_timeout(&address, CONNECT_WITHIN).ok()?;
    stream.set_nonblocking(true).ok()?;
    // The daemon may close the connection before the first byte.
    let _ = stream.write(Manner::of(number).begin());
    Some(stream)
}

/// Whether the daemon still has the connection. A dripping client sends its next byte.
fn stays(stream: &mut TcpStream, number: usize) -> bool {
    let mut buffer = [0; 512];
    let is_open = match stream.read(&mut buffer) {
        Ok(length) => length > 0,
        Err(error) => error.kind() == ErrorKind::WouldBlock,
    };
    is_open && (!matches!(Manner::of(number), Manner::Drip) || stream.write(b"x").is_ok())
}

#[test]
#[ignore = "a client of other tests"]
fn the_client() {
    let [Ok(address), Ok(wanted)] = VARIABLES.map(std::env::var) else { return };
    let (address, wanted) = (address.parse().expect("an address"), wanted.parse::<u64>().expect("a number"));
    let hard = getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX);
    let files = (wanted + OTHER_FILES).min(hard);
    setrlimit(Resource::Nofile, Rlimit { current: Some(files), maximum: Some(hard) }).expect("below the hard limit");
    let size = wanted.min(files - OTHER_FILES);
    let mut crowd: Vec<_> =
        (0..size as usize).map(|number| connect(address, number).or_else(|| connect(address, number))).collect();
    println!("crowd of {}", crowd.iter().flatten().count());
    // A separate thread waits for the end of stdin, since this one is busy with the connections.
    static ENDING: AtomicBool = AtomicBool::new(false);
    std::thread::spawn(|| {
        let _ = std::io::stdin().read(&mut [0]);
        ENDING.store(true, Ordering::Release);
    });
    let mut anew = ANEW;
    while !ENDING.load(Ordering::Acquire) {
        let round = Instant::now();
        let mut opened = 0;
        for (number, client) in crowd.iter_mut().enumerate() {
            let is_gone = !client.as_mut().is_some_and(|stream| stays(stream, number));
            if is_gone && opened < ANEW_EACH_SECOND.min(anew) && !ENDING.load(Ordering::Acquire) {
                *client = connect(address, number);
                opened += 1;
            }
        }
        anew -= opened;
        // One round a second. The test itself does not wait for this.
        let end = round + Duration::from_secs(1);
        while Instant::now() < end && !ENDING.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

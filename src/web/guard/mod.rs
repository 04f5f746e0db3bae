//! Access control: TLS, users and passwords, a rate limit, and headers of answers, by the exporters' common web
//! configuration file.
//!
//! Enters: the file's path. Leaves: the current rules, read again when the file or one that it names has changed.
//! Invariant: a file that cannot be used changes nothing; the previous rules stay in force, and this is logged and
//! counted. Absent on purpose: which requests the rules apply to, which `gate` decides.

mod file;
mod passwords;
mod rate;
mod section;
mod text;
mod tls;
mod tls_section;

use super::counts::{HttpStats, LogLimiter};
use arc_swap::ArcSwap;
use axum::http::{HeaderName, HeaderValue};
use file::File;
use passwords::{Passwords, Verdict};
use rate::Bucket;
use std::fs;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use text::read;
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;

/// How often to check whether a file has changed, while there are requests.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The rules and the files they come from.
pub struct Guard {
    path: PathBuf,
    rules: ArcSwap<Rules>,
    /// The files that were read; one thread at a time checks them.
    files: Mutex<Vec<Stamp>>,
    looked: Mutex<Instant>,
    stats: Arc<HttpStats>,
    broken: LogLimiter,
}

/// The current requirements on clients.
pub(super) struct Rules {
    tls: Option<TlsAcceptor>,
    pub headers: Vec<(HeaderName, HeaderValue)>,
    passwords: Option<Arc<Passwords>>,
    rate: Option<Arc<Bucket>>,
}

/// The state of one file when it was read.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Stamp {
    path: PathBuf,
    /// Device, inode, length, and times of modification and change; `None` if there is no file.
    state: Option<[i64; 7]>,
}

impl Stamp {
    fn of(path: PathBuf) -> Self {
        #[allow(clippy::cast_possible_wrap, reason = "only compared")]
        let state = fs::metadata(&path).ok().map(|file| {
            let times = [file.mtime(), file.mtime_nsec(), file.ctime(), file.ctime_nsec()];
            [file.dev() as i64, file.ino() as i64, file.len() as i64, times[0], times[1], times[2], times[3]]
        });
        Self { path, state }
    }
}

impl Guard {
    /// Reads the file at `path`.
    ///
    /// # Errors
    /// Every fault of it, and of the files that it names.
    pub fn open(path: &Path, stats: Arc<HttpStats>) -> anyhow::Result<Arc<Self>> {
        let one_error = |faults: Vec<String>| {
            let one_error: Vec<_> =
                faults.iter().map(|fault| format!("web.config_file: {}: {fault}", path.display())).collect();
            anyhow::anyhow!(one_error.join("\n"))
        };
        let mut files = Vec::new();
        let rules = Rules::read(path, None, &mut files).map_err(one_error)?;
        stats.read_config(true);
        Ok(Arc::new(Self {
            path: path.to_owned(),
            rules: ArcSwap::from_pointee(rules),
            files: Mutex::new(files),
            looked: Mutex::new(Instant::now()),
            stats,
            broken: LogLimiter::default(),
        }))
    }

    /// Whether connections use TLS, which is fixed for the life of the daemon.
    #[must_use]
    pub fn has_tls(&self) -> bool {
        self.rules.load().tls.is_some()
    }

    /// The rules, at most a second old.
    pub(super) async fn rules(self: &Arc<Self>) -> Arc<Rules> {
        if self.is_due() {
            let guard = Arc::clone(self);
            // If the disk hangs, only this request waits. A check that panicked has changed nothing.
            let _ = tokio::task::spawn_blocking(move || guard.look()).await;
        }
        self.rules.load_full()
    }

    fn is_due(&self) -> bool {
        let mut looked = self.looked.lock().unwrap_or_else(PoisonError::into_inner);
        let is_due = looked.elapsed() >= LOOK_EVERY;
        if is_due {
            *looked = Instant::now();
        }
        is_due
    }

    /// Reads the files again if one has changed, or could not be used.
    fn look(&self) {
        let Ok(mut files) = self.files.try_lock() else { return };
        if !files.is_empty() && files.iter().all(|file| Stamp::of(file.path.clone()) == *file) {
            return;
        }
        let before = self.rules.load_full();
        let mut read = Vec::new();
        match Rules::read(&self.path, Some(&before), &mut read) {
            Ok(rules) => {
                self.rules.store(Arc::new(rules));
                *files = read;
                self.stats.read_config(true);
                tracing::info!(file = %self.path.display(), "the web configuration was reloaded");
            }
            Err(faults) => {
                // Retried at the next check: the files may have been read in the middle of a change.
                files.clear();
                self.stats.read_config(false);
                if self.broken.due().is_some() {
                    let (file, faults) = (self.path.display(), faults.join("; "));
                    tracing::error!(%file, faults, "cannot use the web configuration; the previous one stays in force");
                }
            }
        }
    }
}

impl Rules {
    /// The rules of the file at `path`. Parts that have not changed are taken from `before`. `files` gets the stamps of
    /// all files read, each taken before its file was read.
    fn read(path: &Path, before: Option<&Self>, files: &mut Vec<Stamp>) -> Result<Self, Vec<String>> {
        files.push(Stamp::of(path.to_owned()));
        let text = read(path).map_err(|problem| vec![problem])?;
        let File { tls, headers, users, rate } = file::parse(&text, path.parent().unwrap_or(Path::new(".")))?;
        if before.is_some_and(|before| before.tls.is_some() != tls.is_some()) {
            return Err(vec!["tls_server_config: adding or removing it needs a restart".to_owned()]);
        }
        files.extend(tls.iter().flat_map(tls_section::TlsSection::files).map(Stamp::of));
        let tls = tls.as_ref().map(tls::config).transpose().map_err(|fault| vec![fault])?;
        let kept = before.and_then(|before| before.passwords.clone()).filter(|kept| kept.has_users(&users));
        let passwords = match kept {
            Some(kept) => Some(kept),
            None => Passwords::new(users).map_err(|fault| vec![fault])?.map(Arc::new),
        };
        let kept = before.and_then(|before| before.rate.clone()).filter(|kept| Some(kept.rate) == rate);
        let rate = kept.or_else(|| rate.map(|rate| Arc::new(Bucket::new(rate))));
        Ok(Self { tls: tls.map(|config| TlsAcceptor::from(Arc::new(config))), headers, passwords, rate })
    }

    /// The TLS acceptor, if enabled.
    pub(super) fn tls(&self) -> Option<TlsAcceptor> {
        self.tls.clone()
    }

    /// Takes one request from the rate limit, or returns how long until one is available.
    pub(super) fn take(&self) -> Result<(), Duration> {
        self.rate.as_ref().map_or(Ok(()), |bucket| bucket.take())
    }

    pub(super) fn has_users(&self) -> bool {
        self.passwords.is_some()
    }

    /// Checks a user and a password sent from `address`.
    pub(super) async fn check(&self, user: &str, password: &[u8], address: IpAddr) -> Entry {
        let Some(passwords) = &self.passwords else { return Entry::Open };
        match passwords.check(user, password, address).await {
            Verdict::Right => Entry::Open,
            Verdict::Wrong => Entry::Closed,
            Verdict::Busy => Entry::Busy,
        }
    }
}

/// Whether a client has access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Entry {
    Open,
    Closed,
    Busy,
}

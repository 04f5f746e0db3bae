//! Opens NVML on threads of its own, so that a call that hangs is named in the log and costs no GPU but its own.
//!
//! Enters: the driver's library. Leaves: an [`Nvml`] without the GPUs that hang. Invariants: the caller's thread makes no
//! call of NVML; a call that has not returned is not made a second time. GPUs are opened one after the other on one thread,
//! and each of the rest on its own once one has hung.

use super::devices::{self, Found};
use super::errors;
use super::gpus::Nvml;
use super::progress::{Hung, Progress, locked};
use super::raw::RawFunctions;
use highwater_core::source::{OpenError, Skipped};
use nvml_wrapper::Nvml as Library;
use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How often the caller looks whether a call has returned.
const LOOK: Duration = Duration::from_millis(100);

/// How long a call may take while [`open`] opens NVML, which takes no patience as an argument.
const PATIENCE: Duration = Duration::from_secs(10);

/// Opens NVML, any number of times. It remembers the GPUs that hung in earlier attempts and still do.
#[derive(Debug)]
pub struct Opener {
    library: Option<PathBuf>,
    patience: Duration,
    hung: Hung,
}

/// NVML after its initialization.
#[derive(Clone)]
struct Begun {
    library: Arc<Library>,
    raw: Arc<RawFunctions>,
    count: u32,
    driver_version: Option<String>,
}

/// Loads NVML, from `library` or from where the driver installs it, and finds the GPUs.
///
/// # Errors
/// [`OpenError`] with one of the reasons `library_missing`, `driver_mismatch`, `driver_not_loaded`,
/// `no_permission`, `no_gpus`, `init_failed`, `driver_hangs`, and a message that says how to fix it. A single GPU that
/// cannot be opened, or hangs, is not an error: it is listed in [skipped](highwater_core::source::Source::skipped).
pub fn open(library: Option<&Path>) -> Result<Nvml, OpenError> {
    let mut hang = None;
    let opener = Opener::new(library.map(Path::to_owned), PATIENCE);
    let opened = opener.open(&mut |trouble| {
        hang = trouble.cloned();
        hang.is_none()
    });
    opened.unwrap_or_else(|| Err(hang.unwrap_or_else(|| hangs("NVML"))))
}

fn no_gpus(count: u32, skipped: &[Skipped]) -> OpenError {
    let reasons: Vec<String> = skipped.iter().map(|gpu| format!("GPU {}: {}", gpu.index, gpu.reason)).collect();
    let message = if count == 0 {
        "NVML runs and sees no GPU. To fix it: `lspci | grep -i nvidia` shows whether the node has one; a container \
         sees only the GPUs that it asked for (NVIDIA_VISIBLE_DEVICES, or nvidia.com/gpu in its limits)"
            .to_owned()
    } else {
        format!("NVML counts {count} GPUs and can open none. {}", reasons.join("; "))
    };
    OpenError { reason: "no_gpus", message }
}

/// What the threads report.
enum News {
    Begun(Result<Begun, OpenError>),
    Gpu(u32, Found),
    /// A thread has ended, and holds nothing any more.
    Ended,
}

impl Opener {
    /// Opens `library`, or the one that the driver installs. Initialization, or a GPU, that takes longer than `patience` counts
    /// as hung. Without persistence mode, opening a GPU takes seconds.
    #[must_use]
    pub fn new(library: Option<PathBuf>, patience: Duration) -> Self {
        Self { library, patience, hung: Hung::default() }
    }

    /// Initializes NVML and finds the GPUs. Calls `waiting` several times a second, with an error once NVML as a whole hangs. If
    /// `waiting` returns false, gives up and returns `None`.
    ///
    /// # Errors
    /// As of [`open`].
    pub fn open(&self, waiting: &mut dyn FnMut(Option<&OpenError>) -> bool) -> Option<Result<Nvml, OpenError>> {
        let (sender, news) = channel();
        let progress = Progress::begin();
        if let Err(error) = self.begin(&progress, &sender) {
            return Some(Err(no_thread(&error)));
        }
        let begun = match self.wait_for_begin(&progress, &news, waiting)? {
            Ok(begun) => begun,
            Err(error) => return Some(Err(error)),
        };
        let queue: VecDeque<u32> = (0..begun.count).filter(|index| !self.hung.contains(*index)).collect();
        let (asked, queue) = (queue.len(), Arc::new(Mutex::new(queue)));
        let mut opening = Opening { opener: self, begun, asked, queue, sender, found: BTreeMap::new(), running: 0 };
        if let Err(error) = opening.start() {
            return Some(Err(no_thread(&error)));
        }
        opening.follow(&news, waiting).then(|| self.finish(opening))
    }

    fn begin(&self, progress: &Arc<Progress>, sender: &Sender<News>) -> std::io::Result<()> {
        let (path, progress, sender) = (self.library.clone(), Arc::clone(progress), sender.clone());
        let run = move || {
            // Nobody listens if the caller gave up.
            let _ = sender.send(News::Begun(begin(path.as_deref(), &progress)));
        };
        highwater_engine::thread::spawn("hw-open", run).map(drop)
    }

    /// Waits until NVML is initialized, however long that takes.
    fn wait_for_begin(
        &self,
        progress: &Progress,
        news: &Receiver<News>,
        waiting: &mut dyn FnMut(Option<&OpenError>) -> bool,
    ) -> Option<Result<Begun, OpenError>> {
        let since = Instant::now();
        loop {
            match news.recv_timeout(LOOK) {
                Ok(News::Begun(begun)) => return Some(begun),
                Ok(News::Gpu(..) | News::Ended) | Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return None,
            }
            let hangs = (since.elapsed() >= self.patience).then(|| hangs(&progress.text()));
            if !waiting(hangs.as_ref()) {
                return None;
            }
        }
    }

    fn finish(&self, opening: Opening<'_>) -> Result<Nvml, OpenError> {
        let Opening { begun, mut found, .. } = opening;
        let hung: Vec<u32> = (0..begun.count).filter(|index| !found.contains_key(index)).collect();
        for index in &hung {
            let progress = self.hung.get(*index);
            let reason = progress.map_or_else(|| "it has hung until now".to_owned(), |progress| progress.text());
            tracing::warn!(gpu = index, reason, "this GPU hangs while it is opened, and is left out until it answers");
            let skipped = vec![Skipped { index: index.to_string(), reason }];
            found.insert(*index, Found { skipped, ..Found::default() });
        }
        let found = Found::joined(found.into_values());
        if found.devices.is_empty() {
            return Err(no_gpus(begun.count, &[found.skipped, found.kept_back].concat()));
        }
        let Begun { library, raw, driver_version, .. } = begun;
        Ok(Nvml::of(library, raw, found, driver_version, (hung, self.hung.clone())))
    }
}

/// Initializes NVML.
fn begin(path: Option<&Path>, progress: &Progress) -> Result<Begun, OpenError> {
    let mut builder = Library::builder();
    if let Some(path) = path {
        builder.lib_path(path.as_os_str());
    }
    let refused = |error| errors::open_error(error, path);
    progress.at("nvmlInit");
    let library = Arc::new(builder.init().map_err(refused)?);
    progress.at("nvmlDeviceGetCount");
    let count = library.device_count().map_err(refused)?;
    progress.at("nvmlSystemGetDriverVersion");
    let driver_version = library.sys_driver_version().ok();
    let raw = Arc::new(RawFunctions::of(library.lib(), driver_version.as_deref()));
    Ok(Begun { library, raw, count, driver_version })
}

/// What is wrong where NVML as a whole does not answer.
pub(super) fn hangs(what: &str) -> OpenError {
    let message = format!(
        "{what}: the driver hangs, and is waited for. To find out why: `dmesg | grep -e NVRM -e Xid`, and `nvidia-smi`, which \
         hangs too if it is the driver"
    );
    OpenError { reason: "driver_hangs", message }
}

fn no_thread(error: &std::io::Error) -> OpenError {
    OpenError { reason: "threads", message: format!("cannot start a thread to open NVML: {error}") }
}

/// GPUs that are being opened.
struct Opening<'a> {
    opener: &'a Opener,
    begun: Begun,
    /// How many.
    asked: usize,
    /// Indices of GPUs that no thread opens yet.
    queue: Arc<Mutex<VecDeque<u32>>>,
    sender: Sender<News>,
    found: BTreeMap<u32, Found>,
    /// Threads that have not ended.
    running: usize,
}

impl Opening<'_> {
    /// Starts a thread that opens what is in the queue.
    fn start(&mut self) -> std::io::Result<()> {
        let (begun, queue) = (self.begun.clone(), Arc::clone(&self.queue));
        let (sender, hung) = (self.sender.clone(), self.opener.hung.clone());
        let next = move |hung: &Hung, progress: &Arc<Progress>| {
            let mut queue = locked(&queue);
            let index = queue.front().copied()?;
            // Before it leaves the queue, so that it is in one of both at any time.
            hung.insert(index, progress);
            queue.pop_front();
            Some(index)
        };
        let run = move || {
            let mut progress = Progress::begin();
            while let Some(index) = next(&hung, &progress) {
                let Begun { library, raw, driver_version, .. } = &begun;
                let found = devices::open(library, raw, index, driver_version.as_deref(), &progress);
                // Nobody listens if it was given up.
                let _ = sender.send(News::Gpu(index, found));
                hung.remove(index);
                progress = Progress::begin();
            }
            // Dropped before `Ended` is sent: the caller then holds the only references, and can close NVML.
            drop(begun);
            let _ = sender.send(News::Ended);
        };
        highwater_engine::thread::spawn("hw-open", run)?;
        self.running += 1;
        Ok(())
    }

    /// Waits until each GPU is open or hangs. Returns false if `waiting` returns false, to give up.
    fn follow(&mut self, news: &Receiver<News>, waiting: &mut dyn FnMut(Option<&OpenError>) -> bool) -> bool {
        let mut last = Instant::now();
        loop {
            match news.recv_timeout(LOOK) {
                Ok(News::Gpu(index, found)) => {
                    self.found.insert(index, found);
                    last = Instant::now();
                }
                Ok(News::Ended) => self.running -= 1,
                Ok(News::Begun(_)) | Err(_) => {}
            }
            let is_stuck = last.elapsed() >= self.opener.patience;
            let left = locked(&self.queue).len();
            let is_whole = self.found.len() == self.asked && self.running == 0;
            if left == 0 && (is_stuck || is_whole) {
                return true;
            }
            if is_stuck {
                // One GPU hangs: each of the others gets a thread of its own, or waits where there is none to be had.
                let started = (0..left).take_while(|_| self.start().is_ok()).count();
                tracing::warn!(left, started, "a GPU hangs while it is opened; the others are opened beside it");
                last = Instant::now();
            }
            if !waiting(None) {
                return false;
            }
        }
    }
}

//! How far the opening of NVML is: the call in progress, and the GPUs whose opening has not returned. Any thread may
//! read both at any time.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// GPUs whose opening has not returned, by NVML's index.
#[derive(Debug, Clone, Default)]
pub(super) struct Hung(Arc<Mutex<BTreeMap<u32, Arc<Progress>>>>);

impl Hung {
    pub(super) fn contains(&self, index: u32) -> bool {
        locked(&self.0).contains_key(&index)
    }

    pub(super) fn get(&self, index: u32) -> Option<Arc<Progress>> {
        locked(&self.0).get(&index).cloned()
    }

    pub(super) fn insert(&self, index: u32, progress: &Arc<Progress>) {
        locked(&self.0).insert(index, Arc::clone(progress));
    }

    pub(super) fn remove(&self, index: u32) {
        locked(&self.0).remove(&index);
    }
}

/// Which of NVML's functions was called last, and when.
#[derive(Debug)]
pub(super) struct Progress(Mutex<(&'static str, Instant)>);

impl Progress {
    pub(super) fn begin() -> Arc<Self> {
        Arc::new(Self(Mutex::new(("the loading of the library", Instant::now()))))
    }

    /// The function `call` is about to be called.
    pub(super) fn at(&self, call: &'static str) {
        *locked(&self.0) = (call, Instant::now());
    }

    pub(super) fn text(&self) -> String {
        let (call, since) = *locked(&self.0);
        format!("{call} has not returned for {} s", since.elapsed().as_secs())
    }
}

pub(super) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

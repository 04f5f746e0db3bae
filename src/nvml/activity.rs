//! What the multiprocessors and the memory of one GPU did, measured with GPM.
//!
//! Enters: a sample of GPM at every fifth reading of the medium lane, while kernels run. Leaves: shares of the time
//! between two samples. On an H200 the counters refresh every 100 ms, so two samples closer than that may read 0; beside
//! training a sample costs some 240 µs, more than all other calls of the lane in half a second. Invariant: a GPU without GPM is
//! queried once.

use super::errors::Code;
use super::gpm::{Gpm, GpmSample};
use super::raw::Handle;
use highwater_core::clock::{MILLISECOND_NS, SECOND_NS};
use highwater_core::gpu::Activity;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The shortest time between two samples, half a block of steps in which ranks are compared, less the unevenness of the lane. On
/// the recordings of late ranks in corpus/ it names as many as 200 ms do, and 1 s a tenth fewer.
const SHORTEST_NS: i64 = 490 * MILLISECOND_NS;
/// The longest. After a longer pause another stretch begins.
const LONGEST_NS: i64 = 2 * SECOND_NS;

/// Measures one GPU. Only the medium lane uses it, so the lock is never contended.
#[derive(Debug, Default)]
pub(super) struct ActivityMeter {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The sample at which the current stretch begins, and its time.
    begin: Option<(i64, GpmSample)>,
    /// A sample to be filled next.
    spare: Option<GpmSample>,
    /// Whether the GPU is known to have GPM.
    is_supported: bool,
    returned: Activity,
}

impl ActivityMeter {
    /// What is known without a sample: nothing runs, or the current stretch is still too short.
    pub(super) fn still(&self, at_ns: i64, is_idle: bool) -> Option<Activity> {
        let mut state = self.state();
        if is_idle && state.is_supported {
            state.interrupt();
            return Some(Activity::NONE);
        }
        let elapsed_ns = at_ns.saturating_sub(state.begin.as_ref()?.0);
        (0..SHORTEST_NS).contains(&elapsed_ns).then_some(state.returned)
    }

    /// Takes a sample, which ends the current stretch and begins another.
    ///
    /// # Errors
    /// NVML's code; the current stretch is discarded.
    pub(super) fn advance(&self, gpm: Option<&Gpm>, handle: Handle, at_ns: i64) -> Result<Activity, Code> {
        let gpm = gpm.ok_or(Code::FUNCTION_NOT_FOUND)?;
        let mut state = self.state();
        let answer = state.advance(gpm, handle, at_ns);
        state.returned = answer.unwrap_or_default();
        answer
    }

    /// Discards the current stretch, because the GPU was away.
    pub(super) fn interrupt(&self) {
        *self.state() = State::default();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn interrupt(&mut self) {
        if let Some((_, sample)) = self.begin.take() {
            self.spare = Some(sample);
        }
        self.returned = Activity::default();
    }

    fn advance(&mut self, gpm: &Gpm, handle: Handle, at_ns: i64) -> Result<Activity, Code> {
        // Taken out, so that a failure below leaves no stretch.
        let begin = self.begin.take();
        if !self.is_supported {
            if !gpm.supports(handle)? {
                return Err(Code::NOT_SUPPORTED);
            }
            self.is_supported = true;
        }
        let mut sample = self.spare.take().map_or_else(|| gpm.allocate(), Ok)?;
        gpm.fill(handle, &mut sample)?;
        let earlier = begin.filter(|(from_ns, _)| (1..=LONGEST_NS).contains(&at_ns.saturating_sub(*from_ns)));
        let answer = earlier.as_ref().map_or(Ok(Activity::default()), |(_, earlier)| {
            gpm.activity(earlier, &sample).and_then(|percents| shares(&percents))
        });
        self.spare = earlier.map(|(_, earlier)| earlier);
        self.begin = Some((at_ns, sample));
        answer
    }
}

/// Percents as shares of 1; fails if none is known.
fn shares(percents: &[Result<f64, Code>; 4]) -> Result<Activity, Code> {
    if let [Err(code), Err(_), Err(_), Err(_)] = percents {
        return Err(*code);
    }
    // More than all is no share; a rounding above it is.
    let share =
        |percent: &Result<f64, Code>| percent.ok().filter(|percent| *percent <= 101.0).map(|it| (it / 100.0).min(1.0));
    let [sm_active, sm_occupancy, tensor_active, dram_active] = percents;
    Ok(Activity {
        sm_active_ratio: share(sm_active),
        sm_occupancy_ratio: share(sm_occupancy),
        tensor_active_ratio: share(tensor_active),
        dram_active_ratio: share(dram_active),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percents_are_shares_and_what_cannot_be_one_is_not_known() {
        let activity = shares(&[Ok(94.5), Ok(15.5), Err(Code::NO_DATA), Ok(100.4)]).expect("some are known");
        assert_eq!((activity.sm_active_ratio, activity.sm_occupancy_ratio), (Some(0.945), Some(0.155)));
        assert_eq!((activity.tensor_active_ratio, activity.dram_active_ratio), (None, Some(1.0)));
        assert_eq!(shares(&[Ok(1e9), Ok(0.0), Ok(0.0), Ok(0.0)]).expect("known").sm_active_ratio, None);
        assert_eq!(shares(&[Err(Code::NOT_SUPPORTED); 4]), Err(Code::NOT_SUPPORTED));
    }
}

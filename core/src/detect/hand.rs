//! Moments set by hand, for the detectors' tests: GPUs whose memory and readings a test writes, and what one detector says.

use super::detector::{Detector, Ratios, Trouble};
use super::finding::Sign;
use super::hosts::Hosts;
use super::settings::Settings;
use super::steps::{Phase, Step};
use super::view::{RankNow, View, running};
use crate::clock::{MILLISECOND_NS, SECOND_NS};
use crate::gpu::{Device, GpuState, Medium};
use crate::jobs::{FailedAllocation, HostOom};
use crate::phases::Flush;
use crate::phases::RankKey;
use crate::phases::hand::{self, key};
use crate::ring;
use std::collections::BTreeMap;
use std::sync::Arc;

pub(super) const GIB: u64 = 1 << 30;

/// GPUs of 140 GiB, and what is known of them and of ranks.
pub(super) struct Hand {
    pub now_ns: i64,
    pub settings: Settings,
    pub gpus: Vec<GpuState>,
    pub ranks: Vec<RankNow>,
    pub ooms: Vec<(RankKey, Arc<FailedAllocation>)>,
    pub host_ooms: Vec<(RankKey, Arc<HostOom>)>,
    pub steps: Vec<Step>,
    pub flushes: Vec<(usize, Flush)>,
    pub hosts: Hosts,
    pub since_ns: Vec<i64>,
    /// What detectors before found.
    pub troubles: Vec<Trouble>,
    rings: Vec<ring::Reader>,
    writers: Vec<ring::Writer>,
}

impl Hand {
    pub fn new(gpus: usize) -> Self {
        let (writers, rings) = (0..gpus).map(|_| hand::ring()).unzip();
        let device =
            |gpu: usize| Device { index: gpu.to_string(), memory_total_bytes: Some(140 * GIB), ..Device::default() };
        let state = |gpu| GpuState::new(device(gpu), 600 * SECOND_NS, 100 * MILLISECOND_NS);
        let gpus = (0..gpus).map(state).collect();
        let (ranks, steps, flushes, troubles) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let (settings, hosts, since_ns) = (Settings::default(), Hosts::default(), Vec::new());
        let (ooms, host_ooms) = (Vec::new(), Vec::new());
        Self {
            now_ns: 0,
            settings,
            gpus,
            ranks,
            ooms,
            host_ooms,
            steps,
            flushes,
            hosts,
            since_ns,
            troubles,
            rings,
            writers,
        }
    }

    /// From now on a GPU uses `bytes` bytes of memory.
    pub fn uses(&mut self, gpu: usize, bytes: u64) {
        self.writers[gpu].push(self.now_ns, bytes).expect("in order");
    }

    /// The driver's utilization of a GPU, read now.
    pub fn runs(&self, gpu: usize, utilization_ratio: Option<f64>) {
        self.gpus[gpu].set_medium(self.now_ns, Medium { utilization_ratio, ..Medium::default() });
    }

    /// Rank 0 of job `j`, alone on a GPU.
    pub fn rank_on(gpu: usize) -> RankNow {
        RankNow {
            pid: None,
            pod: None,
            key: key(0),
            gpus: vec![gpu],
            step: None,
            retries: None,
            ooms: None,
            mesh: None,
            world_size: None,
            since_ns: 0,
            heard_ns: 0,
            is_at_rest: false,
        }
    }

    /// Rank 0 and on of job `j`, each on the GPU of its number.
    pub fn with_ranks(count: usize) -> Self {
        let rank = |gpu: usize| RankNow { key: key(gpu), ..Self::rank_on(gpu) };
        Self { ranks: (0..count).map(rank).collect(), ..Self::new(count) }
    }

    /// A step of a rank of job `j`, the `nth` of its run and of that number: its phases, each with its milliseconds, come
    /// one after the other.
    pub fn step(rank: usize, nth: u64, begin_ns: i64, phases: &[(&str, i64)]) -> Step {
        let mut end_ns = begin_ns;
        let mut phase = |(name, ms): &(&str, i64)| {
            let begin_ns = end_ns;
            end_ns += ms * MILLISECOND_NS;
            Phase { name: (*name).into(), begin_ns, end_ns, retries: [None; 2] }
        };
        let phases = phases.iter().map(&mut phase).collect();
        let (peak_bytes, rise_bytes, idle_ns, retries, collected_ns, is_whole) = (None, None, None, None, None, true);
        let (key, gpus, number) = (key(rank), vec![rank], Some(nth));
        Step {
            key,
            number,
            nth,
            begin_ns,
            end_ns,
            gpus,
            phases,
            before: Vec::new(),
            peak_bytes,
            rise_bytes,
            idle_ns,
            outside_bytes: None,
            retries,
            collected_ns,
            is_whole,
        }
    }

    /// What a detector says at the end of the last of these steps, which end now.
    pub fn steps_end(&mut self, detector: &mut impl Detector, steps: Vec<Step>) -> Vec<Sign> {
        self.now_ns = steps.iter().map(|step| step.end_ns).fold(self.now_ns, i64::max);
        self.steps = steps;
        let signs = self.look(detector).0;
        self.steps.clear();
        signs
    }

    /// What a detector knows of a rank's last steps.
    pub fn ratios(detector: &impl Detector, rank: usize) -> Ratios {
        let mut ratios = BTreeMap::new();
        detector.ratios(&mut ratios);
        ratios.remove(&key(rank)).unwrap_or_default()
    }

    /// Shows this moment.
    pub fn view<T>(&self, see: impl FnOnce(&View<'_>) -> T) -> T {
        let mut on = Vec::new();
        running(&self.gpus, &self.ranks, &mut on);
        see(&View {
            on: &on,
            now_ns: self.now_ns,
            settings: &self.settings,
            gpus: &self.gpus,
            rings: &self.rings,
            steps: &self.steps,
            ranks: &self.ranks,
            ooms: &self.ooms,
            host_ooms: &self.host_ooms,
            flushes: &self.flushes,
            hosts: &self.hosts,
            since_ns: &self.since_ns,
        })
    }

    /// What a detector says now.
    pub fn look(&self, detector: &mut impl Detector) -> (Vec<Sign>, Vec<Trouble>) {
        let (mut troubles, mut signs) = (self.troubles.clone(), Vec::new());
        self.view(|view| detector.look(view, &mut troubles, &mut signs));
        (signs, troubles)
    }
}

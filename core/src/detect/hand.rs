//! Moments set by hand, for the detectors' tests: GPUs whose memory and readings a test writes, and what one detector says.

use super::finding::Sign;
use super::settings::Settings;
use super::steps::Step;
use super::view::{RankNow, View};
use super::{Detector, Trouble};
use crate::clock::{MILLISECOND_NS, SECOND_NS};
use crate::gpu::{Device, GpuState, Medium};
use crate::phases::Flush;
use crate::ring;

pub(super) const GIB: u64 = 1 << 30;

/// Ten minutes of one GPU.
pub(super) const RING: ring::Config =
    ring::Config { retention_ns: 600 * SECOND_NS, max_bytes: 1 << 20, resolution_ns: 1_000 };

/// GPUs of 140 GiB, and what is known of them and of ranks.
pub(super) struct Hand {
    pub now_ns: i64,
    pub settings: Settings,
    pub gpus: Vec<GpuState>,
    pub ranks: Vec<RankNow>,
    pub steps: Vec<Step>,
    pub flushes: Vec<(usize, Flush)>,
    rings: Vec<ring::Reader>,
    writers: Vec<ring::Writer>,
}

impl Hand {
    pub fn new(gpus: usize) -> Self {
        let (writers, rings) = (0..gpus).map(|_| ring::ring(RING).expect("a ring")).unzip();
        let device =
            |gpu: usize| Device { index: gpu.to_string(), memory_total_bytes: Some(140 * GIB), ..Device::default() };
        let state = |gpu| GpuState::new(device(gpu), 600 * SECOND_NS, 100 * MILLISECOND_NS);
        let gpus = (0..gpus).map(state).collect();
        let (ranks, steps, flushes) = (Vec::new(), Vec::new(), Vec::new());
        Self { now_ns: 0, settings: Settings::default(), gpus, ranks, steps, flushes, rings, writers }
    }

    /// From now on a GPU uses so much.
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
            key: ("j".into(), 0),
            gpus: vec![gpu],
            step: None,
            retries: None,
            since_ns: 0,
            heard_ns: 0,
            is_at_rest: false,
        }
    }

    /// Shows this moment.
    pub fn view<T>(&self, see: impl FnOnce(&View<'_>) -> T) -> T {
        see(&View {
            now_ns: self.now_ns,
            settings: &self.settings,
            gpus: &self.gpus,
            rings: &self.rings,
            steps: &self.steps,
            ranks: &self.ranks,
            flushes: &self.flushes,
        })
    }

    /// What a detector says now.
    pub fn look(&self, detector: &mut impl Detector) -> (Vec<Sign>, Vec<Trouble>) {
        let (mut troubles, mut signs) = (Vec::new(), Vec::new());
        self.view(|view| detector.look(view, &mut troubles, &mut signs));
        (signs, troubles)
    }
}

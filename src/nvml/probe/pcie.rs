//! The probes of PCIe traffic: the GPU's own counters, and GPM's rates.
//!
//! Invariant: "made in" depends on the counters of this GPU, as in the slow lane. If they are wide, the lane reads them
//! and not GPM's rates; if they are narrow, it reads those and not the counters. The medium lane takes a sample of GPM for what
//! the multiprocessors do, on every GPU while kernels run.

use super::{Builder, MadeIn, Probe, ProbeAnswer, Watch, said, sum};
use crate::nvml::errors::Code;
use crate::nvml::gpm::{Gpm, GpmSample};
use crate::nvml::raw::Handle;

const NARROW: &str = "narrow: wraps at 2^32, not used";
/// One call returns both directions, and needs a new sample.
const RATES: &str = "nvmlGpmSampleGet, nvmlGpmMetricsGet(20,21)";

impl<'a> Builder<'a> {
    /// The counters and the rates of a GPU. `whole` is false for a MIG instance, for which the lane reads neither.
    pub(super) fn pcie(self, whole: bool) -> Vec<Probe<'a>> {
        let lane = |used: bool| if used && whole { MadeIn::Slow } else { MadeIn::Never };
        let widths = self.nvml.raw.pcie_counters(self.handle).map(|pair| pair.map(|one| one.map(|field| field.wide)));
        let wide = widths.is_ok_and(|widths| widths.contains(&Ok(true)));
        let narrow = !wide && widths.is_ok_and(|widths| widths.contains(&Ok(false)));
        let mut probes = vec![self.counters(lane(!narrow), narrow)];
        probes.extend(self.rates(lane(!wide)));
        probes
    }

    fn counters(self, made_in: MadeIn, narrow: bool) -> Probe<'a> {
        let Self { nvml, handle } = self;
        let function = "nvmlDeviceGetFieldValues(197,198)";
        let probe = self.raw("PCIe counters, both ways", function, made_in, Watch::Dear("bytes"), move || {
            sum(nvml.raw.pcie_counters(handle)?)
        });
        if narrow { probe.remarked(NARROW) } else { probe }
    }

    fn rates(self, made_in: MadeIn) -> [Probe<'a>; 3] {
        let Self { nvml, handle } = self;
        let gpm = nvml.gpm.as_ref().ok_or(Code::FUNCTION_NOT_FOUND);
        let mut sample = gpm.and_then(|gpm| Ok((gpm, gpm.allocate()?)));
        let probe =
            |name, function, made_in, ask| Probe { name, function, made_in, watch: Watch::No, remark: None, ask };
        let rate = |direction: usize| -> Box<dyn FnMut() -> ProbeAnswer + 'a> {
            let rates = gpm.and_then(|gpm| Rates::begin(gpm, handle));
            Box::new(move || {
                rates.as_ref().map_err(|code| *code).and_then(|r| r.now(direction)).map(Some).map_err(said)
            })
        };
        [
            // A sample is not a number: rates are computed from two samples.
            probe(
                "GPM sample",
                "nvmlGpmSampleGet",
                MadeIn::Medium,
                Box::new(move || match &mut sample {
                    Ok((gpm, sample)) => gpm.fill(handle, sample).map(|()| None).map_err(said),
                    Err(code) => Err(said(*code)),
                }),
            ),
            probe("PCIe MiB/s by GPM, sent", RATES, made_in, rate(0)),
            probe("PCIe MiB/s by GPM, received", RATES, made_in, rate(1)),
        ]
    }
}

/// Rates since a first sample, which is taken early so that GPM has a long enough window.
struct Rates<'a> {
    gpm: &'a Gpm,
    handle: Handle,
    first: GpmSample,
}

impl<'a> Rates<'a> {
    fn begin(gpm: &'a Gpm, handle: Handle) -> Result<Self, Code> {
        Ok(Self { gpm, handle, first: gpm.sample(handle)? })
    }

    /// Whole MiB a second, by direction: 0 transmitted, 1 received. Each call takes a sample too, as the lane does.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a rate is finite and not below 0")]
    fn now(&self, direction: usize) -> Result<u64, Code> {
        let rates = self.gpm.pcie_rates(&self.first, &self.gpm.sample(self.handle)?)?;
        rates.into_iter().nth(direction).ok_or(Code::NO_DATA)?.map(|rate| rate.round() as u64)
    }
}

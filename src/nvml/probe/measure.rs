//! Times a call, and measures how often a counter changes.
//!
//! Enters: [`Probe`]s. Leaves: percentiles of the calls' durations, and the spacing of distinct values. Invariant: a
//! call that failed has no duration, and a counter that did not change has no period.

use super::Probe;
use std::time::{Duration, Instant};

/// What one call costs.
#[derive(Debug, Clone, PartialEq)]
pub struct Timing {
    /// Calls that succeeded.
    pub answered: usize,
    /// Calls that failed.
    pub failed: usize,
    /// Durations of the successful calls; `None` if there are none.
    pub cost: Option<Cost>,
    /// NVML's message for the first call that failed.
    pub fault: Option<String>,
    /// The last answer, if it is a number.
    pub last: Option<u64>,
}

/// Percentiles of durations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cost {
    /// Half of the calls took at most this.
    pub p50: Duration,
    /// 99 of 100 calls took at most this.
    pub p99: Duration,
    /// The slowest call.
    pub max: Duration,
}

/// How a counter changed while it was watched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Changes {
    /// How often it was read.
    pub polls: usize,
    /// Median time between two reads. A shorter period cannot be detected.
    pub poll_spacing: Duration,
    /// How often a read returned another value than the one before.
    pub count: usize,
    /// Median time between two changes; `None` with fewer than two changes.
    pub period: Option<Duration>,
}

/// Makes a call again and again: at most `most` times, and for at most `budget` unless one call alone takes longer.
pub fn time(probe: &mut Probe<'_>, most: usize, budget: Duration) -> Timing {
    /// Failures after which a call that never succeeded is given up.
    const PATIENCE: usize = 3;
    let mut timing = Timing { answered: 0, failed: 0, cost: None, fault: None, last: None };
    let mut durations = Vec::with_capacity(most);
    let begin = Instant::now();
    while durations.len() + timing.failed < most {
        let before = Instant::now();
        let answer = (probe.ask)();
        let duration = before.elapsed();
        match answer {
            Ok(value) => {
                durations.push(duration);
                timing.last = value;
            }
            Err(fault) => {
                timing.failed += 1;
                timing.fault.get_or_insert(fault);
            }
        }
        let hopeless = durations.is_empty() && timing.failed >= PATIENCE;
        if hopeless || begin.elapsed() >= budget {
            break;
        }
    }
    timing.answered = durations.len();
    timing.cost = cost(durations);
    timing
}

/// Reads all probes in turn for `watched`, with a pause between two rounds. Returns one entry per probe, `None` if the
/// probe never succeeded.
pub fn watch(probes: &mut [&mut Probe<'_>], watched: Duration, pause: Duration) -> Vec<Option<Changes>> {
    let mut seen: Vec<Seen> = probes.iter().map(|_| Seen::default()).collect();
    let begin = Instant::now();
    while begin.elapsed() < watched {
        for (probe, seen) in probes.iter_mut().zip(&mut seen) {
            if let Ok(Some(value)) = (probe.ask)() {
                seen.read(value, begin.elapsed());
            }
        }
        std::thread::sleep(pause);
    }
    seen.into_iter().map(Seen::changes).collect()
}

#[derive(Debug, Default)]
struct Seen {
    last: Option<u64>,
    read_at: Vec<Duration>,
    changed_at: Vec<Duration>,
}

impl Seen {
    fn read(&mut self, value: u64, at: Duration) {
        if self.last.is_some_and(|last| last != value) {
            self.changed_at.push(at);
        }
        self.last = Some(value);
        self.read_at.push(at);
    }

    fn changes(self) -> Option<Changes> {
        Some(Changes {
            polls: self.read_at.len(),
            poll_spacing: median_spacing(&self.read_at).or_else(|| self.read_at.first().copied())?,
            count: self.changed_at.len(),
            period: median_spacing(&self.changed_at),
        })
    }
}

fn median_spacing(times: &[Duration]) -> Option<Duration> {
    let mut spacings: Vec<Duration> =
        times.iter().zip(times.iter().skip(1)).map(|(a, b)| b.saturating_sub(*a)).collect();
    spacings.sort_unstable();
    spacings.get(spacings.len() / 2).copied()
}

fn cost(mut durations: Vec<Duration>) -> Option<Cost> {
    durations.sort_unstable();
    let at = |percent: usize| durations.get((durations.len() * percent).div_ceil(100).saturating_sub(1)).copied();
    Some(Cost { p50: at(50)?, p99: at(99)?, max: *durations.last()? })
}

#[cfg(test)]
mod tests {
    use super::super::{MadeIn, Watch};
    use super::*;

    fn probe<'a>(ask: impl FnMut() -> super::super::ProbeAnswer + 'a) -> Probe<'a> {
        Probe { name: "x", function: "x", made_in: MadeIn::Slow, watch: Watch::No, remark: None, ask: Box::new(ask) }
    }

    #[test]
    fn percentiles_are_of_the_nearest_rank() {
        let durations = (1..=200).rev().map(Duration::from_micros).collect();
        let micros = |n| Duration::from_micros(n);
        assert_eq!(cost(durations), Some(Cost { p50: micros(100), p99: micros(198), max: micros(200) }));
        assert_eq!(cost(vec![micros(7)]), Some(Cost { p50: micros(7), p99: micros(7), max: micros(7) }));
        assert_eq!(cost(Vec::new()), None);
    }

    #[test]
    fn a_call_that_is_never_answered_has_no_cost_and_is_soon_left() {
        let mut asked = 0;
        let timing = time(
            &mut probe(|| {
                asked += 1;
                Err("not supported".into())
            }),
            1000,
            Duration::from_secs(1),
        );
        assert_eq!((timing.answered, timing.failed, timing.cost, timing.last), (0, 3, None, None));
        assert_eq!(timing.fault.as_deref(), Some("not supported"));
        assert_eq!(asked, 3);
    }

    #[test]
    fn a_change_is_a_value_that_differs_from_the_last() {
        let mut seen = Seen::default();
        for (at, value) in [5, 5, 7, 7, 5, 5, 9].into_iter().enumerate() {
            seen.read(value, Duration::from_millis(10 * at as u64));
        }
        let changes = seen.changes();
        assert_eq!(changes.as_ref().map(|changes| changes.count), Some(3));
        assert_eq!(changes.and_then(|changes| changes.period), Some(Duration::from_millis(20)));
        assert_eq!(Seen::default().changes(), None);
    }
}

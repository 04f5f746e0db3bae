//! The rule by the marks: a phase of the late rank is longer than that of its peers, by what later phases of the peers are longer,
//! because they wait in them.

use super::lag::{Found, SLOWDOWN};
use crate::detect::finding::{Certainty, Evidence, HumanDuration, LagCause, seconds};
use crate::detect::peers::Member;
use crate::detect::settings::Settings;
use crate::detect::steps::{Step, is_one_of};
use crate::detect::view::{median_of_others, ratio};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Peers must have waited, in later phases, for at least this part of the lag. The late phase must also end later than
/// theirs by at least this part of it.
const WAITED_SHARE: f64 = 0.5;

/// The phases of a step by name, in the order of their first begin, without communication, which runs beside them; and last the
/// time that no phase covers: the host of a rank that runs ahead of its GPU waits there, at the end of the step.
pub(super) struct Phases(Vec<OnePhase>);

/// How long all phases of one name took in a step, and when the last one ended, nanoseconds.
struct OnePhase {
    name: Arc<str>,
    length_ns: i64,
    end_ns: i64,
}

/// The name of the time that no phase covers.
const UNMARKED: &str = "unmarked time";

impl Phases {
    pub fn of(step: &Step, settings: &Settings) -> Self {
        let mut all: Vec<OnePhase> = Vec::new();
        let is_comm = |name: &str| is_one_of(name, &settings.comm_phases);
        let mut phases: Vec<_> = step.phases.iter().filter(|phase| !is_comm(&phase.name)).collect();
        phases.sort_by_key(|phase| phase.begin_ns);
        for phase in phases {
            let (length_ns, end_ns) = (phase.end_ns - phase.begin_ns, phase.end_ns);
            match all.iter_mut().find(|known| known.name == phase.name) {
                Some(known) => {
                    (known.length_ns, known.end_ns) = (known.length_ns + length_ns, known.end_ns.max(end_ns));
                }
                None => all.push(OnePhase { name: Arc::clone(&phase.name), length_ns, end_ns }),
            }
        }
        // Where phases overlap, nothing is known of it.
        let marked_ns: i64 = all.iter().map(|phase| phase.length_ns).sum();
        let length_ns = (step.length_ns() - marked_ns).max(0);
        all.push(OnePhase { name: UNMARKED.into(), length_ns, end_ns: step.end_ns });
        Self(all)
    }
}

/// By name, the lengths of a phase in all ranks of a step, and its ends, each in order. A rank without the phase spends no time in
/// it.
pub(super) struct Lengths(BTreeMap<Arc<str>, (Vec<i64>, Vec<i64>)>);

impl Lengths {
    pub fn of(all: &[Phases]) -> Self {
        let mut lengths: BTreeMap<Arc<str>, (Vec<i64>, Vec<i64>)> = BTreeMap::new();
        for phase in all.iter().flat_map(|phases| &phases.0) {
            let (of_phase, ends) = lengths.entry(Arc::clone(&phase.name)).or_default();
            of_phase.push(phase.length_ns);
            ends.push(phase.end_ns);
        }
        for (of_phase, ends) in lengths.values_mut() {
            of_phase.resize(all.len(), 0);
            of_phase.sort_unstable();
            ends.sort_unstable();
        }
        Self(lengths)
    }

    /// The median length of a phase in the ranks but the one that took `own_ns`.
    fn others_ns(&self, name: &str, own_ns: i64) -> Option<i64> {
        median_of_others(&self.0.get(name)?.0, own_ns)
    }

    /// The median end of a phase in the other ranks.
    fn others_end_ns(&self, name: &str, own_ns: i64) -> Option<i64> {
        median_of_others(&self.0.get(name)?.1, own_ns)
    }
}

/// The phase with the largest lag of one rank in one step, if its peers waited for it in later phases; `None` if the
/// rank is not late. The phase must also end later than the peers': if all end together, the rank itself waited in it.
/// Peers that wait for a data phase may also do so in unmarked time. For other phases unmarked time does not count: a
/// host that runs ahead of its GPU is held up there by chance.
pub(super) fn judge<'a>(
    settings: &Settings,
    lengths: &Lengths,
    own: &Phases,
    member: &'a Member<'_>,
) -> Option<Found<'a>> {
    let step_ns = member.step.length_ns();
    #[allow(clippy::cast_precision_loss, reason = "a share of milliseconds")]
    let is_most = |part_ns: i64, of_ns: i64| part_ns as f64 >= WAITED_SHARE * of_ns as f64;
    let mut late: Option<(&OnePhase, bool, i64, i64, &Arc<str>)> = None;
    for (at, phase) in own.0.iter().enumerate().filter(|(_, phase)| &*phase.name != UNMARKED) {
        let lag_ns = phase.length_ns - lengths.others_ns(&phase.name, phase.length_ns)?;
        let slows = ratio(step_ns, step_ns - lag_ns).is_some_and(|slowdown| slowdown >= SLOWDOWN);
        if lag_ns < settings.lag_ns || !slows || late.is_some_and(|late| late.2 >= lag_ns) {
            continue;
        }
        let ends_later_ns = phase.end_ns - lengths.others_end_ns(&phase.name, phase.end_ns)?;
        let is_data = is_one_of(&phase.name, &settings.data_phases);
        let later = own.0.iter().skip(at + 1).filter(|later| is_data || &*later.name != UNMARKED);
        let (mut waited_ns, mut longest) = (0, None);
        for later in later {
            let wait_ns = lengths.others_ns(&later.name, later.length_ns)? - later.length_ns;
            waited_ns += wait_ns.max(0);
            longest = longest.max(Some((wait_ns, &later.name)));
        }
        if let Some((_, in_phase)) = longest.filter(|_| is_most(waited_ns, lag_ns) && is_most(ends_later_ns, lag_ns)) {
            late = Some((phase, is_data, lag_ns, waited_ns, in_phase));
        }
    }
    let (phase, is_data, lag_ns, waited_ns, in_phase) = late?;
    let name = &phase.name;
    Some(Found {
        member,
        phase: Some(Arc::clone(name)),
        cause: is_data.then_some(LagCause::Data),
        lag_ns,
        collected_ns: 0,
        host_share: 0.0,
        step_ns,
        lost_ns: lag_ns,
        begin_ns: member.step.begin_ns,
        hold_ns: 0,
        evidence: vec![Evidence { name: "peers_waited_seconds", value: seconds(waited_ns) }],
        numbers: format!(
            "In {} its {name} took {}, that of the other ranks {} at the median, and they spent {} more in {in_phase}.",
            member.step.title(),
            HumanDuration(phase.length_ns),
            HumanDuration(phase.length_ns - lag_ns),
            HumanDuration(waited_ns),
        ),
        certainty: Certainty::Observed,
    })
}

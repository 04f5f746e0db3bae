//! The daemon's active and ended findings and their incidents, made from the detectors' signs.
//!
//! Enters: signs. Leaves: findings, each with an id and that of its incident. Invariants: a sign of an active finding prolongs it; a
//! finding whose signs have run out ended at the time of its last sign, and a later sign raises a new finding; both lists are
//! bounded, and the owner with the most findings makes room. An active finding about a GPU without a job never makes room for a
//! job's.

use super::detector::Ratios;
use super::finding::{Finding, FindingKind, Said, Severity, Sign, Subject};
use super::incident::{Cause, Incident, Incidents};
use super::names::Names;
use super::tally::{Counted, Incurred, Lost, Productive, SubjectCounts};
use crate::clock::SECOND_NS;
use crate::gpu::Workload;
use crate::jobs::JobId;
use crate::phases::RankKey;
use crate::scope::Scope;
use crate::shares;
use std::cmp::Reverse;
use std::collections::{BTreeMap, VecDeque};

/// Active findings at a time. Beyond it a new sign replaces another finding (`make_room`), or is dropped and counted.
const MOST_ACTIVE: usize = 256;
/// Findings that have ended and are kept.
const MOST_ENDED: usize = 256;

/// All findings of the daemon.
#[derive(Debug, Default)]
pub struct Board {
    active: BTreeMap<Key, Finding>,
    ended: VecDeque<Finding>,
    raised: SubjectCounts<Counted>,
    book: IncidentBook,
    dropped: u64,
    next_id: u64,
    ratios: BTreeMap<RankKey, Ratios>,
}

/// A GPU is identified by its UUID: after the driver is reopened, its position may be another GPU's.
type Key = (FindingKind, Option<String>, Option<JobId>, Option<u32>, Option<u64>);

/// What one turn changed.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct Change {
    /// Findings that were raised.
    pub raised: Vec<Finding>,
    /// Findings that became more severe.
    pub escalated: Vec<Finding>,
    /// Findings that ended.
    pub ended: Vec<Finding>,
    /// Of those that were raised or became more severe, the ones that are news of their incident
    /// ([`Incident::is_news`](super::incident::Incident)).
    pub notable: Vec<Finding>,
    /// Incidents that began or came back, as they are after this turn.
    pub begun: Vec<Incident>,
    /// Incidents of which nothing goes on any more.
    pub over: Vec<Incident>,
    /// All that was seen.
    pub signs: Vec<Sign>,
}

/// The incidents, and what is counted of them.
#[derive(Debug, Default)]
struct IncidentBook {
    incidents: Incidents,
    incurred: SubjectCounts<Incurred>,
    lost: SubjectCounts<Lost>,
    productive: Productive,
}

impl IncidentBook {
    /// Puts a finding into the incident to which it belongs now. Returns whether it is news of that.
    fn place(&mut self, finding: &mut Finding, now_ns: i64, change: &mut Change) -> bool {
        let joined = self.incidents.raise(finding, now_ns);
        finding.incident = joined.id;
        if let Some(incident) = self.incidents.get(joined.id).filter(|_| joined.has_come) {
            self.incurred.add(Incurred::of(incident), 1, now_ns);
            change.begun.push(incident.clone());
        }
        joined.is_news
    }

    /// Adds what was lost to an incident and to its job's count.
    fn lose(&mut self, incident: u64, lost_ns: Option<i64>, now_ns: i64) {
        let Some(lost_ns) = lost_ns.and_then(|lost_ns| u64::try_from(lost_ns).ok()) else { return };
        self.incidents.lose(incident, lost_ns);
        if let Some(lost) = self.incidents.get(incident).and_then(Lost::of) {
            self.productive.owe(&lost.job, lost_ns);
            self.lost.add(lost, lost_ns, now_ns);
        }
    }
}

impl Board {
    /// Takes a turn's signs.
    pub fn update(&mut self, signs: Vec<Sign>, now_ns: i64, names: impl Names) -> Change {
        let mut change = Change { signs: signs.clone(), ..Change::default() };
        self.end(now_ns, &mut change, |_| true);
        self.settle(now_ns, &mut change);
        for mut sign in signs {
            let gpu = sign.subject.gpu.and_then(|gpu| names.gpu(gpu));
            // Any sender can invent a job, so a finding about a job without a GPU is never critical.
            if sign.subject.job.is_some() && gpu.is_none() {
                sign.severity = sign.severity.min(Severity::Warning);
            }
            let (uuid, subject) = (gpu.as_ref().map(|(_, uuid)| uuid.clone()), &sign.subject);
            let key = (sign.kind, uuid, subject.job.clone(), subject.rank, sign.code);
            let lost_ns = sign.lost_ns;
            if let Some(finding) = self.active.get_mut(&key) {
                let before = finding.sign.severity;
                finding.prolong(sign, now_ns);
                // As its words, they are those of the newest sign.
                if let Some(workloads) = names.workloads(&finding.sign.subject) {
                    finding.workloads = workloads;
                }
                let is_worse = self.book.incidents.prolong(finding);
                if finding.sign.severity > before {
                    change.notable.extend(is_worse.then(|| finding.clone()));
                    change.escalated.push(finding.clone());
                }
                self.book.lose(finding.incident, lost_ns, now_ns);
                continue;
            }
            if self.active.len() >= MOST_ACTIVE && !self.make_room(&sign, &mut change) {
                self.dropped += 1;
                continue;
            }
            self.next_id += 1;
            let id = self.next_id;
            let workloads = names.workloads(&sign.subject).unwrap_or_default();
            let mut finding = Finding::raised(id, gpu, workloads, sign, now_ns);
            let is_news = self.book.place(&mut finding, now_ns, &mut change);
            self.book.lose(finding.incident, lost_ns, now_ns);
            self.raised.add(Counted::of(&finding), 1, now_ns);
            change.notable.extend(is_news.then(|| finding.clone()));
            change.raised.push(finding.clone());
            self.active.insert(key, finding);
        }
        self.settle(now_ns, &mut change);
        // One whose finding went to its cause's incident in the same turn is gone.
        change.begun.retain_mut(|begun| {
            let incident = self.book.incidents.get(begun.id);
            incident.inspect(|incident| begun.clone_from(incident)).is_some()
        });
        change
    }

    /// Moves late ranks and slow steps whose cause was found, or is over, to the incident to which they belong now.
    fn settle(&mut self, now_ns: i64, change: &mut Change) {
        let book = &mut self.book;
        for finding in self.active.values_mut() {
            if !book.incidents.is_misplaced(finding, now_ns) {
                continue;
            }
            let (from, over) = (finding.incident, book.incidents.end(finding));
            book.place(finding, now_ns, change);
            book.incidents.absorb(from, finding.incident);
            change.over.extend(over.filter(|over| book.incidents.get(over.id).is_some()));
        }
    }

    /// Ends what has run out, of those that `may` end.
    fn end(&mut self, now_ns: i64, change: &mut Change, may: impl Fn(&Finding) -> bool) {
        let has_run_out = |finding: &Finding| finding.sign.until_ns < now_ns && may(finding);
        let keys: Vec<Key> =
            self.active.iter().filter(|(_, finding)| has_run_out(finding)).map(|(key, _)| key.clone()).collect();
        keys.iter().for_each(|key| drop(self.remove(key, change)));
    }

    /// Ends a finding at the time of its last sign, even if the board waited longer for another one.
    fn remove(&mut self, key: &Key, change: &mut Change) -> Option<Finding> {
        let mut finding = self.active.remove(key)?;
        finding.ended_ns = Some(finding.seen_ns);
        change.over.extend(self.book.incidents.end(&finding));
        change.ended.push(finding.clone());
        self.ended.push_back(finding.clone());
        if self.ended.len() > MOST_ENDED {
            let largest = shares::largest(self.ended.iter().map(Finding::owner)).map(|(owner, _)| owner.cloned());
            let oldest = self.ended.iter().position(|ended| Some(ended.owner().cloned()) == largest);
            oldest.and_then(|oldest| self.ended.remove(oldest));
        }
        Some(finding)
    }

    /// Ends an active finding to make room for a sign. Returns whether one could be ended. If another owner has at least two
    /// findings more than the sign's owner, or the sign has no owner, it is the newest of the least severe findings of the owner
    /// with the most. Otherwise it is the oldest of the least severe findings of the sign's owner, if the sign is more severe.
    fn make_room(&mut self, sign: &Sign, change: &mut Change) -> bool {
        let own = sign.subject.owner();
        let owners = || self.active.values().map(Finding::owner);
        let largest = shares::largest(owners().flatten());
        let had = owners().filter(|owner| *owner == own).count();
        let other = largest.filter(|(owner, count)| own.is_none() || (own != Some(*owner) && *count > had + 1));
        let whose = other.map_or(own, |(owner, _)| Some(owner));
        let its = self.active.iter().filter(|(_, finding)| finding.owner() == whose);
        let place = if other.is_some() {
            its.min_by_key(|(_, finding)| (finding.sign.severity, Reverse(finding.id)))
        } else {
            let least = its.min_by_key(|(_, finding)| (finding.sign.severity, finding.id));
            least.filter(|(_, finding)| finding.sign.severity < sign.severity)
        };
        let place = place.map(|(key, _)| key.clone());
        place.and_then(|key| self.remove(&key, change)).is_some()
    }

    /// Advances while there is no node: findings run out, except those about lost GPUs, and the ratios of ranks that are gone
    /// are dropped.
    pub(super) fn advance_without_node(&mut self, now_ns: i64, is_known: impl Fn(&RankKey) -> bool) -> Change {
        self.ratios.retain(|key, _| is_known(key));
        let lost = self.active.values_mut().filter(|finding| finding.sign.kind == FindingKind::GpuLost);
        lost.for_each(|finding| finding.seen_ns = now_ns);
        let mut change = Change::default();
        self.end(now_ns, &mut change, |finding| finding.sign.kind != FindingKind::GpuLost);
        change
    }

    /// Prolongs the findings of lost GPUs that are not among these UUIDs: they are still lost. A missing MIG instance was
    /// removed, so its finding may end.
    pub(super) fn keep_lost(&mut self, uuids: &[String], now_ns: i64) {
        for ((kind, uuid, ..), finding) in &mut self.active {
            if *kind == FindingKind::GpuLost
                && uuid.as_ref().is_some_and(|uuid| !uuids.contains(uuid) && !uuid.starts_with("MIG-"))
            {
                (finding.sign.until_ns, finding.seen_ns) = (now_ns + SECOND_NS, now_ns);
            }
        }
    }

    /// Signs that were dropped because no active finding could make room.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// From now on these are the ranks' ratios.
    pub(super) fn set_ratios(&mut self, ratios: BTreeMap<RankKey, Ratios>) {
        self.ratios = ratios;
    }

    /// By rank, what its last steps were like.
    #[must_use]
    pub fn ratios(&self) -> &BTreeMap<RankKey, Ratios> {
        &self.ratios
    }

    /// Findings that go on.
    pub fn active(&self) -> impl Iterator<Item = &Finding> {
        self.active.values()
    }

    /// Findings that have ended, newest first.
    pub fn ended(&self) -> impl Iterator<Item = &Finding> {
        self.ended.iter().rev()
    }

    /// Findings that go on, and those that have ended.
    pub fn all(&self) -> impl Iterator<Item = &Finding> {
        self.active().chain(self.ended())
    }

    /// Incidents that go on or are over, newest first.
    pub fn incidents(&self) -> impl Iterator<Item = &Incident> {
        self.book.incidents.all()
    }

    /// The number of findings that were raised, by kind and subject. A new count is returned as 0 for its first `settle_ns`. Each
    /// kind also has a count without a subject, which is always 0, so that it has a series from the start.
    pub(super) fn counts(&mut self, now_ns: i64, settle_ns: i64) -> Vec<(Counted, u64)> {
        let none = |kind| (Counted { kind, gpu: None, job: None, rank: None }, 0);
        let mut counts: BTreeMap<Counted, u64> = FindingKind::ALL.into_iter().map(none).collect();
        counts.extend(self.raised.shown(now_ns, settle_ns));
        counts.into_iter().collect()
    }

    /// How often incidents were there, by cause and subject, as [`counts`](Self::counts).
    pub(super) fn incurred(&mut self, now_ns: i64, settle_ns: i64) -> Vec<(Incurred, u64)> {
        let none = |cause| (Incurred { cause, whose: None }, 0);
        let mut counts: BTreeMap<Incurred, u64> = Cause::ALL.into_iter().map(none).collect();
        counts.extend(self.book.incurred.shown(now_ns, settle_ns));
        counts.into_iter().collect()
    }

    /// Adds the time that ranks of a job spent in steps, before the signs of these steps are taken.
    pub(super) fn add_time(&mut self, job: &JobId, time_ns: u64, now_ns: i64) {
        self.book.productive.add(job, time_ns, now_ns);
    }

    /// Nanoseconds in steps that were not lost, by job. A new count is returned as 0 for its first `settle_ns`.
    pub(super) fn productive(&mut self, now_ns: i64, settle_ns: i64) -> Vec<(JobId, u64)> {
        self.book.productive.shown(now_ns, settle_ns)
    }

    /// Nanoseconds that ranks have lost, by job and cause. A new count is returned as 0 for its first `settle_ns`.
    pub(super) fn lost(&mut self, now_ns: i64, settle_ns: i64) -> Vec<(Lost, u64)> {
        self.book.lost.shown(now_ns, settle_ns)
    }
}

impl Subject {
    /// The owner of its job; `None` without a job, when the subject is a GPU alone.
    pub(super) fn owner(&self) -> Option<&Scope> {
        self.job.as_ref().map(JobId::scope)
    }
}

impl Finding {
    pub(super) fn owner(&self) -> Option<&Scope> {
        self.sign.subject.owner()
    }

    /// As its first sign has it, in no incident yet.
    fn raised(id: u64, gpu: Option<(String, String)>, workloads: Vec<Workload>, sign: Sign, now_ns: i64) -> Self {
        let (incident, first, ended_ns) = (0, Said::of(&sign, now_ns), None);
        Self { id, incident, gpu, workloads, first, sign, raised_ns: now_ns, seen_ns: now_ns, ended_ns, signs: 1 }
    }

    fn prolong(&mut self, sign: Sign, now_ns: i64) {
        let before = &self.sign;
        let severity = before.severity.max(sign.severity);
        let certainty = before.certainty.max(sign.certainty);
        let begin_ns = before.begin_ns.min(sign.begin_ns);
        let until_ns = before.until_ns.max(sign.until_ns);
        let waiting_ranks = std::mem::take(&mut self.sign.waiting_ranks);
        self.sign = Sign { severity, certainty, begin_ns, until_ns, ..sign };
        self.sign.add_waiting(&waiting_ranks);
        self.seen_ns = now_ns;
        self.signs += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::super::finding::{Certainty, Text};
    use super::*;
    use crate::gpu::PodName;

    /// Every GPU has this pod, or none is known.
    struct Named(Option<&'static str>);

    impl Names for &Named {
        fn gpu(&self, position: usize) -> Option<(String, String)> {
            of(position)
        }

        fn workloads(&self, _subject: &Subject) -> Option<Vec<Workload>> {
            let name = |pod: &str| PodName { namespace: "ml".into(), pod: pod.into(), container: String::new() };
            self.0.map(|pod| vec![Workload::Pod(name(pod))])
        }
    }

    #[test]
    fn a_finding_names_the_pods_of_its_newest_sign_and_its_incident_all_of_them() {
        let (mut board, until_ns) = (Board::default(), 100);
        let mut take = |names: &Named| {
            board.update(vec![sign(FindingKind::Xid, 0, Severity::Warning, until_ns)], 1, names);
            let pods = |finding: &Finding| finding.workloads.iter().map(ToString::to_string).collect::<Vec<_>>();
            let incident = board.incidents().next().expect("one");
            (
                pods(board.active().next().expect("one")),
                incident.workloads.iter().map(ToString::to_string).collect::<Vec<_>>(),
            )
        };
        let [none, a, b]: [Vec<String>; 3] = [vec![], vec!["pod ml/a".into()], vec!["pod ml/b".into()]];
        assert_eq!(take(&Named(None)), (none.clone(), none));
        assert_eq!(take(&Named(Some("a"))), (a.clone(), a.clone()));
        assert_eq!(take(&Named(None)), (a.clone(), a.clone()), "not known now");
        assert_eq!(take(&Named(Some("b"))), (b.clone(), [a, b].concat()), "a pod in its place");
    }

    fn sign(kind: FindingKind, gpu: usize, severity: Severity, until_ns: i64) -> Sign {
        Sign {
            kind,
            subject: Subject { gpu: Some(gpu), ..Subject::default() },
            severity,
            certainty: Certainty::Suspected,
            begin_ns: 0,
            until_ns,
            step: None,
            code: None,
            lag_cause: None,
            waiting_ranks: Vec::new(),
            lost_ns: None,
            evidence: Vec::new(),
            text: Text::default(),
        }
    }

    #[allow(clippy::unnecessary_wraps, reason = "the board asks so")]
    fn of(gpu: usize) -> Option<(String, String)> {
        Some((gpu.to_string(), format!("GPU-{gpu}")))
    }

    #[test]
    fn signs_prolong_what_goes_on_and_raise_anew_what_has_ended() {
        let mut board = Board::default();
        let raised = board.update(vec![sign(FindingKind::GpuLost, 1, Severity::Warning, 10)], 0, of).raised;
        assert_eq!(raised.len(), 1);
        for (severity, until_ns, now_ns) in [(Severity::Critical, 20, 5), (Severity::Info, 12, 8)] {
            let change = board.update(vec![sign(FindingKind::GpuLost, 1, severity, until_ns)], now_ns, of);
            assert!(change.raised.is_empty() && change.ended.is_empty() && change.signs.len() == 1);
        }
        let finding = board.active().next().expect("it goes on");
        assert_eq!((finding.signs, finding.sign.severity, finding.sign.until_ns), (3, Severity::Critical, 20));
        assert_eq!(board.update(Vec::new(), 21, of).ended[0].id, raised[0].id);
        assert_eq!(board.active().count(), 0);
        let again = board.update(vec![sign(FindingKind::GpuLost, 1, Severity::Info, 40)], 30, of).raised;
        assert_ne!(again[0].id, raised[0].id);
        let counts = board.counts(30, 0);
        assert_eq!(counts.iter().map(|(_, count)| count).sum::<u64>(), 2, "{counts:?}");
    }

    #[test]
    fn the_first_and_the_newest_sign_keep_their_words() {
        let mut board = Board::default();
        let says = |step: u64| {
            let text = Text { what: format!("in step {step}"), ..Text::default() };
            Sign { step: Some(step), text, ..sign(FindingKind::Straggler, 0, Severity::Info, 100) }
        };
        for step in [15, 20, 36] {
            board.update(vec![says(step)], step.cast_signed(), of);
        }
        let finding = board.active().next().expect("it goes on");
        let (first, newest) = (&finding.first, &finding.sign);
        assert_eq!((first.seen_ns, first.step, &*first.what), (15, Some(15), "in step 15"));
        assert_eq!((finding.seen_ns, newest.step, &*newest.text.what), (36, Some(36), "in step 36"));
    }

    #[test]
    fn gpus_kinds_and_codes_are_apart() {
        let mut board = Board::default();
        let xid = |code| Sign { code: Some(code), ..sign(FindingKind::Xid, 0, Severity::Info, 10) };
        let signs = vec![
            sign(FindingKind::GpuLost, 0, Severity::Info, 10),
            sign(FindingKind::GpuLost, 1, Severity::Info, 10),
            sign(FindingKind::IdleGpu, 0, Severity::Info, 10),
            xid(13),
            xid(79),
        ];
        assert_eq!(board.update(signs, 0, of).raised.len(), 5);
    }

    #[test]
    fn a_lost_gpu_stays_lost_while_there_is_no_node_and_where_it_does_not_come_back() {
        let mut board = Board::default();
        board.update(
            vec![sign(FindingKind::GpuLost, 0, Severity::Critical, 5), sign(FindingKind::Xid, 0, Severity::Info, 5)],
            0,
            of,
        );
        let change = board.advance_without_node(10, |_| false);
        assert_eq!(change.ended.iter().map(|finding| finding.sign.kind).collect::<Vec<_>>(), [FindingKind::Xid]);
        board.keep_lost(&["GPU-1".to_owned()], 20);
        assert!(board.update(Vec::new(), 21, of).ended.is_empty());
        assert_eq!(board.update(Vec::new(), 30 + SECOND_NS, of).ended.len(), 1);
    }

    #[test]
    fn what_becomes_worse_is_reported() {
        let mut board = Board::default();
        board.update(vec![sign(FindingKind::Straggler, 0, Severity::Info, 5)], 0, of);
        let change = board.update(vec![sign(FindingKind::Straggler, 0, Severity::Warning, 5)], 1, of);
        assert_eq!((change.raised.len(), change.escalated.len()), (0, 1));
    }

    #[test]
    fn both_lists_are_bounded_and_the_severe_find_a_place() {
        let mut board = Board::default();
        let many = (0..1000).map(|gpu| sign(FindingKind::IdleGpu, gpu, Severity::Info, 10)).collect();
        board.update(many, 0, of);
        assert_eq!((board.active().count(), board.dropped()), (MOST_ACTIVE, 1000 - MOST_ACTIVE as u64));
        let change = board.update(vec![sign(FindingKind::GpuLost, 7, Severity::Critical, 10)], 1, of);
        assert_eq!((change.raised.len(), change.ended.len(), board.active().count()), (1, 1, MOST_ACTIVE));
        board.update(Vec::new(), 11, of);
        assert_eq!(board.ended().count(), MOST_ENDED);
    }

    /// A critical finding about a rank of a user's job.
    fn of_user(user: &str, rank: u32) -> Sign {
        let job = Some(JobId::new(Scope::of(None, Some(user)), "train"));
        let subject = Subject { gpu: Some(0), job, rank: Some(rank) };
        Sign { subject, ..sign(FindingKind::AllocatorThrash, 0, Severity::Critical, 10) }
    }

    fn held(board: &Board, user: Option<&str>) -> usize {
        board.active().filter(|finding| finding.owner().and_then(Scope::user) == user).count()
    }

    #[test]
    fn whatever_one_owner_invents_the_driver_and_the_others_find_their_places() {
        let mut board = Board::default();
        let flood = || (0..1_000).map(|rank| of_user("666", rank));
        board.update(flood().collect(), 0, of);
        assert_eq!((held(&board, Some("666")), board.dropped()), (MOST_ACTIVE, 1_000 - MOST_ACTIVE as u64));
        let lost =
            [sign(FindingKind::GpuLost, 3, Severity::Critical, 10), sign(FindingKind::Xid, 3, Severity::Info, 10)];
        let others = lost.into_iter().chain((0..20).map(|rank| of_user("1", rank)));
        for now_ns in 1..4 {
            // The flood comes before them, and after.
            let signs = flood().chain(others.clone()).chain(flood()).collect();
            board.update(signs, now_ns, of);
            assert_eq!((held(&board, None), held(&board, Some("1"))), (2, 20), "{now_ns}");
        }
        assert_eq!((held(&board, Some("666")), board.active().count()), (MOST_ACTIVE - 22, MOST_ACTIVE));
        // Two that flood have half each, and the driver is heard although all are critical.
        board.update((0..1_000).map(|rank| of_user("667", rank)).collect(), 5, of);
        let many = (0..MOST_ACTIVE).map(|gpu| sign(FindingKind::IdleGpu, gpu, Severity::Info, 10));
        assert_eq!(held(&board, Some("1")), 20);
        assert!(held(&board, Some("666")).abs_diff(held(&board, Some("667"))) <= 1);
        board.update(many.collect(), 6, of);
        assert_eq!(held(&board, None), MOST_ACTIVE, "each GPU of a large node");
    }

    #[test]
    fn what_has_ended_of_one_owner_pushes_out_nothing_of_another() {
        let mut board = Board::default();
        board.update((0..5).map(|rank| of_user("1", rank)).collect(), 0, of);
        board.update(vec![sign(FindingKind::GpuLost, 3, Severity::Critical, 10)], 0, of);
        for nth in 0..20 {
            board.update((0..200).map(|rank| Sign { until_ns: nth, ..of_user("666", rank) }).collect(), nth, of);
        }
        board.update(Vec::new(), 11, of);
        board.update(Vec::new(), 100, of);
        let ended = |user| board.ended().filter(|finding| finding.owner().and_then(Scope::user) == user).count();
        assert_eq!((ended(None), ended(Some("1")), board.ended().count()), (1, 5, MOST_ENDED));
    }

    #[test]
    fn counts_of_one_owner_push_out_none_of_another() {
        let mut board = Board::default();
        board.update(vec![of_user("1", 7)], 0, of);
        for rank in 0..2 * u32::try_from(super::super::tally::MOST_SERIES).expect("few") {
            board.update(vec![Sign { until_ns: 1, ..of_user("666", rank) }], 2 + i64::from(rank), of);
        }
        let of_one = |(of, count): &(Counted, u64)| {
            (of.job.as_ref().and_then(|job| job.scope().user()) == Some("1")).then_some(*count)
        };
        assert_eq!(board.counts(10_000, 0).iter().find_map(of_one), Some(1));
    }

    #[test]
    fn a_job_that_is_on_no_gpu_raises_nothing_critical() {
        let mut board = Board::default();
        let nowhere = Sign { subject: Subject { gpu: None, ..of_user("1", 0).subject }, ..of_user("1", 0) };
        board.update(vec![nowhere, of_user("1", 1)], 0, of);
        let severities: Vec<_> = board.active().map(|finding| finding.sign.severity).collect();
        assert_eq!(severities, [Severity::Warning, Severity::Critical]);
    }

    #[test]
    fn what_goes_on_keeps_its_begin_and_the_highest_of_all_it_was() {
        let mut board = Board::default();
        let of_gpu = |begin_ns, certainty, severity| Sign {
            begin_ns,
            certainty,
            ..sign(FindingKind::Straggler, 0, severity, 5)
        };
        board.update(vec![of_gpu(7, Certainty::Confirmed, Severity::Warning)], 0, of);
        let change = board.update(vec![of_gpu(3, Certainty::Suspected, Severity::Warning)], 1, of);
        assert!(change.escalated.is_empty(), "no worse than before");
        board.update(vec![of_gpu(9, Certainty::Observed, Severity::Info)], 2, of);
        let finding = board.active().next().expect("it goes on");
        assert_eq!((finding.sign.begin_ns, finding.sign.certainty), (3, Certainty::Confirmed));
        assert_eq!((finding.raised_ns, finding.seen_ns, finding.sign.severity), (0, 2, Severity::Warning));
    }

    #[test]
    fn what_is_raised_is_apart_from_what_becomes_worse() {
        let mut board = Board::default();
        board.update(vec![sign(FindingKind::Straggler, 0, Severity::Info, 5)], 0, of);
        let signs =
            vec![sign(FindingKind::Straggler, 0, Severity::Warning, 5), sign(FindingKind::Xid, 1, Severity::Info, 6)];
        let change = board.update(signs, 1, of);
        let kinds = |findings: &[Finding]| findings.iter().map(|finding| finding.sign.kind).collect::<Vec<_>>();
        assert_eq!(
            (kinds(&change.raised), kinds(&change.escalated)),
            (vec![FindingKind::Xid], vec![FindingKind::Straggler])
        );
        assert!(board.update(Vec::new(), 5, of).ended.is_empty(), "it lasts through its last moment");
        assert_eq!(board.update(Vec::new(), 6, of).ended.len(), 1);
        let all: Vec<_> = board.all().map(|finding| (finding.sign.kind, finding.ended_ns)).collect();
        assert_eq!(all, [(FindingKind::Xid, None), (FindingKind::Straggler, Some(1))], "it ended with its last sign");
    }

    #[test]
    fn each_subject_has_a_count_of_its_own_which_is_0_first_and_never_falls() {
        let mut board = Board::default();
        let of_gpu = |board: &mut Board, at_ns| {
            board.update(vec![sign(FindingKind::Xid, 1, Severity::Info, at_ns)], at_ns, of);
            board.update(Vec::new(), at_ns + 1, of);
        };
        let count = |board: &mut Board, at_ns, settle_ns| {
            let counts = board.counts(at_ns, settle_ns);
            assert_eq!(counts.iter().filter(|(of, _)| of.gpu.is_none()).count(), FindingKind::ALL.len());
            assert!(counts.iter().all(|(of, count)| of.gpu.is_some() || *count == 0));
            counts.iter().find_map(|(of, count)| (of.gpu.as_ref()?.0 == "1").then_some(*count))
        };
        assert_eq!(count(&mut board, 0, 30), None);
        of_gpu(&mut board, 10);
        of_gpu(&mut board, 20);
        assert_eq!([15, 39, 40].map(|at_ns| count(&mut board, at_ns, 30)), [Some(0), Some(0), Some(2)]);
        of_gpu(&mut board, 41);
        assert_eq!(count(&mut board, 41, 1_000), Some(3), "a slower reader has come");
        // Others come, and the least recent is forgotten; when it comes back it begins at 0.
        for gpu in 2..2 + super::super::tally::MOST_SERIES {
            board.update(vec![sign(FindingKind::Xid, gpu, Severity::Info, 50)], 50, of);
            board.update(Vec::new(), 51, of);
        }
        assert_eq!(count(&mut board, 51, 0), None);
        of_gpu(&mut board, 60);
        assert_eq!([60, 90].map(|at_ns| count(&mut board, at_ns, 30)), [Some(0), Some(1)]);
    }

    #[test]
    fn ratios_are_those_of_the_last_turn_and_of_ranks_that_are_known() {
        let mut board = Board::default();
        let of = |rank: u32| (("j".into(), rank), Ratios { data_stall: Some(f64::from(rank)), ..Ratios::default() });
        board.set_ratios([of(1), of(2)].into());
        assert_eq!(board.ratios(), &[of(1), of(2)].into());
        board.advance_without_node(0, |key| key.1 == 2);
        assert_eq!(board.ratios(), &[of(2)].into());
    }

    #[test]
    fn a_gpu_that_is_lost_ends_when_it_answers_or_was_taken_apart() {
        let lost = |uuid: &'static str, uuids: &[String]| {
            let mut board = Board::default();
            let name = move |_: usize| Some((String::new(), uuid.to_owned()));
            board.update(vec![sign(FindingKind::GpuLost, 0, Severity::Critical, 5)], 0, name);
            board.keep_lost(uuids, 20);
            board.update(Vec::new(), 20, name).ended.len()
        };
        let here = ["GPU-1".to_owned()];
        assert_eq!((lost("GPU-0", &here), lost("GPU-1", &here), lost("MIG-0", &here)), (0, 1, 1));
        let mut board = Board::default();
        board.update(vec![sign(FindingKind::Xid, 0, Severity::Info, 5)], 0, of);
        board.keep_lost(&[], 20);
        assert_eq!(board.update(Vec::new(), 20, of).ended.len(), 1, "another kind");
    }
}

//! Findings that have one cause, as one.
//!
//! Enters: the findings of a recording, with the numbers of their incidents. Leaves: incidents in order of time, each with its kinds of
//! findings, the cause first. A finding without a number, as of an older file, is an incident of its own.

use super::model::Found;
use highwater_core::detect::FindingKind;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Findings of one cause.
#[derive(Debug)]
pub(super) struct Incident<'a> {
    /// Its kinds of findings, the cause first; of each its findings in order of time.
    pub kinds: Vec<Vec<&'a Found>>,
}

/// The incidents of these findings, in the order in which they began.
pub(super) fn incidents(found: &[Found]) -> Vec<Incident<'_>> {
    let mut groups: Vec<(Option<u64>, Vec<&Found>)> = Vec::new();
    for one in found {
        let known = one.incident.and_then(|id| groups.iter_mut().find(|(of, _)| *of == Some(id)));
        match known {
            Some((_, group)) => group.push(one),
            None => groups.push((one.incident, vec![one])),
        }
    }
    groups.into_iter().map(|(_, group)| Incident::of(group)).collect()
}

impl<'a> Incident<'a> {
    fn of(group: Vec<&'a Found>) -> Self {
        let mut kinds: BTreeMap<(u8, &str), Vec<&Found>> = BTreeMap::new();
        for found in group {
            let known = FindingKind::ALL.into_iter().find(|kind| kind.label() == found.kind);
            // A file may say anything.
            let order = known.map_or(u8::MAX, FindingKind::order_in_incident);
            kinds.entry((order, &found.kind)).or_default().push(found);
        }
        let mut kinds: Vec<_> = kinds.into_values().collect();
        kinds.iter_mut().for_each(|findings| findings.sort_by_key(|found| found.begin_ns));
        Self { kinds }
    }

    /// What it was last reported with: the newest finding of its cause. It has at least one.
    pub fn newest(&self) -> Option<&'a Found> {
        self.kinds.first()?.last().copied()
    }

    /// The newest finding of each kind that followed from the cause.
    pub fn followed(&self) -> impl Iterator<Item = &'a Found> + '_ {
        self.kinds.iter().skip(1).filter_map(|findings| findings.last().copied())
    }

    /// When it came, nanoseconds: the begins of the findings of its cause.
    pub fn times(&self) -> impl Iterator<Item = i64> + '_ {
        self.kinds.first().into_iter().flatten().map(|found| found.begin_ns)
    }

    /// Whether it is a single finding.
    pub fn is_single(&self) -> bool {
        self.kinds.iter().map(Vec::len).sum::<usize>() == 1
    }

    /// The worst severity of its findings.
    pub fn severity(&self) -> &'a str {
        let worst = |found: &&&Found| ["critical", "warning", "info"].iter().position(|known| *known == found.severity);
        let all = self.kinds.iter().flatten();
        all.min_by_key(|found| worst(found).unwrap_or(usize::MAX)).map_or("info", |found| &found.severity)
    }
}

/// For a page: the positions of the findings in the list of all, by incident and kind.
pub(super) fn page(found: &[Found]) -> Value {
    let position = |one: &&Found| found.iter().position(|other| std::ptr::eq(other, *one));
    let all = incidents(found).into_iter().map(|incident| {
        let kinds = incident.kinds.iter().map(|findings| findings.iter().filter_map(position).collect::<Vec<_>>());
        json!({ "severity": incident.severity(), "kinds": kinds.collect::<Vec<_>>() })
    });
    Value::Array(all.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(kind: &str, severity: &str, incident: Option<u64>, begin_ns: i64) -> Found {
        Found {
            kind: kind.to_owned(),
            severity: severity.to_owned(),
            certainty: "observed".to_owned(),
            lag_cause: None,
            gpu: None,
            job: None,
            rank: None,
            incident,
            workloads: Vec::new(),
            begin_ns,
            end_ns: None,
            what: format!("{kind} {begin_ns}"),
            why: String::new(),
            advice: String::new(),
            seen_ns: None,
            first: None,
        }
    }

    #[test]
    fn findings_of_one_cause_are_one_with_the_cause_first_and_others_apart() {
        let all = [
            found("slow_steps", "warning", Some(4), 1),
            found("low_headroom", "critical", Some(4), 2),
            found("xid", "warning", None, 3),
            found("comm_starvation", "warning", Some(4), 4),
            found("low_headroom", "critical", Some(4), 60),
            found("something else", "odd", Some(5), 61),
            found("xid", "warning", None, 62),
        ];
        let incidents = incidents(&all);
        let whats = |incident: &Incident| -> Vec<String> {
            incident.newest().into_iter().chain(incident.followed()).map(|found| found.what.clone()).collect()
        };
        let seen: Vec<_> =
            incidents.iter().map(|one| (one.severity(), one.times().count(), one.is_single(), whats(one))).collect();
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        assert_eq!(
            seen,
            [
                ("critical", 2, false, names(&["low_headroom 60", "comm_starvation 4", "slow_steps 1"])),
                ("warning", 1, true, names(&["xid 3"])),
                ("odd", 1, true, names(&["something else 61"])),
                ("warning", 1, true, names(&["xid 62"])),
            ]
        );
        assert_eq!(page(&all)[0], json!({ "severity": "critical", "kinds": [[1, 4], [3], [0]] }));
    }
}

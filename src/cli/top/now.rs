//! What the daemon says now, in the form in which it is shown.
//!
//! Enters: the answers of `/api/v1/gpus`, `/api/v1/jobs` and `/api/v1/incidents`. Leaves: GPUs, processes with their ranks,
//! and incidents. Invariant: no text has control characters, because names come from other users' jobs.

use crate::web;
use anyhow::Context as _;
use highwater_engine::dial::printable;
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use unicode_width::UnicodeWidthChar as _;

/// One moment.
#[derive(Debug, Default)]
pub(super) struct Now {
    /// What is read; empty if nothing is.
    pub source: String,
    /// Why nothing is read.
    pub trouble: Option<String>,
    pub gpus: Vec<ListedGpu>,
    pub processes: Vec<Process>,
    /// Those that go on, the worst first.
    pub incidents: Vec<Incident>,
}

/// A GPU or MIG instance. Bytes; what is not known is `None`.
#[derive(Debug, Default, Clone, Deserialize)]
#[serde(default)]
pub(super) struct ListedGpu {
    #[serde(rename = "gpu")]
    pub index: String,
    pub uuid: Option<String>,
    pub name: Option<String>,
    pub up: bool,
    pub trouble: Option<String>,
    pub memory_usable_bytes: Option<u64>,
    pub memory_used_bytes: Option<u64>,
    pub memory_peak_bytes: Option<u64>,
    pub utilization_ratio: Option<f64>,
    pub power_watts: Option<f64>,
    pub power_limit_watts: Option<f64>,
    pub temperature_celsius: Option<f64>,
    pub processes: Option<Vec<OnGpu>>,
}

impl ListedGpu {
    /// What was left free when its memory was fullest in the last minute.
    pub fn headroom_bytes(&self) -> Option<u64> {
        Some(self.memory_usable_bytes?.saturating_sub(self.memory_peak_bytes.or(self.memory_used_bytes)?))
    }
}

#[derive(Debug, Clone, Deserialize)]
pub(super) struct OnGpu {
    pid: u32,
    used_bytes: Option<u64>,
}

/// A process on GPUs, or the part of it that is one rank.
#[derive(Debug, Default, Clone, PartialEq)]
pub(super) struct Process {
    /// `None` if a rank's is not known.
    pub pid: Option<u32>,
    /// Indices of its GPUs.
    pub gpus: Vec<String>,
    /// On all of them; `None` if one is not known.
    pub used_bytes: Option<u64>,
    /// Of this node's `/proc`, where it is read.
    pub user: Option<String>,
    pub command: Option<String>,
    pub rank: Option<Rank>,
}

/// The rank that a process sends marks for.
#[derive(Debug, Default, Clone, PartialEq)]
pub(super) struct Rank {
    pub job: String,
    pub rank: u32,
    pub step: Option<u64>,
    /// The innermost phase that is open.
    pub phase: Option<String>,
}

/// Findings of one cause.
#[derive(Debug, Default, Clone, Deserialize)]
#[serde(default)]
pub(super) struct Incident {
    pub severity: String,
    pub job: Option<String>,
    pub begin_unix_nano: i64,
    pub ended_unix_nano: Option<i64>,
    pub times: u64,
    pub lost_seconds: Option<f64>,
    pub what: String,
    pub advice: String,
}

#[derive(Deserialize)]
struct JobsAnswer {
    jobs: Vec<JobAnswer>,
}

#[derive(Deserialize)]
struct JobAnswer {
    job: String,
    ranks: Vec<RankAnswer>,
}

#[derive(Deserialize)]
struct RankAnswer {
    rank: u32,
    pid: Option<u32>,
    step: Option<u64>,
    /// UUIDs.
    gpus: Vec<String>,
    open: Vec<String>,
}

/// A text as a terminal may show it: without control characters, and without characters of no width, which can reverse the order of
/// a line.
fn shown(text: &str) -> String {
    printable(text).chars().filter(|one| one.width().is_some_and(|width| width > 0)).collect()
}

impl Now {
    /// What the answers say. The user and the command of processes are looked up if their numbers hold for this process too.
    ///
    /// # Errors
    /// An answer is not what this version knows.
    pub fn of(mut answers: Value) -> anyhow::Result<Self> {
        let text = |value: &Value| value.as_str().map(shown);
        let gpus = &mut answers["gpus"];
        let is_local = gpus["process_ids_of"].as_str().is_some_and(|place| Some(place) == web::process_ids_of());
        let (source, trouble) = (text(&gpus["source"]).unwrap_or_default(), text(&gpus["detail"]));
        let gpus = if trouble.is_some() { Value::Array(Vec::new()) } else { gpus["gpus"].take() };
        let mut gpus: Vec<ListedGpu> = serde_json::from_value(gpus).context("the daemon's list of GPUs")?;
        let jobs: JobsAnswer = serde_json::from_value(answers["jobs"].take()).context("the daemon's list of jobs")?;
        let incidents = answers["incidents"]["incidents"].take();
        let mut incidents: Vec<Incident> =
            serde_json::from_value(incidents).context("the daemon's list of incidents")?;
        incidents.retain(|incident| incident.ended_unix_nano.is_none());
        for incident in &mut incidents {
            let texts = [&mut incident.what, &mut incident.advice, &mut incident.severity];
            for text in texts.into_iter().chain(&mut incident.job) {
                *text = shown(text);
            }
        }
        incidents.sort_by_key(|incident| (severity(&incident.severity), std::cmp::Reverse(incident.begin_unix_nano)));
        for gpu in &mut gpus {
            gpu.index = shown(&gpu.index);
            for text in [&mut gpu.name, &mut gpu.trouble].into_iter().flatten() {
                *text = shown(text);
            }
        }
        let processes = processes(&gpus, &jobs, is_local);
        Ok(Self { source, trouble, gpus, processes, incidents })
    }
}

/// The worst first.
fn severity(label: &str) -> usize {
    ["critical", "warning", "info"].iter().position(|known| *known == label).unwrap_or(usize::MAX)
}

/// A row for each rank, with its process on its GPUs, and one for the rest of each process. A rank whose process the driver does
/// not list, as in another PID namespace, has a row if it is at work.
fn processes(gpus: &[ListedGpu], jobs: &JobsAnswer, is_local: bool) -> Vec<Process> {
    let mut by_pid = BTreeMap::<u32, Vec<(&ListedGpu, Option<u64>)>>::new();
    for gpu in gpus {
        for on in gpu.processes.iter().flatten() {
            by_pid.entry(on.pid).or_default().push((gpu, on.used_bytes));
        }
    }
    let mut rows = Vec::new();
    for job in &jobs.jobs {
        for rank in &job.ranks {
            let is_its = |gpu: &ListedGpu| {
                rank.gpus.is_empty() || gpu.uuid.as_ref().is_some_and(|uuid| rank.gpus.contains(uuid))
            };
            let listed = rank.pid.and_then(|pid| by_pid.get_mut(&pid));
            let its: Vec<_> = listed.into_iter().flat_map(|on| on.extract_if(.., |(gpu, _)| is_its(gpu))).collect();
            if its.is_empty() && rank.open.is_empty() {
                continue;
            }
            let named =
                || gpus.iter().filter(|gpu| !rank.gpus.is_empty() && is_its(gpu)).map(|gpu| (gpu, None)).collect();
            let phase = rank.open.last().map(|phase| shown(phase));
            let known = Rank { job: shown(&job.job), rank: rank.rank, step: rank.step, phase };
            let on = if its.is_empty() { named() } else { its };
            rows.push(Process { rank: Some(known), ..Process::on(rank.pid, &on) });
        }
    }
    let rest = by_pid.iter().filter(|(_, on)| !on.is_empty());
    rows.extend(rest.map(|(pid, on)| Process::on(Some(*pid), on)));
    if is_local {
        let users = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
        rows.iter_mut().for_each(|row| row.look_up(&users));
    }
    rows
}

impl Process {
    fn on(pid: Option<u32>, on: &[(&ListedGpu, Option<u64>)]) -> Self {
        let used_bytes = on.iter().map(|(_, bytes)| *bytes).sum::<Option<u64>>().filter(|_| !on.is_empty());
        Self { pid, gpus: on.iter().map(|(gpu, _)| gpu.index.clone()).collect(), used_bytes, ..Self::default() }
    }

    /// Reads whose it is, by the text of `/etc/passwd`, and what it runs. A process that has ended since has neither.
    fn look_up(&mut self, users: &str) {
        use std::os::unix::fs::MetadataExt as _;
        let Some(pid) = self.pid else { return };
        let folder = format!("/proc/{pid}");
        self.user = std::fs::metadata(&folder).ok().map(|folder| user(users, folder.uid()));
        let line = std::fs::read(format!("{folder}/cmdline")).unwrap_or_default();
        let words: Vec<_> = line.split(|byte| *byte == 0).map(String::from_utf8_lossy).collect();
        let line = shown(words.join(" ").trim_end());
        self.command = Some(line).filter(|line| !line.is_empty());
    }
}

/// The name of a user, or the number if the list has no name for it.
fn user(users: &str, uid: u32) -> String {
    let name = users.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)?.parse() == Ok(uid)).then(|| shown(name))
    });
    name.unwrap_or_else(|| uid.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn each_rank_has_its_part_of_a_process_and_the_rest_a_row_of_its_own() {
        let gpu = |index: &str, processes: Value| json!({"gpu": index, "uuid": format!("GPU-{index}"), "up": true, "processes": processes});
        let rank = |rank: u32, pid: Option<u32>, gpus: Value, open: Value| json!({"rank": rank, "pid": pid, "step": 12, "gpus": gpus, "open": open});
        let answers = json!({
            "gpus": {"source": "nvml", "gpus": [
                gpu("0", json!([{"pid": 7, "used_bytes": 5}, {"pid": 8, "used_bytes": null}, {"pid": 9, "used_bytes": 2}])),
                gpu("1", json!([{"pid": 7, "used_bytes": 6}, {"pid": 9, "used_bytes": 3}])),
                gpu("2", Value::Null),
            ]},
            "jobs": {"jobs": [{"job": "llama\u{1b}[31m", "ranks": [
                rank(0, Some(7), json!(["GPU-1"]), json!(["step", "forward"])),
                rank(1, Some(9), json!([]), json!([])),
                rank(2, Some(70), json!(["GPU-2"]), json!(["step"])),
                rank(3, None, json!([]), json!([])),
            ]}]},
            "incidents": {"incidents": [
                {"severity": "info", "what": "b", "begin_unix_nano": 3},
                {"severity": "critical\u{1b}", "what": "a\u{7}\u{202e}", "begin_unix_nano": 1},
                {"severity": "critical", "what": "gone", "begin_unix_nano": 1, "ended_unix_nano": 2},
            ]},
        });
        let now = Now::of(answers).expect("known");
        let rows: Vec<_> = now
            .processes
            .iter()
            .map(|row| (row.pid, row.gpus.join(","), row.used_bytes, row.rank.as_ref().map(|rank| rank.rank)))
            .collect();
        let row = |pid, gpus: &str, bytes, rank| (Some(pid), gpus.to_owned(), bytes, rank);
        let ranks = [row(7, "1", Some(6), Some(0)), row(9, "0,1", Some(5), Some(1)), row(70, "2", None, Some(2))];
        let rest = [row(7, "0", Some(5), None), row(8, "0", None, None)];
        assert_eq!(rows, [&ranks[..], &rest[..]].concat(), "a rank that is at rest without a process has none");
        let first = now.processes[0].rank.as_ref().expect("a rank");
        assert_eq!((first.job.as_str(), first.phase.as_deref()), ("llama[31m", Some("forward")));
        assert_eq!(now.incidents.iter().map(|one| one.what.as_str()).collect::<Vec<_>>(), ["a", "b"]);
    }

    #[test]
    fn why_nothing_is_read_is_kept_and_what_is_no_answer_is_an_error() {
        let lists = |gpus: Value| json!({"gpus": gpus, "jobs": {"jobs": []}, "incidents": {"incidents": []}});
        let now = Now::of(lists(json!({"status": 503, "detail": "no driver"}))).expect("known");
        assert_eq!((now.trouble.as_deref(), now.gpus.len()), (Some("no driver"), 0));
        let error = Now::of(lists(json!({"gpus": 7}))).expect_err("no list");
        assert!(format!("{error:#}").starts_with("the daemon's list of GPUs"), "{error:#}");
    }

    #[test]
    fn a_process_of_this_node_has_its_user_and_command() {
        let mut own = Process { pid: Some(std::process::id()), ..Process::default() };
        let users = std::fs::read_to_string("/etc/passwd").expect("a list");
        own.look_up(&users);
        assert_eq!(own.user, Some(user(&users, rustix::process::getuid().as_raw())));
        assert!(own.command.is_some_and(|command| command.contains("highwater")));
        assert_eq!((user(&users, 0), user(&users, u32::MAX - 7)), ("root".to_owned(), (u32::MAX - 7).to_string()));
    }
}

//! Every panel of every dashboard against the truth: what the daemons' API says of the same seconds, on 1, 16 and 64 nodes, with classic
//! and with native histograms.

use crate::daemon::Daemon;
use crate::dashboards::{Dashboard, dashboards, filled, panels, text};
use crate::scraper::{Sample, Scraper};
use crate::tools;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tempfile::TempDir;

/// Nodes of the whole fleet; the smaller ones are its first.
const NODES: usize = 64;
const SIZES: [usize; 3] = [1, 16, NODES];
/// What stands for Grafana's rate interval, its range, and the window that a reader chose, seconds.
const RECENT_S: f64 = 40.0;
const RANGE_S: f64 = 80.0;
const WINDOW_S: f64 = 15.0;
/// What the busiest and the idlest phase of the scenario are: a utilization is that of a moment.
const BUSY: [f64; 2] = [0.02, 0.95];
/// The last looks, of which findings are kept: as long as a gauge may be old.
const LAST_LOOKS: usize = 3;
/// How old a gauge may be: two scrapes.
const OLD_S: f64 = 11.0;
/// How often the API's gauges are looked at, seconds.
const LOOK_S: f64 = 4.0;
/// By how much a panel may differ from the truth.
const TOLERANCE: f64 = 0.1;
/// What classic buckets guarantee of a quantile: the ratio between the bounds of a bucket.
const BUCKET: f64 = 1.29;

/// What a query should return.
#[derive(Debug)]
enum Wanted {
    /// One number.
    One(f64),
    /// A row for each of these values of labels.
    Rows(&'static [&'static str], Vec<(Vec<String>, f64)>),
    /// The same of gauges that change from second to second: between the lowest and the highest that the API had of late.
    Ranges(&'static [&'static str], Vec<(Vec<String>, [f64; 2])>),
    /// One such gauge.
    Range([f64; 2]),
    /// As many rows, whatever their values.
    Count(usize),
    /// A quantile over these values: classic buckets are further from it.
    Quantile(f64, Vec<f64>),
    /// A row with a quantile for each value of a label.
    Quantiles(&'static str, f64, BTreeMap<String, Vec<f64>>),
    /// Buckets of a heat map, which hold this number of events.
    Events(f64),
    /// It cannot be computed from the API: why, or which test has it.
    Elsewhere(&'static str),
}

/// A step or a phase that ended in the last [`RANGE_S`].
#[derive(Debug, Clone)]
struct Ended {
    node: usize,
    /// `None` is a step.
    phase: Option<String>,
    end_s: f64,
    seconds: f64,
    peak_bytes: f64,
    /// `None` where it is not known.
    joules: Option<f64>,
    idle_s: f64,
}

/// A GPU at the end.
#[derive(Debug, Clone)]
struct Gpu {
    node: usize,
    instance: String,
    index: String,
    usable: f64,
    limit_w: f64,
    celsius: f64,
    /// Memory over the last window, the rate interval and the range: highest, mean, lowest.
    window: [f64; 3],
    recent: [f64; 3],
    range: [f64; 3],
}

/// A rank at the end, and what its counters were before.
#[derive(Debug, Clone)]
struct Rank {
    node: usize,
    instance: String,
    gpu: String,
    number: u64,
    /// How many retries of the allocator, since the begin of the rate interval and of the range.
    retries: [f64; 2],
    profile: Value,
    /// Its gauges in the API until the end.
    seen: Vec<Seen>,
}

/// Gauges of one rank and its GPU at a moment.
#[derive(Debug, Clone, Copy)]
struct Seen {
    at_s: f64,
    step: f64,
    retries: f64,
    comm_slowdown: f64,
    compute_lag: f64,
    data_stall: f64,
    utilization: f64,
}

/// What the API said.
#[derive(Debug)]
struct Truth {
    nodes: Vec<String>,
    now_s: f64,
    ended: BTreeMap<u64, Vec<Ended>>,
    gpus: Vec<Gpu>,
    ranks: Vec<Rank>,
    /// The findings that went on, by the look and the node.
    findings: Vec<(usize, usize, Value)>,
}

fn number(value: &Value, pointer: &str) -> f64 {
    value.pointer(pointer).and_then(Value::as_f64).unwrap_or(f64::NAN)
}

/// The same, and 0 where it is not known.
fn known(value: &Value, pointer: &str) -> f64 {
    value.pointer(pointer).and_then(Value::as_f64).unwrap_or(0.0)
}

fn unix_s() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs_f64()
}

fn get(daemon: &Daemon, path: &str) -> Value {
    serde_json::from_str(&daemon.get(path)).expect("JSON")
}

/// The scenario of one node: two GPUs, two ranks of one job, and on the first node all that goes wrong.
fn scenario(node: usize) -> String {
    let (first, world) = (2 * node, 2 * NODES);
    let mut text = format!(
        "seed = {seed}\n[[gpus]]\ncount = 2\n[[jobs]]\nname = \"even\"\nranks = [0, 1]\nfirst_rank = {first}\nworld_size = {world}\n\
         base = \"40 GiB\"\noutside = \"{outside} GiB\"\nphases = [\n\
         {{ name = \"data\", duration = \"{data} ms\", busy = 0.02 }},\n\
         {{ name = \"forward\", duration = \"400 ms\", jitter = \"12 ms\", to = \"90 GiB\", shape = \"steps\", busy = 0.9 }},\n\
         {{ name = \"backward\", duration = \"600 ms\", to = \"{to} GiB\", shape = \"steps\", busy = 0.95, release = true }},\n\
         {{ name = \"comm\", duration = \"120 ms\", busy = 0.6, collective = true }},\n\
         {{ name = \"optimizer\", duration = \"80 ms\", busy = 0.8 }} ]\n[jobs.layers]\ncount = 30\nevery_steps = 5\nsharded = true\n",
        seed = 1_000 + node,
        outside = 2 + node % 4,
        data = 50 + node % 3 * 40,
        to = 100 + node % 8,
    );
    if node == 0 {
        text.push_str(
            "[jobs.near_oom]\noffset = \"4 s\"\nfor = \"1 h\"\nfree = \"200 MiB\"\n\
             [[xids]]\ngpu = 0\nat = \"3 s\"\nxid = 31\n\
             [[degraded]]\ngpu = 1\nat = \"3 s\"\nfor = \"1 h\"\nthrottle = \"hw_power_brake_slowdown\"\n",
        );
    }
    text
}

/// The gauges of both ranks of a node.
fn look(daemon: &Daemon) -> [Seen; 2] {
    let (at_s, job, gpus) = (unix_s(), get(daemon, "/api/v1/jobs/even"), get(daemon, "/api/v1/gpus"));
    [0, 1].map(|nth| {
        let rank = &job["ranks"][nth];
        Seen {
            at_s,
            step: number(rank, "/step"),
            retries: number(rank, "/alloc_retries"),

            comm_slowdown: number(rank, "/ratios/comm_slowdown"),
            compute_lag: number(rank, "/ratios/compute_lag"),
            data_stall: number(rank, "/ratios/data_stall"),
            utilization: number(&gpus["gpus"][nth], "/utilization_ratio"),
        }
    })
}

fn findings_of(daemon: &Daemon) -> Vec<Value> {
    let findings = get(daemon, "/api/v1/findings?limit=512");
    findings["findings"]
        .as_array()
        .expect("findings")
        .iter()
        .filter(|found| found["ended_unix_nano"].is_null())
        .cloned()
        .collect()
}

/// Asks the API of all nodes. `seen`: what [`look`] returned of each of them until now; `findings`: those of the last looks.
fn ask(daemons: &[Daemon], seen: &[Vec<[Seen; 2]>], findings: Vec<(usize, usize, Value)>) -> Truth {
    let now_s = unix_s();
    let ns = |seconds: f64| (seconds * 1e9) as i64;
    let mut truth = Truth {
        nodes: daemons.iter().map(|daemon| daemon.address().to_owned()).collect(),
        now_s,
        ended: BTreeMap::new(),
        gpus: Vec::new(),
        ranks: Vec::new(),
        findings,
    };
    for (node, daemon) in daemons.iter().enumerate() {
        let instance = daemon.address().to_owned();
        let of_gpu = |gpu: &str, length_s: f64| {
            let answer = get(
                daemon,
                &format!("/api/v1/gpus/{gpu}/memory?from={}&to={}&max_points=1", ns(now_s - length_s), ns(now_s)),
            );
            ["/peak_bytes", "/mean_bytes", "/min_bytes"].map(|pointer| number(&answer, pointer))
        };
        for gpu in get(daemon, "/api/v1/gpus")["gpus"].as_array().expect("GPUs") {
            let index = text(&gpu["gpu"]).to_owned();
            truth.gpus.push(Gpu {
                node,
                instance: instance.clone(),
                usable: number(gpu, "/memory_usable_bytes"),
                limit_w: number(gpu, "/power_limit_watts"),
                celsius: number(gpu, "/temperature_celsius"),
                window: of_gpu(&index, WINDOW_S),
                recent: of_gpu(&index, RECENT_S + WINDOW_S),
                range: of_gpu(&index, RANGE_S + WINDOW_S),
                index,
            });
        }
        let job = get(daemon, "/api/v1/jobs/even");
        for (nth, rank) in job["ranks"].as_array().expect("ranks").iter().enumerate() {
            let seen: Vec<Seen> = seen[node].iter().map(|both| both[nth]).collect();
            // Between two looks they rise evenly.
            let before = |at_s: f64| {
                let later = seen.iter().position(|seen| seen.at_s > at_s).expect("a later look").max(1);
                let (one, other) = (seen[later - 1], seen[later]);
                one.retries + (other.retries - one.retries) * (at_s - one.at_s) / (other.at_s - one.at_s)
            };
            let retries = [RECENT_S, RANGE_S].map(|length_s| number(rank, "/alloc_retries") - before(now_s - length_s));
            let layers = get(daemon, &format!("/api/v1/jobs/even/layers?rank={}", rank["rank"]));
            truth.ranks.push(Rank {
                node,
                instance: instance.clone(),
                gpu: nth.to_string(),
                number: rank["rank"].as_u64().expect("a rank"),
                retries,
                profile: layers["profiles"][0].clone(),
                seen,
            });
        }
        for phase in get(daemon, "/api/v1/jobs/even/phases?limit=100000")["phases"].as_array().expect("phases") {
            let (begin_s, end_s) = (number(phase, "/begin_unix_nano") / 1e9, number(phase, "/end_unix_nano") / 1e9);
            let is_known =
                ["step", "phase"].contains(&text(&phase["kind"])) && end_s > now_s - RANGE_S && end_s <= now_s;
            if is_known {
                let rank = phase["rank"].as_u64().expect("a rank");
                truth.ended.entry(rank).or_default().push(Ended {
                    node,
                    phase: (phase["kind"] == "phase").then(|| text(&phase["phase"]).to_owned()),
                    end_s,
                    seconds: end_s - begin_s,
                    peak_bytes: number(phase, "/gpus/0/peak_bytes"),
                    // What is not known is in no counter.
                    joules: phase.pointer("/gpus/0/energy_joules").and_then(Value::as_f64),
                    idle_s: known(phase, "/gpus/0/gpu_idle_seconds"),
                });
            }
        }
    }
    truth
}

fn mean(values: impl IntoIterator<Item = f64>) -> f64 {
    let values: Vec<f64> = values.into_iter().collect();
    values.iter().sum::<f64>() / values.len() as f64
}

fn most(values: impl IntoIterator<Item = f64>) -> f64 {
    values.into_iter().fold(f64::NEG_INFINITY, f64::max)
}

fn least(values: impl IntoIterator<Item = f64>) -> f64 {
    values.into_iter().fold(f64::INFINITY, f64::min)
}

/// A quantile as PromQL's `quantile` has it.
fn quantile(share: f64, values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let rank = share * (values.len() - 1) as f64;
    let (low, high) = (values[rank.floor() as usize], values[rank.ceil() as usize]);
    low + (high - low) * rank.fract()
}

impl Truth {
    /// That of the first nodes.
    fn of(&self, nodes: usize) -> Self {
        Self {
            nodes: self.nodes[..nodes].to_vec(),
            now_s: self.now_s,
            ended: self
                .ended
                .iter()
                .filter(|(_, all)| all[0].node < nodes)
                .map(|(rank, all)| (*rank, all.clone()))
                .collect(),
            gpus: self.gpus.iter().filter(|one| one.node < nodes).cloned().collect(),
            ranks: self.ranks.iter().filter(|one| one.node < nodes).cloned().collect(),
            findings: self.findings.iter().filter(|(_, node, _)| *node < nodes).cloned().collect(),
        }
    }

    /// The steps that ended in the last seconds given.
    fn steps(&self, length_s: f64) -> impl Iterator<Item = &Ended> {
        self.ended.values().flatten().filter(move |one| one.phase.is_none() && one.end_s > self.now_s - length_s)
    }

    fn phases(&self, length_s: f64) -> impl Iterator<Item = &Ended> {
        self.ended.values().flatten().filter(move |one| one.phase.is_some() && one.end_s > self.now_s - length_s)
    }

    /// Something of the phases of each name.
    fn by_phase(&self, length_s: f64, of: impl Fn(&[&Ended]) -> f64) -> Vec<(Vec<String>, f64)> {
        let mut named = BTreeMap::<String, Vec<&Ended>>::new();
        for one in self.phases(length_s) {
            named.entry(one.phase.clone().unwrap_or_default()).or_default().push(one);
        }
        named.into_iter().map(|(name, phases)| (vec![name], of(&phases))).collect()
    }

    /// Something of each rank, by the columns that a table or a heat map has.
    fn rows<T>(&self, columns: &'static [&'static str], of: impl Fn(&Rank) -> T) -> Vec<(Vec<String>, T)> {
        let row = |rank: &Rank| {
            let label = |column: &&str| match *column {
                "instance" => rank.instance.clone(),
                "gpu" => rank.gpu.clone(),
                // As heat maps sort them.
                "rank" if columns == ["rank"] => format!("{:03}", rank.number),
                _ => rank.number.to_string(),
            };
            (columns.iter().map(label).collect(), of(rank))
        };
        self.ranks.iter().map(row).collect()
    }

    fn by_rank(&self, columns: &'static [&'static str], of: impl Fn(&Rank) -> f64) -> Wanted {
        Wanted::Rows(columns, self.rows(columns, of))
    }

    /// A gauge of a rank, over the last seconds given.
    fn range(&self, rank: &Rank, length_s: f64, of: fn(&Seen) -> f64) -> [f64; 2] {
        let seen = || rank.seen.iter().filter(|seen| seen.at_s > self.now_s - length_s).map(of);
        [least(seen()), most(seen())]
    }

    fn ranges(&self, columns: &'static [&'static str], length_s: f64, of: fn(&Seen) -> f64) -> Wanted {
        Wanted::Ranges(columns, self.rows(columns, |rank| self.range(rank, length_s, of)))
    }

    /// How long the communication of each step of late took beside what is usual, which looks alone may miss.
    fn comm_slowdown(&self, rank: &Rank, length_s: f64) -> [f64; 2] {
        let is_comm = |one: &&Ended| one.phase.as_deref() == Some("comm");
        let usual = quantile(0.5, self.of_rank(rank, RANGE_S).filter(is_comm).map(|one| one.seconds));
        let of_late = || self.of_rank(rank, length_s).filter(is_comm).map(|one| one.seconds / usual);
        let [low, high] = self.range(rank, length_s, |seen| seen.comm_slowdown);
        [low.min(least(of_late())), high.max(most(of_late()))]
    }

    /// A number over all ranks, at each look of the last seconds.
    fn range_of_all(&self, length_s: f64, of: fn(&Seen) -> f64, over: impl Fn(Vec<f64>) -> f64) -> [f64; 2] {
        let looks = 0..self.ranks[0].seen.len();
        let of_late = looks.filter(|nth| self.ranks[0].seen[*nth].at_s > self.now_s - length_s);
        let values: Vec<f64> =
            of_late.map(|nth| over(self.ranks.iter().map(|rank| of(&rank.seen[nth])).collect())).collect();
        [least(values.iter().copied()), most(values.iter().copied())]
    }

    fn by_gpu(&self, of: impl Fn(&Gpu) -> f64) -> Wanted {
        Wanted::Rows(
            &["instance", "gpu"],
            self.gpus.iter().map(|gpu| (vec![gpu.instance.clone(), gpu.index.clone()], of(gpu))).collect(),
        )
    }

    fn by_node(&self, of: impl Fn(usize) -> f64) -> Wanted {
        Wanted::Rows(
            &["instance"],
            self.nodes.iter().enumerate().map(|(node, instance)| (vec![instance.clone()], of(node))).collect(),
        )
    }

    fn of_job(value: f64) -> Wanted {
        Wanted::Rows(&["training_job"], vec![(vec!["even".to_owned()], value)])
    }

    /// The steps and phases of a rank.
    fn of_rank(&self, rank: &Rank, length_s: f64) -> impl Iterator<Item = &Ended> + Clone {
        self.ended[&rank.number].iter().filter(move |one| one.end_s > self.now_s - length_s)
    }

    /// The steps of a rank.
    fn steps_of(&self, rank: &Rank, length_s: f64) -> Vec<f64> {
        self.of_rank(rank, length_s).filter(|one| one.phase.is_none()).map(|one| one.seconds).collect()
    }

    /// Power of a GPU, as the energy of the phases on it. Where a thread that reads it came late, the energy of a phase is not known.
    fn power_of(&self, gpu: &Gpu, length_s: f64) -> f64 {
        let rank = self.ranks.iter().find(|rank| rank.node == gpu.node && rank.gpu == gpu.index).expect("a rank");
        let phases = self.of_rank(rank, length_s).filter(|one| one.phase.is_some());
        let known = || phases.clone().filter_map(|one| Some((one.joules?, one.seconds)));
        known().map(|(joules, _)| joules).sum::<f64>() / known().map(|(_, seconds)| seconds).sum::<f64>()
    }

    /// The highest peak of the phases of a rank that ended in the last seconds given, bytes.
    fn peak_of(&self, rank: &Rank, length_s: f64) -> f64 {
        most(self.of_rank(rank, length_s).filter(|one| one.phase.is_some()).map(|one| one.peak_bytes))
    }

    fn usable_of(&self, rank: &Rank) -> f64 {
        self.gpus.iter().find(|gpu| gpu.node == rank.node && gpu.index == rank.gpu).expect("a GPU").usable
    }

    /// How many findings of some kind went on: the least and the most of the last looks.
    fn count(&self, is: impl Fn(usize, &Value) -> bool) -> [f64; 2] {
        let of_look = |look: usize| {
            self.findings.iter().filter(|(at, node, found)| *at == look && is(*node, found)).count() as f64
        };
        [least((0..LAST_LOOKS).map(of_look)), most((0..LAST_LOOKS).map(of_look))]
    }
}

/// What a panel's query should return; `None` if nobody has said so.
fn wanted(board: &str, title: &str, nth: usize, of: &Truth) -> Option<Wanted> {
    use Wanted::{Count, Elsewhere, Events, One, Quantile, Quantiles, Rows};
    let nodes = of.nodes.len() as f64;
    let gpus = of.gpus.len() as f64;
    let step = |length_s: f64| mean(of.steps(length_s).map(|one| one.seconds));
    let idle = |length_s: f64| {
        of.phases(length_s).map(|one| one.idle_s).sum::<f64>() / of.phases(length_s).map(|one| one.seconds).sum::<f64>()
    };
    let joules_a_step = |length_s: f64| {
        of.phases(length_s).filter_map(|one| one.joules).sum::<f64>() / of.steps(length_s).count() as f64
    };
    // Of events that are seldom, one more or less may fall into an interval whose ends are scrapes.
    let around = |count: f64| if count == 0.0 { [0.0; 2] } else { [count - 1.0, count + 1.0] };
    let retries = |nth: usize| around(of.ranks.iter().map(|rank| rank.retries[nth]).sum::<f64>());
    let fullness = |gpu: &Gpu| gpu.window[0] / gpu.usable;
    let full_of_late = |gpu: &Gpu| gpu.recent[0] / gpu.usable;
    let steps_a_second = |rank: &Rank| of.steps_of(rank, RECENT_S).len() as f64 / RECENT_S;

    let profile = |rank: &Rank, name: &str| number(&rank.profile, &format!("/totals/{name}"));
    let highest = |values: Vec<f64>| most(values);
    let top_layers = |name: &str| {
        let mut tops = BTreeMap::<String, f64>::new();
        for layer in of.ranks.iter().flat_map(|rank| rank.profile["totals"]["top"].as_array().expect("layers")) {
            let known = tops.entry(text(&layer["layer"]).to_owned()).or_insert(0.0);
            *known = known.max(number(layer, &format!("/{name}")));
        }
        Rows(&["layer"], tops.into_iter().map(|(layer, bytes)| (vec![layer], bytes)).collect())
    };
    let durations_by_phase = || {
        let mut named = BTreeMap::<String, Vec<f64>>::new();
        for one in of.phases(RECENT_S) {
            named.entry(one.phase.clone().unwrap_or_default()).or_default().push(one.seconds);
        }
        named
    };
    let ordered = |nth: usize, share: &dyn Fn(&Rank) -> f64| {
        let values = || of.ranks.iter().map(share);
        One([most(values()), quantile(0.5, values()), least(values())][nth])
    };
    Some(match (board, title, nth) {
        (_, "Alerts firing" | "Alerts firing, now" | "Alerts that fire", _) => {
            Elsewhere("the alerts' tests: an alert waits for minutes")
        }
        (_, "XID errors", 0) => Count(1),
        ("fleet", "Nodes reporting", 0) | ("exporter-health", "Daemons reporting", 0) => One(nodes),
        ("fleet", "GPUs and nodes that answer", 1) => One(nodes),
        ("fleet", "GPUs and nodes that answer", 0) | (_, "GPUs answering", 0) => One(gpus),
        (_, "Nodes gone" | "Daemons gone" | "Nodes not read" | "Nothing to read" | "GPUs lost" | "Ranks gone", 0) => {
            One(0.0)
        }
        ("fleet", "Critical findings", 0) => Wanted::Range(of.count(|_, found| found["severity"] == "critical")),
        ("fleet", "Warnings", 0) => Wanted::Range(of.count(|_, found| found["severity"] == "warning")),
        ("gpu-memory", "Findings, now", 0) => Wanted::Range(of.count(|_, found| !found["gpu"].is_null())),
        ("fleet", "Findings that go on, by kind", 0) => {
            let kinds: BTreeSet<&str> = of.findings.iter().map(|(_, _, found)| text(&found["finding"])).collect();
            let rows =
                kinds.into_iter().map(|kind| (vec![kind.to_owned()], of.count(|_, found| found["finding"] == kind)));
            Wanted::Ranges(&["finding"], rows.collect())
        }
        ("fleet" | "training-job", "Findings that go on", 0) => {
            Elsewhere("texts, a row a kind and rank: every_kind_of_finding_has_its_texts")
        }
        ("fleet", "GPUs above 97 %", 0) => One(of.gpus.iter().filter(|gpu| fullness(gpu) > 0.97).count() as f64),
        (_, "GPUs throttled" | "Throttled, now", 0) => One(1.0),
        (_, "XIDs in range" | "XIDs, in range", 0) => Elsewhere("the XID is older than the range"),
        ("fleet", "Power" | "Power of all GPUs", 0) => One(of.gpus.iter().map(|gpu| of.power_of(gpu, RECENT_S)).sum()),
        ("fleet", "GPUs", 0..=2)
        | ("gpu-memory", "GPUs", 0 | 1)
        | ("gpu-memory", "Memory now", 0)
        | ("gpu-memory", "GPU answers", 0) => of.by_gpu(|_| 1.0),
        ("fleet", "GPUs", 3) | ("gpu-memory", "Memory now", 1) => of.by_gpu(fullness),
        ("fleet", "GPUs", 4) | ("gpu-memory", "Utilization", 0) => {
            Wanted::Ranges(&["instance", "gpu"], of.rows(&["instance", "gpu"], |_| BUSY))
        }
        ("fleet", "GPUs", 5) | ("gpu-memory", "Power", 0) => of.by_gpu(|gpu| of.power_of(gpu, RECENT_S)),
        ("fleet", "GPUs", 6) | ("gpu-memory", "Temperature", 0) => of.by_gpu(|gpu| gpu.celsius),
        ("fleet", "GPUs", 7) => of.by_gpu(|gpu| f64::from(gpu.node == 0 && gpu.index == "1")),
        ("fleet", "GPUs", 8) => Elsewhere("the XID is older than the range"),
        ("fleet", "GPUs", 9) => {
            of.by_gpu(|gpu| of.count(|node, found| node == gpu.node && found["gpu"] == gpu.index.as_str())[1])
        }
        ("fleet", "GPUs", 10) | ("gpu-memory", "Memory now", 5) => of.by_rank(&["instance", "gpu", "rank"], |_| 1.0),
        ("fleet", "GPUs", 11) => of.by_gpu(|gpu| of.power_of(gpu, RECENT_S) / gpu.limit_w),
        ("fleet", "GPUs", 12) => of.by_gpu(|gpu| 89.0 - gpu.celsius),
        ("gpu-memory", "Below slowdown, now", 0) => One(least(of.gpus.iter().map(|gpu| 89.0 - gpu.celsius))),
        ("fleet", "Nodes", 0 | 1 | 5) => of.by_node(|_| 1.0),
        ("fleet", "Nodes", 2) => of.by_node(|_| 2.0),
        ("fleet", "Nodes", 3) => of.by_node(|node| most(of.gpus.iter().filter(|gpu| gpu.node == node).map(fullness))),
        ("fleet", "Nodes", 4) => Elsewhere("exporter-health has it"),
        ("fleet", "Nodes", 6) => Count(0),
        ("fleet", "Jobs", 0 | 1) => Truth::of_job(of.ranks.len() as f64),
        ("fleet", "Jobs", 2) => Truth::of_job(nodes),
        ("fleet", "Jobs", 3) => Truth::of_job(step(RECENT_S)),
        ("fleet", "Jobs", 4) | ("training-job", "Worst lag", 0) => {
            Wanted::Range(of.range_of_all(OLD_S, |seen| seen.compute_lag, highest))
        }
        ("fleet", "Jobs", 5) | ("training-job", "Worst data stall", 0) => {
            Wanted::Range(of.range_of_all(OLD_S, |seen| seen.data_stall, highest))
        }
        ("fleet", "Jobs", 6) => Wanted::Range(of.count(|_, found| !found["job"].is_null())),
        ("fleet", "How full the GPUs are", 0) => One(most(of.gpus.iter().map(full_of_late))),
        ("fleet", "How full the GPUs are", 1) => One(quantile(0.9, of.gpus.iter().map(full_of_late))),
        ("fleet", "How full the GPUs are", 2) => One(quantile(0.5, of.gpus.iter().map(full_of_late))),
        ("fleet", "GPUs at work", 0) => Wanted::Range(of.range_of_all(RECENT_S, |seen| seen.utilization, mean)),
        ("fleet", "GPUs at work", 1) => Wanted::Range(BUSY),
        ("gpu-memory", "Fullest GPU, in range", 0) => One(most(of.gpus.iter().map(|gpu| gpu.range[0] / gpu.usable))),
        ("gpu-memory", "Fullest GPU, now", 0) => One(most(of.gpus.iter().map(fullness))),
        ("gpu-memory", "Above 97 %, in range" | "Time above each threshold", _) => {
            Elsewhere("the API does not have it: the core's tests of time near full")
        }
        // Where the allocator counts them, its count is shown.
        ("gpu-memory", "Flushes, in range", 0) | (_, "Retries, in range", 0) => Wanted::Range(retries(1)),
        ("gpu-memory", "Allocator flushes", 0) => {
            Wanted::Ranges(&["instance", "gpu"], of.rows(&["instance", "gpu"], |rank| around(rank.retries[0])))
        }
        ("gpu-memory", "How full, by GPU", 0) => of.by_gpu(full_of_late),
        ("gpu-memory", "Peak of each interval", 0) => of.by_gpu(|gpu| gpu.recent[0]),
        ("gpu-memory", "Peak of each interval", 1) => One(most(of.gpus.iter().map(|gpu| gpu.usable))),
        ("gpu-memory", "Least free memory", 0) => of.by_gpu(|gpu| gpu.usable - gpu.recent[0]),
        ("gpu-memory", "Pods now", 0 | 1) => {
            Elsewhere("no kubelet is asked here: tests/it/kubelet.rs and tests/it/cluster.rs")
        }
        ("fleet", "GPUs with less than 1 GiB free for longer than 5 ms", 0..=2) => {
            Elsewhere("the counters' own tests, promtool's, benches/fleet and tests/gpu/pods.py")
        }
        ("gpu-memory", "Lowest use of each interval", 0) => of.by_gpu(|gpu| gpu.recent[2]),
        ("gpu-memory", "Memory now", 2 | 3) => Elsewhere("of the instant of a scrape: tests/it/prometheus.rs"),
        ("gpu-memory", "Memory now", 4) => of.by_gpu(|gpu| gpu.usable - gpu.window[0]),
        (
            "gpu-memory",
            "Memory controller" | "SM clock" | "PCIe" | "NVLink" | "ECC, remapped rows" | "Clocks event reasons",
            _,
        ) => Elsewhere("the API does not have it: tests/it/prometheus.rs and nvml_source compare it with the driver"),
        ("gpu-memory", "Power", 1) => One(700.0),
        ("gpu-memory", "Temperature", 1) => {
            Rows(&["limit"], vec![(vec!["slowdown".to_owned()], 89.0), (vec!["shutdown".to_owned()], 95.0)])
        }
        ("gpu-memory", "Energy in this range", 0) => of.by_gpu(|gpu| of.power_of(gpu, RANGE_S) * RANGE_S / 3_600.0),
        // Repeated for each GPU of one node: here for the first node, and both of its GPUs.
        ("gpu-memory", "GPU $node_gpu", column) => Rows(
            &["instance", "gpu"],
            of.gpus
                .iter()
                .filter(|gpu| gpu.node == 0)
                .map(|gpu| (vec![gpu.instance.clone(), gpu.index.clone()], gpu.recent[column]))
                .collect(),
        ),
        ("training-job", "Silent for", 0) => Elsewhere("less than a scrape's age"),
        ("training-job", "Step time, mean", 0)
        | ("training-job", "Step duration", 0)
        | ("training-job", "Seconds per step, by phase", 1) => One(step(RECENT_S)),
        ("training-job", "Against this range", 0) => One(step(RECENT_S) / step(RANGE_S)),
        ("training-job", "GPU idle", 0) => One(idle(RECENT_S)),
        ("training-job", "Highest peak", 0) => {
            One(most(of.ranks.iter().map(|rank| of.peak_of(rank, WINDOW_S) / of.usable_of(rank))))
        }
        ("training-job", "Comm slowdown", 0) => {
            Wanted::Range(of.range_of_all(OLD_S, |seen| seen.comm_slowdown, highest))
        }
        (_, "OOMs, in range", 0) => One(0.0),
        ("training-job", "Compute lag, by rank", 0) => of.ranges(&["rank"], RECENT_S + OLD_S, |seen| seen.compute_lag),
        ("training-job", "Data stall, by rank", 0) => of.ranges(&["rank"], RECENT_S + OLD_S, |seen| seen.data_stall),
        ("training-job", "Comm slowdown, by rank", 0) => {
            Wanted::Ranges(&["rank"], of.rows(&["rank"], |rank| of.comm_slowdown(rank, RECENT_S + OLD_S)))
        }
        ("training-job", "Where each rank is", 0) => Elsewhere("of the instant of a scrape: tests/it/prometheus.rs"),
        ("training-job", "Step duration", 1) => {
            One(most(of.ranks.iter().map(|rank| mean(of.steps_of(rank, RECENT_S)))))
        }
        ("training-job", "Step duration", 2) => Quantile(0.5, of.steps(RECENT_S).map(|one| one.seconds).collect()),
        ("training-job", "Step duration", 3) => Quantile(0.99, of.steps(RECENT_S).map(|one| one.seconds).collect()),
        ("training-job", "Steps by duration", 0) => Events(of.steps(RECENT_S).count() as f64),
        ("training-job", "Steps per second", nth) => ordered(nth, &steps_a_second),
        ("training-job", "Ranks", 0) => of.by_rank(&["instance", "rank", "gpu"], |_| 1.0),
        ("training-job", "Ranks", 1) => of.ranges(&["instance", "rank"], OLD_S, |seen| seen.step),
        ("training-job", "Ranks", 2) => Elsewhere("less than a scrape's age"),
        ("training-job", "Ranks", 3) => of.by_rank(&["instance", "rank"], |rank| mean(of.steps_of(rank, RECENT_S))),
        ("training-job", "Ranks", 4) => of.ranges(&["instance", "rank"], OLD_S, |seen| seen.compute_lag),
        ("training-job", "Ranks", 5) => of.ranges(&["instance", "rank"], OLD_S, |seen| seen.data_stall),
        ("training-job", "Ranks", 6) => {
            Wanted::Ranges(&["instance", "rank"], of.rows(&["instance", "rank"], |rank| of.comm_slowdown(rank, OLD_S)))
        }
        ("training-job", "Ranks", 7) => of.by_rank(&["instance", "rank"], |rank| of.peak_of(rank, WINDOW_S)),
        ("training-job", "Ranks", 8) => {
            Elsewhere("a job says it with each mark, also of layers: tests/it/prometheus.rs")
        }
        ("training-job" | "layers", "Outside the allocator" | "Outside, by rank", _) | ("training-job", "Ranks", 9) => {
            Elsewhere("the API has it of ended phases only: tests/it/prometheus.rs")
        }
        ("training-job", "Seconds per step, by phase", 0) => {
            let steps = of.steps(RECENT_S).count() as f64;
            Rows(&["phase"], of.by_phase(RECENT_S, |phases| phases.iter().map(|one| one.seconds).sum::<f64>() / steps))
        }
        ("training-job", "Phase duration", 0) => {
            Rows(&["phase"], of.by_phase(RECENT_S, |phases| mean(phases.iter().map(|one| one.seconds))))
        }
        ("training-job", "Phase duration", 1) => Quantiles("phase", 0.99, durations_by_phase()),
        ("training-job", "Phase duration over all ranks", 0) => {
            Elsewhere("of five minutes: promtool's tests of the rule and of its quantile")
        }
        ("training-job", "Peak by phase", 0) => {
            Rows(&["phase"], of.by_phase(RECENT_S, |phases| most(phases.iter().map(|one| one.peak_bytes))))
        }
        ("training-job", "Peak by rank", 0) => {
            of.by_rank(&["rank"], |rank| of.peak_of(rank, RECENT_S) / of.usable_of(rank))
        }
        ("training-job", "Floor of memory", nth) => {
            let floor = |rank: &Rank| {
                of.gpus.iter().find(|gpu| gpu.node == rank.node && gpu.index == rank.gpu).expect("a GPU").recent[2]
            };
            ordered(nth, &floor)
        }
        ("training-job", "Allocator: reserved, allocated", _)
        | ("layers", "Allocated, by rank" | "Reserved, by rank" | "Reserved but not allocated", _) => {
            Elsewhere("what a job says at each begin and end of a phase: tests/it/prometheus.rs")
        }
        ("training-job", "Allocator retries and OOMs", 0) => Wanted::Range(retries(0)),
        ("training-job", "Allocator retries and OOMs", 1) => One(0.0),
        ("training-job", "Tensor cores active, by rank", 0) => {
            Elsewhere("the simulated job has none: tests/it/otlp and GPUs")
        }
        ("training-job", "GPU idle, by phase", 0) => Rows(
            &["phase"],
            of.by_phase(RECENT_S, |phases| {
                phases.iter().map(|one| one.idle_s).sum::<f64>() / phases.iter().map(|one| one.seconds).sum::<f64>()
            }),
        ),
        ("training-job", "Energy per step, by phase", 0) => {
            let steps = of.steps(RECENT_S).count() as f64;
            Rows(
                &["phase"],
                of.by_phase(RECENT_S, |phases| phases.iter().filter_map(|one| one.joules).sum::<f64>() / steps),
            )
        }
        ("training-job", "Power, by phase", 0) => Rows(
            &["phase"],
            of.by_phase(RECENT_S, |phases| {
                phases.iter().filter_map(|one| one.joules).sum::<f64>()
                    / phases.iter().map(|one| one.seconds).sum::<f64>()
            }),
        ),
        ("compare-runs", "Runs", 0 | 1) => Truth::of_job(of.ranks.len() as f64),
        ("compare-runs", "Runs", 2)
        | ("compare-runs", "Memory of each run by step", 0)
        | ("compare-runs", "Step of each run", 0) => Wanted::Range(of.range_of_all(OLD_S, |seen| seen.step, highest)),
        ("compare-runs", "Runs", 3) | ("compare-runs", "Step time over the range", 0) => Truth::of_job(step(RANGE_S)),
        ("compare-runs", "Runs", 4) => Truth::of_job(most(of.phases(RANGE_S).map(|one| one.peak_bytes))),
        ("compare-runs", "Runs", 5) => Truth::of_job(joules_a_step(RANGE_S)),
        ("compare-runs", "Runs", 6) => Truth::of_job(idle(RANGE_S)),
        ("compare-runs", "Runs", 7) => Wanted::Range(retries(1)),
        ("compare-runs", "Runs", 8) => Truth::of_job(0.0),
        ("compare-runs", "Memory of each run over time", 0) | ("compare-runs", "Memory of each run by step", 1) => {
            Truth::of_job(most(of.gpus.iter().map(|gpu| gpu.recent[0])))
        }
        ("compare-runs", "Highest share of memory", 0) => Truth::of_job(most(of.gpus.iter().map(fullness))),
        ("compare-runs", "Step time of each run", 0) => Truth::of_job(step(RECENT_S)),
        ("compare-runs", "Mean duration of each phase", 0) => {
            Rows(&["phase"], of.by_phase(RANGE_S, |phases| mean(phases.iter().map(|one| one.seconds))))
        }
        ("compare-runs", "Highest peak of each phase", 0) => {
            Rows(&["phase"], of.by_phase(RANGE_S, |phases| most(phases.iter().map(|one| one.peak_bytes))))
        }
        ("compare-runs", "Energy per step", 0) => Truth::of_job(joules_a_step(RECENT_S)),
        ("compare-runs", "Utilization", 0) => Wanted::Range(of.range_of_all(RECENT_S, |seen| seen.utilization, mean)),
        ("layers", "Profiled step" | "Retries, in range", _) | ("layers", "Profile of each rank", 1) => {
            Elsewhere("it changes every few seconds: tests/it/layers.rs")
        }
        ("layers", "Layers", 0) => One(most(of.ranks.iter().map(|rank| profile(rank, "layers")))),
        ("layers", "Activations", 0) if nth == 0 => {
            One(most(of.ranks.iter().map(|rank| profile(rank, "activation_bytes"))))
        }
        ("layers", "Parameters", 0) if nth == 0 => {
            One(most(of.ranks.iter().map(|rank| profile(rank, "parameter_bytes"))))
        }
        ("layers", "Activations", nth) => ordered(nth, &|rank| profile(rank, "activation_bytes")),
        ("layers", "Parameters", nth) => ordered(nth, &|rank| profile(rank, "parameter_bytes")),
        ("layers", "Gathered", nth) => ordered(nth, &|rank| profile(rank, "gathered_bytes")),
        ("layers", "Highest allocated", 0) => {
            One(most(of.ranks.iter().map(|rank| profile(rank, "allocated_max_bytes"))))
        }
        ("layers", "Highest reserved", 0) => One(most(of.ranks.iter().map(|rank| profile(rank, "reserved_max_bytes")))),
        ("layers", "Missing records", 0) => One(0.0),
        ("layers", "Top layers, by activations", 0) => top_layers("activation_bytes"),
        ("layers", "Their parameters", 0) => top_layers("parameter_bytes"),
        ("layers", "Profile of each rank", 0) => of.by_rank(&["instance", "rank"], |_| 1.0),
        ("layers", "Profile of each rank", 2) => of.by_rank(&["instance", "rank"], |rank| profile(rank, "layers")),
        ("layers", "Profile of each rank", 3) => of.by_rank(&["instance", "rank"], |_| 0.0),
        ("layers", "Profile of each rank", 4) => {
            of.by_rank(&["instance", "rank"], |rank| profile(rank, "activation_bytes"))
        }
        ("layers", "Profile of each rank", 5) => {
            of.by_rank(&["instance", "rank"], |rank| profile(rank, "parameter_bytes"))
        }
        ("layers", "Profile of each rank", 6) => {
            of.by_rank(&["instance", "rank"], |rank| profile(rank, "gathered_bytes"))
        }
        ("layers", "Profile of each rank", 7) => {
            of.by_rank(&["instance", "rank"], |rank| profile(rank, "allocated_max_bytes"))
        }
        ("layers", "Profile of each rank", 8) => {
            of.by_rank(&["instance", "rank"], |rank| profile(rank, "reserved_max_bytes"))
        }
        ("layers", "Allocator retries, by rank", 0) => {
            let rows = of.ranks.iter().map(|rank| (vec![rank.number.to_string()], around(rank.retries[0])));
            Wanted::Ranges(&["rank"], rows.collect())
        }
        ("exporter-health", "Versions", 0) => One(1.0),
        ("exporter-health", "Daemons", 0..=3) => of.by_node(|_| 1.0),
        ("exporter-health", "Daemons", 4 | 6) => Count(0),
        ("exporter-health", "Sampling period in force", 0) => of.by_node(|_| 0.05),
        ("exporter-health", _, _) => {
            Elsewhere("of the daemon itself, which its API does not have: tests/it/prometheus.rs")
        }
        _ => return None,
    })
}

/// Whether samples are what was wanted; otherwise how they differ.
fn differs(samples: &[Sample], wanted: &Wanted, is_native: bool) -> Option<String> {
    let near = |value: f64, truth: f64, tolerance: f64| (value - truth).abs() <= tolerance * truth.abs() + 1e-9;
    let known: Vec<&Sample> = samples.iter().filter(|sample| !sample.value.is_nan()).collect();
    let within = |value: f64, share: f64, values: &[f64]| {
        let truth = quantile(share, values.iter().copied());
        let ratio = if is_native { 1.0 + TOLERANCE } else { BUCKET };
        (!(value >= truth / ratio && value <= truth * ratio)).then(|| format!("{value} for {truth}"))
    };
    let between = |value: f64, [low, high]: [f64; 2]| {
        let is = value >= low * (1.0 - TOLERANCE) - 1e-9 && value <= high * (1.0 + TOLERANCE) + 1e-9;
        (!is).then(|| format!("{value}, and {low} to {high} were seen"))
    };
    match wanted {
        Wanted::Elsewhere(_) => None,
        Wanted::Range(range) => match known[..] {
            [one] => between(one.value, *range),
            _ => Some(format!("{} rows for one", known.len())),
        },
        Wanted::Ranges(labels, rows) => {
            if known.len() != rows.len() {
                return Some(format!("{} rows for {}", known.len(), rows.len()));
            }
            rows.iter().find_map(|(names, range)| match row_of(&known, labels, names) {
                Some(one) => between(one.value, *range).map(|text| format!("{names:?}: {text}")),
                None => Some(format!("no row for {names:?}")),
            })
        }
        Wanted::Count(count) => (known.len() != *count).then(|| format!("{} rows for {count}", known.len())),
        Wanted::One(truth) => match known[..] {
            [one] if near(one.value, *truth, TOLERANCE) => None,
            [one] => Some(format!("{} for {truth}", one.value)),
            _ => Some(format!("{} rows for one, {truth}", known.len())),
        },
        Wanted::Quantile(share, values) => match known[..] {
            [one] => within(one.value, *share, values),
            _ => Some(format!("{} rows for one", known.len())),
        },
        Wanted::Events(count) => {
            // Classic buckets count those below them too.
            let all = most(known.iter().map(|one| one.value));
            (!near(all, *count, TOLERANCE)).then(|| format!("{all} events for {count}"))
        }
        Wanted::Quantiles(label, share, rows) => rows.iter().find_map(|(name, values)| {
            let one = known.iter().find(|sample| sample.labels.get(*label).is_some_and(|value| value == name));
            one.map_or_else(
                || Some(format!("no row for {name}")),
                |one| within(one.value, *share, values).map(|text| format!("{name}: {text}")),
            )
        }),
        Wanted::Rows(labels, rows) => {
            if known.len() != rows.len() {
                return Some(format!("{} rows for {}", known.len(), rows.len()));
            }
            rows.iter().find_map(|(names, truth)| {
                let is = |sample: &&&Sample| {
                    labels.iter().zip(names).all(|(label, name)| sample.labels.get(*label) == Some(name))
                };
                let one = known.iter().find(is);
                match one {
                    Some(one) if near(one.value, *truth, TOLERANCE) => None,
                    Some(one) => Some(format!("{names:?}: {} for {truth}", one.value)),
                    None => Some(format!("no row for {names:?}")),
                }
            })
        }
    }
}

/// The row with these labels.
fn row_of<'a>(known: &[&'a Sample], labels: &[&str], names: &[String]) -> Option<&'a Sample> {
    known
        .iter()
        .copied()
        .find(|sample| labels.iter().zip(names).all(|(label, name)| sample.labels.get(*label) == Some(name)))
}

fn configuration(nodes: &[String], lines: &str) -> String {
    let targets: Vec<String> = nodes.iter().map(|address| format!("{address:?}")).collect();
    format!(
        "global: {{scrape_interval: 5s, scrape_timeout: 5s, evaluation_interval: 5s}}\nrule_files: [{:?}]\n\
         scrape_configs:\n  - job_name: highwater\n    static_configs: [{{targets: [{}]}}]\n{lines}",
        tools::root().join("dashboards/alerts/recording.yaml"),
        targets.join(", ")
    )
}

/// Waits until a time has come: what is compared is of that time.
fn pass(until: Instant) {
    while Instant::now() < until {
        std::thread::park_timeout(until.saturating_duration_since(Instant::now()));
    }
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn every_panel_is_within_a_tenth_of_the_truth_on_1_16_and_64_nodes() {
    let (Some(debians), Some(newest)) = (tools::find("prometheus"), tools::find("prometheus-3")) else { return };
    let folder = TempDir::new().expect("a folder");
    let daemons: Vec<Daemon> = (0..NODES)
        .map(|node| {
            let file = folder.path().join(format!("{node}.toml"));
            std::fs::write(&file, scenario(node)).expect("written");
            let source = format!("sim:{}", file.display());
            // What 64 daemons on a small machine can do: each panel is about what is read, however often.
            Daemon::start(&["serve", "--source", &source, "--set", "sampling.period=50ms"])
        })
        .collect();
    let daemons: Vec<Daemon> = daemons.into_iter().map(Daemon::ready).collect();
    let nodes: Vec<String> = daemons.iter().map(|daemon| daemon.address().to_owned()).collect();
    let native = "    scrape_native_histograms: true\n";
    let scrapers: Vec<(usize, bool, Scraper)> = SIZES
        .iter()
        .flat_map(|size| [(*size, false, &debians, ""), (*size, true, &newest, native)])
        .map(|(size, is_native, program, lines)| {
            (size, is_native, Scraper::configured(program, &configuration(&nodes[..size], lines)))
        })
        .collect();
    // Jobs have begun, the first node's trouble goes on, and its first steps are out of the range.
    let mut next = Instant::now() + Duration::from_secs(25);
    let mut seen: Vec<Vec<[Seen; 2]>> = vec![Vec::new(); NODES];
    let mut findings = Vec::new();
    let looks = (RANGE_S / LOOK_S) as usize + 2;
    for nth in 0..looks {
        pass(next);
        next += Duration::from_secs_f64(LOOK_S);
        for (node, (daemon, seen)) in daemons.iter().zip(&mut seen).enumerate() {
            seen.push(look(daemon));
            if let Some(last) = (nth + LAST_LOOKS).checked_sub(looks) {
                findings.extend(findings_of(daemon).into_iter().map(|found| (last, node, found)));
            }
        }
    }
    let truth = ask(&daemons, &seen, findings);
    let (recent, range, range_s) = (format!("{RECENT_S}s"), format!("{RANGE_S}s"), RANGE_S.to_string());
    let window = format!("{WINDOW_S}s");
    let chosen = [
        ("$__rate_interval", recent.as_str()),
        ("$__range_s", &range_s),
        ("$__range", &range),
        ("$__interval", &recent),
        ("$node", &nodes[0]),
        ("$job", "even"),
        ("$window", &window),
    ];
    let (mut problems, mut compared, mut elsewhere) = (String::new(), 0, BTreeSet::new());
    for (size, is_native, scraper) in &scrapers {
        let truth = truth.of(*size);
        for Dashboard { file, json } in dashboards() {
            let board = file.trim_end_matches(".json");
            for panel in panels(&json) {
                let title = text(&panel["title"]);
                let targets = panel["targets"].as_array().map(Vec::as_slice).unwrap_or_default();
                for (nth, target) in targets.iter().enumerate() {
                    let what = format!(
                        "{board}, {title}, query {nth}, {size} nodes, {}",
                        if *is_native { "native" } else { "classic" }
                    );
                    let Some(wanted) = wanted(board, title, nth, &truth) else {
                        let _ = writeln!(problems, "{what}: nobody has said what it should be");
                        continue;
                    };
                    if let Wanted::Elsewhere(why) = wanted {
                        elsewhere.insert(format!("{board}, {title}, query {nth}: {why}"));
                        continue;
                    }
                    compared += 1;
                    let expression = filled(text(&target["expr"]), &chosen);
                    let samples = scraper.query_at(&expression, truth.now_s);
                    if let Some(difference) = differs(&samples, &wanted, *is_native) {
                        let _ = writeln!(problems, "{what}: {difference}");
                    }
                }
            }
        }
    }
    println!("{compared} comparisons, {} queries elsewhere: {elsewhere:#?}", elsewhere.len());
    assert!(problems.is_empty(), "{problems}");
}

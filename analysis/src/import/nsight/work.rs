//! What ran on GPUs: kernels, copies and fills with the calls that launched them, as traces.
//!
//! Enters: an export. Leaves: a trace for each process that uses a GPU. What several processes run on one GPU is in the trace of the one
//! that runs the most on it, so that no time of a GPU counts twice. Invariants: at most `MOST_EVENTS` rows are kept of all
//! tables; of calls, only those are kept that launched something, and of each only its begin.

use super::gpus::{self, GpuNumbers, MOST_DEVICES, process};
use super::launches::{Launches, correlation};
use super::names::{self, Copies, RangeNames};
use super::ranges::Ranges;
use super::steps::{self, Marks};
use crate::timeline::{Builder, DeviceProperties, Full, GpuRun, MOST_EVENTS, NamedKernel, Parameters, Trace};
use highwater_core::source::OpenError;
use highwater_engine::recording::rows::{MOST_GPUS, RecordingReader, needed, number};
use highwater_engine::recording::{FileProblem, SkippedLines};
use rusqlite::Row;
use std::collections::{BTreeMap, HashMap};

const KERNELS: &str = "CUPTI_ACTIVITY_KIND_KERNEL";
const COPIES: &str = "CUPTI_ACTIVITY_KIND_MEMCPY";
const FILLS: &str = "CUPTI_ACTIVITY_KIND_MEMSET";
/// CUDA graphs as a whole (`--cuda-graph-trace=graph`).
const GRAPHS: &str = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE";
/// The tables of what ran on GPUs.
pub(crate) const TABLES: [&str; 4] = [KERNELS, COPIES, FILLS, GRAPHS];
/// The columns of what ran on a GPU, which come first in each query.
const COMMON: [&str; 6] = ["start", "end", "deviceId", "globalPid", "correlationId", "streamId"];

/// What an export has of the work of GPUs.
#[derive(Debug)]
pub(crate) struct ProfiledWork {
    /// One for each process whose work was the most on some GPU.
    pub traces: Vec<Trace>,
    /// What was guessed, for people.
    pub assumed: Vec<String>,
    /// What it lacks, for people.
    pub missing: Vec<&'static str>,
    /// Rows that could not be read.
    pub skipped: SkippedLines,
}

/// What ran on the GPUs.
///
/// # Errors
/// A table cannot be read, or there is more than is kept.
pub(crate) fn profile(mut file: RecordingReader) -> Result<ProfiledWork, OpenError> {
    let gpus = GpuNumbers::read(&mut file)?;
    let too_large =
        file.refuse("recording_too_large", format!("it has more than {MOST_EVENTS} kernels, copies and steps"));
    let owners = owners(&mut file, &gpus)?;
    let mut work = Builders { gpus, owners, builders: BTreeMap::new(), taken: 0, too_large };
    work.kernels(&mut file)?;
    work.copies(&mut file)?;
    work.fills(&mut file)?;
    let has_graphs = work.graphs(&mut file)?;
    let mut launches = Launches::read(&mut file, work.builders.values().flat_map(Builder::correlations))?;
    let marks = steps::marks(&mut file, Some(&work.builders.keys().copied().flatten().collect()))?;
    let (epoch_ns, properties) = (gpus::epoch_ns(&mut file)?, properties(&mut file)?);
    let (mut assumed, missing) = (marks.assumed.clone(), marks.missing.clone());
    if has_graphs {
        assumed.push(
            "CUDA graphs count as computation: the file has no kernels of them (--cuda-graph-trace=node)".to_owned(),
        );
    }
    let mut names = RangeNames::new(marks.family.clone());
    if let Some(ranges) = Ranges::find(&mut file)? {
        // What cannot be read of them was counted before.
        let skipped = file.skipped.clone();
        launches.find_ranges(&mut file, &ranges, &mut names, |range, name| {
            let of = work.builders.get_mut(&Some(process(range.thread)));
            if let Some(builder) = of {
                builder.take_annotation(range.thread, name, range.begin_ns, range.end_ns);
            }
        })?;
        file.skipped = skipped;
    }
    let mut traces = work.traces(&launches, &names, &marks)?;
    for trace in &mut traces {
        (trace.base_ns, trace.properties) = (epoch_ns, properties.clone());
    }
    Ok(ProfiledWork { traces, assumed, missing, skipped: file.skipped })
}

/// The process that runs the most on each GPU.
fn owners(file: &mut RecordingReader, gpus: &GpuNumbers) -> Result<BTreeMap<u32, Option<i64>>, OpenError> {
    let mut counts: BTreeMap<u32, BTreeMap<Option<i64>, u64>> = BTreeMap::new();
    for table in TABLES {
        if !file.has_column(table, "deviceId") {
            continue;
        }
        let columns = file.columns(table, ["deviceId", "globalPid"]);
        let query = format!("SELECT {columns}, count(*) FROM {table} GROUP BY 1, 2");
        // What cannot be read is counted where the row itself is read.
        let read = |row: &Row<'_>| {
            Ok((number(row, 0).unwrap_or(None), number::<i64>(row, 1).unwrap_or(None), needed(row, 2)?))
        };
        for (device, global, count) in file.rows::<(Option<u32>, _, u64)>(table, &query, 0, MOST_DEVICES, read)? {
            let Some(device) = device else { continue };
            let of = counts.entry(gpus.of(global, device)).or_default().entry(global.map(process)).or_default();
            *of = of.saturating_add(count);
        }
    }
    if counts.len() > MOST_GPUS {
        return Err(file.refuse("recording_too_large", format!("it has more than {MOST_GPUS} GPUs")));
    }
    let most = |of: BTreeMap<Option<i64>, u64>| of.into_iter().max_by_key(|(_, count)| *count).and_then(|(of, _)| of);
    Ok(counts.into_iter().map(|(gpu, of)| (gpu, most(of))).collect())
}

/// The names and sizes of the GPUs.
fn properties(file: &mut RecordingReader) -> Result<Vec<DeviceProperties>, OpenError> {
    let facts = gpus::facts(file)?.into_iter();
    let of = |(id, device): (u32, highwater_core::gpu::Device)| DeviceProperties {
        id,
        name: device.name,
        total_bytes: device.memory_total_bytes,
    };
    Ok(facts.map(of).collect())
}

/// What has been read.
struct Builders {
    gpus: GpuNumbers,
    owners: BTreeMap<u32, Option<i64>>,
    /// By process.
    builders: BTreeMap<Option<i64>, Builder>,
    taken: usize,
    too_large: OpenError,
}

impl Builders {
    /// Reads a table of what ran, with further columns. A table that the export lacks has no rows.
    fn each<T>(
        &mut self,
        file: &mut RecordingReader,
        table: &'static str,
        further: &str,
        read: impl Fn(&Row<'_>) -> Result<T, FileProblem>,
        mut take: impl FnMut(&mut Builder, Option<i64>, GpuRun, T) -> Result<(), Full>,
    ) -> Result<u64, OpenError> {
        if !file.has_table(table) {
            return Ok(0);
        }
        let query = format!("SELECT {}, {further} FROM {table}", file.columns(table, COMMON));
        let Self { gpus, owners, builders, taken, too_large } = self;
        let mut count = 0;
        file.each(
            table,
            &query,
            0,
            |row| Ok((run(row, gpus)?, read(row)?)),
            |(run, more)| {
                (*taken, count) = (*taken + 1, count + 1);
                if *taken > MOST_EVENTS {
                    return Err(too_large.clone());
                }
                let owner = owners.get(&run.device).copied().flatten();
                take(builders.entry(owner).or_default(), owner, run, more).map_err(|Full| too_large.clone())
            },
        )?;
        Ok(count)
    }

    fn kernels(&mut self, file: &mut RecordingReader) -> Result<(), OpenError> {
        let names = file.columns(KERNELS, ["demangledName", "shortName"]);
        let name = format!("coalesce({names})");
        let texts = names::texts(file, KERNELS, &name)?;
        let mut known: HashMap<(Option<i64>, Option<i64>), NamedKernel> = HashMap::new();
        let further = format!("{name} AS name");
        self.each(
            file,
            KERNELS,
            &further,
            |row| number::<i64>(row, COMMON.len()),
            |builder, owner, run, id| {
                // What has no text has no name of its own.
                let text = id.and_then(|id| texts.get(&id));
                let key = (owner, id.filter(|_| text.is_some()));
                let kernel = match known.get(&key) {
                    Some(kernel) => *kernel,
                    None => {
                        *known.entry(key).or_insert(builder.kernel(text.map_or("(no name)", String::as_str), false)?)
                    }
                };
                builder.take_kernel(run, kernel, Parameters::default())
            },
        )?;
        Ok(())
    }

    fn copies(&mut self, file: &mut RecordingReader) -> Result<(), OpenError> {
        let names = Copies::read(file)?;
        let further = file.columns(COPIES, ["copyKind", "srcKind", "dstKind"]);
        let at = COMMON.len();
        let read = |row: &Row<'_>| Ok(names.copy(number(row, at)?, number(row, at + 1)?, number(row, at + 2)?));
        self.each(file, COPIES, &further, read, |builder, _, run, name| builder.take_copy(run, &name))?;
        Ok(())
    }

    fn fills(&mut self, file: &mut RecordingReader) -> Result<(), OpenError> {
        let names = Copies::read(file)?;
        let further = file.columns(FILLS, ["memKind"]);
        let read = |row: &Row<'_>| Ok(names.fill(number(row, COMMON.len())?));
        self.each(file, FILLS, &further, read, |builder, _, run, name| builder.take_copy(run, &name))?;
        Ok(())
    }

    /// CUDA graphs of which the export has no kernels; returns whether there are any.
    fn graphs(&mut self, file: &mut RecordingReader) -> Result<bool, OpenError> {
        let count = self.each(
            file,
            GRAPHS,
            "NULL",
            |_| Ok(()),
            |builder, _, run, ()| {
                let graph = builder.kernel("CUDA graph", false)?;
                builder.take_kernel(run, graph, Parameters::default())
            },
        )?;
        Ok(count > 0)
    }

    fn traces(self, launches: &Launches, names: &RangeNames, marks: &Marks) -> Result<Vec<Trace>, OpenError> {
        let mut traces = Vec::with_capacity(self.builders.len());
        for (process, mut builder) in self.builders {
            for (number, begin_ns, end_ns) in
                process.and_then(|process| marks.steps.get(&process)).into_iter().flatten()
            {
                builder.take_step(*number, *begin_ns, *end_ns).map_err(|Full| self.too_large.clone())?;
            }
            for (begin_ns, end_ns) in process.and_then(|process| marks.loading.get(&process)).into_iter().flatten() {
                builder.take_loading(*begin_ns, *end_ns).map_err(|Full| self.too_large.clone())?;
            }
            names.iter().for_each(|(number, name)| builder.take_operator(number, name));
            traces.push(builder.finish_launched(|correlation| launches.of(correlation)));
        }
        Ok(traces)
    }
}

/// Where and when a row ran.
fn run(row: &Row<'_>, gpus: &GpuNumbers) -> Result<GpuRun, FileProblem> {
    let (begin_ns, end_ns): (i64, i64) = (needed(row, 0)?, needed(row, 1)?);
    if end_ns < begin_ns {
        return Err(FileProblem::malformed("end: it lies before start"));
    }
    let global = number(row, 3)?;
    Ok(GpuRun {
        device: gpus.of(global, needed(row, 2)?),
        begin_ns,
        end_ns,
        correlation: correlation(global, number(row, 4)?),
        operator: None,
        stream: number(row, 5)?,
    })
}

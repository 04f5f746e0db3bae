//! NVTX ranges: what a program calls the parts of its work.

use super::gpus::process;
use super::names::{LONGEST_TEXT, has_texts, labels};
use highwater_core::source::OpenError;
use highwater_engine::recording::FileProblem;
use highwater_engine::recording::rows::{RecordingReader, needed, number, text};
use rusqlite::Row;
use std::collections::BTreeSet;

/// The table of ranges and marks.
pub(crate) const TABLE: &str = "NVTX_EVENTS";
/// Nsight's event types, for exports without the enumeration: a range that ends on its thread, a range that may end on another
/// thread, and the creation of a domain.
const KINDS: [(&str, i64); 3] = [("NvtxPushPopRange", 59), ("NvtxStartEndRange", 60), ("NvtxDomainCreate", 75)];
/// Domains of libraries, whose ranges are their calls.
const LIBRARIES: [&str; 10] =
    ["nccl", "cccl", "cublas", "cudnn", "cufft", "cusolver", "cusparse", "cutensor", "nvshmem", "thrust"];
/// The most domains of all processes.
const MOST_DOMAINS: usize = 1 << 12;

/// A range that has ended.
#[derive(Debug)]
pub(super) struct Range {
    /// The `globalTid` of the thread that began it.
    pub thread: i64,
    pub begin_ns: i64,
    pub end_ns: i64,
    pub name: String,
}

/// The ranges of an export, in the order in which they began.
pub(super) struct Ranges {
    query: String,
    /// Process and number of the domains of libraries.
    of_libraries: BTreeSet<(i64, i64)>,
}

impl Ranges {
    /// Finds out how the export has them; `None` if it has none.
    pub(super) fn find(file: &mut RecordingReader) -> Result<Option<Self>, OpenError> {
        if !file.has_table(TABLE) || !file.has_column(TABLE, "end") {
            return Ok(None);
        }
        let named = labels(file, "ENUM_NSYS_EVENT_TYPE", "name")?;
        let [of_thread, of_process, domain] = KINDS
            .map(|(name, number)| named.iter().find(|(_, known)| *known == name).map_or(number, |(number, _)| *number));
        let has = |column| file.has_column(TABLE, column);
        let own = if has("text") { short("n.text") } else { "NULL".to_owned() };
        let (name, join) = if has("textId") && has_texts(file) {
            let listed =
                format!("LEFT JOIN StringIds s ON s.id = n.textId AND octet_length(s.value) <= {LONGEST_TEXT}");
            (format!("coalesce({own}, s.value)"), listed)
        } else {
            (own.clone(), String::new())
        };
        let kinds =
            if has("eventType") { format!("AND n.eventType IN ({of_thread}, {of_process})") } else { String::new() };
        let [thread, of_domain] =
            ["globalTid", "domainId"].map(|column| if has(column) { format!("n.{column}") } else { "NULL".to_owned() });
        let query = format!(
            "SELECT n.start, n.\"end\", {thread}, {of_domain}, {name} FROM {TABLE} n {join} \
             WHERE n.\"end\" IS NOT NULL {kinds} ORDER BY n.start"
        );
        let has_domains = has("eventType") && has("domainId") && has("text") && has("globalTid");
        let of_libraries = if has_domains { of_libraries(file, domain)? } else { BTreeSet::new() };
        Ok(Some(Self { query, of_libraries }))
    }

    /// Passes each range that has a name and is not a library's. A range whose end is not known is none.
    pub(super) fn each(
        &self,
        file: &mut RecordingReader,
        mut take: impl FnMut(Range) -> Result<(), OpenError>,
    ) -> Result<(), OpenError> {
        let read = |row: &Row<'_>| {
            let (begin_ns, end_ns): (i64, i64) = (needed(row, 0)?, needed(row, 1)?);
            if end_ns < begin_ns {
                return Err(FileProblem::malformed("end: it lies before start"));
            }
            let (thread, domain) = (number::<i64>(row, 2)?.unwrap_or(0), number::<i64>(row, 3)?.unwrap_or(0));
            let name = text(row, 4)?.filter(|_| !self.of_libraries.contains(&(process(thread), domain)));
            Ok(name.map(|name| Range { thread, begin_ns, end_ns, name }))
        };
        file.each(TABLE, &self.query, 0, read, |range| range.map_or(Ok(()), &mut take))
    }
}

/// A column, if its text is not too long to read. Old exports have an empty text instead of none.
fn short(column: &str) -> String {
    format!("CASE WHEN octet_length({column}) BETWEEN 1 AND {LONGEST_TEXT} THEN {column} END")
}

/// The domains of libraries.
fn of_libraries(file: &mut RecordingReader, created: i64) -> Result<BTreeSet<(i64, i64)>, OpenError> {
    let query = format!("SELECT globalTid, domainId, {} FROM {TABLE} WHERE eventType = ?1", short("text"));
    let rows = file.rows(TABLE, &query, created, MOST_DOMAINS, |row| {
        Ok((number::<i64>(row, 0)?.unwrap_or(0), number::<i64>(row, 1)?, text(row, 2)?.unwrap_or_default()))
    })?;
    let is_library = |name: &str| LIBRARIES.iter().any(|known| name.to_ascii_lowercase().contains(known));
    let of = |(thread, domain, name): (i64, Option<i64>, String)| {
        Some((process(thread), domain.filter(|_| is_library(&name))?))
    };
    Ok(rows.into_iter().filter_map(of).collect())
}

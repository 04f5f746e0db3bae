//! A report as one HTML page that opens from disk without a network.
//!
//! Enters: reports. Leaves: the page, with its style, its script and its data inside. Invariant: it makes no request.

use super::compare::Comparison;
use super::layers::Profile;
use super::model::{Gpu, Report};
use super::{advised, axis, incidents, logged, packed, text, trace};
use crate::timeline::{Ranks, RanksError};
use crate::viewer::Page;
use highwater_engine::recording::Times;
use serde_json::{Value, json};

const BODY: &str = include_str!("page/body.html");
const SCRIPTS: [&str; 4] = [
    include_str!("page/data.js"),
    include_str!("page/flame.js"),
    include_str!("page/allocator.js"),
    include_str!("page/report.js"),
];

/// The page. With `align_step`, recordings begin at this step instead of at their begin.
#[must_use]
pub fn page(
    reports: &[Report],
    comparison: Option<&Comparison>,
    ranks: Option<&Result<Ranks, RanksError>>,
    align_step: Option<u64>,
) -> String {
    let offsets = axis::offsets(reports);
    let names: Vec<&str> = reports.iter().map(|report| report.name.as_str()).collect();
    let data = json!({
        "recordings": reports.iter().zip(offsets).map(|(report, offset)| recording(report, offset)).collect::<Vec<_>>(),
        "comparison": comparison,
        "ranks": ranks.map(super::json::ranks),
        "align_step": align_step,
        "columns": packed::columns(reports),
    });
    Page { title: &names.join(", "), body: BODY, scripts: &SCRIPTS, data: &data, connects: false }.document().html
}

/// A recording; `offset_ns` is how much later it began than the first on the clock that it shares with others.
fn recording(report: &Report, offset_ns: Option<i64>) -> Value {
    let origin = &report.origin;
    let gpus_of = |rank| report.gpus_of.get(rank).into_iter().flatten().collect::<Vec<_>>();
    let rows = report.spans.rows().iter().map(|row| super::json::row(row, report.begin_ns));
    json!({
        "name": report.name,
        "format": origin.format,
        "host": origin.host,
        "source": origin.source,
        "notice": origin.notice(),
        "note": origin.note,
        "state": origin.state,
        "missing": origin.missing,
        "assumed": origin.assumed,
        "times": super::json::times(report),
        "begin_unix_ms": (origin.times == Times::Unix).then_some(report.begin_ns / 1_000_000),
        "offset_ns": offset_ns,
        "duration_ns": report.duration_ns(),
        "trace": report.trace.as_ref().map(|traced| trace::page(traced, report.begin_ns)),
        "logged": report.logged.iter().map(logged::page).collect::<Vec<_>>(),
        "headline": text::headline(report),
        "gpus": report.gpus.iter().map(|gpu| gpu_of(gpu, report.begin_ns)).collect::<Vec<_>>(),
        "ranks": report.spans.ranks(),
        "gpus_of": report.spans.ranks().iter().map(gpus_of).collect::<Vec<_>>(),
        "rows": rows.collect::<Vec<_>>(),
        "spans": report.spans.spans().len(),
        "left_out": report.spans.left_out(),
        "layer_names": report.layers.names,
        "profiles": report.layers.profiles.iter().map(|one| profile(one, report.layers.top())).collect::<Vec<_>>(),
        "findings": super::json::findings(report).unwrap_or_default(),
        "incidents": incidents::page(report.found()),
        "advice": advised(report).into_iter().map(|advised| advised.text).collect::<Vec<_>>(),
        "skipped": report.skipped.count,
        "skipped_first": report.skipped.first.first().map(ToString::to_string),
    })
}

/// A profile without its records, which are in the columns. Its layers are positions in `layer_names`.
fn profile(profile: &Profile, most: usize) -> Value {
    let mut value = super::json::totals(profile);
    if let Some(fields) = value.as_object_mut() {
        fields.insert("count".to_owned(), profile.of_layers().count().into());
        fields.insert("left_out".to_owned(), profile.left_out.into());
        let top = profile.top.iter().take(most).map(|top| {
            json!({
                "layer": top.number,
                "activation_bytes": top.activations,
                "parameter_bytes": top.parameters,
            })
        });
        fields.insert("top".to_owned(), top.collect());
    }
    value
}

fn gpu_of(gpu: &Gpu, begin_ns: i64) -> Value {
    let mut value = super::json::gpu(gpu, begin_ns, super::allocator::page);
    let curve = &gpu.usage.curve;
    if let Some(fields) = value.as_object_mut() {
        fields.insert("points".to_owned(), curve.points().len().into());
        fields.insert("activity_points".to_owned(), gpu.activity.points().len().into());
        fields.insert("breakdown_points".to_owned(), gpu.breakdown.points().len().into());
        fields.insert("unit_bytes".to_owned(), packed::unit_bytes(curve.points()).into());
        fields.insert("bucket_ns".to_owned(), curve.bucket_ns().into());
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{Ended, Room, Spans, hand};
    use highwater_core::jobs::EndedBy;
    use highwater_core::wire::Kind;

    /// Eight GPUs whose memory changes with every reading for ten minutes, and as many phases as are kept.
    fn restless() -> Report {
        let mut random = 1_u64;
        let mut next = |below: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % below
        };
        let mut readings = || {
            let reading = |reading: i64| (reading * 1_000_000 + next(900_000).cast_signed(), Some(next(70_000) << 21));
            (0..600_000).map(reading).collect::<Vec<_>>()
        };
        let gpus: Vec<_> = (0..8).map(|_| readings()).collect();
        let mut report = hand::report("</script><b>{data}{script}", &gpus);
        let mut spans = Spans::new(Room::of(1).spans, Vec::new());
        for nth in 0..Room::of(1).spans {
            let begin_ns = nth as i64 * 10_000_000;
            let (rank, name) = (next(8) as u32, ["forward", "backward", "comm"][nth % 3].to_owned());
            let (end_ns, peak_bytes) = (begin_ns + next(900_000_000).cast_signed(), Some(next(70_000) << 21));
            spans.push(Ended {
                job: "job".to_owned(),
                rank,
                kind: Kind::Phase,
                name,
                step: Some(nth as u64 / 24),
                begin_ns,
                end_ns,
                by: EndedBy::End,
                peak_bytes,
            });
        }
        spans.finish();
        report.spans = spans;
        report
    }

    #[test]
    fn the_worst_recording_of_ten_minutes_is_a_page_of_two_megabytes_and_names_are_data() {
        let report = restless();
        let points: usize = report.gpus.iter().map(|gpu| gpu.usage.curve.points().len()).sum();
        assert!(points > Room::of(1).points / 3, "only {points} points are kept");
        let page = page(&[report], None, None, None);
        assert!(page.len() < 2_000_000, "{} bytes", page.len());
        assert_eq!((page.matches("<script").count(), page.matches("</script>").count()), (2, 2));
        assert!(
            page.contains("<title>&lt;/script&gt;&lt;b&gt;{data}{script}</title>"),
            "a name is no place of the template"
        );
    }
}

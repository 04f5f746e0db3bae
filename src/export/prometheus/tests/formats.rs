//! Compares the protobuf exposition with the text, sample by sample, and its native histograms with the durations.

use super::*;
use highwater_core::histogram::Histogram;
use prost::Message;
use std::collections::BTreeMap;

/// The messages of the public `metrics.proto`, as far as they are used.
#[derive(Clone, PartialEq, Message)]
struct MetricFamily {
    #[prost(string, optional, tag = "1")]
    name: Option<String>,
    #[prost(string, optional, tag = "2")]
    help: Option<String>,
    #[prost(enumeration = "Type", optional, tag = "3")]
    kind: Option<i32>,
    #[prost(message, repeated, tag = "4")]
    metric: Vec<Decoded>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, prost::Enumeration)]
enum Type {
    Counter = 0,
    Gauge = 1,
    Histogram = 4,
}

#[derive(Clone, PartialEq, Message)]
struct Decoded {
    #[prost(message, repeated, tag = "1")]
    label: Vec<LabelPair>,
    #[prost(message, optional, tag = "2")]
    gauge: Option<Single>,
    #[prost(message, optional, tag = "3")]
    counter: Option<Single>,
    #[prost(message, optional, tag = "7")]
    histogram: Option<Native>,
}

#[derive(Clone, PartialEq, Message)]
struct LabelPair {
    #[prost(string, optional, tag = "1")]
    name: Option<String>,
    #[prost(string, optional, tag = "2")]
    value: Option<String>,
}

#[derive(Clone, PartialEq, Message)]
struct Single {
    #[prost(double, optional, tag = "1")]
    value: Option<f64>,
}

#[derive(Clone, PartialEq, Message)]
struct Native {
    #[prost(uint64, optional, tag = "1")]
    sample_count: Option<u64>,
    #[prost(double, optional, tag = "2")]
    sample_sum: Option<f64>,
    #[prost(message, repeated, tag = "3")]
    bucket: Vec<Bucket>,
    #[prost(sint32, optional, tag = "5")]
    schema: Option<i32>,
    #[prost(double, optional, tag = "6")]
    zero_threshold: Option<f64>,
    #[prost(uint64, optional, tag = "7")]
    zero_count: Option<u64>,
    #[prost(message, repeated, tag = "12")]
    positive_span: Vec<Span>,
    #[prost(sint64, repeated, packed = "false", tag = "13")]
    positive_delta: Vec<i64>,
}

#[derive(Clone, PartialEq, Message)]
struct Bucket {
    #[prost(uint64, optional, tag = "1")]
    cumulative_count: Option<u64>,
    #[prost(double, optional, tag = "2")]
    upper_bound: Option<f64>,
}

#[derive(Clone, PartialEq, Message)]
struct Span {
    #[prost(sint32, optional, tag = "1")]
    offset: Option<i32>,
    #[prost(uint32, optional, tag = "2")]
    length: Option<u32>,
}

impl Native {
    /// Every bucket's upper bound and count, seconds, those of 0 first. Panics where Prometheus would refuse them.
    fn buckets(&self) -> Vec<(f64, u64)> {
        let schema = self.schema.expect("a native histogram");
        assert!((-4..=8).contains(&schema), "schema {schema}");
        let mut buckets = vec![(self.zero_threshold.expect("a threshold"), self.zero_count.expect("a count"))];
        let (mut index, mut count, mut deltas) = (0, 0, self.positive_delta.iter());
        for (position, span) in self.positive_span.iter().enumerate() {
            let offset = span.offset.expect("an offset");
            assert!(position == 0 || offset > 0, "spans overlap: {self:?}");
            index += offset;
            for _ in 0..span.length.expect("a length") {
                count += deltas.next().expect("a delta for each bucket");
                let bound = (f64::from(index) * f64::from(-schema).exp2()).exp2();
                buckets.push((bound, u64::try_from(count).expect("no count is negative")));
                index += 1;
            }
        }
        assert_eq!(deltas.next(), None, "a bucket for each delta");
        assert_eq!(buckets.iter().map(|(_, count)| count).sum::<u64>(), self.sample_count.expect("a count"));
        buckets
    }

    /// The upper bound of the bucket in which the value of this rank is, and the bound below it.
    fn bucket_of(&self, rank: u64) -> (f64, f64) {
        let width = (-f64::from(self.schema.expect("native"))).exp2().exp2();
        let mut seen = 0;
        let bucket = self.buckets().into_iter().find(|(_, count)| {
            seen += count;
            seen >= rank
        });
        let upper = bucket.expect("there are as many").0;
        (upper / width, upper)
    }
}

fn decode(mut bytes: &[u8]) -> Vec<MetricFamily> {
    let mut families = Vec::new();
    while !bytes.is_empty() {
        families.push(MetricFamily::decode_length_delimited(&mut bytes).expect("well formed"));
    }
    families
}

pub(super) type Samples = BTreeMap<String, String>;

/// The samples as lines of the text.
fn samples(families: &[MetricFamily]) -> Samples {
    let mut lines = Samples::new();
    for family in families {
        let name = family.name.as_deref().expect("a name");
        for metric in &family.metric {
            let pair = |pair: &LabelPair| {
                let value = pair.value.as_deref().expect("a value").replace('\\', "\\\\");
                let value = value.replace('"', "\\\"").replace('\n', "\\n");
                format!("{}=\"{value}\"", pair.name.as_deref().expect("a name"))
            };
            let labels: Vec<String> = metric.label.iter().map(pair).collect();
            let mut put = |suffix: &str, more: Option<String>, value: String| {
                let labels = labels.iter().cloned().chain(more).collect::<Vec<_>>().join(",");
                let labels = if labels.is_empty() { labels } else { format!("{{{labels}}}") };
                assert_eq!(lines.insert(format!("{name}{suffix}{labels}"), value), None, "{name} has a sample twice");
            };
            let single = metric.gauge.as_ref().or(metric.counter.as_ref());
            let is_kind = match family.kind() {
                Type::Counter => metric.counter.is_some(),
                Type::Gauge => metric.gauge.is_some(),
                Type::Histogram => metric.histogram.is_some(),
            };
            assert!(is_kind, "{family:?}");
            if let Some(single) = single {
                put("", None, single.value.expect("a value").to_string());
            }
            if let Some(histogram) = &metric.histogram {
                let count = histogram.sample_count.expect("a count").to_string();
                for bucket in &histogram.bucket {
                    let bound = format!("le=\"{}\"", bucket.upper_bound.expect("a bound"));
                    put("_bucket", Some(bound), bucket.cumulative_count.expect("a count").to_string());
                }
                put("_bucket", Some("le=\"+Inf\"".to_owned()), count.clone());
                put("_sum", None, histogram.sample_sum.expect("a sum").to_string());
                put("_count", None, count);
            }
        }
    }
    lines
}

/// The samples of the protobuf exposition of these families.
pub(super) fn samples_of(families: Families) -> Samples {
    samples(&decode(&protobuf::encode(families)))
}

/// The lines of a text exposition, which end in a line feed alone: a help text may end in a carriage return.
fn split(text: &str) -> impl Iterator<Item = &str> {
    text.split_terminator('\n')
}

/// The samples of a text exposition. Label values of the tests have no spaces at their ends.
pub(super) fn lines(text: &str) -> Samples {
    let lines = split(text).filter(|line| !line.starts_with('#'));
    lines.map(|line| line.rsplit_once(' ').expect("a value")).map(|(name, value)| (name.into(), value.into())).collect()
}

/// Each family's comments, as the text has them.
fn comments(families: &[MetricFamily]) -> Vec<String> {
    let of = |family: &MetricFamily| {
        let (name, help) = (family.name.as_deref().expect("a name"), family.help.as_deref().expect("a help"));
        let help = help.replace('\\', "\\\\").replace('\n', "\\n");
        [format!("# HELP {name} {help}"), format!("# TYPE {name} {}", format!("{:?}", family.kind()).to_lowercase())]
    };
    families.iter().flat_map(of).collect()
}

proptest! {
    #[test]
    fn both_formats_have_the_same_samples(family in family()) {
        let (mut text, mut bytes) = (Vec::new(), Vec::new());
        // Of samples with the same labels a scraper takes one.
        let mut family = family;
        let mut seen = std::collections::HashSet::new();
        family.samples.retain(|sample| seen.insert(sample.labels.to_vec()));
        series::write(&family, &mut text);
        protobuf::write_delimited(&family, &mut bytes);
        let (text, decoded) = (String::from_utf8(text).expect("text"), decode(&bytes));
        prop_assert_eq!(samples(&decoded), lines(&text));
        let of_text: Vec<&str> = split(&text).filter(|line| line.starts_with('#')).collect();
        prop_assert_eq!(comments(&decoded), of_text);
    }

    /// Covers the durations of a job, which have a scale of their own, and those that threads count.
    #[test]
    fn a_quantile_is_in_its_bucket(
        mut durations_ns in prop::collection::vec(prop_oneof![0..2_i64, 1..1_000_000_i64, 80_000_000..120_000_000_i64, 0..i64::MAX], 1..300),
        share in 0.0..1.0_f64,
    ) {
        let (mut of_job, of_threads) = (Durations::new(BOUNDS_S), Histogram::new(BOUNDS_S));
        for duration_ns in &durations_ns {
            of_job.observe_ns(*duration_ns);
            of_threads.observe_ns(*duration_ns);
        }
        durations_ns.sort_unstable();
        let rank = ((durations_ns.len() as f64 * share).ceil() as usize).clamp(1, durations_ns.len());
        let exact_s = durations_ns[rank - 1] as f64 * 1e-9;
        for counts in [of_job.counts(), of_threads.counts()] {
            let native = native(counts);
            let (lower, upper) = native.bucket_of(rank as u64);
            let is_within = exact_s <= upper * (1.0 + 1e-9) && (exact_s >= lower * (1.0 - 1e-9) || exact_s == 0.0);
            prop_assert!(is_within, "{} in ({}, {}] at schema {:?}", exact_s, lower, upper, native.schema);
        }
    }
}

fn native(counts: Counts) -> Native {
    let mut families = Families::default();
    families.histogram(&crate::metrics::catalogue::SAMPLER_LATENESS, (), counts);
    decode(&protobuf::encode(families))[0].metric[0].histogram.clone().expect("a histogram")
}

#[test]
fn a_bucket_is_open_below_and_closed_above() {
    let mut durations = Durations::new(BOUNDS_S);
    // The scale of what is kept is far above 8, the finest schema: 2^-8 powers of two to a bucket.
    [500_000_000, 500_000_001].iter().for_each(|ns| durations.observe_ns(*ns));
    let finest = native(durations.counts());
    assert_eq!(finest.schema, Some(8));
    assert_eq!(finest.buckets()[1..], [(0.5, 1), ((-255.0_f64 / 256.0).exp2(), 1)]);
    durations.observe_ns(250_000_000);
    let wider = native(durations.counts());
    assert_eq!(wider.schema, Some(7));
    assert_eq!(wider.buckets()[1..], [(0.25, 1), (0.5, 1), ((-127.0_f64 / 128.0).exp2(), 1)]);
    assert_eq!(wider.positive_span.len(), 2, "the gap between them is a span's offset");
}

#[test]
fn a_histogram_without_observations_is_a_native_one() {
    let native = native(Durations::new(BOUNDS_S).counts());
    assert_eq!((native.sample_count, native.bucket.len(), native.positive_span.len()), (Some(0), BOUNDS_S.len(), 0));
    assert!(native.zero_threshold.is_some_and(|threshold| threshold > 0.0 && threshold < 1e-9));
    assert_eq!(native.zero_count, Some(0));
}

#[test]
fn short_gaps_are_buckets_and_long_ones_begin_a_span() {
    let mut durations = Durations::new(BOUNDS_S);
    // At scale 3 after these extremes: eight buckets to a power of two.
    [1_000_000, 2_000_000_000].iter().for_each(|ns| durations.observe_ns(*ns));
    [1_000_000_000, 1_250_000_000].iter().for_each(|ns| durations.observe_ns(*ns));
    let native = native(durations.counts());
    let lengths: Vec<_> = native.positive_span.iter().map(|span| span.length.expect("a length")).collect();
    assert_eq!((native.schema, lengths), (Some(3), vec![1, 4, 1]));
    assert_eq!(native.positive_delta, [1, 0, -1, 0, 1, 0]);
}

/// All of a node, as a scraper gets it.
#[test]
fn the_whole_catalogue_is_the_same_in_both_formats() {
    let mut families = Families::default();
    for (place, metric) in crate::metrics::catalogue::ALL.iter().enumerate() {
        for sample in 0..3 {
            let labels: Vec<String> = metric.labels.iter().map(|label| format!("{label} \"{sample}\"")).collect();
            let labels: Vec<&str> = labels.iter().map(String::as_str).collect();
            match metric.kind {
                MetricKind::Histogram => {
                    let mut durations = Durations::new(BOUNDS_S);
                    (0..200).for_each(|n| durations.observe_ns(n * n * 1_000_003));
                    families.histogram(metric, Labels::found(&labels), durations.counts());
                }
                MetricKind::Counter | MetricKind::Gauge if labels.is_empty() && sample > 0 => {}
                MetricKind::Counter | MetricKind::Gauge => {
                    families.count(metric, Labels::found(&labels), Some(place as u64 * 7 + sample))
                }
            }
            if metric.labels.is_empty() {
                break;
            }
        }
    }
    let text = String::from_utf8(encode(families.clone()).expect("well formed")).expect("text");
    let decoded = decode(&Format::Protobuf.encode(families).expect("it cannot fail"));
    assert_eq!(samples(&decoded), lines(&text));
    assert_eq!(comments(&decoded), split(&text).filter(|line| line.starts_with('#')).collect::<Vec<_>>());
    let native = decoded.iter().filter(|family| family.kind() == Type::Histogram).count();
    assert_eq!(native, 4, "job steps, phases, lateness and driver calls");
}

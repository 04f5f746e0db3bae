//! Compares the output of `series` with that of the crate for the same family.

use super::size::MOST_FINE;
use super::*;
use crate::metrics::{Buckets, Choice, Families, Family, Labels, Sample, Value};
use highwater_core::histogram::{Counts, Durations};
use proptest::prelude::*;

const BOUNDS_S: &[f64] = &[0.001, 0.25, 1.0, 2.5, 300.0];

/// Any finite number, including whole ones and those at the edge of what a double holds exactly.
fn number() -> impl Strategy<Value = f64> {
    let whole = prop_oneof![-100..100_i64, 8_999_999_999_999_990..9_007_199_254_740_999_i64, any::<i64>()];
    #[allow(clippy::cast_precision_loss, reason = "any number will do")]
    let whole = whole.prop_map(|whole| whole as f64);
    prop_oneof![whole, prop::num::f64::NORMAL | prop::num::f64::SUBNORMAL | prop::num::f64::ZERO, -1e3..1e3]
}

/// Texts with characters that must be escaped, and with others.
fn text() -> impl Strategy<Value = String> {
    prop::collection::vec(prop_oneof![Just('\\'), Just('"'), Just('\n'), Just('}'), Just('é'), any::<char>()], 0..8)
        .prop_map(String::from_iter)
}

fn histogram() -> impl Strategy<Value = Value> {
    prop::collection::vec(0..400_000_000_000_i64, 0..20).prop_map(|durations_ns| {
        let mut durations = Durations::new(BOUNDS_S);
        durations_ns.into_iter().for_each(|duration_ns| durations.observe_ns(duration_ns));
        Value::Histogram(Box::new(durations.counts()))
    })
}

/// A family as the catalogue could have it. It is leaked, because the catalogue is static.
fn family() -> impl Strategy<Value = Family> {
    const NAMES: [&[&str]; 3] = [&[], &["training_job"], &["training_job", "rank", "phase"]];
    let kind = prop_oneof![Just(MetricKind::Gauge), Just(MetricKind::Counter), Just(MetricKind::Histogram)];
    (prop::sample::select(&NAMES[..]), kind, text()).prop_flat_map(|(labels, kind, help)| {
        let metric: &'static Metric = Box::leak(Box::new(Metric {
            name: "highwater_x",
            kind,
            labels,
            help: format!("Of {help}").leak(),
            place: 0,
        }));
        let value = match kind {
            MetricKind::Histogram => histogram().boxed(),
            MetricKind::Gauge | MetricKind::Counter => number().prop_map(Value::Number).boxed(),
        };
        let labels = prop::collection::vec(text(), labels.len())
            .prop_map(|values| Labels::found(&values.iter().map(String::as_str).collect::<Vec<_>>()));
        let sample = (labels, value).prop_map(|(labels, value)| Sample { labels, value });
        let buckets = prop::sample::select(&[Buckets::Fine, Buckets::Coarse, Buckets::None][..]);
        let samples = prop::collection::vec(sample, 1..5);
        (samples, buckets).prop_map(move |(samples, buckets)| Family { metric, samples, buckets })
    })
}

proptest! {
    #[test]
    fn a_family_is_written_as_the_crate_writes_it(family in family()) {
        let (mut own, mut of_crate) = (Vec::new(), Vec::new());
        series::write(&family, &mut own);
        TextEncoder::new().encode(&[message::of(&family)], &mut of_crate).expect("the family is well formed");
        prop_assert_eq!(String::from_utf8(own).expect("text"), String::from_utf8(of_crate).expect("text"));
    }
}

#[test]
fn a_family_of_many_histograms_has_every_fourth_bucket_in_each_format() {
    use Buckets::{Coarse, Fine, None};
    let few = MOST_FINE;
    for (samples, phase_buckets, buckets) in
        [(few, Fine, 62), (few + 1, Fine, 17), (few, Coarse, 17), (few, None, 1), (few + 1, None, 1)]
    {
        let mut families = Families::of(Choice { phase_buckets, ..Choice::default() });
        for rank in 0..samples {
            let mut durations = Durations::new(highwater_core::phases::DURATION_BOUNDS_S);
            [90_000_000, 99_000_000, 400_000_000_000].iter().for_each(|ns| durations.observe_ns(*ns));
            families.histogram(
                &crate::metrics::catalogue::JOB_STEP_DURATION,
                Labels::of_rank(&("j".into(), u32::try_from(rank).expect("few"))),
                durations.counts(),
            );
        }
        let text = String::from_utf8(encode(families.clone()).expect("well formed")).expect("text");
        let (name, labels) = ("highwater_job_step_duration_seconds", "training_job=\"j\",rank=\"255\"");
        let of = |start: &str| text.lines().filter(|line| line.starts_with(start)).count();
        assert_eq!(of(&format!("{name}_bucket{{{labels}")), buckets);
        let has_bounds = usize::from(phase_buckets != None);
        for (line, count) in [
            ("_bucket{L,le=\"0.1\"} 2", has_bounds),
            ("_bucket{L,le=\"300\"} 2", has_bounds),
            ("_bucket{L,le=\"+Inf\"} 3", 1),
            ("_count{L} 3", 1),
        ] {
            assert_eq!(of(&format!("{name}{}", line.replace('L', labels))), count, "{line}");
        }
        assert_eq!(formats::samples_of(families), formats::lines(&text));
    }
}

/// A setting about phases changes no histogram of the daemon itself, and one about diagnostics no other metric.
#[test]
fn what_is_not_chosen_is_left_out_and_nothing_else() {
    use crate::metrics::catalogue as c;
    let text = |choice: Choice| {
        let mut families = Families::of(choice);
        let mut durations = Durations::new(BOUNDS_S);
        durations.observe_ns(1);
        families.histogram(&c::NVML_CALL_DURATION, ["x"], durations.counts());
        families.histogram(&c::SAMPLER_LATENESS, (), durations.counts());
        families.count(&c::NVML_CALL_FAILURES, ["x"], Some(1));
        families.number(&c::NVML_BUSY, (), Some(0.5));
        families.number(&c::PROCESS_CPU, (), Some(0.25));
        String::from_utf8(encode(families).expect("well formed")).expect("text")
    };
    let whole = text(Choice::default());
    assert_eq!(text(Choice { phase_buckets: Buckets::None, ..Choice::default() }), whole);
    let without = text(Choice { diagnostics: false, ..Choice::default() });
    let names = |text: &str| -> Vec<String> {
        text.lines().filter_map(|line| Some(line.strip_prefix("# TYPE ")?.split(' ').next()?.to_owned())).collect()
    };
    assert_eq!(
        (names(&whole).len(), names(&without)),
        (5, vec![c::NVML_BUSY.name.to_owned(), c::PROCESS_CPU.name.to_owned()])
    );
}

#[test]
fn families_of_every_length_are_in_the_exposition() {
    for samples in [1, 2, 24] {
        let mut families = Families::default();
        for pid in 0..samples {
            let labels = ["0", "GPU-1", &pid.to_string()];
            families.count(&crate::metrics::catalogue::PROCESS_MEMORY_USED, Labels::found(&labels), Some(1 << 30));
        }
        families.number(&crate::metrics::catalogue::PROCESS_CPU, (), Some(0.25));
        let text = String::from_utf8(encode(families).expect("well formed")).expect("text");
        let of = |start: &str| text.lines().filter(|line| line.starts_with(start)).count();
        assert_eq!(of("highwater_process_gpu_memory_used_bytes{gpu=\"0\",uuid=\"GPU-1\",pid="), samples);
        assert_eq!((of("# HELP"), of("# TYPE"), of("process_cpu_seconds_total 0.25")), (2, 2, 1), "{samples}");
    }
}

mod formats;

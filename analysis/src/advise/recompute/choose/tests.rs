use super::*;

/// A table: ids and savings; a `*` before an id means `ON`.
fn table(rows: &[(&str, u64)]) -> Vec<Plan> {
    let plan = |(nth, (id, saving)): (usize, &(&str, u64))| Plan {
        combination: id.trim_start_matches('*').parse().expect("an id"),
        is_on: id.starts_with('*'),
        frequency: Some(1),
        saving_bytes: (*saving > 0).then_some(*saving),
        expression: None,
        line: nth + 1,
    };
    rows.iter().enumerate().map(plan).collect()
}

fn chosen(rows: &[(&str, u64)], enabled: Option<&str>, exclusive: &[&str], need: u64) -> Result<Choice, ChooseError> {
    let plans = table(rows);
    let offers: Vec<Offer<'_>> = plans.iter().map(|plan| Offer { plan, saving_bytes: plan.saving_bytes }).collect();
    let enabled = enabled.map(|list| super::super::plans::listed(list).expect("a list"));
    let ids = |set: &&str| set.split(',').map(|id| id.parse().expect("an id")).collect();
    let exclusive: Vec<Vec<Id>> = exclusive.iter().map(ids).collect();
    choose(&offers, enabled.as_deref(), &exclusive, need)
}

/// What is enabled, and what it saves.
fn enable(rows: &[(&str, u64)], exclusive: &[&str], need: u64) -> (String, u64) {
    let choice = chosen(rows, None, exclusive, need).expect("a choice");
    assert!(choice.is_exact, "{choice:?}");
    (choice.enable.join(" "), choice.saving_bytes)
}

/// The table of ONNX Runtime's documentation.
const BLOOM: [(&str, u64); 8] = [
    ("Reshape+Where+:1:-1", 134_217_728),
    ("BiasSoftmax+:1:-1", 134_086_656),
    ("Cast+:1:-1", 67_043_328),
    ("BiasGelu+:1:-1", 20_951_040),
    ("FusedMatMul+:1:-1", 20_951_040),
    ("Add+:1:-1", 5_237_760),
    ("Reshape+Unsqueeze+Unsqueeze+Cast+Sub+Mul+Cast+:1:-1", 4_096),
    ("Cast+:2:-1", 2_048),
];

#[test]
fn the_fewest_and_of_those_the_smallest() {
    assert_eq!(enable(&BLOOM, &[], 0), (String::new(), 0));
    assert_eq!(enable(&BLOOM, &[], 1), ("Cast+:2:-1".into(), 2_048));
    assert_eq!(enable(&BLOOM, &[], 5_000_000), ("Add+:1:-1".into(), 5_237_760));
    assert_eq!(enable(&BLOOM, &[], 6_000_000), ("BiasGelu+:1:-1".into(), 20_951_040), "the earlier of two");
    assert_eq!(enable(&BLOOM, &[], 200 << 20), ("Reshape+Where+:1:-1 BiasSoftmax+:1:-1".into(), 268_304_384));
    let three = "Reshape+Where+:1:-1 BiasSoftmax+:1:-1 BiasGelu+:1:-1";
    assert_eq!(enable(&BLOOM, &[], 256 << 20), (three.replace("BiasGelu+:1:-1", "Add+:1:-1"), 273_542_144));
    assert_eq!(enable(&BLOOM, &[], 273_542_145), (three.into(), 289_255_424));
}

#[test]
fn strategies_of_one_cluster_exclude_each_other() {
    // All but `Cast+:2:-1`, which saves less than `Cast+:1:-1`.
    let all: u64 = BLOOM.iter().map(|(_, saving)| saving).sum::<u64>() - 2_048;
    assert_eq!(enable(&BLOOM, &[], all).1, all);
    let error = chosen(&BLOOM, None, &[], all + 1).expect_err("too much");
    assert_eq!(error, ChooseError::Unreachable { need_bytes: all + 1, most_bytes: all, unknown_savings: 0 });
    let counts = [("A+:1:-1", 10), ("A+:1:2", 4), ("B+:1:-1", 3)];
    assert_eq!(enable(&counts, &[], 13), ("A+:1:-1 B+:1:-1".into(), 13));
    assert_eq!(enable(&counts, &[], 11), ("A+:1:-1 B+:1:-1".into(), 13), "not A twice");
}

#[test]
fn a_combination_excludes_what_shares_a_cluster_with_it() {
    let rows = [("A+:1:-1,B+:1:-1", 10), ("A+:1:-1", 6), ("B+:2:-1", 5), ("C+:1:-1", 1)];
    assert_eq!(enable(&rows, &[], 9), ("A+:1:-1,B+:1:-1".into(), 10));
    // The largest one is in the way of what suffices.
    assert_eq!(enable(&rows, &[], 12), ("A+:1:-1 B+:2:-1 C+:1:-1".into(), 12));
    assert!(chosen(&rows, None, &[], 13).is_err());
}

#[test]
fn options_of_one_row_exclude_each_other() {
    let rows = [("A+:1:-1", 6), ("B+:2:-1", 5), ("C+:1:-1,B+:2:-1", 3)];
    assert_eq!(enable(&rows, &[], 11).0, "A+:1:-1 B+:2:-1");
    let set = ["A+:1:-1,B+:2:-1"];
    assert!(chosen(&rows, None, &set, 7).is_err());
    assert_eq!(enable(&rows, &set, 6).0, "A+:1:-1");
    // Of B another strategy is meant.
    assert_eq!(enable(&rows, &["A+:1:-1,B+:1:-1"], 11).0, "A+:1:-1 B+:2:-1");
    assert_eq!(enable(&rows, &["A+:1:-1"], 11).0, "A+:1:-1 B+:2:-1", "one alone excludes nothing");
}

#[test]
fn what_is_enabled_stays_and_saves_nothing_more() {
    let rows = [("*A+:1:-1", 60), ("A+:2:-1", 30), ("A+:1:-1,C+:1:-1", 50), ("B+:1:-1", 10), ("C+:1:-1", 9)];
    let choice = chosen(&rows, None, &[], 19).expect("a choice");
    assert_eq!((choice.enable.join(" "), choice.keep.join(" ")), ("B+:1:-1 C+:1:-1".into(), "A+:1:-1".into()));
    assert_eq!((choice.positions.as_slice(), choice.saving_bytes), ([3, 4].as_slice(), 19));
    assert_eq!(choice.inline, "A+:1:-1,B+:1:-1,C+:1:-1");
    assert_eq!(choice.json, r#"["A+:1:-1","B+:1:-1","C+:1:-1"]"#);
    assert_eq!(
        chosen(&rows, None, &["A+:1:-1,B+:1:-1"], 10).expect_err("B is out").to_string(),
        "10 bytes cannot be saved: the plans that are not enabled save at most 9 bytes"
    );
}

#[test]
fn a_configuration_counts_more_than_the_log() {
    let rows = [("*A+:1:-1", 60), ("B+:1:-1", 10), ("B+:1:-1,C+:1:-1", 40), ("D+:1:-1", 5)];
    let choice = |enabled| chosen(&rows, Some(enabled), &[], 5).expect("a choice");
    let (keep, enable) = (|enabled| choice(enabled).keep.join(" "), |enabled| choice(enabled).enable.join(" "));
    assert_eq!((keep(""), enable("")), (String::new(), "D+:1:-1".into()), "the log's `ON` is over");
    // Its count is kept, and B is not chosen again.
    assert_eq!((keep("B+:1:1"), choice("B+:1:1").inline), ("B+:1:1".into(), "B+:1:1,D+:1:-1".into()));
    // Enabled for what is disabled; the last of one cluster is in force.
    assert_eq!((keep("D+:0:-1"), enable("D+:0:-1")), (String::new(), "D+:1:-1".into()));
    assert_eq!(keep("B+:1:-1,C+:1:3,B+:1:0,C+:2:4"), "C+:2:4");
    // Without B and C one by one, the combination is enabled by them.
    assert_eq!((keep("C+:1:-1,B+:1:-1"), enable("C+:1:-1,B+:1:-1")), ("C+:1:-1 B+:1:-1".into(), "D+:1:-1".into()));
}

#[test]
fn combinations_are_whole_in_json_and_their_ids_are_once_in_a_list() {
    let rows = [("*A+:1:-1", 3), ("*B+:1:-1", 3), ("*A+:1:-1,B+:1:-1", 9), ("C+:1:-1,D+:2:-1", 7)];
    let choice = chosen(&rows, None, &[], 7).expect("a choice");
    assert_eq!(choice.inline, "A+:1:-1,B+:1:-1,C+:1:-1,D+:2:-1");
    assert_eq!(choice.json, r#"["A+:1:-1,B+:1:-1","C+:1:-1,D+:2:-1"]"#);
    let read = super::super::plans::configured(choice.json.as_bytes()).expect("a list");
    assert_eq!(read.iter().map(ToString::to_string).collect::<Vec<_>>().join(","), choice.inline);
}

#[test]
fn a_combination_of_two_subgraphs_of_one_kind_names_it_twice() {
    let choice = chosen(&[("A+:1:-1,A+:1:-1", 8), ("A+:1:-1", 5)], None, &[], 6).expect("a choice");
    assert_eq!((choice.inline.as_str(), choice.json.as_str()), ("A+:1:-1", r#"["A+:1:-1,A+:1:-1"]"#));
    assert_eq!((choice.saving_bytes, choice.is_exact), (8, true));
}

#[test]
fn plans_without_a_known_saving_are_counted() {
    let rows = [("A+:1:-1", 0), ("B+:1:-1", 8), ("C+:1:0", 9), ("D+:0:-1", 9), ("*E+:1:-1", 0)];
    let choice = chosen(&rows, None, &[], 8).expect("a choice");
    assert_eq!((choice.enable.join(" "), choice.unknown_savings), ("B+:1:-1".into(), 1));
    assert_eq!(
        chosen(&rows, None, &[], 9).expect_err("too much").to_string(),
        "9 bytes cannot be saved: the plans that are not enabled save at most 8 bytes; the saving of 1 plan is not known"
    );
}

#[test]
fn what_is_too_much_is_refused() {
    let error = |rows: &[(&str, u64)]| chosen(rows, None, &[], 1).expect_err("too much");
    assert_eq!(error(&[("A+:1:-1", u64::MAX), ("B+:1:-1", 1)]), ChooseError::TooManyBytes);
    let sets: Vec<String> = (0..1_025).map(|nth| format!("A+:1:-1,X{nth}+:1:-1")).collect();
    let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
    let rows = |count| vec![("A+:1:-1", 1); count];
    assert_eq!(chosen(&rows(1_022), None, &sets, 1).map(|choice| choice.positions), Ok(vec![0]));
    assert_eq!(chosen(&rows(1_023), None, &sets, 1), Err(ChooseError::TooManyExclusions));
}

#[test]
fn from_a_log_to_a_configuration() {
    let log = "\
|2      |For each row options are mutually exclusive, only one of them can be enabled.         |
|       |>>Option 1     : Recompute subgraph Mul+Cast+                                         |
|       |  Status       : Disabled. Enable with export ORTMODULE_MEMORY_OPT_CONFIG=Mul+Cast+:1:-1 |
|       |>>Option 2     : RecomputeWithCompromise subgraph Cast+                               |
|       |  Status       : Disabled. Enable with export ORTMODULE_MEMORY_OPT_CONFIG=Cast+:2:-1  |
Memory Optimizer     :  ON   :  Memory Optimization Level: [USER_SPECIFIED], Optimization Config: [Add+:1:2]
 - Plan 1            :  OFF  :  Mul+Cast+:1:-1   2     8,192              8.0*d0*d1
 - Plan 2            :  OFF  :  Cast+:2:-1       2     4,096              4.0*d0*d1
 - Plan 3            :  OFF  :  BiasGelu+:1:-1   2     3,072              3.0*d0*d1
 - Plan 4            :  ON   :  Add+:1:-1        2     1,024              1.0*d0*d1
";
    let log = super::super::plan_log::read(log.as_bytes()).expect("a log");
    let advice = |dims: &[(&str, u64)], need| {
        let dims = dims.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
        let offer = |plan| Ok(Offer { plan, saving_bytes: plan.saving(&dims)? });
        let offers: Result<Vec<_>, super::super::expression::ExpressionError> = log.plans.iter().map(offer).collect();
        choose(&offers.expect("savings"), log.enabled.as_deref(), &log.exclusive(), need)
    };
    let choice = advice(&[], 10_000).expect("a choice");
    assert_eq!((choice.inline.as_str(), choice.saving_bytes), ("Add+:1:2,Mul+Cast+:1:-1,BiasGelu+:1:-1", 11_264));
    assert!(matches!(advice(&[], 11_265), Err(ChooseError::Unreachable { most_bytes: 11_264, .. })));
    let choice = advice(&[("d0", 4), ("d1", 1_024)], 13_000).expect("a larger batch");
    assert_eq!((choice.enable.join(" "), choice.saving_bytes), ("Cast+:2:-1".to_owned(), 16_384));
}

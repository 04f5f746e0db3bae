use super::*;
use crate::log_lines::MOST_LINE_BYTES;

/// ONNX Runtime's `docs/Memory_Optimizer.md`, in the form of 2024.
const DOCUMENTED: &str = "\
Memory Optimizer     :  ON   :  Memory Optimization Level: [USER_SPECIFIED], Optimization Config: [BiasGelu+:1:1]
                                Configs                                              Freq  Max Saving(Bytes)  Saving Symbolic(Bytes)
 - Plan 1            :  OFF  :  Reshape+Where+:1:-1                                  1     134,217,728        128.0*inputs_input_ids_dim0*inputs_input_ids_dim1**2
 - Plan 2            :  OFF  :  BiasSoftmax+:1:-1                                    1     134,086,656        128.0*inputs_input_ids_dim0*inputs_input_ids_dim1*(inputs_input_ids_dim1 - 1)
 - Plan 3            :  OFF  :  Cast+:1:-1                                           1     67,043,328         64.0*inputs_input_ids_dim0*inputs_input_ids_dim1*(inputs_input_ids_dim1 - 1)
 - Plan 4            :  ON   :  BiasGelu+:1:-1                                       1     20,951,040         20480.0*inputs_input_ids_dim0*(inputs_input_ids_dim1 - 1)
 - Plan 5            :  OFF  :  FusedMatMul+:1:-1                                    1     20,951,040         20480.0*inputs_input_ids_dim0*(inputs_input_ids_dim1 - 1)
 - Plan 6            :  OFF  :  Add+:1:-1                                            1     5,237,760          5120.0*inputs_input_ids_dim0*(inputs_input_ids_dim1 - 1)
 - Plan 7            :  OFF  :  Reshape+Unsqueeze+Unsqueeze+Cast+Sub+Mul+Cast+:1:-1  1     4,096              4.0*inputs_input_ids_dim0*inputs_input_ids_dim1
 - Plan 8            :  OFF  :  Cast+:2:-1                                           1     2,048              2.0*inputs_input_ids_dim0*inputs_input_ids_dim1

Note 1: use comma as delimiter to enable multiple memory optimization plans at the same time:
  export ORTMODULE_MEMORY_OPT_CONFIG=<plan1 config>,<plan2 config>,...
Note 2: memory saving is calculated based on the 1st batch symbolic dim values:
  inputs_input_ids_dim0=1,  inputs_input_ids_dim1=1024,  inputs_attention_mask_dim0=1,  inputs_attention_mask_dim1=1024,
";

/// The same page, and the pull request that brought the summary for a row that is enabled.
const INSIGHT: &str = "\
MemoryInsight Summary - User config: not provided
===========================================================================================================================================
|Freq   | Memory Optimization Opportunities (Clustered by node-level activation patterns)                                                 |
|_ _ _ _|_ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _|
|6      |For each row options are mutually exclusive, only one of them can be enabled.                                                    |
|       |                                                                                                                                 |
|       |>>Option 1     : Recompute subgraph BiasGelu+                                                                                    |
|       |  Status       : Enabled, requested count=-1, actual applied count=2                                                             |
|       |  Stashed Activations:                                                                                                           |
|       |   - ReuseFreq :  Output 0(6),                                                                                                   |
|_ _ _ _|_ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _|
|1      |For each row options are mutually exclusive, only one of them can be enabled.                                                    |
|       |                                                                                                                                 |
|       |>>Option 1     : Recompute subgraph Reshape+Unsqueeze+Unsqueeze+Cast+Sub+Mul+Cast+                                               |
|       |  Status       : Disabled. Enable with export ORTMODULE_MEMORY_OPT_CONFIG=Reshape+Unsqueeze+Unsqueeze+Cast+Sub+Mul+Cast+:1:-1    |
|       |  Stashed Activations:                                                                                                           |
|       |   - Output 0  : [((inputs_input_ids_dim0)*(1)*(1)*(inputs_input_ids_dim1))], byte/elem: 4, 100% saved                           |
|       |                                                                                                                                 |
|       |>>Option 2     : RecomputeWithCompromise subgraph Cast+                                                                          |
|       |  Status       : Disabled. Enable with export ORTMODULE_MEMORY_OPT_CONFIG=Cast+:2:-1                                             |
|       |  Stashed Activations:                                                                                                           |
|       |   - Output 0  : [((inputs_input_ids_dim0)*(1)*(1)*(inputs_input_ids_dim1))], byte/elem: 4, 50% saved                            |
";

fn of(text: &str) -> Log {
    read(text.as_bytes()).expect("a reader that does not fail")
}

/// A row: id, state, frequency, saving, expression.
fn rows(log: &Log) -> Vec<String> {
    let row = |plan: &Plan| {
        let Plan { combination, is_on, frequency, saving_bytes, expression, .. } = plan;
        format!("{combination} {is_on} {frequency:?} {saving_bytes:?} {}", expression.as_deref().unwrap_or("-"))
    };
    log.plans.iter().map(row).collect()
}

#[test]
fn the_table_of_the_documentation() {
    let log = of(DOCUMENTED);
    assert_eq!((log.plans.len(), log.tables, &log.unreadable), (8, 1, &Unreadable::default()));
    assert_eq!(
        rows(&log)[3],
        "BiasGelu+:1:-1 true Some(1) Some(20951040) 20480.0*inputs_input_ids_dim0*(inputs_input_ids_dim1 - 1)"
    );
    assert_eq!((log.plans[3].line, log.plans.iter().filter(|plan| plan.is_on).count()), (6, 1));
    assert_eq!(log.plans[7].combination.to_string(), "Cast+:2:-1");
    let enabled: Vec<String> = log.enabled.iter().flatten().map(ToString::to_string).collect();
    assert_eq!(enabled, ["BiasGelu+:1:1"], "with the count that was asked for");
    let names: Vec<&str> = log.dims.keys().map(String::as_str).collect();
    assert_eq!((names.len(), log.dims.get("inputs_input_ids_dim1")), (4, Some(&1_024)), "{names:?}");
}

#[test]
fn what_is_printed_is_what_the_expressions_say() {
    let log = of(DOCUMENTED);
    for plan in &log.plans {
        assert_eq!(plan.saving(&log.dims), Ok(plan.saving_bytes), "{plan:?}");
    }
    let twice = Dims::from([("inputs_input_ids_dim0".to_owned(), 2), ("inputs_input_ids_dim1".to_owned(), 2_048)]);
    assert_eq!(log.plans[0].saving(&twice), Ok(Some(8 * 134_217_728)));
}

#[test]
fn whatever_a_launcher_puts_before_lines_is_ignored() {
    for before in ["\t", "[1,0]<stderr>:", "2024-02-27 07:18:55,283 orttraining.rank-0 [WARNING] - ", "|_"] {
        let prefixed: String = DOCUMENTED.lines().map(|line| format!("{before}{line}\r\n")).collect();
        let (log, plain) = (of(&prefixed), of(DOCUMENTED));
        assert_eq!(log, plain, "{before}");
    }
    let copied = of(&DOCUMENTED.replace("    ", " ").replace("  ", " "));
    assert_eq!(rows(&copied), rows(&of(DOCUMENTED)), "with blanks lost");
}

#[test]
fn options_of_the_summary() {
    let log = of(INSIGHT);
    let options: Vec<Vec<String>> = log
        .insight
        .iter()
        .map(|row| row.iter().map(|option| format!("{} {}", option.id, option.is_on)).collect())
        .collect();
    let second = ["Reshape+Unsqueeze+Unsqueeze+Cast+Sub+Mul+Cast+:1:-1 false", "Cast+:2:-1 false"];
    assert_eq!(options, [vec!["BiasGelu+:1:-1 true"], second.to_vec()]);
    let exclusive = log.exclusive();
    assert_eq!((exclusive.len(), exclusive[0][1].to_string()), (1, "Cast+:2:-1".to_owned()));
    assert_eq!((log.plans.len(), &log.unreadable), (0, &Unreadable::default()));
    // A later summary replaces it; a count that was asked for is kept.
    let later = INSIGHT.replace("requested count=-1", "requested count=12");
    let log = of(&format!("{INSIGHT}{later}"));
    assert_eq!((log.insight.len(), log.insight[0][0].id.to_string()), (2, "BiasGelu+:1:12".to_owned()));
}

#[test]
fn savings_without_a_number_and_rows_without_details() {
    let log = of("\
 - Plan 1  :  OFF  :  A+:1:-1,B+:1:-1  24  4.0*x*(y - 1)  4.0*x*(y - 1)
 - Plan 2  :  ON   :  C+:2:-1          2   nan            4.0*z
 - Plan 3  :  OFF  :  D+:1:-1
 - Plan 4  :  OFF  :  E+:1:-1          3
 - Plan 5  :  OFF  :  F+:1:-1          3   4,096          4096.00000000000
 - Plan 6  :  OFF  :  G+:1:-1          3   4,09           x
");
    let expected = [
        "A+:1:-1,B+:1:-1 false Some(24) None 4.0*x*(y - 1)",
        "C+:2:-1 true Some(2) None 4.0*z",
        "D+:1:-1 false None None -",
        "E+:1:-1 false Some(3) None -",
        "F+:1:-1 false Some(3) Some(4096) 4096.00000000000",
        "G+:1:-1 false Some(3) None x",
    ];
    assert_eq!(rows(&log), expected);
}

#[test]
fn rows_that_cannot_be_read_are_counted_with_their_line_and_reason() {
    let long = "x+".repeat(expression::MOST_BYTES / 2 + 1);
    let log = of(&format!(
        "step 1\n - Plan 1 : OFF : A+:1 1 4 x\n - Plan 2 : ON : B+:1:-1 often 4 x\n - Plan 3 : OFF : C+:1:-1 1 8 x\n\
         - Plan 4 : OFF : D+:1:-1 1 99,999,999,999,999,999,999 x\n - Plan 5 : OFF : E+:1:-1 1 8 {long}\n\
         - Plan 6 : OFF : \n|>>Option 1 : Recompute subgraph A+ |\n"
    ));
    assert_eq!(rows(&log), ["C+:1:-1 false Some(1) Some(8) x"]);
    let expected = [
        (2, "`A+:1` is not of the form `cluster:strategy:count`"),
        (3, "the frequency `often` is no number"),
        (5, "the saving `99,999,999,999,999,999,999` is above 2^64 bytes"),
        (6, "the saving has 16386 bytes, and may have 16384"),
        (7, "`` is not of the form `cluster:strategy:count`"),
        (8, "an option outside of a row"),
    ];
    let first: Vec<(usize, &str)> =
        log.unreadable.first.iter().map(|(line, reason)| (*line, reason.as_str())).collect();
    assert_eq!((first.as_slice(), log.unreadable.count), (expected.as_slice(), 6));
}

#[test]
fn lines_that_are_no_rows_are_ignored() {
    let log = of("\
Plan 1 : finish the model
Plan  : OFF : A+:1:-1
Plan 1 OFF : A+:1:-1
Plan one : OFF : A+:1:-1
Status       : Disabled. Enable with export ORTMODULE_MEMORY_OPT_CONFIG=A+:1:-1
 - FLOP Reduction    :  ON   :  Reduce FLOPs by upstreaming shrinking-sized ops
Memory Optimizer     :  ON   :  Memory Optimization Level: [TRANSFORMER_LAYERWISE_RECOMPUTE], Optimization Config: [ALL_RECOMPUTE_FOR_EACH_LAYER]
\u{0}\u{1b}[0m Plan
");
    assert_eq!(log, Log::default());
}

#[test]
fn the_last_table_counts() {
    let other = DOCUMENTED.replace(":1:-1 ", ":1:-1 7").replace("[BiasGelu+:1:1]", "[mem_opt.json]");
    let log = of(&format!("{DOCUMENTED}{other}"));
    assert_eq!((log.tables, log.plans.len(), log.enabled), (2, 8, None));
    assert_eq!(log.plans[0].line, 3 + DOCUMENTED.lines().count());
}

#[test]
fn enabled_plans_in_the_words_of_each_version() {
    for line in [
        "Memory Optimizer : ON : User config: A+:1:2,B+:2:-1, probe level: 1",
        "Memory Optimizer : ON : RecomputeConfig: A+:1:2,B+:2:-1, ProbeLevel: 1",
        "Memory Optimizer : ON : Memory Optimization Level: [USER_SPECIFIED], Optimization Config: [A+:1:2,B+:2:-1], Probe Level: [1]",
    ] {
        let enabled: Vec<String> = of(line).enabled.iter().flatten().map(ToString::to_string).collect();
        assert_eq!(enabled, ["A+:1:2", "B+:2:-1"], "{line}");
    }
    assert_eq!(of("Memory Optimizer : OFF : Enable with env ORTMODULE_MEMORY_OPT_CONFIG=<config>").enabled, None);
}

#[test]
fn lines_and_tables_are_bounded() {
    let row = " - Plan 2 : OFF : A+:1:-1 1 4 x";
    let fits = format!("{}{row}", " ".repeat(MOST_LINE_BYTES - row.len()));
    let log = of(&format!("{fits}\n {fits}\n{row}\n{fits} {}\n{fits}", fits.repeat(3)));
    assert_eq!((log.plans.len(), log.long_lines), (3, 2));
    assert_eq!(log.plans.iter().map(|plan| plan.line).collect::<Vec<_>>(), [1, 3, 5]);
    assert_eq!(of(&"x".repeat(MOST_LINE_BYTES + 1)).long_lines, 1, "without an end");
    let log = of(&format!("{row}\n").repeat(MOST_PLANS + 150));
    assert_eq!((log.plans.len(), log.unreadable.count, log.unreadable.first.len()), (MOST_PLANS, 150, MOST_SHOWN));
    let row = "|For each row options are mutually exclusive\n|>>Option 1 : Recompute subgraph A+ |\n";
    let log = of(&row.repeat(MOST_PLANS + 2));
    assert_eq!((log.insight.len(), log.unreadable.count), (MOST_PLANS, 2));
    assert!(log.insight.iter().all(|row| row.len() == 1));
    let row = "|For each row options are mutually exclusive\n";
    let log = of(&format!("{}|>>Option 1 : Recompute subgraph A+ |\n", row.repeat(MOST_PLANS + 1)));
    assert_eq!((log.insight.len(), log.unreadable.count), (MOST_PLANS, 1));
    assert!(log.insight.iter().all(Vec::is_empty), "the option is of none of them");
    assert_eq!(of(&"Plan 1 : ".repeat(7_000)), Log::default());
}

#[test]
fn a_log_that_is_not_utf_8_and_a_reader_that_fails() {
    let mut bytes = b"\xff\xfe loss 0.5\n".to_vec();
    bytes.extend_from_slice(DOCUMENTED.as_bytes());
    assert_eq!(read(bytes.as_slice()).expect("a log").plans.len(), 8);
    struct Failing;
    impl io::Read for Failing {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            Err(io::Error::other("gone"))
        }
    }
    assert_eq!(read(io::BufReader::new(Failing)).expect_err("gone").to_string(), "gone");
}

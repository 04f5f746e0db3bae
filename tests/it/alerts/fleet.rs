//! The rules that compare ranks across nodes, on a job of 512 GPUs on 64 nodes. Of a node that is late as a whole no daemon knows:
//! all ranks that it sees are alike.

use super::{files, json_text, succeeds};
use crate::tools;
use std::fmt::Write as _;
use std::process::Command;

const NODES: usize = 64;
const GPUS: usize = 8;
/// promtool refuses a query over more than 10,000 samples, which one rule takes of an hour of all ranks.
const MINUTES: usize = 8;

/// A job on all nodes. Its ranks spend 57 s of a minute in steps.
struct Fleet {
    name: &'static str,
    /// The seconds of a minute in which the tensor cores of a node's ranks work, and in which their GPUs are idle.
    node: fn(usize) -> (f64, f64),
    /// Each eighth of the nodes is a stage of a pipeline that sends its coordinates.
    has_stages: bool,
    /// The node that is named, and by how much of a step it is late in percent.
    late: Option<(usize, u32)>,
}

const FLEETS: [Fleet; 7] = [
    Fleet { name: "even", node: |_| (18.0, 5.7), has_stages: false, late: None },
    Fleet {
        name: "computes",
        node: |node| if node == 17 { (30.0, 5.7) } else { (18.0, 5.7) },
        has_stages: false,
        late: Some((17, 40)),
    },
    Fleet {
        name: "host",
        node: |node| if node == 63 { (18.0, 28.5) } else { (18.0, 5.7) },
        has_stages: false,
        late: Some((63, 40)),
    },
    Fleet {
        name: "a-little",
        node: |node| if node == 17 { (20.5, 8.0) } else { (18.0, 5.7) },
        has_stages: false,
        late: None,
    },
    Fleet {
        name: "two",
        node: |node| if node == 17 || node == 40 { (30.0, 5.7) } else { (18.0, 5.7) },
        has_stages: false,
        late: None,
    },
    Fleet {
        name: "pipeline",
        node: |node| if node >= 56 { (30.0, 5.7) } else { (18.0, 5.7) },
        has_stages: true,
        late: None,
    },
    Fleet {
        name: "late-stage",
        node: |node| {
            if node == 58 {
                (50.0, 5.7)
            } else if node >= 56 {
                (30.0, 5.7)
            } else {
                (18.0, 5.7)
            }
        },
        has_stages: true,
        late: Some((58, 40)),
    },
];

impl Fleet {
    fn series(&self, out: &mut String) {
        for rank in 0..NODES * GPUS {
            let node = rank / GPUS;
            // No two ranks are quite alike: by up to 3 %.
            let noise = 1.0 + ((rank * 7_919 % 101) as f64 / 50.0 - 1.0) * 0.03;
            let (tensor_s, idle_s) = (self.node)(node);
            let labels =
                format!(r#"job="highwater",instance="node-{node}",training_job="{}",rank="{rank}""#, self.name);
            let mut add = |name: &str, values: &str| {
                let _ = writeln!(out, "      - series: 'highwater_job_{name}{{{labels}}}'\n        values: {values}");
            };
            add("step_duration_seconds_sum", &format!("0+57x{MINUTES}"));
            add("step_active_observed_seconds_total", &format!("0+57x{MINUTES}"));
            add("step_idle_observed_seconds_total", &format!("0+57x{MINUTES}"));
            add("step_tensor_active_seconds_total", &format!("0+{}x{MINUTES}", tensor_s * noise));
            add("step_gpu_idle_seconds_total", &format!("0+{}x{MINUTES}", idle_s * noise));
            if self.has_stages {
                add("pipeline_stage", &format!("{}x{MINUTES}", node / 8));
            }
        }
    }
}

#[test]
#[ignore = "needs a peer: make test-peers"]
fn of_512_gpus_the_node_that_is_late_as_a_whole_is_named_and_nobody_else() {
    let Some(promtool) = tools::find("promtool") else { return };
    let mut test = String::from("rule_files: [");
    test += &files().iter().map(|path| json_text(&path.to_string_lossy())).collect::<Vec<_>>().join(", ");
    test += "]\nevaluation_interval: 1m\ngroup_eval_order: [highwater-now, highwater-jobs]\n";
    test += "tests:\n";
    for fleet in &FLEETS {
        test += "  - interval: 1m\n    input_series:\n";
        fleet.series(&mut test);
        // A tenth of a step: the noise of the ranks.
        test += "    promql_expr_test:\n      - expr: round(highwater:job_late_node, 0.1)\n";
        let _ = writeln!(test, "        eval_time: {MINUTES}m\n        exp_samples:");
        if let Some((node, percent)) = fleet.late {
            let labels = format!(r#"{{job="highwater",instance="node-{node}",training_job="{}"}}"#, fleet.name);
            let _ = writeln!(test, "          - {{labels: '{labels}', value: {}}}", f64::from(percent) / 100.0);
        }
    }
    let file = tempfile::Builder::new().suffix(".yaml").tempfile().expect("a temporary file");
    std::fs::write(file.path(), test).expect("writable");
    let printed = succeeds(Command::new(promtool).args(["test", "rules"]).arg(file.path()));
    assert_eq!(printed.matches("SUCCESS").count(), 1, "{printed}");
}

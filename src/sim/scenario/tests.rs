//! Tests of valid and invalid scenarios.

use super::parse::SHIPPED;
use super::*;
use crate::sim::Sim;
use highwater_core::source::Source;

fn refusal(text: &str) -> String {
    Scenario::parse(text, "s.toml").expect_err(text).to_string()
}

#[test]
fn every_shipped_scenario_is_good() {
    for (name, text) in SHIPPED {
        let scenario = Scenario::parse(text, &format!("config/scenarios/{name}.toml")).expect(name);
        assert_eq!(scenario.name, *name);
    }
    assert_eq!(Scenario::shipped("no such"), None);
}

#[test]
fn an_error_names_key_file_and_line() {
    let job = "[[jobs]]\nname = \"a\"\nranks = 1\n";
    for (text, message) in [
        ("seed = \"x\"\n", "s.toml:1: seed: invalid type: string \"x\", expected u64"),
        ("seed =\n", "s.toml:1: string values must be quoted, expected literal string"),
        (
            "seed = 1\nsede = 2\n",
            "s.toml:2: sede: unknown field `sede`, expected one of \
             `seed`, `gpus`, `jobs`, `spikes`, `lost`, `degraded`, `xids`",
        ),
        (job, "s.toml:1: jobs[0]: missing field `phases`"),
        (
            &format!(
                "{job}[[jobs.phases]]\nname = \"f\"\nduration = \"1 s\"\n[[jobs.phases]]\nname = \"g\"\nduration = \"1 x\"\n"
            ),
            "s.toml:9: jobs[0].phases[1].duration: `1 x`: `x` is no known unit; \
             known units are ns, us, ms, s, m (or min), h, d",
        ),
        (
            &format!("{job}phases = [\n  {{ name = \"f\", duration = 5 }},\n]\n"),
            "s.toml:5: jobs[0].phases[0].duration: invalid type: integer `5`, \
             expected a duration with its unit, like `200 ms` or `1.5 s`",
        ),
        (
            "[[spikes]]\ngpu = 3\nduration = \"1 ms\"\nbytes = \"1 GiB\"\n",
            "s.toml:2: spikes[0].gpu: there is no GPU 3 in this scenario",
        ),
    ] {
        assert_eq!(refusal(text), message);
    }
}

#[test]
fn all_that_is_wrong_is_reported_at_once() {
    let text = "[[jobs]]\nname = \"a\"\nranks = [7]\nphases = [{ name = \"f\", duration = \"0 s\", busy = 2.0 }]\n";
    assert_eq!(
        refusal(text),
        "s.toml:3: jobs[0].ranks[0]: there is no GPU 7 in this scenario\n\
         s.toml:4: jobs[0].phases[0].duration: must be at least 1 us with the jitter taken off\n\
         s.toml:4: jobs[0].phases[0].busy: must lie between 0 and 1"
    );
}

#[test]
fn a_pipeline_divides_its_ranks_and_fits_their_gpus() {
    let of = |ranks: u32, keys: &str, forward: &str| {
        let phases = format!(
            "phases = [{{ name = \"forward\", duration = \"1 s\"{forward} }}, {{ name = \"backward\", duration = \"1 s\" }}]"
        );
        let text = format!(
            "[[gpus]]\ncount = 8\n[[jobs]]\nname = \"a\"\nranks = {ranks}\n{phases}\n[jobs.pipeline]\nmicrobatches = 8\n{keys}\n"
        );
        Scenario::parse(&text, "s.toml").map_or_else(|error| error.to_string(), |_| String::new())
    };
    assert_eq!(of(8, "stages = 4", ""), "");
    for (keys, fault) in [
        ("stages = 3", "jobs[0].pipeline.stages: must be 2 or more, and divide the 8 ranks"),
        ("stages = 0", "jobs[0].pipeline.stages: must be 2 or more"),
        ("stages = 4\nchunks = 0", "jobs[0].pipeline.chunks: must be 1 to 16"),
        ("stages = 4\nchunks = 2\nschedule = \"gpipe\"", "jobs[0].pipeline.chunks: must be 1 with"),
        ("stages = 4\nweights = [1.0]", "jobs[0].pipeline.weights: must have a number for each stage"),
        ("stages = 2\nweights = [1.0, 0.0]", "jobs[0].pipeline.weights[1]: must lie between"),
        ("stages = 4\nspread = 1.0", "jobs[0].pipeline.spread: must lie between"),
        ("stages = 4\nslow = { rank = 8, factor = 2.0 }", "jobs[0].pipeline.slow.rank: the job has no such rank"),
        ("stages = 4\nwait = \"\"", "jobs[0].pipeline.wait: must not be empty"),
    ] {
        assert!(of(8, keys, "").contains(fault), "{keys}: {}", of(8, keys, ""));
    }
    for (keys, forward, fault) in [
        ("stages = 4", ", release = true", "its phase `forward` cannot have `collective` or `release`"),
        ("stages = 4", ", collective = true", "its phase `forward` cannot have `collective` or `release`"),
        (
            "stages = 4\n[jobs.data_stall]\nevery_steps = 2\nduration = \"1 s\"\nphase = \"backward\"",
            "",
            "`data_stall` cannot be in its phase `backward`",
        ),
    ] {
        assert!(of(8, keys, forward).contains(fault), "{keys}: {}", of(8, keys, forward));
    }
    // Eight microbatches of 20 GiB in flight do not fit one GPU; the four that 1F1B keeps do.
    let forward = ", to = \"20 GiB\", shape = \"ramp\"";
    assert_eq!(of(8, "stages = 4", forward), "");
    assert!(of(8, "stages = 4\nschedule = \"gpipe\"", forward).contains("they take 164864 MiB"));
}

#[test]
fn layers_need_memory_that_rises_and_a_bounded_number() {
    let of = |layers: &str, to: &str| {
        let phases = format!("phases = [{{ name = \"forward\", duration = \"1 s\"{to} }}]");
        refusal(&format!("[[jobs]]\nname = \"a\"\nranks = 1\n{phases}\n[jobs.layers]\n{layers}\n"))
    };
    let rises = ", to = \"1 GiB\", shape = \"ramp\"";
    assert!(
        of("count = 5000\nevery_steps = 1", rises).contains("jobs[0].layers.count: must be 1 to 4096 with 1 ranks")
    );
    assert!(of("count = 0\nevery_steps = 1", rises).contains("jobs[0].layers.count"));
    assert!(of("count = 9\nevery_steps = 0", rises).contains("jobs[0].layers.every_steps: must be at least 1"));
    assert!(of("count = 9\nevery_steps = 1", "").contains("jobs[0].layers: needs a phase `forward` with `to`"));
}

#[test]
fn every_scenario_in_the_documentation_is_good() {
    let text = include_str!("../../../docs/scenarios.md");
    let blocks: Vec<&str> = text.split("```toml\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
    assert_eq!(blocks.len(), 2);
    for block in blocks {
        let scenario = Scenario::parse(block, "docs/scenarios.md").unwrap_or_else(|error| panic!("{error}"));
        assert!(Sim::new(scenario, 0).annotations().nth(1_000).is_some());
    }
}

#[test]
fn what_cannot_be_played_is_refused() {
    let job = |more: &str| {
        format!(
            "[[jobs]]\nname = \"j\"\nranks = [0]\nbase = \"10 GiB\"\nphases = [{{ name = \"forward\", duration = \"9 ms\" }}]\n{more}"
        )
    };
    let second = "[[jobs]]\nname = \"k\"\nranks = [0]\nphases = [{ name = \"forward\", duration = \"9 ms\" }]\n";
    for (text, message) in [
        ("gpus = []\n".to_owned(), "t.toml:1: gpus: must be 1 to 256 GPUs in all"),
        (
            "[[gpus]]\ntotal = \"1 GiB\"\nreserved = \"1 GiB\"\n".to_owned(),
            "t.toml:3: gpus[0].reserved: must be less than `total`",
        ),
        (
            job("outside = \"200 GiB\"\n"),
            "t.toml:3: jobs[0].ranks: GPU 0 has 143156 MiB for its jobs, and with this one they take 215040 MiB",
        ),
        (job(&second.replace("\"k\"", "\"j\"")), "t.toml:7: jobs[1].name: there is another job `j`"),
        (job("").replace("[0]", "[0, 0]"), "t.toml:3: jobs[0].ranks[1]: GPU 0 has a rank of this job already"),
        (
            job("").replace("[0]", "[true]"),
            "t.toml:3: jobs[0].ranks: a number of ranks, or a list of the GPUs that they run on",
        ),
        (job("oom = { at = \"1 s\", phase = \"f\" }\n"), "t.toml:6: jobs[0].oom.phase: the job has no such phase"),
        (job("oom = { at = \"1 s\", rank = 1 }\n"), "t.toml:6: jobs[0].oom.rank: the job has no such rank"),
        (
            job(&format!("oom = {{ at = \"1 s\" }}\n{second}")),
            "t.toml:6: jobs[0].oom: needs a GPU that no other job shares",
        ),
        (job("near_oom = { for = \"1 s\" }\n"), "t.toml:6: jobs[0].near_oom: needs either `free` or `ballast`"),
        (
            job("near_oom = { for = \"9 s\", every = \"5 s\", free = \"1 GiB\" }\n"),
            "t.toml:6: jobs[0].near_oom.for: must not be longer than `every`",
        ),
        (
            job("near_oom = { for = \"9 s\", free = \"140 GiB\" }\n"),
            "t.toml:6: jobs[0].near_oom.free: the GPU has no more than 131892 MiB left at the job's peak",
        ),
        (
            job("").replace("\"9 ms\"", "\"9 ms\", to = \"2 GiB\""),
            "t.toml:5: jobs[0].phases[0].shape: `to` needs `ramp` or `steps`, and they need `to`\nt.toml:5: jobs[0].phases[0].to: must not be below the job's `base`",
        ),
        (job("first_step_stretch = nan\n"), "t.toml:6: jobs[0].first_step_stretch: must lie between 1 and 1000"),
        (job("").replace("9 ms", "9000 d"), "t.toml:5: jobs[0].phases[0].duration: must be at most 366 d"),
    ] {
        assert_eq!(Scenario::parse(&text, "t.toml").map(|_| ()).expect_err(&text).to_string(), message);
    }
}

/// Ranks are never created for a number this large: they would take more memory than there is.
#[test]
fn more_ranks_than_a_node_has_are_refused_before_they_are_made() {
    let text = "[[gpus]]\n[[jobs]]\nname = \"a\"\nranks = 4294967295\nphases = []\n";
    let error = Scenario::parse(text, "many.toml").expect_err("too many").to_string();
    assert!(error.contains("jobs[0].ranks") && error.contains("must be 1 to 256"), "{error}");
}

#[test]
fn ranks_of_a_job_on_several_nodes_have_their_numbers_and_the_size_of_the_whole() {
    let job = "[[gpus]]\ncount = 2\n[[jobs]]\nname = \"a\"\nranks = 2\nfirst_rank = 6\n";
    let phases = "phases = [{ name = \"forward\", duration = \"1 ms\" }]\n";
    let sizes = |text: &str| {
        let scenario = Scenario::parse(text, "s.toml").expect("a scenario");
        let said: Vec<_> = Sim::new(scenario, 0).annotations().take(8).collect();
        (said.iter().map(|said| said.rank).collect::<std::collections::BTreeSet<_>>(), said[0].world_size)
    };
    let numbers = [Some(6), Some(7)].into();
    assert_eq!(sizes(&format!("{job}{phases}")), (numbers, Some(8)));
    let numbers = [Some(6), Some(7)].into();
    assert_eq!(sizes(&format!("{job}world_size = 64\n{phases}")), (numbers, Some(64)));
    assert_eq!(
        refusal(&format!("{job}world_size = 7\n{phases}")),
        "s.toml:7: jobs[0].world_size: must be 8 or more, as ranks up to 7 are here"
    );
}

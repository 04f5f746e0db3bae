//! Traces as a few lines: what, its name, when in microseconds, and what else is known.
//!
//! ```text
//! step 3 0..100
//! loading 0..20
//! kernel gemm 30..60 launched 25
//! nccl AllReduce 50..90 launched 26 group 0 seq 7 bytes 4096 of 2
//! ```

use crate::kineto::read;
use crate::timeline::Trace;

/// A trace of these lines, as Kineto writes it, whose clock begins at 1970 plus `base` nanoseconds.
pub fn trace(base: Option<u64>, rank: u64, lines: &str) -> Trace {
    let mut events = Vec::new();
    for (number, line) in lines.lines().map(str::trim).filter(|line| !line.is_empty()).enumerate() {
        event(&mut events, number + 1, line);
    }
    let base = base.map_or_else(String::new, |base| format!(r#""baseTimeNanoseconds": {base}, "#));
    let info = format!(r#""distributedInfo": {{"backend": "nccl", "rank": {rank}, "world_size": 2}}"#);
    let text = format!(r#"{{{base}{info}, "traceEvents": [{}]}}"#, events.join(",\n"));
    read(text.as_bytes()).expect("a trace")
}

fn event(events: &mut Vec<String>, correlation: usize, line: &str) {
    let words: Vec<&str> = line.split_whitespace().collect();
    let at = words.iter().position(|word| word.contains("..")).expect("a time");
    let (begin, end) = words[at].split_once("..").expect("a time");
    let (begin, end): (f64, f64) = (begin.parse().expect("a begin"), end.parse().expect("an end"));
    let known = |name: &str| words[at..].windows(2).find(|pair| pair[0] == name).map(|pair| pair[1]);
    let name = words.get(1).filter(|_| at == 2).copied().unwrap_or("x");
    let (category, name) = match words[0] {
        "step" => ("user_annotation", format!("ProfilerStep#{name}")),
        "loading" => ("user_annotation", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__".to_owned()),
        "nccl" => ("kernel", format!("ncclDevKernel_{name}_RING_LL(ncclDevKernelArgsStorage<4096ul>)")),
        "copy" => ("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)".to_owned()),
        "echo" => ("gpu_user_annotation", format!("ProfilerStep#{name}")),
        category => (category, name.to_owned()),
    };
    let mut args = vec![format!(r#""correlation": {correlation}, "device": {}"#, known("gpu").unwrap_or("0"))];
    let members = [("group", "Process Group Name"), ("seq", "Seq"), ("of", "Group size"), ("bytes", "In msg nelems")];
    args.extend(known("ranks").map(|ranks| format!(r#""Process Group Ranks": "{ranks}""#)));
    for (word, member) in members {
        args.extend(known(word).map(|value| format!(r#""{member}": {value}"#)));
    }
    args.extend(known("bytes").map(|_| r#""dtype": "Byte""#.to_owned()));
    let event = |category: &str, name: &str, begin: f64, end: f64, args: &str| {
        let times = format!(r#""ts": {begin:.3}, "dur": {:.3}"#, end - begin);
        format!(r#"{{"ph": "X", "cat": "{category}", "name": "{name}", {times}, "args": {{{args}}}}}"#)
    };
    events.push(event(category, &name, begin, end, &args.join(", ")));
    if let Some(launched) = known("launched") {
        let launched: f64 = launched.parse().expect("a time");
        let args = format!(r#""correlation": {correlation}"#);
        events.push(event("cuda_runtime", "cudaLaunchKernel", launched, launched + 1.0, &args));
    }
}

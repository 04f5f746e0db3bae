//! One picture: lines of text, each in parts with a meaning.
//!
//! Enters: a moment, and what of it is wanted. Leaves: text for a terminal or a file. What is wrong stands between the GPUs
//! and the processes; of many GPUs the fullest are shown.

use super::super::terminal::gib;
use super::now::{Incident, ListedGpu, Now, Process};
use std::cmp::Reverse;
use std::fmt::Write as _;
use std::time::Duration;
use unicode_width::UnicodeWidthChar as _;

/// Columns of a picture that goes to no terminal.
pub(super) const WIDTH_WITHOUT_TERMINAL: usize = 160;
/// Lines that a page key moves.
pub(super) const PAGE: usize = 10;
/// GPUs that are always shown, if there are as many.
const FEW_GPUS: usize = 8;
/// Lines of incidents that are always shown.
const FEW_LINES: usize = 6;
/// With less free memory at its peak than this, a GPU is full: NCCL and the allocator need as much.
const FULL_BYTES: u64 = 1 << 30;

/// What of a moment is shown, and how.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Viewport {
    pub columns: usize,
    pub rows: usize,
    /// The first process that is shown.
    pub scroll: usize,
    pub order: Order,
    pub is_paused: bool,
    pub has_help: bool,
    pub interval: Duration,
    /// Why there is nothing newer.
    pub fault: Option<String>,
}

/// In which order processes are shown.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Order {
    #[default]
    Memory,
    Pid,
    Gpu,
    Job,
}

impl Order {
    /// The one after this.
    pub fn next(self) -> Self {
        match self {
            Self::Memory => Self::Pid,
            Self::Pid => Self::Gpu,
            Self::Gpu => Self::Job,
            Self::Job => Self::Memory,
        }
    }

    fn label(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Pid => "pid",
            Self::Gpu => "GPU",
            Self::Job => "job",
        }
    }
}

/// What the output can show.
#[derive(Debug, Clone, Copy)]
pub(super) struct Paint {
    pub has_color: bool,
    pub is_unicode: bool,
}

/// What a part of a line means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Style {
    Plain,
    Bold,
    Dim,
    Good,
    Warn,
    Bad,
    Head,
}

impl Style {
    /// The parameters of the terminal's sequence for it.
    fn code(self) -> Option<&'static str> {
        Some(match self {
            Self::Plain => return None,
            Self::Bold => "1",
            Self::Dim => "2",
            Self::Good => "32",
            Self::Warn => "33",
            Self::Bad => "1;31",
            Self::Head => "7",
        })
    }
}

type Line = Vec<(Style, String)>;

/// One picture.
pub(super) struct Frame {
    lines: Vec<Line>,
    columns: usize,
    /// The first process that is shown: no further than the last ones.
    pub scroll: usize,
}

impl Frame {
    /// What is shown of `now`.
    pub fn new(now: &Now, view: &Viewport, about: &str) -> Self {
        let mut lines = vec![header(now, about)];
        if let Some(trouble) = &now.trouble {
            lines.push(vec![(Style::Bad, format!("Nothing is read: {trouble}"))]);
        }
        lines.push(Line::new());
        lines.extend(gpus(now, view));
        lines.push(Line::new());
        let rest = |lines: &Vec<Line>| view.rows.saturating_sub(lines.len() + 1);
        let most = (rest(&lines) / 2).max(FEW_LINES);
        lines.extend(incidents(&now.incidents, view.columns, most));
        lines.push(Line::new());
        let scroll = processes(&now.processes, view, rest(&lines), &mut lines);
        let is_live = view.rows != usize::MAX;
        if is_live {
            lines.truncate(view.rows.saturating_sub(1));
            lines.resize(view.rows.saturating_sub(1), Line::new());
            lines.push(footer(view));
        }
        Self { lines, columns: view.columns, scroll }
    }

    /// The whole picture, a line break after each line.
    pub fn text(&self, paint: Paint) -> String {
        let mut text = String::new();
        for line in &self.lines {
            let mut room = self.columns;
            for (style, part) in line {
                let part = if paint.is_unicode { part.clone() } else { ascii(part) };
                let part = fitting(&part, room);
                room = room.saturating_sub(width(part));
                match style.code().filter(|_| paint.has_color) {
                    Some(code) => {
                        let _ = write!(text, "\x1b[{code}m{part}\x1b[0m");
                    }
                    None => text.push_str(part),
                }
            }
            while !paint.has_color && text.ends_with(' ') {
                text.pop();
            }
            text.push('\n');
        }
        text
    }
}

/// The columns that a text takes: the sum over its characters, as [`fitting`] counts them.
fn width(text: &str) -> usize {
    text.chars().map(|one| one.width().unwrap_or(0)).sum()
}

/// The part of a text that fits into a number of columns.
fn fitting(text: &str, columns: usize) -> &str {
    let mut taken = 0;
    let end = text.char_indices().find(|(_, one)| {
        taken += one.width().unwrap_or(0);
        taken > columns
    });
    end.map_or(text, |(end, _)| &text[..end])
}

/// For terminals that show no UTF-8.
fn ascii(text: &str) -> String {
    let of = |one: char| match one {
        '█' => '#',
        '▏' | '▎' | '▍' | '▌' | '▋' | '▊' | '▉' | '░' => '.',
        '│' => '|',
        '·' => '-',
        '→' => '>',
        '°' => ' ',
        one if one.is_ascii() => one,
        _ => '?',
    };
    text.chars().map(of).collect()
}

fn header(now: &Now, about: &str) -> Line {
    let incidents = match now.incidents.as_slice() {
        [] => (Style::Good, "nothing is wrong".to_owned()),
        [worst, ..] => {
            let count = now.incidents.len();
            (style(&worst.severity), format!("{count} incident{}", if count == 1 { "" } else { "s" }))
        }
    };
    let source = if now.source.is_empty() { "nothing is read" } else { &now.source };
    let about = (Style::Dim, format!(" · {about} · "));
    vec![(Style::Bold, "highwater top".to_owned()), (Style::Plain, format!("  {source}")), about, incidents]
}

fn footer(view: &Viewport) -> Line {
    if let Some(fault) = &view.fault {
        return vec![(Style::Bad, fault.clone())];
    }
    if view.has_help {
        let keys =
            "q quit · s order · space pause · + - faster, slower · up down, page up, page down: processes · h back";
        return vec![(Style::Head, keys.to_owned())];
    }
    let state = if view.is_paused { "paused".to_owned() } else { format!("every {:?}", view.interval) };
    vec![(Style::Dim, format!("q quit · h help · by {} (s) · {state} (space)", view.order.label()))]
}

/// All GPUs, or the fullest ones if there are too many for a screen.
fn gpus(now: &Now, view: &Viewport) -> Vec<Line> {
    let most = (view.rows / 2).max(FEW_GPUS);
    let mut shown: Vec<&ListedGpu> = now.gpus.iter().collect();
    if shown.len() > most {
        // Those that do not answer come first, and those whose memory is not known last.
        shown.sort_by_key(|gpu| (gpu.up, gpu.headroom_bytes().unwrap_or(u64::MAX)));
        shown.truncate(most - 1);
    }
    let has = |least: usize| view.columns >= least;
    let mut head = format!("{:<8}{:>9}{:>9}{:>9}  ", "GPU", "USED GiB", "PEAK 1m", "FREE");
    head.push_str(&format!("{:>5}", "UTIL"));
    if has(90) {
        head.push_str(&format!("{:>12}{:>7}", "POWER W", "TEMP"));
    }
    if has(130) {
        head.push_str(&format!("  {:<22}", "MODEL"));
    }
    let bar = view.columns.saturating_sub(head.len() + 2).min(80);
    let lines = shown.iter().map(|gpu| {
        if !gpu.up {
            let why = gpu.trouble.as_deref().unwrap_or("it does not say why");
            return vec![(Style::Bad, format!("{:<8} does not answer: {why}", gpu.index))];
        }
        let (free, fullness) = (gpu.headroom_bytes(), fullness(gpu));
        let mut line = vec![
            (Style::Bold, format!("{:<8}", gpu.index)),
            (Style::Plain, format!("{:>9}{:>9}", gib(gpu.memory_used_bytes), gib(gpu.memory_peak_bytes))),
            (fullness, format!("{:>9}", gib(free))),
            (Style::Plain, format!("  {:>5}", percent(gpu.utilization_ratio))),
        ];
        if has(90) {
            let whole = |number: Option<f64>| number.map_or_else(|| "?".to_owned(), |number| format!("{number:.0}"));
            let power = format!("{}/{}", whole(gpu.power_watts), whole(gpu.power_limit_watts));
            line.push((Style::Plain, format!("{power:>12}{:>5}°C", whole(gpu.temperature_celsius))));
        }
        if has(130) {
            line.push((Style::Dim, format!("  {:<22}", fitting(gpu.name.as_deref().unwrap_or("?"), 22))));
        }
        line.push((Style::Plain, "  ".to_owned()));
        line.push((fullness, memory_bar(gpu, bar)));
        line
    });
    let mut all = vec![vec![(Style::Head, format!("{head:<width$}", width = view.columns))]];
    all.extend(lines);
    if now.gpus.len() > shown.len() {
        let more = now.gpus.len() - shown.len();
        all.push(vec![(Style::Dim, format!("{more} more GPUs have more free memory"))]);
    }
    all
}

fn percent(ratio: Option<f64>) -> String {
    ratio.map_or_else(|| "?".to_owned(), |ratio| format!("{:.0} %", ratio * 100.0))
}

fn fullness(gpu: &ListedGpu) -> Style {
    match gpu.headroom_bytes().zip(gpu.memory_usable_bytes) {
        None => Style::Plain,
        Some((free, _)) if free < FULL_BYTES => Style::Bad,
        Some((free, usable)) if free < usable / 20 => Style::Warn,
        Some(_) => Style::Good,
    }
}

/// What is used now, and where the peak of the last minute was.
#[allow(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "eighths of a few columns"
)]
fn memory_bar(gpu: &ListedGpu, columns: usize) -> String {
    const EIGHTHS: [char; 7] = ['▏', '▎', '▍', '▌', '▋', '▊', '▉'];
    let Some((used, usable)) = gpu.memory_used_bytes.zip(gpu.memory_usable_bytes) else { return String::new() };
    let eighths = |bytes: u64| ((bytes as f64 / usable.max(1) as f64).min(1.0) * columns as f64 * 8.0).round() as usize;
    let (filled, peak) =
        (eighths(used), gpu.memory_peak_bytes.map(|peak| (eighths(peak) / 8).min(columns.saturating_sub(1))));
    let column = |at: usize| match filled.saturating_sub(at * 8) {
        0 if Some(at) == peak => '│',
        0 => '░',
        part @ 1..=7 => EIGHTHS[part - 1],
        _ => '█',
    };
    (0..columns).map(column).collect()
}

fn style(severity: &str) -> Style {
    match severity {
        "critical" => Style::Bad,
        "warning" => Style::Warn,
        _ => Style::Plain,
    }
}

/// What is wrong: what, since when and at what cost, and what to do.
fn incidents(incidents: &[Incident], columns: usize, most: usize) -> Vec<Line> {
    let mut lines = Vec::new();
    for (shown, incident) in incidents.iter().enumerate() {
        let mut its: Vec<Line> = Vec::new();
        let whose = incident.job.as_ref().map(|job| format!("{job}: ")).unwrap_or_default();
        let what = format!("{whose}{} {}", incident.what, how_long(incident));
        for (at, row) in wrapped(&what, columns.saturating_sub(10)).into_iter().enumerate() {
            let label = if at == 0 { incident.severity.as_str() } else { "" };
            its.push(vec![(style(&incident.severity), format!("{label:<10}")), (Style::Plain, row)]);
        }
        for (at, row) in wrapped(&incident.advice, columns.saturating_sub(12)).into_iter().enumerate() {
            let mark = if at == 0 { "→ " } else { "  " };
            its.push(vec![(Style::Dim, format!("{:<10}{mark}{row}", ""))]);
        }
        if lines.len() + its.len() > most && shown > 0 {
            let more = incidents.len() - shown;
            lines.push(vec![(Style::Dim, format!("{more} more incidents"))]);
            break;
        }
        lines.extend(its);
    }
    lines
}

/// `(4 times in 3 min; ranks lost 12.5 s)`.
fn how_long(incident: &Incident) -> String {
    let now_ns = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_nanos();
    let begin_ns = u128::try_from(incident.begin_unix_nano).unwrap_or(0);
    let seconds = u64::try_from(now_ns.saturating_sub(begin_ns) / 1_000_000_000).unwrap_or(0);
    let lasted = match seconds {
        0..=119 => format!("{seconds} s"),
        120..=7_199 => format!("{} min", seconds / 60),
        _ => format!("{} h", seconds / 3_600),
    };
    let mut text =
        if incident.times > 1 { format!("({} times in {lasted}", incident.times) } else { format!("(for {lasted}") };
    if let Some(lost) = incident.lost_seconds {
        let _ = write!(text, "; ranks lost {lost:.1} s");
    }
    text + ")"
}

/// The words of a text in lines of a number of columns. A word that is longer has a line of its own, and is cut.
fn wrapped(text: &str, columns: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if width(line) + 1 + width(word) <= columns => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

/// Adds the table of processes, in at most `rows` lines. Returns which of them is the first.
fn processes(all: &[Process], view: &Viewport, rows: usize, lines: &mut Vec<Line>) -> usize {
    let mut sorted: Vec<&Process> = all.iter().collect();
    let job = |process: &Process| process.rank.as_ref().map(|rank| (rank.job.clone(), rank.rank));
    match view.order {
        Order::Memory => sorted.sort_by_key(|process| (Reverse(process.used_bytes), process.pid)),
        Order::Pid => sorted.sort_by_key(|process| process.pid),
        Order::Gpu => sorted.sort_by(|one, other| (&one.gpus, one.pid).cmp(&(&other.gpus, other.pid))),
        // Those without a job come last.
        Order::Job => sorted.sort_by_key(|process| (job(process).is_none(), job(process), process.pid)),
    }
    let room = rows.saturating_sub(1).max(1);
    let scroll = view.scroll.min(sorted.len().saturating_sub(room));
    let (of_job, of_phase) = if view.columns < 120 { (16, 10) } else { (24, 14) };
    let head = format!(
        "{:>9}  {:<10}{:<8}{:>7}  {:<of_job$}{:>6}{:>10}  {:<of_phase$}{}",
        "PID", "USER", "GPU", "GiB", "JOB", "RANK", "STEP", "PHASE", "COMMAND"
    );
    lines.push(vec![(Style::Head, format!("{head:<width$}", width = view.columns))]);
    if sorted.is_empty() {
        lines.push(vec![(
            Style::Dim,
            "No process has a context on a GPU, or the driver does not list them.".to_owned(),
        )]);
    }
    for process in sorted.iter().skip(scroll).take(room) {
        let known = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".to_owned());
        let rank = process.rank.as_ref();
        let pid = process.pid.map_or_else(|| "?".to_owned(), |pid| pid.to_string());
        let step = rank.and_then(|rank| rank.step).map_or_else(|| "-".to_owned(), |step| step.to_string());
        lines.push(vec![
            (Style::Plain, format!("{pid:>9}  {}", column(&known(&process.user), 10))),
            (Style::Plain, column(&process.gpus.join(","), 8)),
            (Style::Bold, format!("{:>7}  ", gib(process.used_bytes))),
            (Style::Plain, column(rank.map_or("-", |rank| rank.job.as_str()), of_job)),
            (Style::Plain, format!("{:>6}", rank.map_or_else(|| "-".to_owned(), |rank| rank.rank.to_string()))),
            (Style::Plain, format!("{step:>10}  ")),
            (Style::Plain, column(rank.and_then(|rank| rank.phase.as_deref()).unwrap_or("-"), of_phase)),
            (Style::Dim, known(&process.command)),
        ]);
    }
    scroll
}

/// A text in a number of columns, the last of which is a space.
fn column(text: &str, columns: usize) -> String {
    let text = fitting(text, columns.saturating_sub(1));
    format!("{text}{}", " ".repeat(columns.saturating_sub(width(text))))
}

#[cfg(test)]
mod tests {
    use super::super::now::Rank;
    use super::*;

    const PLAIN: Paint = Paint { has_color: false, is_unicode: true };
    const GIB: u64 = 1 << 30;

    fn gpu(index: usize, used: u64, peak: u64) -> ListedGpu {
        ListedGpu {
            index: index.to_string(),
            name: Some("NVIDIA H200".to_owned()),
            up: true,
            memory_usable_bytes: Some(100 * GIB),
            memory_used_bytes: Some(used * GIB),
            memory_peak_bytes: Some(peak * GIB),
            utilization_ratio: Some(0.98),
            power_watts: Some(651.4),
            power_limit_watts: Some(700.0),
            temperature_celsius: Some(61.0),
            ..ListedGpu::default()
        }
    }

    fn now() -> Now {
        let rank = Rank { job: "llama".into(), rank: 3, step: Some(12), phase: Some("backward".into()) };
        let process = |pid: u32, gpu: &str, gib: u64| Process {
            pid: Some(pid),
            gpus: vec![gpu.to_owned()],
            used_bytes: Some(gib * GIB),
            ..Process::default()
        };
        let trainer = Process {
            rank: Some(rank),
            user: Some("alice".into()),
            command: Some("python3 train.py".into()),
            ..process(70_001, "0", 50)
        };
        let incident = Incident {
            severity: "critical".into(),
            job: Some("llama".into()),
            times: 3,
            lost_seconds: Some(12.54),
            what: "GPU 1 had only 200 MiB free.".into(),
            advice: "Use a smaller batch.".into(),
            begin_unix_nano: i64::MAX,
            ..Incident::default()
        };
        Now {
            source: "nvml 580".into(),
            gpus: vec![gpu(0, 50, 75), gpu(1, 90, 100)],
            processes: vec![trainer, process(9, "1", 90)],
            incidents: vec![incident],
            ..Now::default()
        }
    }

    #[test]
    fn a_picture_has_each_gpu_what_is_wrong_and_each_process() {
        let view = Viewport { columns: 100, rows: 20, interval: Duration::from_secs(1), ..Viewport::default() };
        let text = Frame::new(&now(), &view, "http://here").text(PLAIN);
        expect_test::expect![[r#"
            highwater top  nvml 580 · http://here · 1 incident

            GPU      USED GiB  PEAK 1m     FREE   UTIL     POWER W   TEMP
            0            50.0     75.0     25.0   98 %     651/700   61°C  ██████████████████▌░░░░░░░░│░░░░░░░░░
            1            90.0    100.0      0.0   98 %     651/700   61°C  █████████████████████████████████▎░░│

            critical  llama: GPU 1 had only 200 MiB free. (3 times in 0 s; ranks lost 12.5 s)
                      → Use a smaller batch.

                  PID  USER      GPU         GiB  JOB               RANK      STEP  PHASE     COMMAND
                    9  -         1          90.0  -                    -         -  -         -
                70001  alice     0          50.0  llama                3        12  backward  python3 train.py







            q quit · h help · by memory (s) · every 1s (space)
        "#]]
        .assert_eq(&text);
        assert_eq!(text.lines().count(), 20);
    }

    #[test]
    fn colours_say_how_full_a_gpu_was_and_none_are_needed() {
        let view = Viewport { columns: 100, rows: 20, ..Viewport::default() };
        let color = Frame::new(&now(), &view, "").text(Paint { has_color: true, is_unicode: true });
        assert!(color.contains("\x1b[32m     25.0\x1b[0m") && color.contains("\x1b[1;31m      0.0\x1b[0m"), "{color}");
        let ascii = Frame::new(&now(), &view, "").text(Paint { has_color: false, is_unicode: false });
        assert!(
            ascii.is_ascii() && ascii.contains("#################.") && ascii.contains("> Use a smaller"),
            "{ascii}"
        );
    }

    #[test]
    fn of_many_gpus_the_fullest_and_those_that_do_not_answer_are_shown() {
        let mut many =
            Now { gpus: (0..64).map(|index| gpu(index, index as u64, index as u64)).collect(), ..Now::default() };
        many.gpus[5] = ListedGpu { up: false, trouble: Some("fell off the bus".into()), ..many.gpus[5].clone() };
        let view = Viewport { columns: 80, rows: 24, ..Viewport::default() };
        let text = Frame::new(&many, &view, "").text(PLAIN);
        let rows: Vec<&str> = text.lines().skip(3).take(12).collect();
        assert_eq!(rows[0], "5        does not answer: fell off the bus");
        assert!(rows[1].starts_with("63 ") && rows[10].starts_with("54 "), "{text}");
        assert_eq!(rows[11], "53 more GPUs have more free memory");
        assert_eq!(text.lines().count(), 24);
    }

    #[test]
    fn processes_are_sorted_and_scrolled_and_no_further_than_the_last() {
        let order = |order: Order, scroll: usize, rows: usize| {
            let mut lines = Vec::new();
            let view = Viewport { columns: 100, order, scroll, ..Viewport::default() };
            let first = processes(&now().processes, &view, rows, &mut lines);
            let pid = |line: &Line| line[0].1.split_whitespace().next().unwrap_or_default().to_owned();
            (first, lines.iter().skip(1).map(pid).collect::<Vec<_>>())
        };
        assert_eq!(order(Order::Memory, 0, 9), (0, vec!["9".to_owned(), "70001".to_owned()]));
        assert_eq!(order(Order::Gpu, 0, 9).1, ["70001", "9"]);
        assert_eq!(order(Order::Job, 0, 9).1, ["70001", "9"]);
        assert_eq!(order(Order::Pid, usize::MAX, 2), (1, vec!["70001".to_owned()]));
        assert_eq!([Order::Memory, Order::Pid, Order::Gpu, Order::Job].map(|order| order.next() == order), [false; 4]);
    }

    #[test]
    fn long_texts_are_wrapped_and_many_incidents_counted() {
        assert_eq!(wrapped("aa bbb cccc", 6), ["aa bbb", "cccc"]);
        assert_eq!(wrapped("longer-than-that a", 6), ["longer-than-that", "a"]);
        let incident = Incident { what: "It is slow.".into(), advice: "Look.".into(), ..Incident::default() };
        let many = vec![incident; 9];
        let lines = incidents(&many, 80, 6);
        assert_eq!((lines.len(), lines[6][0].1.as_str()), (7, "6 more incidents"));
        assert_eq!(incidents(&many, 80, usize::MAX).len(), 18);
    }

    #[test]
    fn wide_characters_take_two_columns() {
        assert_eq!((fitting("作業一", 5), fitting("abc", 5)), ("作業", "abc"));
        assert_eq!(column("作業一", 6), "作業  ");
    }
}

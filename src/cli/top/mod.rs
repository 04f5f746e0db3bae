//! `top`: GPUs, their processes and jobs, and what is wrong with them, in a terminal.
//!
//! Enters: the daemon on this node, or the GPUs themselves where none answers. Leaves: a picture once a second, or one for
//! scripts. Absent on purpose: anything that changes something, such as ending a process.

mod frame;
mod now;
mod screen;
mod source;

use super::common::{Misuse, duration};
use super::serve::{Signals, drive, ended};
use super::terminal;
use clap::Args;
use frame::{Frame, Paint, Viewport};
use now::Now;
use screen::{KeyPress, Screen};
use source::Source;
use std::io::IsTerminal as _;
use std::time::Duration;

/// Steps of the keys `+` and `-`, and the shortest and longest time between two pictures.
const FASTER: u32 = 2;
const SHORTEST: Duration = Duration::from_millis(250);
const LONGEST: Duration = Duration::from_secs(60);

#[derive(Debug, Args)]
pub(super) struct Top {
    /// The daemon to ask [default: the one of this node, http://127.0.0.1:10450; where none answers, the GPUs are read here].
    #[arg(long, value_name = "URL")]
    via: Option<String>,
    /// Print one picture and end. Where the output is no terminal, it is plain text.
    #[arg(long)]
    once: bool,
    /// What the picture is made of, as JSON.
    #[arg(long, requires = "once")]
    json: bool,
    /// Time between two pictures, such as 500ms.
    #[arg(short = 'd', long, value_name = "TIME", default_value = "1s", value_parser = duration)]
    interval: Duration,
    /// What to read where no daemon is asked: nvml, sim, sim:SCENARIO.
    #[arg(long, value_name = "SOURCE", conflicts_with = "via")]
    source: Option<String>,
    /// Path of libnvidia-ml.so.1.
    #[arg(long, value_name = "PATH", conflicts_with = "via")]
    nvml_library: Option<String>,
}

impl Top {
    pub fn run(&self) -> anyhow::Result<()> {
        let is_terminal = std::io::stdout().is_terminal();
        if !self.once && !is_terminal {
            return Err(Misuse("top: the output is no terminal; --once prints one picture".to_owned()).into());
        }
        drive(async {
            let source =
                Source::find(self.via.as_deref(), self.source.as_deref(), self.nvml_library.as_deref()).await?;
            let done = if self.once { self.print(&source, is_terminal).await } else { self.show(&source).await };
            source.stop();
            done
        })
    }

    /// One picture, on standard output.
    async fn print(&self, source: &Source, is_terminal: bool) -> anyhow::Result<()> {
        let answers = source.answers().await?;
        if self.json {
            return Ok(terminal::print_line(serde_json::to_string_pretty(&answers)?)?);
        }
        let columns = if is_terminal { terminal::size().0 } else { frame::WIDTH_WITHOUT_TERMINAL };
        let paint = Paint { has_color: is_terminal && terminal::wants_color(), is_unicode: terminal::is_unicode() };
        let now = Now::of(answers)?;
        let view = Viewport { columns, rows: usize::MAX, ..Viewport::default() };
        let frame = Frame::new(&now, &view, source.about());
        Ok(terminal::print(frame.text(paint))?)
    }

    /// A picture after the other, until `q`, Control-C or a signal.
    async fn show(&self, source: &Source) -> anyhow::Result<()> {
        // From now on signals are waited for, because they must leave the terminal as it was.
        let (mut signals, mut screen) = (Signals::listen()?, Screen::take()?);
        let paint = Paint { has_color: terminal::wants_color(), is_unicode: terminal::is_unicode() };
        let mut view = Viewport { interval: self.interval.clamp(SHORTEST, LONGEST), ..Viewport::default() };
        let mut shown: Option<Now> = None;
        let mut fault = None;
        loop {
            if !view.is_paused || shown.is_none() {
                let answers = tokio::select! {
                    answers = source.answers() => answers,
                    _ = ended(&mut signals) => return Ok(()),
                    () = is_over(&mut screen, &mut view) => return Ok(()),
                };
                match answers.and_then(Now::of) {
                    Ok(now) => (shown, fault) = (Some(now), None),
                    // What was seen last stays, with why there is nothing newer.
                    Err(error) => fault = Some(format!("{error:#}")),
                }
            }
            let next = tokio::time::Instant::now() + view.interval;
            loop {
                (view.columns, view.rows) = terminal::size();
                view.fault.clone_from(&fault);
                let frame = Frame::new(shown.as_ref().unwrap_or(&Now::default()), &view, source.about());
                screen.draw(&frame.text(paint))?;
                view.scroll = frame.scroll;
                tokio::select! {
                    _ = ended(&mut signals) => return Ok(()),
                    key = screen.key() => if act(key, &mut view) { return Ok(()) },
                    () = tokio::time::sleep_until(next) => break,
                }
            }
        }
    }
}

/// Does what keys ask for while a daemon is waited for, until one ends the program.
async fn is_over(screen: &mut Screen, view: &mut Viewport) {
    while !act(screen.key().await, view) {}
}

/// What a key does. Returns whether it ends the program.
fn act(key: Option<KeyPress>, view: &mut Viewport) -> bool {
    match key {
        Some(KeyPress::Character('q') | KeyPress::Interrupt) => return true,
        Some(KeyPress::Character('s')) => view.order = view.order.next(),
        Some(KeyPress::Character(' ' | 'p')) => view.is_paused = !view.is_paused,
        Some(KeyPress::Character('h' | '?')) => view.has_help = !view.has_help,
        Some(KeyPress::Character('+' | '=')) => view.interval = (view.interval / FASTER).max(SHORTEST),
        Some(KeyPress::Character('-')) => view.interval = (view.interval * FASTER).min(LONGEST),
        Some(KeyPress::Up | KeyPress::Character('k')) => view.scroll = view.scroll.saturating_sub(1),
        Some(KeyPress::Down | KeyPress::Character('j')) => view.scroll = view.scroll.saturating_add(1),
        Some(KeyPress::PageUp) => view.scroll = view.scroll.saturating_sub(frame::PAGE),
        Some(KeyPress::PageDown) => view.scroll = view.scroll.saturating_add(frame::PAGE),
        Some(KeyPress::Character('g') | KeyPress::Home) => view.scroll = 0,
        Some(KeyPress::Character('G') | KeyPress::End) => view.scroll = usize::MAX,
        Some(KeyPress::Character(_)) | None => {}
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use frame::Order;

    #[test]
    fn keys_are_those_of_other_tops() {
        let mut view = Viewport { interval: Duration::from_secs(1), ..Viewport::default() };
        let mut press = |key: KeyPress| (act(Some(key), &mut view), view.clone());
        assert!(press(KeyPress::Interrupt).0 && press(KeyPress::Character('q')).0);
        assert_eq!(press(KeyPress::Character('s')).1.order, Order::Pid);
        assert!(press(KeyPress::Character(' ')).1.is_paused && !press(KeyPress::Character('p')).1.is_paused);
        assert_eq!((press(KeyPress::Down).1.scroll, press(KeyPress::PageUp).1.scroll), (1, 0));
        assert_eq!(press(KeyPress::End).1.scroll, usize::MAX);
        assert_eq!(press(KeyPress::Character('+')).1.interval, Duration::from_millis(500));
        for _ in 0..20 {
            press(KeyPress::Character('-'));
        }
        assert_eq!(press(KeyPress::Character('x')), (false, Viewport { interval: LONGEST, ..view }));
    }
}

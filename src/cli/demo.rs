//! `demo`: the daemon on simulated GPUs, with suggestions to try.

use super::common::Common;
use super::serve::{Signals, drive, print_address, until_ended};
use super::terminal;
use crate::config::{Settings, SourceSpec, default_socket, load};
use crate::daemon;
use anyhow::Context as _;
use highwater_engine::files::OwnFolder;
use highwater_engine::shared_state::SharedState;
use std::io::IsTerminal as _;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

/// How often the progress line is updated.
const PROGRESS: Duration = Duration::from_secs(1);
/// If no terminal can overwrite the line, it is printed this many times less often.
const PROGRESS_PLAIN_EVERY: u32 = 5;
/// How often to check whether there is anything to show yet.
const FIRST_LOOK: Duration = Duration::from_millis(10);

/// Printed in place of commands that would be refused.
const POSTS_NEED_A_TOKEN: &str = "\
Over HTTP, marks and captures here need `Authorization: Bearer TOKEN`, the token of `annotations.token_file`.";

pub(super) fn run(common: &Common) -> anyhow::Result<()> {
    let mut settings = load(&common.layers())?;
    settings.source = SourceSpec::Sim(None);
    // Removed when this ends, however it does.
    let _own = own_folder(common, &mut settings)?;
    let socket = settings.annotations_socket.clone();
    let takes_posts =
        settings.listen.ip().is_loopback() && settings.token_file.is_none() && settings.namespace_tokens.is_none();
    drive(async {
        let signals = Signals::listen()?;
        let daemon = daemon::start(settings).await?;
        print_address(&daemon);
        // A failed write is no reason to end.
        let _ = terminal::print_line(what_to_look_at(daemon.address, takes_posts, socket.as_deref()));
        let progress = tokio::spawn(show_progress(daemon.site.snapshots.state.clone()));
        until_ended(signals, common.run_for).await;
        progress.abort();
        daemon.stop().await;
        Ok(())
    })
}

/// Puts the socket and the captures into a temporary folder, unless the settings name other places. So the demo runs
/// beside a running daemon, and leaves nothing behind.
fn own_folder(common: &Common, settings: &mut Settings) -> anyhow::Result<Option<OwnFolder>> {
    let has_socket = common.annotations_socket.is_none() && settings.annotations_socket == Some(default_socket());
    let has_captures = settings.captures.directory == crate::capture::default_directory();
    if !has_socket && !has_captures {
        return Ok(None);
    }
    let own = OwnFolder::make("highwater-demo").context("cannot make a folder for the demonstration")?;
    if has_socket {
        settings.annotations_socket = Some(own.path().join("annotations.sock"));
    }
    if has_captures {
        settings.captures.directory = Some(own.path().join("captures"));
    }
    Ok(Some(own))
}

fn what_to_look_at(address: SocketAddr, takes_posts: bool, socket: Option<&Path>) -> String {
    // It may listen on all addresses, as in a container.
    let is_any = address.ip().is_unspecified();
    let url = if is_any { format!("http://localhost:{}", address.port()) } else { format!("http://{address}") };
    let posts = if takes_posts { posts(&url) } else { POSTS_NEED_A_TOKEN.to_owned() };
    let marks = marks(socket);
    format!(
        "
Four simulated H200s, two training jobs. `moe-tight` runs short of memory for 15 s of every minute.

  open  {url}/
  curl  {url}/metrics
  curl  '{url}/api/v1/jobs/moe-tight/phases?limit=5'
  curl  '{url}/api/v1/gpus/2/memory?max_points=50'
  curl  '{url}/api/v1/findings'

{posts}
{marks}
"
    )
}

/// How the reader's own job sends its marks.
fn marks(socket: Option<&Path>) -> String {
    let Some(socket) = socket else { return "No socket takes marks: it is set to `none`.".to_owned() };
    format!(
        "Mark the steps of a Python job, from a clone of the repository:
  export HIGHWATER_ANNOTATIONS_SOCKET={}
  python3 python/example.py --gpu 0",
        socket.display()
    )
}

fn posts(url: &str) -> String {
    format!(
        "Mark a phase of your own:
  curl {url}/api/v1/annotations -d '{{\"event\":\"begin\",\"name\":\"mine\",\"job\":\"me\",\"gpu\":0}}'
  curl {url}/api/v1/annotations -d '{{\"event\":\"end\",\"name\":\"mine\",\"job\":\"me\"}}'
  sleep 1; curl -s {url}/metrics | grep 'phase=\"mine\"'
Record the last seconds into a file for `sqlite3`:
  curl {url}/api/v1/captures -d '{{\"seconds_after\":1}}'; sleep 3; curl {url}/api/v1/captures"
    )
}

async fn show_progress(state: SharedState) {
    let is_terminal = std::io::stdout().is_terminal();
    let mut seconds = 0;
    // Waits until the node is known, so that the first line has values. Without a terminal, the next line comes 5 s later.
    while state.slot.node().is_none() {
        tokio::time::sleep(FIRST_LOOK).await;
    }
    let mut ticks = tokio::time::interval(PROGRESS);
    loop {
        ticks.tick().await;
        let line = progress(&state);
        if is_terminal {
            terminal::status(line);
        } else if seconds % PROGRESS_PLAIN_EVERY == 0 {
            let _ = terminal::print_line(line);
        }
        seconds += 1;
    }
}

/// One line: each GPU's memory, each job's step.
fn progress(state: &SharedState) -> String {
    let Some(node) = state.slot.node() else { return "starting".into() };
    let used =
        node.rings.iter().map(|ring| terminal::gib(ring.newest_ns().and_then(|at_ns| ring.at(at_ns).ok().flatten())));
    let used = used.collect::<Vec<_>>().join(" ");
    let jobs = state.ledger.open();
    let step = |(name, job): (&highwater_core::jobs::JobId, &highwater_core::jobs::Job)| {
        let steps = job.ranks.values().filter_map(|rank| rank.step).max();
        format!("{name} step {}", steps.map_or_else(|| "?".into(), |step| step.to_string()))
    };
    let jobs = jobs.by_id().iter().map(step).collect::<Vec<_>>().join(", ");
    format!("used GiB: {used} | {jobs}")
}

//! Wires the whole daemon: source ▶ lanes ▶ rings ▶ join ◀ annotations, with HTTP over all of it.
//!
//! Enters: settings. Leaves: a running daemon, until it is stopped. Threads and channels start here, and in `live` those that
//! read a source. Exceptions: the sampler replaces a thread that hangs in the driver, and gives a GPU whose calls take long a
//! thread of its own; the intake starts another `hw-peer` if one hangs; opening NVML starts `hw-open` threads.

mod finding_log;
#[cfg(test)]
mod findings;
mod listeners;
mod live;
#[cfg(test)]
mod neighbours;
mod parts;
mod playback;
mod readers;
mod recording;
mod shared;
mod sockets;
mod threads;
mod tokens;

#[cfg(test)]
mod bounds;

use crate::capture::{self, Recorder};
use crate::config::{Settings, SourceSpec};
use crate::export::otlp;
use crate::heap;
use crate::machine;
use crate::metrics::{Collect, Snapshots};
use crate::web::Site;
use crate::web::annotations::Access;
use anyhow::Context as _;
use highwater_core::clock::{Clock, Live};
use highwater_core::gpu::Processes;
use highwater_core::source::provenance::is_simulated;
use highwater_engine::dial::{Dial, Tcp};
use highwater_engine::files::Folder;
use highwater_engine::intake::Intake;
use highwater_engine::place::kubelet::Kubelet;
use listeners::{Listeners, Servers};
use parts::{intake, scenario, state, watch_workloads};
use playback::Playback;
pub use readers::Readers;
pub use recording::{OutputFormat, Recording, Unrecorded};
use shared::SharedParts;
use sockets::Sockets;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use threads::{DRAIN, HTTP_DRAIN, join_all, spawn, spawn_watched};

/// A running daemon.
pub struct Daemon {
    /// The address that the HTTP server listens on.
    pub address: SocketAddr,
    /// Whether that address speaks TLS.
    pub is_tls: bool,
    /// The state that its handlers share.
    pub site: Site,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
    sockets: Sockets,
    servers: Servers,
    stop_otlp: Option<tokio::sync::oneshot::Sender<()>>,
    /// Closes when the thread that reads the source ends.
    reading: tokio::sync::oneshot::Receiver<()>,
}

/// Builds the daemon and starts it. Must be called on a tokio runtime.
///
/// # Errors
/// The address or the socket cannot be bound; a scenario, recording, token or certificate cannot be read; or
/// the folder of the exporter's queue cannot be used. A missing driver is not an error: the daemon logs it and retries.
pub async fn start(mut settings: Settings) -> anyhow::Result<Daemon> {
    let live: Arc<dyn Clock> = Arc::new(Live::start());
    let scenario = scenario(&settings)?;
    let playback = Playback::open(&settings, &*live)?;
    let clock = playback.as_ref().map_or_else(|| Arc::clone(&live), |playback| Arc::clone(&playback.clock) as _);
    let (listeners, sockets) = open_doors(&settings)?;
    let (address, is_tls) = (listeners.address()?, listeners.is_tls());

    let stop = Arc::new(AtomicBool::new(false));
    let processes = Arc::new(Processes::default());
    let kubelet = Kubelet::new(&settings.kubelet).map(Arc::new);
    let intake = intake(&settings, &clock, &live, &processes, kubelet.clone())?;
    let mut on_error = StopOnError { stop: Arc::clone(&stop), intake: Arc::clone(&intake), is_needed: true };
    let state = state(&settings, &intake, kubelet, clock);
    let source = source_attributes(&settings.source, playback.as_ref().map(Playback::description));
    let otlp = settings.otlp_export.take().map(|mut settings| {
        settings.resource.extend(source);
        (settings, Arc::new(otlp::OtlpStats::default()))
    });
    let (recorder, captures) = capture::recorder(&settings.captures, settings.retention_ns, &state, &intake);
    let parts = parts(&intake, &recorder, &listeners, otlp.as_ref().map(|(_, stats)| stats));
    let snapshots = Snapshots {
        state: state.clone(),
        choice: settings.metrics,
        node_name: machine::node_name().unwrap_or_default().into(),
        parts,
    };
    let site = Site::new(snapshots, Arc::clone(&intake), recorder.clone());
    let shared =
        SharedParts { settings: Arc::new(settings), state, intake, processes, recorder, stop: Arc::clone(&stop) };

    let mut threads = Vec::new();
    // Started first, because its settings may be wrong.
    let stop_otlp = otlp.map(|(settings, stats)| export(settings, &site, &stats, &mut threads)).transpose()?;
    sockets.serve(&shared.intake, &stop, &mut threads)?;
    watch_workloads(&shared.settings, &live, &shared.state, &stop, &mut threads)?;
    let stopped = Arc::clone(&stop);
    let captures = captures.map(|captures| spawn("hw-capture", move || captures.run(&stopped)));
    threads.extend(captures.transpose()?);
    let (reader, reading) = match playback {
        Some(playback) => spawn_watched("hw-replay", move || playback.play(&shared, &live))?,
        None => spawn_watched("hw-source", move || live::keep_open(&shared, scenario.as_ref()))?,
    };
    threads.push(reader);

    let servers = listeners.serve(&site, &mut threads)?;
    let stopped = Arc::clone(&stop);
    threads.push(spawn("hw-heap", move || heap::look_after(&stopped))?);
    on_error.is_needed = false;
    Ok(Daemon { address, is_tls, site, stop, threads, sockets, servers, stop_otlp, reading })
}

/// Ends the threads of a daemon of which a later part could not be started.
struct StopOnError {
    stop: Arc<AtomicBool>,
    intake: Arc<Intake>,
    is_needed: bool,
}

impl Drop for StopOnError {
    fn drop(&mut self) {
        if self.is_needed {
            self.stop.store(true, Ordering::Relaxed);
            self.intake.end_readers();
        }
    }
}

/// The parts with statistics of their own, for every exporter.
fn parts(
    intake: &Arc<Intake>,
    recorder: &Recorder,
    listeners: &Listeners,
    otlp: Option<&Arc<otlp::OtlpStats>>,
) -> Vec<Arc<dyn Collect>> {
    let mut parts: Vec<Arc<dyn Collect>> = vec![
        Arc::clone(intake) as _,
        Arc::new(recorder.clone()),
        Arc::clone(&listeners.gate.stats) as _,
        Arc::new(heap::Parts),
    ];
    parts.extend(otlp.map(|stats| Arc::clone(stats) as _));
    parts
}

impl Daemon {
    /// Stops everything within two seconds: no new requests and annotations, then the lanes, then the exporter.
    pub async fn stop(self) {
        self.stop.store(true, Ordering::Relaxed);
        // Otherwise the servers would wait for streams that never end.
        self.site.live.stop();
        self.wake();
        let export_the_end = async {
            // The exporter is stopped only after the source is no longer read, so that its last export is complete. A
            // source that hangs is not waited for. An exporter that has already ended ignores the signal.
            let _ = tokio::time::timeout(HTTP_DRAIN, self.reading).await;
            let _ = self.stop_otlp.map(|stop_otlp| stop_otlp.send(()));
        };
        tokio::join!(self.servers.stop(), export_the_end);
        let drained = tokio::task::spawn_blocking(move || join_all(self.threads, DRAIN)).await;
        if !drained.unwrap_or(false) {
            tracing::warn!("a thread did not end in time; it is left behind");
        }
    }

    /// Wakes the threads whose wait may be long, so that they notice the stop. `hw-source` then wakes the lanes.
    fn wake(&self) {
        self.site.intake.end_readers();
        self.threads.iter().for_each(|handle| handle.thread().unpark());
        self.site.recorder.wake();
        self.sockets.close();
    }
}

/// Starts the exporter on a thread and a runtime of its own, so that a slow receiver cannot affect HTTP.
fn export(
    settings: otlp::OtlpSettings,
    site: &Site,
    stats: &Arc<otlp::OtlpStats>,
    threads: &mut Vec<JoinHandle<()>>,
) -> anyhow::Result<tokio::sync::oneshot::Sender<()>> {
    let dial: Arc<dyn Dial> = Arc::new(Tcp);
    let exporter = otlp::Exporter::new(settings, site.snapshots.clone(), stats, &dial).map_err(anyhow::Error::msg)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.context("cannot start the OTLP runtime")?;
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    threads.push(spawn("hw-otlp", move || {
        highwater_engine::thread::stand_back();
        runtime.block_on(exporter.run(async {
            // Either result ends it: a stop was sent, or the daemon was dropped.
            let _ = stopped.await;
        }));
        // A name lookup in progress is not waited for.
        runtime.shutdown_background();
    })?);
    Ok(stop)
}

fn access(settings: &Settings) -> anyhow::Result<Access> {
    if settings.token_file.is_none() && settings.namespace_tokens.is_none() {
        let listen = settings.annotations_listen.unwrap_or(settings.listen);
        return Ok(if listen.ip().is_loopback() { Access::Open } else { Access::Closed });
    }
    Ok(Access::Tokens(Arc::new(tokens::read(settings)?)))
}

/// Opens the listeners and sockets through which clients reach the daemon, and logs where annotations are accepted.
fn open_doors(settings: &Settings) -> anyhow::Result<(Listeners, Sockets)> {
    let access = access(settings)?;
    let is_closed = matches!(access, Access::Closed);
    if settings.namespace_tokens.is_some() && settings.token_file.is_none() {
        tracing::info!("requests for captures over HTTP are refused: they need annotations.token_file");
    }
    let listeners = Listeners::open(settings, access)?;
    let sockets = Sockets::open(settings)?;
    if is_closed {
        tracing::info!(
            "annotations over HTTP are refused: the address is not loopback, and neither annotations.token_file nor \
             annotations.namespace_tokens is set"
        );
    }
    Ok((listeners, sockets))
}

/// Reads the files that the settings name, as [`start`] would, and starts nothing.
///
/// # Errors
/// Every fault: files that cannot be read or parsed, a token that is too short, certificates, the OTLP queue's folder.
pub fn check(settings: &Settings) -> Result<(), Vec<anyhow::Error>> {
    let read = [
        scenario(settings).map(|_| ()),
        Playback::open(settings, &Live::start()).map(|_| ()),
        access(settings).map(|_| ()),
        listeners::guard(settings, &Arc::default()).map(|_| ()),
        queue_folder(settings),
    ];
    let faults: Vec<_> = read.into_iter().filter_map(Result::err).chain(bad_certificates(settings)).collect();
    if faults.is_empty() { Ok(()) } else { Err(faults) }
}

/// Resource attributes that mark every point and span of a simulation or a replay; none for NVML. `replayed` describes the
/// recording that is replayed.
fn source_attributes(source: &SourceSpec, replayed: Option<String>) -> Vec<(String, String)> {
    let description = match source {
        SourceSpec::Nvml => return Vec::new(),
        SourceSpec::Sim(name) => format!("sim:{}", name.as_deref().unwrap_or("demo")),
        SourceSpec::Replay(path) => replayed.unwrap_or_else(|| format!("replay:{}", path.display())),
    };
    let attribute = |name: &str, value: String| (format!("highwater.{name}"), value);
    let simulated = is_simulated(&description).then(|| attribute("simulated", true.to_string()));
    std::iter::once(attribute("source", description)).chain(simulated).collect()
}

/// Whether `otlp.queue_dir` can be used. A running daemon may hold its lock, so that is not tried; nothing is created.
fn queue_folder(settings: &Settings) -> anyhow::Result<()> {
    let Some(wanted) = settings.otlp_export.as_ref().and_then(|otlp| otlp.queue_dir.as_deref()) else { return Ok(()) };
    let is_there = |path: &&Path| path.symlink_metadata().is_ok();
    match wanted.ancestors().find(is_there) {
        Some(there) if there == wanted => drop(Folder::open(wanted).context("otlp.queue_dir")?),
        Some(there) if !there.is_dir() => anyhow::bail!("otlp.queue_dir: {} is not a folder", there.display()),
        _ => {}
    }
    Ok(())
}

/// Errors in the certificates for OTLP receivers, each error once.
fn bad_certificates(settings: &Settings) -> Vec<anyhow::Error> {
    let endpoints = settings.otlp_export.iter().flat_map(|otlp| [&otlp.metrics, &otlp.traces].into_iter().flatten());
    let mut faults: Vec<String> =
        endpoints.filter_map(|endpoint| otlp::ReceiverClient::new(endpoint.clone(), Arc::new(Tcp)).err()).collect();
    faults.dedup();
    faults.into_iter().map(anyhow::Error::msg).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_resource_says_that_no_gpu_is_read() {
        let of = |source, replayed: Option<&str>| -> Vec<String> {
            let attributes = source_attributes(&source, replayed.map(str::to_owned)).into_iter();
            attributes.map(|(name, value)| format!("{name}={value}")).collect()
        };
        assert!(of(SourceSpec::Nvml, None).is_empty());
        assert_eq!(of(SourceSpec::Sim(None), None), ["highwater.source=sim:demo", "highwater.simulated=true"]);
        assert_eq!(of(SourceSpec::Sim(Some("spike".to_owned())), None)[0], "highwater.source=sim:spike");
        let replay = || SourceSpec::Replay("/r/a.sqlite".into());
        assert_eq!(of(replay(), Some("replay:/r/a.sqlite")), ["highwater.source=replay:/r/a.sqlite"]);
        let simulated = ["highwater.source=replay:/r/a.sqlite of sim:demo", "highwater.simulated=true"];
        assert_eq!(of(replay(), Some("replay:/r/a.sqlite of sim:demo")), simulated);
    }
}

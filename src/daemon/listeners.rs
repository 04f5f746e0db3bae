//! The TCP listeners, and what each serves: everything, annotations, and the probes.
//!
//! Enters: settings and routes. Leaves: servers that run until they are stopped. Probes have a thread of their own, so
//! that connections and requests of other listeners never delay them.

use super::threads::{HTTP_DRAIN, spawn};
use crate::config::Settings;
use crate::web::annotations::Access;
use crate::web::counts::{HttpStats, Listener};
use crate::web::gate::{Gate, Refusals};
use crate::web::guard::Guard;
use crate::web::serve::{Server, TAKE_PATIENCE, listen};
use crate::web::{self, descriptors};
use anyhow::Context as _;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;
use tokio::net::TcpListener;
use tokio::sync::watch;

/// For each listener, the most connections, and the divisor of the process's file descriptors that limits them too.
pub(super) const SLOTS: (usize, u64) = (256, 4);
const ANNOTATIONS_SLOTS: (usize, u64) = (128, 8);
pub(super) const HEALTH_SLOTS: (usize, u64) = (32, 16);

/// Listeners that are bound but do not serve yet.
pub(super) struct Listeners {
    http: TcpListener,
    annotations: Option<TcpListener>,
    health: Option<TcpListener>,
    /// The checks on every request, except those of the probes' listener.
    pub(super) gate: Arc<Gate>,
}

/// Running servers.
pub(super) struct Servers {
    stop: watch::Sender<()>,
    running: Vec<tokio::task::JoinHandle<()>>,
}

impl Listeners {
    /// Opens every listener.
    pub(super) fn open(settings: &Settings, access: Access) -> anyhow::Result<Self> {
        let stats = Arc::<HttpStats>::default();
        let guard = guard(settings, &stats)?;
        let hosts = settings.web_hosts.clone();
        let optional = |setting, address: Option<_>| address.map(|address| open(setting, address)).transpose();
        Ok(Self {
            http: open("listen", settings.listen)?,
            annotations: optional("annotations.listen", settings.annotations_listen)?,
            health: optional("health.listen", settings.health_listen)?,
            gate: Arc::new(Gate { hosts, guard, access, stats, refusals: Refusals::default() }),
        })
    }

    /// The address at which everything is served.
    pub(super) fn address(&self) -> anyhow::Result<SocketAddr> {
        Ok(self.http.local_addr()?)
    }

    /// Whether any listener other than the probes' uses TLS.
    pub(super) fn is_tls(&self) -> bool {
        self.gate.guard.as_ref().is_some_and(|guard| guard.has_tls())
    }

    /// Serves all of them. Adds the thread for probes to `threads`.
    pub(super) fn serve(self, site: &web::Site, threads: &mut Vec<JoinHandle<()>>) -> anyhow::Result<Servers> {
        let descriptors = descriptors::raise();
        let (stop, stopping) = watch::channel(());
        let server = |name, listener, routes, (most, share)| {
            let slots = descriptors::slots(descriptors, most, share);
            let guard = self.gate.guard.clone().filter(|_| name != Listener::Health);
            Server { name, listener, routes, slots, stats: Arc::clone(&self.gate.stats), guard }
        };
        if let Some(listener) = self.health {
            let health = server(Listener::Health, listener, web::probes(site.clone()), HEALTH_SLOTS);
            threads.push(spawn_health(health, stopping.clone())?);
        }
        let routes = web::router(site.clone(), Arc::clone(&self.gate), self.annotations.is_none());
        let mut servers = vec![server(Listener::Http, self.http, routes, SLOTS)];
        if let Some(listener) = self.annotations {
            tracing::info!(address = %listener.local_addr()?, "taking annotations over TCP");
            let routes = web::annotations(site, Arc::clone(&self.gate));
            servers.push(server(Listener::Annotations, listener, routes, ANNOTATIONS_SLOTS));
        }
        let serving = servers.into_iter().map(|server| tokio::spawn(server.run(stopped(stopping.clone()))));
        let running = serving.collect();
        Ok(Servers { stop, running })
    }
}

impl Servers {
    /// Stops taking requests, and waits for those in progress.
    pub(super) async fn stop(self) {
        // Servers that have already ended do not receive it.
        let _ = self.stop.send(());
        let all = async {
            for server in self.running {
                if let Err(error) = server.await {
                    tracing::error!(%error, "an HTTP server panicked");
                }
            }
        };
        if tokio::time::timeout(HTTP_DRAIN, all).await.is_err() {
            tracing::info!("requests still in progress are cut off");
        }
    }
}

/// Reads the web configuration file, if there is one.
pub(super) fn guard(settings: &Settings, stats: &Arc<HttpStats>) -> anyhow::Result<Option<Arc<Guard>>> {
    settings.web_config_file.as_deref().map(|path| Guard::open(path, Arc::clone(stats))).transpose()
}

fn open(setting: &str, address: SocketAddr) -> anyhow::Result<TcpListener> {
    listen(address, TAKE_PATIENCE).map_err(|error| {
        let is_taken = error.kind() == io::ErrorKind::AddrInUse;
        let hint =
            if is_taken { "; perhaps another daemon runs: set another port, or 0 for any that is free" } else { "" };
        anyhow::anyhow!("{setting}: cannot listen on {address}: {error}{hint}")
    })
}

/// Ends when the stop is sent, or when its sender is dropped.
async fn stopped(mut stopping: watch::Receiver<()>) {
    let _ = stopping.changed().await;
}

/// Serves probes on a thread and a runtime of their own.
fn spawn_health(health: Server, stopping: watch::Receiver<()>) -> anyhow::Result<JoinHandle<()>> {
    tracing::info!(address = %health.listener.local_addr()?, "serving probes");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.context("cannot start the runtime for probes")?;
    // Moved from the runtime that opened it to the new one.
    let listener = health.listener.into_std()?;
    spawn("hw-health", move || {
        highwater_engine::thread::stand_back();
        runtime.block_on(async {
            let listener = match TcpListener::from_std(listener) {
                Ok(listener) => listener,
                Err(error) => return tracing::error!(%error, "probes are not served"),
            };
            let cut_off = async {
                stopped(stopping.clone()).await;
                tokio::time::sleep(HTTP_DRAIN).await;
            };
            tokio::select! {
                () = Server { listener, ..health }.run(stopped(stopping.clone())) => {}
                () = cut_off => {}
            }
        });
    })
}

//! The Unix sockets that take annotations, and their threads.
//!
//! Enters: the path of the datagram socket; the seqpacket socket lies beside it. Leaves: events, to the intake.

use super::threads::spawn;
use crate::config::Settings;
use anyhow::Context as _;
use highwater_engine::intake::Intake;
use highwater_engine::intake::datagram::Socket;
use highwater_engine::intake::seqpacket::Listener;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread::JoinHandle;

/// Both sockets, or none if the settings name none.
#[derive(Default)]
pub(super) struct Sockets {
    datagram: Option<Arc<Socket>>,
    seqpacket: Option<Arc<Listener>>,
}

impl Sockets {
    /// Binds them, and logs where they are.
    pub(super) fn open(settings: &Settings) -> anyhow::Result<Self> {
        let Some(path) = settings.annotations_socket.as_deref() else { return Ok(Self::default()) };
        let (datagram, seqpacket) = (bind(path)?, listen(path)?);
        let (socket, beside) = (datagram.path().display(), seqpacket.path().display());
        tracing::info!(%socket, seqpacket = %beside, "taking annotations");
        Ok(Self { datagram: Some(Arc::new(datagram)), seqpacket: Some(Arc::new(seqpacket)) })
    }

    /// Starts their threads.
    pub(super) fn serve(
        &self,
        intake: &Arc<Intake>,
        stop: &Arc<AtomicBool>,
        threads: &mut Vec<JoinHandle<()>>,
    ) -> anyhow::Result<()> {
        if let Some(socket) = self.datagram.clone() {
            let (intake, stop) = (Arc::clone(intake), Arc::clone(stop));
            threads.push(spawn("hw-socket", move || socket.run(&intake, &stop))?);
        }
        if let Some(listener) = self.seqpacket.clone() {
            let (intake, stop) = (Arc::clone(intake), Arc::clone(stop));
            threads.push(spawn("hw-seqpacket", move || listener.run(&intake, &stop))?);
        }
        Ok(())
    }

    /// Wakes their threads, which then check whether they must stop.
    pub(super) fn close(&self) {
        if let Some(socket) = &self.datagram {
            socket.close();
        }
        if let Some(listener) = &self.seqpacket {
            listener.close();
        }
    }
}

fn listen(beside: &Path) -> anyhow::Result<Listener> {
    let context = || format!("cannot bind the seqpacket socket beside {} (set annotations.socket)", beside.display());
    Listener::beside(beside).with_context(context)
}

fn bind(path: &Path) -> anyhow::Result<Socket> {
    let context = || format!("cannot bind the annotation socket {} (set annotations.socket)", path.display());
    Socket::bind(path).with_context(context)
}

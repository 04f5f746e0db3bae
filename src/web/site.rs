//! The state that the handlers share.
//!
//! Enters: the parts of a daemon. Leaves: one cheap clone for each request. Absent on purpose: anything that is only one
//! handler's.

use super::answers::Answers;
use super::live::Live;
use super::sender::Peer;
use crate::capture::Recorder;
use crate::metrics::Snapshots;
use axum::extract::FromRef;
use axum::http::{HeaderMap, header};
use highwater_engine::intake::Intake;
use highwater_engine::shared_state::SharedState;
use std::sync::Arc;

/// The state that the handlers share.
#[derive(Clone)]
pub struct Site {
    /// The current state, and the exporters' view of it.
    pub snapshots: Snapshots,
    /// The intake that takes annotations.
    pub intake: Arc<Intake>,
    /// The flight recorder.
    pub recorder: Recorder,
    /// Long answers in progress.
    pub answers: LongAnswers,
    /// The clients of the live stream.
    pub live: Live,
}

/// Long answers in progress, with their limit. One per server.
#[derive(Clone, Debug, Default)]
pub struct LongAnswers(pub(super) Arc<Answers>);

impl Site {
    /// The site of a daemon.
    #[must_use]
    pub fn new(mut snapshots: Snapshots, intake: Arc<Intake>, recorder: Recorder) -> Self {
        let answers = LongAnswers::default();
        snapshots.parts.push(Arc::clone(&answers.0) as _);
        let live = Live::new(snapshots.state.clone(), Arc::clone(&answers.0));
        Self { snapshots, intake, recorder, answers, live }
    }

    /// Records a scrape. The client's address and `User-Agent` identify the scraper.
    pub(super) fn note_scrape(&self, peer: Option<&Peer>, headers: &HeaderMap) {
        let address = peer.map(|peer| peer.peer.ip().to_string()).unwrap_or_default();
        let program = headers.get(header::USER_AGENT).and_then(|program| program.to_str().ok()).unwrap_or_default();
        let (node, state) = (self.state().slot.node(), self.state());
        state.findings.note_scrape(&format!("{address} {program}"), state.clock_of(node.as_deref()).now_ns());
    }

    /// The current state.
    pub(super) fn state(&self) -> &SharedState {
        &self.snapshots.state
    }
}

impl FromRef<Site> for Live {
    fn from_ref(site: &Site) -> Self {
        site.live.clone()
    }
}

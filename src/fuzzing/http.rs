//! Fuzzes HTTP requests, through the routes: method, path, query, headers and body.

use super::world;
use crate::metrics::{Choice, Snapshots};
use crate::web::annotations::Access;
use crate::web::gate::{Gate, Refusals};
use crate::web::hosts::Hosts;
use crate::web::{self, Site};
use axum::Router;
use axum::body::Body;
use highwater_core::clock::Manual;
use highwater_engine::shared_state::SharedState;
use http_body_util::BodyExt as _;
use std::cell::RefCell;
use std::sync::Arc;
use tokio::runtime::Runtime;
use tower_service::Service as _;

/// Requests answered by one set of routes. After these, new routes replace it, and its state is dropped.
const MOST_REQUESTS: u32 = 256;
/// The longest answer allowed, bytes.
const MOST_ANSWER_BYTES: usize = 64 << 20;

struct Server {
    runtime: Runtime,
    routes: Router,
    requests: u32,
}

/// Answers the request in the input: `METHOD TARGET`, one header per line, a blank line, the body.
pub fn http(data: &[u8]) {
    thread_local!(static SERVER: RefCell<Option<Server>> = const { RefCell::new(None) });
    let Some(request) = request(data) else { return };
    SERVER.with_borrow_mut(|server| {
        let server = server.get_or_insert_with(Server::new);
        if server.requests == MOST_REQUESTS {
            (server.routes, server.requests) = (routes(), 0);
        }
        server.requests += 1;
        server.answer(request);
    });
}

impl Server {
    fn new() -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
        Self { runtime, routes: routes(), requests: 0 }
    }

    fn answer(&mut self, request: http::Request<Body>) {
        let bytes = self.runtime.block_on(async {
            let Ok(answer) = self.routes.call(request).await;
            assert!(answer.status().as_u16() != 500, "{answer:?}");
            answer.into_body().collect().await.expect("the answer is whole").to_bytes()
        });
        assert!(bytes.len() <= MOST_ANSWER_BYTES, "{} bytes", bytes.len());
    }
}

fn routes() -> Router {
    let clock = Arc::new(Manual::at(world::END_NS));
    let intake = Arc::new(world::intake(&clock));
    let (state, recorder) = (SharedState::of(&world::node(), intake.ledger()), crate::capture::Recorder::default());
    let stats = Arc::<web::counts::HttpStats>::default();
    let (hosts, refusals) = (Hosts::default(), Refusals::default());
    let gate = Gate { hosts, guard: None, access: Access::Open, stats: Arc::clone(&stats), refusals };
    let snapshots = Snapshots {
        state,
        choice: Choice::default(),
        node_name: Arc::default(),
        parts: vec![Arc::clone(&intake) as _, stats],
    };
    let site = Site::new(snapshots, intake, recorder);
    web::router(site, Arc::new(gate), true)
}

fn request(data: &[u8]) -> Option<http::Request<Body>> {
    let mut lines = data.splitn(2, |byte| *byte == b'\n');
    let mut words = lines.next()?.splitn(2, |byte| *byte == b' ');
    let mut request = http::Request::builder().method(words.next()?).uri(words.next()?);
    let mut rest = lines.next().unwrap_or_default();
    while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
        let line = &rest[..end];
        rest = &rest[end + 1..];
        if line.is_empty() {
            break;
        }
        let colon = line.iter().position(|byte| *byte == b':')?;
        request = request.header(&line[..colon], line[colon + 1..].trim_ascii());
    }
    request.body(Body::from(rest.to_vec())).ok()
}

//! `/api/v1/captures`: the list of captures, the request for a capture, and the files.
//!
//! A file is found by its name in the recorder's list, never by a path that a client sends, and read in pieces while
//! the client reads them.

use super::api::{MOST_POINTS, MemoryAnswer, POINTS, bad_query};
use super::gate::Gate;
use super::json::{self, Json};
use super::page;
use super::problem::Problem;
use super::serve::in_time;
use super::site::{LongAnswers, Site};
use crate::capture::{Listed, Recorder, Refusal, Request};
use crate::heap;
use crate::web::annotations::{Access, Holder};
use axum::body::{Body, Bytes};
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use highwater_analysis::report::{self as reports, Report, Room};
use highwater_engine::recording::State as Progress;
use highwater_engine::recording::curve::curve;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, Read as _};
use std::sync::Arc;
use std::time::Duration;
#[cfg(test)]
use utoipa::ToSchema;

/// The longest request, bytes.
const MOST_BODY_BYTES: usize = 4 << 10;
/// The longest note, bytes.
const MOST_NOTE_BYTES: usize = 1 << 10;
/// Bytes of a file that are read at once.
const PIECE_BYTES: usize = 64 << 10;

/// The state that these handlers share.
#[derive(Clone)]
pub(super) struct CaptureState {
    recorder: Recorder,
    /// Who may request captures: the same clients that may send annotations.
    access: Access,
    answers: LongAnswers,
    /// Held while a report is made: one at a time, so that reports take one core and their memory once.
    reporting: Arc<tokio::sync::Mutex<()>>,
}

impl CaptureState {
    pub fn new(site: &Site, gate: &Gate) -> Self {
        let (recorder, answers) = (site.recorder.clone(), site.answers.clone());
        Self { recorder, access: gate.access.clone(), answers, reporting: Arc::default() }
    }
}

/// The answer of `GET /api/v1/captures`.
#[derive(Serialize)]
#[cfg_attr(test, derive(ToSchema))]
pub(super) struct CapturesAnswer {
    /// Whether captures are taken.
    on: bool,
    /// How far back a requested capture may reach.
    most_seconds_before: Option<f64>,
    /// Why nothing can be written at the moment.
    trouble: Option<String>,
    captures: Vec<Listed>,
}

/// All captures, newest first.
#[cfg_attr(test, utoipa::path(get, path = "/api/v1/captures", tag = "captures", responses((status = 200, body = CapturesAnswer))))]
pub(super) async fn list(State(captures): State<CaptureState>) -> Json<CapturesAnswer> {
    #[allow(clippy::cast_precision_loss, reason = "seconds of at most a day")]
    let most_seconds_before = captures.recorder.most_before_ns().map(|most_ns| most_ns as f64 / 1e9);
    Json(CapturesAnswer {
        on: captures.recorder.stats().is_some(),
        most_seconds_before,
        trouble: captures.recorder.trouble(),
        captures: captures.recorder.list(),
    })
}

/// The body of `POST /api/v1/captures`; every key is optional.
#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(ToSchema))]
#[serde(deny_unknown_fields)]
struct Asked {
    /// Seconds before now; `captures.before` if left out.
    seconds_before: Option<f64>,
    /// Seconds after now; `captures.after` if left out.
    seconds_after: Option<f64>,
    /// Kept with the capture.
    #[serde(default)]
    note: String,
}

/// The answer to a request for a capture.
#[derive(Serialize)]
#[cfg_attr(test, derive(ToSchema))]
struct Begun {
    /// The capture's name.
    id: String,
    /// Where its file will be.
    href: String,
}

/// Begins a capture, and returns its name.
#[cfg_attr(test, utoipa::path(post, path = "/api/v1/captures", tag = "captures", request_body = Option<Asked>, responses(
    (status = 202, body = Begun), (status = 400, body = super::problem::Body), (status = 401, body = super::problem::Body),
    (status = 403, body = super::problem::Body), (status = 409, description = "Another one is being taken.", body = super::problem::Body),
    (status = 429, description = "Asked for too often.", body = super::problem::Body),
    (status = 503, description = "Captures are off, or nothing can be written.", body = super::problem::Body),
    (status = 507, body = super::problem::Body))))]
pub(super) async fn ask(
    State(captures): State<CaptureState>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Problem> {
    // A capture has all of the node, and the room for captures is everyone's.
    if let Holder::Namespace(namespace) = captures.access.check(&headers, "requests for captures")? {
        let detail = format!("the token of namespace `{namespace}` is for annotations alone");
        return Err(Problem::new(StatusCode::FORBIDDEN, detail));
    }
    let request = request(&read(body).await?)?;
    let id = match captures.recorder.ask(request) {
        Ok(id) => id,
        Err(Refusal::TooOften { wait }) => return Ok(too_often(wait)),
        Err(refusal) => return Err(refused(&refusal)),
    };
    let location = format!("/api/v1/captures/{id}");
    let body = Json(Begun { id, href: location.clone() });
    Ok((StatusCode::ACCEPTED, [(header::LOCATION, location)], body).into_response())
}

async fn read(body: Body) -> Result<Bytes, Problem> {
    let too_large = |_| {
        let detail = format!("the body did not arrive completely, or is longer than {MOST_BODY_BYTES} bytes");
        Problem::new(StatusCode::BAD_REQUEST, detail)
    };
    in_time(axum::body::to_bytes(body, MOST_BODY_BYTES)).await?.map_err(too_large)
}

fn request(body: &[u8]) -> Result<Request, Problem> {
    let bad = |detail: String| Problem::new(StatusCode::BAD_REQUEST, detail);
    let is_empty = body.iter().all(u8::is_ascii_whitespace);
    let asked: Asked = if is_empty { Ok(Asked::default()) } else { serde_json::from_slice(body) }
        .map_err(|error| bad(format!("not a valid request: {error}")))?;
    if asked.note.len() > MOST_NOTE_BYTES || asked.note.chars().any(char::is_control) {
        return Err(bad(format!("note: is longer than {MOST_NOTE_BYTES} bytes or has control characters")));
    }
    let nanoseconds = |what: &str, seconds: Option<f64>| match seconds {
        None => Ok(None),
        // The recorder refuses any time that is too long; here it must only fit the type.
        #[allow(clippy::cast_possible_truncation, reason = "some nanoseconds of a time that people give in seconds")]
        Some(seconds) if (0.0..=3e7).contains(&seconds) => Ok(Some((seconds * 1e9) as i64)),
        Some(_) => Err(bad(format!("{what}: is not a number of seconds"))),
    };
    Ok(Request {
        before_ns: nanoseconds("seconds_before", asked.seconds_before)?,
        after_ns: nanoseconds("seconds_after", asked.seconds_after)?,
        note: asked.note,
    })
}

fn too_often(wait: Duration) -> Response {
    let seconds = wait.as_secs() + u64::from(wait.subsec_nanos() > 0);
    let detail = format!("{}; ask again in {seconds} s", Refusal::TooOften { wait });
    let problem = Problem::new(StatusCode::TOO_MANY_REQUESTS, detail);
    ([(header::RETRY_AFTER, seconds.to_string())], problem).into_response()
}

fn refused(refusal: &Refusal) -> Problem {
    let status = match refusal {
        Refusal::Limit(_) => StatusCode::BAD_REQUEST,
        Refusal::Busy { .. } => StatusCode::CONFLICT,
        Refusal::TooOften { .. } => StatusCode::TOO_MANY_REQUESTS,
        Refusal::NoRoom => StatusCode::INSUFFICIENT_STORAGE,
        Refusal::Off | Refusal::Unavailable(_) | Refusal::NoGpus | Refusal::Ended => StatusCode::SERVICE_UNAVAILABLE,
    };
    let problem = Problem::new(status, refusal.to_string());
    if let Refusal::Busy { id } = refusal { problem.with("id", id) } else { problem }
}

/// A finished capture of this name, or why there is none.
fn finished(captures: &CaptureState, id: &str) -> Result<Listed, Problem> {
    if let Some(trouble) = captures.recorder.failure(id) {
        let detail = format!("capture `{id}` failed: {trouble}");
        return Err(Problem::new(StatusCode::GONE, detail).with("trouble", &trouble));
    }
    let listed = captures.recorder.find(id).ok_or_else(|| gone(id))?;
    if listed.state == Progress::Writing {
        let detail = "it is still being written; /api/v1/captures shows its state";
        return Err(Problem::new(StatusCode::CONFLICT, detail));
    }
    Ok(listed)
}

fn gone(id: &str) -> Problem {
    Problem::new(StatusCode::NOT_FOUND, format!("there is no capture `{id}`; /api/v1/captures lists them"))
}

/// The file of a capture: an SQLite database.
#[cfg_attr(test, utoipa::path(get, path = "/api/v1/captures/{id}", tag = "captures",
    params(("id" = String, Path, description = "Its name.")),
    responses((status = 200, body = Vec<u8>, content_type = "application/vnd.sqlite3"),
        (status = 404, body = super::problem::Body), (status = 409, description = "It is being written.", body = super::problem::Body),
        (status = 410, description = "It failed.", body = super::problem::Body), (status = 503, body = super::problem::Body))))]
pub(super) async fn download(
    State(captures): State<CaptureState>,
    Path(id): Path<String>,
) -> Result<Response, Problem> {
    let listed = finished(&captures, &id)?;
    let (recorder, found) = (captures.recorder, listed.clone());
    let opened = blocking(move || recorder.open(&found).and_then(|file| Ok((file.metadata()?.len(), file)))).await;
    let (bytes, file) = opened.map_err(|error| {
        // It may have been removed since it was listed.
        if error.kind() == io::ErrorKind::NotFound {
            return gone(&id);
        }
        tracing::warn!(id, %error, "a capture cannot be opened");
        Problem::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "the capture cannot be opened at the moment; see the daemon's log",
        )
    })?;
    let headers = [
        (header::CONTENT_TYPE, "application/vnd.sqlite3".to_owned()),
        (header::CONTENT_LENGTH, bytes.to_string()),
        (header::CONTENT_DISPOSITION, format!("attachment; filename=\"{}.sqlite\"", listed.id)),
    ];
    let pieces = futures_util::stream::try_unfold(file, |file| async {
        let (file, piece) = blocking(move || piece(file)).await?;
        Ok::<_, io::Error>((!piece.is_empty()).then_some((Bytes::from(piece), file)))
    });
    Ok((headers, Body::from_stream(pieces)).into_response())
}

/// The query of `GET /api/v1/captures/{id}/memory`.
#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(utoipa::IntoParams))]
#[serde(deny_unknown_fields)]
#[cfg_attr(test, into_params(parameter_in = Query))]
pub(super) struct CaptureMemoryQuery {
    /// UUID of a GPU.
    gpu: String,
    /// Begin, Unix nanoseconds; that of the capture if left out.
    from: Option<i64>,
    /// End, Unix nanoseconds; that of the capture if left out.
    to: Option<i64>,
    /// The most points; 10,000 if left out, at most 100,000. If there are more, extremes are kept.
    max_points: Option<usize>,
}

/// The memory of a GPU in a capture, within an interval.
#[cfg_attr(test, utoipa::path(get, path = "/api/v1/captures/{id}/memory", tag = "captures",
    params(("id" = String, Path, description = "Its name."), CaptureMemoryQuery),
    responses((status = 200, body = MemoryAnswer), (status = 400, body = super::problem::Body),
        (status = 404, description = "There is no such capture, or it has nothing of that GPU and time.", body = super::problem::Body),
        (status = 409, description = "It is being written.", body = super::problem::Body),
        (status = 410, description = "It failed.", body = super::problem::Body),
        (status = 503, description = "It cannot be read.", body = super::problem::Body))))]
pub(super) async fn memory(
    State(captures): State<CaptureState>,
    Path(id): Path<String>,
    query: Result<Query<CaptureMemoryQuery>, QueryRejection>,
) -> Result<Response, Problem> {
    let Query(query) = query.map_err(bad_query)?;
    let listed = finished(&captures, &id)?;
    let interval = (query.from.unwrap_or(i64::MIN), query.to.unwrap_or(i64::MAX));
    let (gpu, most) = (query.gpu.clone(), query.max_points.unwrap_or(POINTS).clamp(4, MOST_POINTS));
    // As a report, it takes memory and a core: one at a time, also if the client goes away.
    let alone = Arc::clone(&captures.reporting).lock_owned().await;
    let read = blocking(move || {
        let _alone = alone;
        curve(&captures.recorder.path_of(&listed)?, &gpu, interval, most).map(|curve| (captures.answers, curve))
    });
    let (answers, found) = read.await.map_err(|error| {
        tracing::warn!(id, %error, "the memory of a capture cannot be read");
        Problem::new(StatusCode::SERVICE_UNAVAILABLE, "the capture cannot be read; see the daemon's log")
    })?;
    let nothing = || Problem::new(StatusCode::NOT_FOUND, "the capture has nothing of that GPU and time");
    let answer = MemoryAnswer::of_capture(found.ok_or_else(nothing)?, query.gpu);
    Ok(answers.0.keep(json::line(&answer)?).response(json::TYPE))
}

/// The report of a capture: its curves, phases and findings as a page.
#[cfg_attr(test, utoipa::path(get, path = "/api/v1/captures/{id}/report", tag = "captures",
    params(("id" = String, Path, description = "Its name.")),
    responses((status = 200, body = String, content_type = "text/html"),
        (status = 404, body = super::problem::Body), (status = 409, description = "It is being written.", body = super::problem::Body),
        (status = 410, description = "It failed.", body = super::problem::Body),
        (status = 503, description = "It cannot be read.", body = super::problem::Body))))]
pub(super) async fn report(State(captures): State<CaptureState>, Path(id): Path<String>) -> Result<Response, Problem> {
    let listed = finished(&captures, &id)?;
    // Held by the work itself: a client that goes away does not end it.
    let alone = Arc::clone(&captures.reporting).lock_owned().await;
    let made = blocking(move || {
        let _alone = alone;
        let page = page_of(&captures.recorder.path_of(&listed)?)?;
        Ok(captures.answers.0.keep(page.into_bytes()))
    });
    let made = made.await.map_err(|error| {
        tracing::warn!(id, %error, "the report of a capture cannot be made");
        Problem::new(StatusCode::SERVICE_UNAVAILABLE, "the capture cannot be read; see the daemon's log")
    })?;
    // The document names its own policy; only a header can forbid other pages to show it.
    Ok((page::CLOSED, made.response("text/html; charset=utf-8")).into_response())
}

/// The page of a capture, within half the room of a report: the daemon makes it beside everything else.
fn page_of(path: &std::path::Path) -> io::Result<String> {
    let report = Report::open_own(path, Room::of(2)).map_err(io::Error::other)?;
    Ok(reports::page(&[report], None, None, None))
}

fn piece(mut file: File) -> io::Result<(File, Vec<u8>)> {
    let mut piece = vec![0; PIECE_BYTES];
    let length = file.read(&mut piece)?;
    piece.truncate(length);
    Ok((file, piece))
}

/// Runs blocking disk work on a thread where it delays nothing else.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(|| heap::making(work)).await.map_err(io::Error::other)?
}

//! `/api/v1/captures`: the list of captures, the request for a capture, and the files.
//!
//! A file is found by its name in the recorder's list, never by a path that a client sends, and read in pieces while
//! the client reads them.

use super::json::Json;
use super::problem::Problem;
use super::serve::in_time;
use crate::capture::{Recorder, Refusal, Request};
use crate::recording::State as Progress;
use crate::web::annotations::Access;
use axum::body::{Body, Bytes};
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Value, json};
use std::fs::File;
use std::io::{self, Read as _};
use std::time::Duration;

/// The longest request, bytes.
const MOST_BODY_BYTES: usize = 4 << 10;
/// The longest note, bytes.
const MOST_NOTE_BYTES: usize = 1 << 10;
/// Bytes of a file that are read at once.
const PIECE_BYTES: usize = 64 << 10;

/// The state that these handlers share.
#[derive(Clone)]
pub(super) struct Desk {
    pub recorder: Recorder,
    /// Who may request captures: the same clients that may send annotations.
    pub access: Access,
}

/// `GET /api/v1/captures`: newest first.
pub(super) async fn list(State(desk): State<Desk>) -> Json<Value> {
    let is_on = desk.recorder.stats().is_some();
    #[allow(clippy::cast_precision_loss, reason = "seconds of at most a day")]
    let most_seconds = desk.recorder.most_before_ns().map(|most_ns| most_ns as f64 / 1e9);
    let (trouble, captures) = (desk.recorder.trouble(), desk.recorder.list());
    Json(json!({ "on": is_on, "most_seconds_before": most_seconds, "trouble": trouble, "captures": captures }))
}

/// The body of `POST /api/v1/captures`; every key is optional.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Asked {
    seconds_before: Option<f64>,
    seconds_after: Option<f64>,
    #[serde(default)]
    note: String,
}

/// `POST /api/v1/captures`: begins a capture, and returns its name.
pub(super) async fn ask(State(desk): State<Desk>, headers: HeaderMap, body: Body) -> Result<Response, Problem> {
    desk.access.check(&headers, "requests for captures")?;
    let request = request(&read(body).await?)?;
    let id = match desk.recorder.ask(request) {
        Ok(id) => id,
        Err(Refusal::TooOften { wait }) => return Ok(too_often(wait)),
        Err(refusal) => return Err(refused(&refusal)),
    };
    let location = format!("/api/v1/captures/{id}");
    let body = Json(json!({ "id": id, "href": location }));
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

/// `GET /api/v1/captures/{id}`: the file.
pub(super) async fn download(State(desk): State<Desk>, Path(id): Path<String>) -> Result<Response, Problem> {
    let gone =
        || Problem::new(StatusCode::NOT_FOUND, format!("there is no capture `{id}`; /api/v1/captures lists them"));
    if let Some(trouble) = desk.recorder.failure(&id) {
        let detail = format!("capture `{id}` failed: {trouble}");
        return Err(Problem::new(StatusCode::GONE, detail).with("trouble", &trouble));
    }
    let listed = desk.recorder.find(&id).ok_or_else(gone)?;
    if listed.state == Progress::Writing {
        let detail = "it is still being written; /api/v1/captures shows its state";
        return Err(Problem::new(StatusCode::CONFLICT, detail));
    }
    let (recorder, found) = (desk.recorder, listed.clone());
    let opened = blocking(move || recorder.open(&found).and_then(|file| Ok((file.metadata()?.len(), file)))).await;
    let (bytes, file) = opened.map_err(|error| {
        // It may have been removed since it was listed.
        if error.kind() == io::ErrorKind::NotFound {
            return gone();
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

fn piece(mut file: File) -> io::Result<(File, Vec<u8>)> {
    let mut piece = vec![0; PIECE_BYTES];
    let length = file.read(&mut piece)?;
    piece.truncate(length);
    Ok((file, piece))
}

/// Runs blocking disk work on a thread where it delays nothing else.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)?
}

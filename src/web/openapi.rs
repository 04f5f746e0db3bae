//! `GET /api/v1/openapi.json`: the description of the API.
//!
//! Invariant: a test generates `docs/openapi.json` from the handlers and the types of their answers. The program contains only
//! that file.

use super::json;
use axum::http::header;
use axum::response::{IntoResponse as _, Response};

const DESCRIPTION: &str = include_str!("../../docs/openapi.json");

pub(super) async fn openapi() -> Response {
    ([(header::CONTENT_TYPE, json::TYPE)], DESCRIPTION).into_response()
}

#[cfg(test)]
mod tests {
    use super::super::{
        activity, advice, annotations, api, breakdown, captures, findings, incidents, job, layers, live, phases,
        timeline,
    };
    use utoipa::OpenApi;

    #[derive(OpenApi)]
    #[openapi(
        paths(
            activity::activity,
            annotations::post,
            api::gpus,
            api::jobs,
            api::memory,
            breakdown::breakdown,
            captures::ask,
            captures::download,
            captures::list,
            captures::memory,
            captures::report,
            findings::findings,
            incidents::incidents,
            job::job,
            layers::layers,
            advice::advice,
            live::live,
            phases::phases,
            timeline::timeline
        ),
        info(
            title = "highwater",
            description = "GPU memory, steps and phases of one node. Times are Unix nanoseconds, sizes are bytes. Errors are \
                           RFC 9457 problem details.",
            license(name = "Apache-2.0")
        )
    )]
    struct Description;

    #[test]
    fn the_description_is_that_of_the_handlers() {
        let text = Description::openapi().to_json().expect("it has JSON");
        expect_test::expect_file!["../../docs/openapi.json"].assert_eq(&format!("{text}\n"));
    }
}

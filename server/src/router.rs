//! Every URL of the server, one table. What stands under `/api/v1` is taken from the handlers' own
//! descriptions, so `openapi.json` cannot forget one.

use crate::{
    app::App,
    document,
    error::Error,
    gate, guard,
    handlers::{
        agent_files, agent_socket, agents, annotations, assets, attempts, audit, bundled, checkpoint_files,
        checkpoints, dataset_files, datasets, docs, evaluation, events, fork, health, history, jobs, layers,
        login, logs, machine_metrics, metrics, metrics_query, oidc, pages, panels, people, people_pages,
        pictures, predict, projects, queue, queue_page, stream, tokens,
    },
    request_id, slow_body, uploads,
};
use axum::{
    Json, Router,
    extract::{DefaultBodyLimit, Request},
    http::StatusCode,
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{MethodRouter, any, get, post},
};
use std::{any::Any, time::Duration};
use tower_http::{
    CompressionLevel,
    catch_panic::CatchPanicLayer,
    compression::{
        CompressionLayer,
        predicate::{DefaultPredicate, NotForContentType, Predicate},
    },
};
use utoipa::OpenApi;
use utoipa_axum::{router::OpenApiRouter, routes};

/// The largest body of a request. A specification or a form takes a few kilobytes.
const BODY_BYTES: usize = 1 << 20;
/// Until a handler must have begun to answer. Looking at a large dataset takes longest.
const PATIENCE: Duration = Duration::from_secs(150);

#[derive(OpenApi)]
#[openapi(info(
    title = "Lockstep",
    description = "Submit training jobs, watch them, fetch what they made. Errors are RFC 9457 problems."
))]
struct Document;

/// What programs rely on.
fn api() -> OpenApiRouter<App> {
    let v1 = OpenApiRouter::new()
        .routes(routes!(jobs::list::list, jobs::create::create))
        .routes(routes!(jobs::check::validate))
        .routes(routes!(jobs::show, jobs::delete, annotations::change))
        .routes(routes!(attempts::list))
        .routes(routes!(history::show))
        .routes(routes!(annotations::size))
        .routes(routes!(annotations::list))
        .routes(routes!(projects::list))
        .routes(routes!(jobs::groups::list))
        .routes(routes!(queue::list))
        .routes(routes!(jobs::cancel))
        .routes(routes!(jobs::retry))
        .routes(routes!(jobs::pause))
        .routes(routes!(jobs::resume))
        .routes(routes!(fork::fork))
        .routes(routes!(fork::check))
        .routes(routes!(metrics::find))
        .routes(routes!(metrics::csv))
        .routes(routes!(metrics_query::find))
        .routes(routes!(panels::show, panels::put, panels::delete))
        .routes(routes!(panels::show_project, panels::put_project))
        .routes(routes!(layers::histograms))
        .routes(routes!(layers::network))
        .routes(routes!(logs::query))
        .routes(routes!(events::list))
        .routes(routes!(checkpoints::list))
        .routes(routes!(checkpoints::show))
        .routes(routes!(checkpoint_files::file))
        .routes(routes!(evaluation::evaluation))
        .routes(routes!(pictures::of_job))
        .merge(
            OpenApiRouter::new()
                .routes(routes!(predict::predict))
                .layer(DefaultBodyLimit::max(predict::BODY_BYTES)),
        )
        .routes(routes!(datasets::list, datasets::create))
        .routes(routes!(bundled::register))
        .routes(routes!(datasets::inspect))
        .routes(routes!(pictures::of_dataset))
        .routes(routes!(datasets::show, datasets::delete))
        .routes(routes!(datasets::inspect_again))
        .routes(routes!(agents::list))
        .routes(routes!(machine_metrics::find))
        .routes(routes!(agents::remove))
        .routes(routes!(agents::drain))
        .routes(routes!(agents::undrain))
        .routes(routes!(agent_socket::socket))
        .routes(routes!(agent_files::begin, agent_files::needed))
        .routes(routes!(agent_files::file))
        .routes(routes!(agent_files::dataset))
        .routes(routes!(dataset_files::list, dataset_files::parts))
        .routes(routes!(agent_files::upload_state, agent_files::upload_done))
        .merge(
            OpenApiRouter::new()
                .routes(routes!(agent_files::upload_piece))
                .layer(DefaultBodyLimit::max(uploads::PIECE_BYTES)),
        )
        .routes(routes!(tokens::list, tokens::create))
        .routes(routes!(tokens::revoke))
        .routes(routes!(people::list, people::create))
        .routes(routes!(people::change, people::delete))
        .routes(routes!(people::change_own))
        .routes(routes!(login::link))
        .routes(routes!(audit::list))
        .routes(routes!(stream::job_stream))
        .routes(routes!(stream::list_stream))
        .routes(routes!(served_document));
    OpenApiRouter::with_openapi(Document::openapi())
        .nest("/api/v1", v1)
        .routes(routes!(health::healthz))
        .routes(routes!(health::readyz))
        .routes(routes!(health::prometheus))
}

/// The document of `GET /api/v1/openapi.json`.
pub fn openapi() -> utoipa::openapi::OpenApi {
    document::complete(api().into_openapi())
}

/// This document
#[utoipa::path(get, path = "/openapi.json", tag = "document", responses((status = 200, body = Object)))]
async fn served_document() -> Json<utoipa::openapi::OpenApi> {
    Json(openapi())
}

/// What is not in the document: pages and what they load.
fn pages() -> [(&'static str, MethodRouter<App>); 19] {
    [
        ("/", get(pages::home)),
        ("/jobs", get(pages::jobs)),
        ("/jobs/new", get(pages::new_job).post(pages::submit_job)),
        ("/jobs/{id}", get(pages::job)),
        ("/queue", get(queue_page::show)),
        ("/compare", get(pages::compare)),
        ("/datasets", get(pages::datasets).post(pages::add_dataset)),
        ("/machines", get(pages::machines)),
        ("/audit", get(pages::audit)),
        ("/people", get(people_pages::all).post(people_pages::change)),
        ("/account", get(people_pages::account).post(people_pages::change_account)),
        ("/docs", get(docs::index)),
        ("/docs/{*path}", get(docs::page)),
        ("/login", get(login::show).post(login::submit)),
        ("/login/oidc", get(oidc::begin)),
        ("/login/oidc/callback", get(oidc::finish)),
        ("/logout", post(login::sign_out)),
        ("/static/{*path}", get(assets::asset)),
        ("/api/{*path}", any(no_such_call)),
    ]
}

/// The paths of pages and of what they load, for whoever walks all of them.
pub fn page_paths() -> Vec<&'static str> {
    pages().into_iter().map(|(path, _)| path).collect()
}

/// Every URL of the server.
pub(crate) fn build_router(app: App) -> Router {
    lockstep_web::layout::set_assets(assets::folder().to_owned());
    let (api, _) = api().split_for_parts();
    let pages = pages().into_iter().fold(Router::new(), |router, (path, page)| router.route(path, page));
    pages
        .merge(api)
        .fallback(pages::not_found)
        .method_not_allowed_fallback(wrong_method)
        .layer(DefaultBodyLimit::max(BODY_BYTES))
        .layer(middleware::from_fn_with_state(app.clone(), slow_body::refuse))
        .layer(middleware::from_fn(in_time))
        // Weights do not compress, and ranges are of the file's own bytes.
        // The quickest way: charts wait for their answers, and the slowest saves a tenth more.
        .layer(CompressionLayer::new().quality(CompressionLevel::Fastest).compress_when(
            DefaultPredicate::new().and(NotForContentType::const_new("application/octet-stream")),
        ))
        .layer(CatchPanicLayer::custom(panicked))
        .layer(middleware::from_fn_with_state(app.clone(), gate::gate))
        .layer(middleware::from_fn_with_state(app.clone(), guard::guard))
        .layer(middleware::from_fn(request_id::name))
        .with_state(app)
}

/// Answers for a handler that has not begun to answer in time.
async fn in_time(request: Request, next: Next) -> Response {
    match tokio::time::timeout(PATIENCE, next.run(request)).await {
        Ok(response) => response,
        Err(_) => {
            let detail = format!("this was not done within {} s; try again", PATIENCE.as_secs());
            Error::Refused(StatusCode::GATEWAY_TIMEOUT, detail).into_response()
        }
    }
}

async fn no_such_call() -> Error {
    Error::NotFound("there is no such call; see /api/v1/openapi.json".into())
}

async fn wrong_method() -> Error {
    let detail = "this address does not know that method; see /api/v1/openapi.json";
    Error::Refused(StatusCode::METHOD_NOT_ALLOWED, detail.into())
}

fn panicked(panic: Box<dyn Any + Send + 'static>) -> Response {
    let said = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
    Error::Internal(format!("a handler panicked: {}", said.unwrap_or("?"))).into_response()
}

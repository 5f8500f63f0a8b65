//! The table of all URLs of the server. Routes under `/api/v1` come from the handlers' descriptions, so `openapi.json` has all of them.

use super::{
    agents, assets, checkpoints, datasets, docs, health, jobs, models, people, runs, sweeps, webhooks,
};
use crate::{
    app::App,
    checkpoints::uploads,
    http::{
        authorize, document,
        error::{Error, PageError},
        request_checks, request_id, request_times, slow_body,
    },
};
use axum::{
    Json, Router,
    extract::{DefaultBodyLimit, MatchedPath, Request},
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
    request_id::{MakeRequestUuid, PropagateRequestIdLayer, SetRequestIdLayer},
    trace::TraceLayer,
};
use utoipa::OpenApi;
use utoipa_axum::{router::OpenApiRouter, routes};

/// Maximum size of a request's body, in bytes. A specification or a form has a few kilobytes.
const BODY_BYTES: usize = 1 << 20;
/// Time limit for a handler to begin a response. Requests for large datasets take longest.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(150);

#[derive(OpenApi)]
#[openapi(info(
    title = "Lockstep",
    description = "Submit training jobs, monitor them, and download their results. Errors are RFC 9457 problems."
))]
struct Document;

/// Routes of the REST interface.
fn api() -> OpenApiRouter<App> {
    let v1 = OpenApiRouter::new()
        .routes(routes!(jobs::list::list, jobs::create::create))
        .routes(routes!(jobs::check::validate))
        .routes(routes!(jobs::show, jobs::delete, jobs::annotations::change))
        .routes(routes!(jobs::attempts::list))
        .routes(routes!(jobs::history::show))
        .routes(routes!(jobs::annotations::size))
        .routes(routes!(jobs::annotations::list))
        .routes(routes!(jobs::projects::list))
        .routes(routes!(jobs::groups::list))
        .routes(routes!(jobs::queue::list))
        .routes(routes!(jobs::cancel))
        .routes(routes!(jobs::retry))
        .routes(routes!(jobs::pause))
        .routes(routes!(jobs::resume))
        .routes(routes!(checkpoints::fork::fork))
        .routes(routes!(checkpoints::fork::check))
        .routes(routes!(jobs::metrics::find))
        .routes(routes!(jobs::metrics::csv))
        .routes(routes!(jobs::metrics_query::find))
        .routes(routes!(jobs::panels::show, jobs::panels::put, jobs::panels::delete))
        .routes(routes!(jobs::panels::show_project, jobs::panels::put_project))
        .routes(routes!(jobs::layers::histograms))
        .routes(routes!(jobs::layers::network))
        .routes(routes!(jobs::logs::query))
        .routes(routes!(jobs::events::list))
        .routes(routes!(checkpoints::list))
        .routes(routes!(checkpoints::show))
        .routes(routes!(checkpoints::files::file))
        .routes(routes!(checkpoints::evaluation::evaluation))
        .routes(routes!(checkpoints::evaluation::neighbours))
        .routes(routes!(jobs::pictures::of_job))
        .merge(
            OpenApiRouter::new()
                .routes(routes!(checkpoints::predict::predict))
                .layer(DefaultBodyLimit::max(checkpoints::predict::BODY_BYTES)),
        )
        .routes(routes!(sweeps::list, sweeps::create))
        .routes(routes!(sweeps::show, sweeps::delete))
        .routes(routes!(sweeps::pause))
        .routes(routes!(sweeps::resume))
        .routes(routes!(sweeps::cancel))
        .routes(routes!(runs::create))
        .routes(routes!(runs::change))
        .routes(routes!(runs::log))
        .routes(routes!(runs::files::list))
        .routes(routes!(runs::files::download, runs::files::upload, runs::files::delete))
        .routes(routes!(datasets::list, datasets::create))
        .routes(routes!(datasets::bundled::register))
        .routes(routes!(datasets::uploads::upload_archive))
        .routes(routes!(datasets::uploads::register_upload))
        .routes(routes!(datasets::inspect))
        .routes(routes!(jobs::pictures::of_dataset))
        .routes(routes!(datasets::show, datasets::delete))
        .routes(routes!(datasets::inspect_again))
        .routes(routes!(models::list, models::create))
        .routes(routes!(models::show))
        .routes(routes!(models::show_version, models::remove_version))
        .routes(routes!(models::show_alias, models::put_alias, models::remove_alias))
        .routes(routes!(agents::list))
        .routes(routes!(agents::machine_metrics::find))
        .routes(routes!(agents::remove))
        .routes(routes!(agents::drain))
        .routes(routes!(agents::undrain))
        .routes(routes!(agents::socket::socket))
        .routes(routes!(agents::files::begin, agents::files::needed))
        .routes(routes!(agents::files::file))
        .routes(routes!(agents::files::dataset))
        .routes(routes!(agents::dataset_files::list, agents::dataset_files::parts))
        .routes(routes!(agents::files::upload_state, agents::files::upload_done))
        .merge(
            OpenApiRouter::new()
                .routes(routes!(agents::files::upload_piece))
                .layer(DefaultBodyLimit::max(uploads::PIECE_BYTES)),
        )
        .routes(routes!(people::tokens::list, people::tokens::create))
        .routes(routes!(people::tokens::revoke))
        .routes(routes!(people::list, people::create))
        .routes(routes!(people::change, people::delete))
        .routes(routes!(people::change_own))
        .routes(routes!(people::login::link))
        .routes(routes!(people::audit::list))
        .routes(routes!(webhooks::list, webhooks::create))
        .routes(routes!(webhooks::change, webhooks::delete))
        .routes(routes!(webhooks::test))
        .routes(routes!(webhooks::deliveries))
        .routes(routes!(jobs::stream::job_stream))
        .routes(routes!(jobs::stream::list_stream))
        .routes(routes!(served_document));
    OpenApiRouter::with_openapi(Document::openapi())
        .nest("/api/v1", v1)
        .routes(routes!(health::healthz))
        .routes(routes!(health::readyz))
        .routes(routes!(health::prometheus))
}

/// The document of `GET /api/v1/openapi.json`.
pub fn openapi() -> serde_json::Value {
    document::complete(api().into_openapi())
}

/// Show the OpenAPI document
#[utoipa::path(get, path = "/openapi.json", tag = "document", responses((status = 200, body = Object)))]
async fn served_document() -> Json<serde_json::Value> {
    Json(openapi())
}

/// Routes that are not in the OpenAPI document: pages and their files, a call of a page's script, and calls of MLflow's clients.
fn pages() -> [(&'static str, MethodRouter<App>); 34] {
    [
        ("/", get(jobs::pages::home)),
        ("/jobs", get(jobs::pages::jobs)),
        ("/jobs/new", get(jobs::pages::new_job).post(jobs::pages::submit_job)),
        ("/api/v1/jobs/form", post(jobs::pages::job_file)),
        ("/jobs/{id}", get(jobs::pages::job)),
        ("/queue", get(jobs::queue_page::show)),
        ("/compare", get(jobs::pages::compare)),
        ("/datasets", get(datasets::pages::datasets).post(datasets::pages::add_dataset)),
        ("/models", get(models::pages::models)),
        ("/models/{name}", get(models::pages::model)),
        ("/sweeps", get(sweeps::pages::sweeps)),
        ("/sweeps/{id}", get(sweeps::pages::sweep)),
        ("/machines", get(agents::pages::machines)),
        ("/audit", get(people::audit::show)),
        ("/webhooks", get(webhooks::show).post(webhooks::submit)),
        ("/people", get(people::pages::all).post(people::pages::change)),
        ("/account", get(people::pages::account).post(people::pages::change_account)),
        ("/docs", get(docs::index)),
        ("/docs/{*path}", get(docs::page)),
        ("/login", get(people::login::show).post(people::login::submit)),
        ("/login/oidc", get(people::oidc::begin)),
        ("/login/oidc/callback", get(people::oidc::finish)),
        ("/logout", post(people::login::sign_out)),
        ("/static/{*path}", get(assets::asset)),
        ("/api/{*path}", any(no_such_call)),
        // Calls of MLflow's clients. Paths that have a separate rule in `authorize/rules.rs` are listed separately.
        ("/api/2.0/mlflow/experiments/search", any(runs::mlflow::call)),
        ("/api/2.0/mlflow/runs/create", any(runs::mlflow::call)),
        ("/api/2.0/mlflow/runs/delete", any(runs::mlflow::call)),
        ("/api/2.0/mlflow/runs/search", any(runs::mlflow::call)),
        ("/api/2.0/mlflow/logged-models/search", any(runs::mlflow::call)),
        ("/api/2.0/mlflow/{*call}", any(runs::mlflow::call)),
        ("/api/3.0/mlflow/{*call}", any(runs::mlflow::call)),
        ("/api/2.0/mlflow-artifacts/artifacts", any(runs::mlflow::artifacts::list)),
        ("/api/2.0/mlflow-artifacts/artifacts/{*path}", any(runs::mlflow::artifacts::file)),
    ]
}

/// The paths of all pages and their files, for tests.
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
        .fallback(no_such_page)
        .method_not_allowed_fallback(wrong_method)
        .layer(DefaultBodyLimit::max(BODY_BYTES))
        .layer(middleware::from_fn_with_state(app.config.clone(), slow_body::limit_body_time))
        .layer(middleware::from_fn(limit_time))
        // Files are not compressed: weights would hardly shrink, and byte ranges of a request count uncompressed bytes.
        // Charts wait for responses, so the level is the fastest. The slowest level would save only a tenth more.
        .layer(CompressionLayer::new().quality(CompressionLevel::Fastest).compress_when(
            DefaultPredicate::new().and(NotForContentType::const_new("application/octet-stream")),
        ))
        .layer(CatchPanicLayer::custom(panic_response))
        .layer(middleware::from_fn_with_state(app.http.clone(), authorize::authorize))
        .layer(middleware::from_fn_with_state(app.http.clone(), request_checks::check_request))
        .layer(middleware::from_fn(runs::mlflow::format_errors))
        .layer(PropagateRequestIdLayer::x_request_id())
        // A span without events, because requests are in the access log.
        .layer(
            TraceLayer::new_for_http()
                .make_span_with(request_id::span)
                .on_request(())
                .on_response(())
                .on_eos(())
                .on_failure(()),
        )
        .layer(SetRequestIdLayer::x_request_id(MakeRequestUuid))
        .layer(middleware::map_request(request_id::remove_unsafe))
        .layer(middleware::from_fn_with_state(app.request_times.clone(), request_times::measure))
        .with_state(app)
}

/// Responds with 504 if a handler has not begun its response in time. An upload may take longer, as long as data arrives
/// (`slow_body.rs`).
async fn limit_time(route: Option<MatchedPath>, request: Request, next: Next) -> Response {
    if authorize::is_upload(request.method(), route.as_ref().map(MatchedPath::as_str)) {
        return next.run(request).await;
    }
    match tokio::time::timeout(REQUEST_TIMEOUT, next.run(request)).await {
        Ok(response) => response,
        Err(_) => {
            let detail =
                format!("the request was not completed within {} s; try again", REQUEST_TIMEOUT.as_secs());
            Error::Refused(StatusCode::GATEWAY_TIMEOUT, detail).into_response()
        }
    }
}

async fn no_such_page() -> PageError {
    PageError(Error::NotFound("There is no page at this URL.".into()))
}

async fn no_such_call() -> Error {
    Error::NotFound("there is no such call; see /api/v1/openapi.json".into())
}

async fn wrong_method() -> Error {
    let detail = "this URL does not support that method; see /api/v1/openapi.json";
    Error::Refused(StatusCode::METHOD_NOT_ALLOWED, detail.into())
}

fn panic_response(panic: Box<dyn Any + Send + 'static>) -> Response {
    let message =
        panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
    Error::Internal(format!("a handler panicked: {}", message.unwrap_or("?"))).into_response()
}

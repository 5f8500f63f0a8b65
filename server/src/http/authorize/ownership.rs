//! The owners of jobs, datasets and models, and the rights of other callers. They are checked before the handler of every
//! route that names such an object, so a new route cannot forget the check. Private objects are "not found" for other callers. If the server has
//! people, only owners and admins may change an object.

use crate::{
    auth::{Auth, SERVER_TOKEN_NAME, access::Caller},
    http::error::{Error, Result},
    store::Ownership,
};
use axum::{
    RequestExt,
    extract::{RawPathParams, Request},
    http::Method,
};
use lockstep_protocol::JobId;

/// Requests that do not change the job that they name, although their method is POST. A caller who may see the job may make them.
const UNCHANGING_POSTS: [&str; 3] =
    ["/api/v1/jobs/{id}/fork", "/api/v1/jobs/{id}/fork/check", "/api/v1/checkpoints/{id}/predict"];

/// The kind of object that a route names.
#[derive(Debug, Clone, Copy)]
enum Kind {
    Job,
    /// A job by its id, or a run from elsewhere by the id that its program chose.
    Run,
    Checkpoint,
    Dataset,
    Model,
    Sweep,
}

impl Kind {
    fn of(route: &str) -> Option<Self> {
        let kinds = [
            ("/jobs/{id}", Kind::Job),
            ("/api/v1/jobs/{id}", Kind::Job),
            ("/api/v1/runs/{id}", Kind::Run),
            ("/api/v1/checkpoints/{id}", Kind::Checkpoint),
            ("/api/v1/datasets/{name}", Kind::Dataset),
            ("/sweeps/{id}", Kind::Sweep),
            ("/api/v1/sweeps/{id}", Kind::Sweep),
            ("/models/{name}", Kind::Model),
            ("/api/v1/models/{name}", Kind::Model),
        ];
        let is_below = |rest: &str| rest.is_empty() || rest.starts_with(['/', '.']);
        let found = kinds.into_iter().find(|(start, _)| route.strip_prefix(start).is_some_and(is_below));
        found.map(|(_, kind)| kind)
    }

    /// The error that handlers return for an object that does not exist.
    fn not_found(self, route: &str) -> Error {
        Error::NotFound(
            match self {
                Kind::Job if route.starts_with("/jobs/") => "No job has this id. It may have been deleted.",
                Kind::Job | Kind::Run => "no job has this id",
                Kind::Checkpoint => "no checkpoint has this id",
                Kind::Dataset => "no dataset has this name",
                Kind::Model => "no model has this name",
                Kind::Sweep => "no sweep has this id",
            }
            .into(),
        )
    }

    fn word(self) -> &'static str {
        match self {
            Kind::Job | Kind::Run | Kind::Checkpoint => "job",
            Kind::Dataset => "dataset",
            Kind::Model => "model",
            Kind::Sweep => "sweep",
        }
    }
}

/// Checks that the caller may make this request with the object that it names, before query, method and body are checked. An object that
/// does not exist gets the same response as a private object of another owner, so the response does not reveal which case applies.
///
/// # Errors
/// 404 if the object does not exist or is private, 403 if the request would change an object of another owner.
pub(super) async fn check(
    auth: &Auth,
    caller: &Caller,
    method: &Method,
    route: &str,
    request: &mut Request,
) -> Result<()> {
    let Some(kind) = Kind::of(route) else { return Ok(()) };
    if caller.sees_all() {
        return Ok(());
    }
    // Decoded as for the handler. A text that cannot be decoded names no object.
    let Ok(params) = request.extract_parts::<RawPathParams>().await else { return Ok(()) };
    let Some(name) = params.iter().find(|(key, _)| ["id", "name"].contains(key)).map(|(_, value)| value)
    else {
        return Ok(());
    };
    let ownership = match kind {
        Kind::Job => job_ownership(auth, name).await?,
        Kind::Run => job_ownership(auth, auth.run_id(caller, name).as_str()).await?,
        // A checkpoint's id begins with the id of its job. Whether the checkpoint exists is checked by the handler.
        Kind::Checkpoint => job_ownership(auth, name.split('-').next().unwrap_or_default()).await?,
        Kind::Dataset => auth.store.dataset_ownership(name).await?,
        Kind::Model => model_ownership(auth, caller, name).await?,
        Kind::Sweep => auth.store.sweep(name).await?.map(|row| row.ownership),
    };
    let Some(ownership) = ownership.filter(|ownership| caller.sees_owned(ownership)) else {
        return Err(kind.not_found(route));
    };
    let is_read = method.is_safe() || UNCHANGING_POSTS.contains(&route);
    if is_read || auth.may_change(caller, ownership.owner.as_deref()) {
        return Ok(());
    }
    Err(Error::Forbidden(not_yours(kind, &ownership)))
}

async fn job_ownership(auth: &Auth, id: &str) -> Result<Option<Ownership>> {
    let Ok(id) = id.parse::<JobId>() else { return Ok(None) };
    Ok(auth.store.job_ownership(&id).await?)
}

/// The owner of a model, who is the owner of the job of its first version. A caller who may see any version may see the model.
async fn model_ownership(auth: &Auth, caller: &Caller, name: &str) -> Result<Option<Ownership>> {
    let versions = auth.store.model_versions(Some(name)).await?;
    let is_visible = versions.iter().any(|row| caller.sees_owned(&row.ownership));
    let first = versions.into_iter().next().filter(|_| is_visible);
    // Not private, even if the first version's job is, because the caller may see another version.
    Ok(first.map(|row| Ownership { private: false, ..row.ownership }))
}

fn not_yours(kind: Kind, ownership: &Ownership) -> String {
    let word = kind.word();
    match &ownership.owner {
        Some(owner) if owner == SERVER_TOKEN_NAME => {
            format!("this {word} belongs to the server's own token: only admins may change it")
        }
        Some(owner) => format!("this {word} belongs to {owner}: only the owner and admins may change it"),
        None => format!("this {word} has no owner: only admins may change it"),
    }
}

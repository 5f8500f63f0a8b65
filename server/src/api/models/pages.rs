//! The pages of models.

use super::{no_such_model, visible_models};
use crate::api::prelude::*;
use crate::{
    api::html::{Page, html},
    auth::Auth,
    store::Store,
};
use lockstep_web::models as views;

/// `GET /models`
pub(crate) async fn models(
    State(store): State<Arc<dyn Store>>,
    Extension(caller): Extension<Caller>,
) -> Page {
    let models = visible_models(&*store, &caller).await?;
    let jobs: Vec<_> = models.iter().map(|model| model.newest.job.clone()).collect();
    let trained_validation = store.trained_validation(&jobs).await?;
    html(views::ModelsPage { models, trained_validation, user: caller.current_user() })
}

/// `GET /models/{name}`
pub(crate) async fn model(
    State(store): State<Arc<dyn Store>>,
    State(auth): State<Arc<Auth>>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<String>,
) -> Page {
    let mut rows = store.model_versions(Some(&name)).await?;
    let may_change =
        rows.first().is_some_and(|first| auth.may_change(&caller, first.ownership.owner.as_deref()));
    rows.retain(|row| caller.sees_owned(&row.ownership));
    if rows.is_empty() {
        return Err(no_such_model().into());
    }
    let versions: Vec<_> = rows.into_iter().rev().map(|row| row.version).collect();
    let jobs: Vec<_> = versions.iter().map(|version| version.job.clone()).collect();
    let trained_validation = store.trained_validation(&jobs).await?;
    html(views::ModelPage { name, versions, trained_validation, may_change, user: caller.current_user() })
}

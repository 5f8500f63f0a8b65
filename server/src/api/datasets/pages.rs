//! The page of datasets with its form.

use super::{
    NewDataset,
    inspections::{MAX_WAIT, NotInspected},
    register, visible_datasets,
};
use crate::api::prelude::*;
use crate::{
    api::html::{Page, html},
    auth::Auth,
    datasets::Datasets,
    http::{authorize::AuditSubject, error::Code},
};
use axum::{Form, response::Redirect};
use lockstep_protocol::dataset::Dataset;
use lockstep_web::datasets as views;

/// `GET /datasets`
pub(crate) async fn datasets(
    State(datasets): State<Arc<Datasets>>,
    State(auth): State<Arc<Auth>>,
    Extension(caller): Extension<Caller>,
) -> Page {
    datasets_page(&datasets, &auth, &caller, views::DatasetForm::default()).await
}

async fn datasets_page(datasets: &Datasets, auth: &Auth, caller: &Caller, form: views::DatasetForm) -> Page {
    let visible = visible_datasets(&*datasets.store, caller).await?;
    let may_change = |dataset: &&Dataset| auth.may_change(caller, dataset.owner.as_deref());
    let changeable = visible.iter().filter(may_change).map(|dataset| dataset.name.clone()).collect();
    html(views::DatasetsPage {
        datasets: visible,
        changeable,
        may_add: datasets.roots.may_name(caller),
        form,
        user: caller.current_user(),
    })
}

/// `POST /datasets`: submits the form without scripts.
pub(crate) async fn add_dataset(
    State(datasets): State<Arc<Datasets>>,
    State(auth): State<Arc<Auth>>,
    Extension(caller): Extension<Caller>,
    Form(new): Form<NewDataset>,
) -> Page {
    let (name, path) = (new.name.clone(), new.path.clone());
    let mut form = views::DatasetForm { name, path, ..Default::default() };
    let status = match register(&datasets, &caller, new, MAX_WAIT).await {
        Ok(dataset) => {
            let created = Extension(AuditSubject(dataset.name));
            return Ok((created, Redirect::to("/datasets")).into_response());
        }
        Err(NotInspected::UnderWay(under_way)) => {
            form.path_error = Some(format!("{}: send this form again to continue", under_way.detail));
            StatusCode::ACCEPTED
        }
        Err(NotInspected::Failed(Error::Invalid(mistakes))) => {
            for mistake in mistakes {
                let field =
                    if mistake.pointer == "/name" { &mut form.name_error } else { &mut form.path_error };
                *field = Some(mistake.detail);
            }
            StatusCode::UNPROCESSABLE_ENTITY
        }
        Err(NotInspected::Failed(Error::Conflict(detail) | Error::WithCode(Code::NameTaken, detail))) => {
            form.name_error = Some(detail);
            StatusCode::CONFLICT
        }
        Err(NotInspected::Failed(other)) => return Err(other.into()),
    };
    Ok((status, datasets_page(&datasets, &auth, &caller, form).await?).into_response())
}

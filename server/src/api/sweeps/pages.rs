//! The pages of sweeps.

use super::{find, visible_sweeps, with_trials};
use crate::api::prelude::*;
use crate::{
    api::html::{Page, html},
    auth::Auth,
    store::Store,
};
use lockstep_protocol::sweep::Sweep;
use lockstep_web::sweeps as views;

/// `GET /sweeps`
pub(crate) async fn sweeps(
    State(store): State<Arc<dyn Store>>,
    Extension(caller): Extension<Caller>,
) -> Page {
    let mut sweeps: Vec<Sweep> = Vec::new();
    for row in visible_sweeps(&*store, &caller).await? {
        sweeps.push(with_trials(&*store, &row).await?);
    }
    html(views::SweepsPage { sweeps, user: caller.current_user() })
}

/// `GET /sweeps/{id}`
pub(crate) async fn sweep(
    State(store): State<Arc<dyn Store>>,
    State(auth): State<Arc<Auth>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Page {
    let row = find(&*store, &id).await?;
    let may_change = auth.may_change(&caller, row.ownership.owner.as_deref());
    let sweep = with_trials(&*store, &row).await?;
    html(views::SweepPage { sweep, may_change, user: caller.current_user() })
}

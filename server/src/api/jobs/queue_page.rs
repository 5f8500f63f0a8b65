//! The page of the queue.

use super::queue::{self, QueuePage, QueueQuery};
use crate::api::prelude::*;
use crate::{
    api::html::{Page, html},
    auth::Auth,
    http::extract::PageQuery,
    scheduler::Scheduler,
};
use lockstep_protocol::queue::QueuedJob;
use lockstep_web::queue as views;

/// `GET /queue`
pub(crate) async fn show(
    State(scheduler): State<Arc<Scheduler>>,
    State(auth): State<Arc<Auth>>,
    Extension(caller): Extension<Caller>,
    PageQuery(mut query): PageQuery<QueueQuery>,
) -> Page {
    // The page's title has the number of jobs.
    query.count = Some(true);
    let QueuePage { jobs, reservations, next_cursor, total } =
        queue::read_page(&scheduler, &caller, &query).await?;
    let may_change = |job: &&QueuedJob| auth.may_change(&caller, job.owner.as_deref());
    let changeable = jobs.items.iter().filter(may_change).filter_map(|job| job.id.clone()).collect();
    html(views::QueuePage {
        jobs: jobs.items,
        total: total.unwrap_or(0),
        reservations,
        project: query.project.clone().unwrap_or_default(),
        owner: query.owner.clone().unwrap_or_default(),
        changeable,
        is_first: query.cursor.is_none(),
        next: next_cursor,
        user: caller.current_user(),
    })
}

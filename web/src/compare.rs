//! Comparison of jobs. The URL contains the ids of the jobs, and the script requests the jobs, so the page itself contains no data.

use crate::layout::CurrentUser;
use askama::Template;

/// `GET /compare`.
#[derive(Debug, Clone, Template)]
#[template(path = "compare.html")]
pub struct ComparePage {
    /// The person or token that looks at the page.
    pub user: CurrentUser,
}

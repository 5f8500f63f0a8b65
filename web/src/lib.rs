//! The dashboard's pages. The pages are made from plain data, without input or output: the server's page handlers fill these structs and
//! call `render`. Only the clock is read, for ages.
//!
//! | URL | page | live data from |
//! |---|---|---|
//! | `GET /jobs` (and `/`) | [`jobs::JobsPage`] | `/api/v1/stream` |
//! | `GET /jobs/new`, `POST /jobs/new` | [`submit::SubmitPage`] | `/api/v1/jobs/form`, `/api/v1/jobs/validate` |
//! | `GET /jobs/{id}` | [`job::JobPage`] | `/api/v1/jobs/{id}/stream` |
//! | `GET /compare` | [`compare::ComparePage`] | |
//! | `GET /datasets`, `POST /datasets` | [`datasets::DatasetsPage`] | |
//! | `GET /models`, `GET /models/{name}` | [`models::ModelsPage`], [`models::ModelPage`] | |
//! | `GET /sweeps`, `GET /sweeps/{id}` | [`sweeps::SweepsPage`], [`sweeps::SweepPage`] | the page's own URL |
//! | `GET /machines` | [`machines::MachinesPage`] | `/api/v1/agents` |
//! | `GET /queue` | [`queue::QueuePage`] | `/api/v1/stream`, and the page's own URL |
//! | `GET /docs`, `GET /docs/{path}` | [`docs::DocsPage`] | |
//! | `GET /login` | [`login::LoginPage`], [`login::FirstAdminPage`] | |
//! | `GET /people`, `POST /people` | [`people::PeoplePage`] | |
//! | `GET /account`, `POST /account` | [`people::AccountPage`] | |
//! | `GET /audit` | [`audit::AuditPage`] | |
//! | `GET /webhooks`, `POST /webhooks` | [`webhooks::WebhooksPage`] | |
//! | any URL, on an error | [`layout::ErrorPage`] | |
//!
//! The pages contain no inline script and no inline style, so they work under
//! `default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; form-action 'self'`.

/// Renders a page as HTML. No data of a page can cause an error.
pub use askama::Template;

pub mod audit;
pub mod compare;
pub mod datasets;
pub mod docs;
pub mod job;
pub mod jobs;
pub mod layout;
pub mod login;
pub mod machines;
pub mod models;
pub mod numbers;
pub mod people;
pub mod queue;
pub mod submit;
pub mod sweeps;
pub mod webhooks;

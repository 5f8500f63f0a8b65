//! From the socket to the handler: connections (`listener`), TLS, who sent a request (`ingress`), which requests are accepted at all
//! (`guard`), who may make a request (`gate`), and the format of responses and errors.

pub(crate) mod access_log;
pub(crate) mod attachment;
pub(crate) mod conditional;
pub(crate) mod document;
pub(crate) mod error;
pub(crate) mod extract;
pub(crate) mod gate;
pub(crate) mod guard;
pub(crate) mod ingress;
pub(crate) mod listener;
pub(crate) mod rate_limit;
pub(crate) mod request_id;
pub(crate) mod request_times;
pub(crate) mod slow_body;
pub mod tls;

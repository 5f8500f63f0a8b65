//! Durations of requests, by route and class of status, for `GET /metrics`.

use crate::util::{histogram::Histogram, lock};
use axum::{
    extract::{MatchedPath, Request, State},
    http::StatusCode,
    middleware::Next,
    response::Response,
};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

/// Classes of status: 1xx to 5xx.
const CLASSES: usize = 5;
/// The label of requests without a route.
const NO_ROUTE: &str = "none";

/// The durations by route. A route is a pattern of the router, so the number of entries does not grow with the number of URLs.
#[derive(Debug, Default)]
pub(crate) struct RequestTimes(Mutex<BTreeMap<String, [Histogram; CLASSES]>>);

impl RequestTimes {
    fn observe(&self, route: &str, status: StatusCode, duration: Duration) {
        let class = usize::from(status.as_u16() / 100).clamp(1, CLASSES) - 1;
        lock(&self.0).entry(route.to_owned()).or_default()[class].observe(duration);
    }

    /// Appends the samples of the family `name`.
    pub(crate) fn write(&self, text: &mut String, name: &str) {
        for (route, times) in &*lock(&self.0) {
            for (class, times) in (1..).zip(times).filter(|(_, times)| !times.is_empty()) {
                times.write(text, name, &format!("route=\"{route}\",status=\"{class}xx\","));
            }
        }
    }
}

/// Measures the time to the beginning of the response, because a client may read a stream or a large file for any time.
pub(crate) async fn measure(
    State(times): State<Arc<RequestTimes>>,
    route: Option<MatchedPath>,
    request: Request,
    next: Next,
) -> Response {
    let began = Instant::now();
    let response = next.run(request).await;
    let route = route.as_ref().map_or(NO_ROUTE, MatchedPath::as_str);
    times.observe(route, response.status(), began.elapsed());
    response
}

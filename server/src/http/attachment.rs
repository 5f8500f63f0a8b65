//! Names under which browsers save responses.

use axum::http::HeaderValue;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_');

/// Returns the header `Content-Disposition` (RFC 6266) of a file with this name, with `-` for each space. Programs that do not know
/// `filename*`, such as curl, use `filename`, which has only ASCII letters, digits, `-`, `.` and `_`.
pub(crate) fn attachment(name: &str) -> HeaderValue {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || ['-', '.', '_'].contains(&c);
    let plain: String = name.chars().map(|c| if is_plain(c) { c } else { '-' }).collect();
    let encoded = name.replace(' ', "-");
    let encoded = utf8_percent_encode(&encoded, ESCAPED);
    let value = format!("attachment; filename=\"{plain}\"; filename*=UTF-8''{encoded}");
    // Both names have only visible ASCII characters, so the value is valid.
    HeaderValue::try_from(value).unwrap_or(HeaderValue::from_static("attachment"))
}

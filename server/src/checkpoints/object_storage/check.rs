//! Checks that the object store can be used, and converts errors into texts that say what to change.

use super::{ObjectStorage, with_timeout};
use crate::util::with_causes;
use object_store::{Error, ObjectStoreExt};

/// The content of the test object.
const TEXT: &str = "lockstep writes, reads and deletes this object when it starts";
/// Address of the metadata service of Amazon's machines, from which `object_store` requests credentials if none are given.
const MACHINE_CREDENTIALS: &str = "169.254.169.254";

/// Part of the error of [`with_timeout`] for a request that timed out.
const TIMED_OUT: &str = "has not answered within";

/// Why the store cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Unusable {
    /// What is wrong, and what to change.
    pub(crate) why: String,
    /// Whether the cause is transient, so that the store may work later with the same configuration.
    pub(crate) is_temporary: bool,
}

impl Unusable {
    /// An error that is not transient, so the user must change something.
    pub(crate) fn permanent(why: String) -> Self {
        Self { why, is_temporary: false }
    }
}

impl From<Error> for Unusable {
    fn from(error: Error) -> Self {
        Self { why: describe(&error), is_temporary: is_temporary(&with_causes(&error)) }
    }
}

impl ObjectStorage {
    /// Writes, reads, lists and deletes a small object.
    ///
    /// # Errors
    /// The store cannot be used. The text says what the user must change.
    pub(crate) async fn check(&self) -> Result<(), Unusable> {
        let folder = self.root.clone().join("lockstep-check");
        let path = folder.clone().join(uuid::Uuid::new_v4().simple().to_string());
        let test = async {
            self.put(&path, TEXT.into()).await.map_err(|error| ("written", error))?;
            let found = with_timeout(self.objects.get(&path)).await.map_err(|error| ("read", error))?;
            let found = with_timeout(found.bytes()).await.map_err(|error| ("read", error))?;
            let listed = with_timeout(self.objects.list_with_delimiter(Some(&folder))).await;
            let listed = listed.map_err(|error| ("listed", error))?;
            with_timeout(self.objects.delete(&path)).await.map_err(|error| ("deleted", error))?;
            let is_listed = listed.objects.iter().any(|object| object.location == path);
            Ok(found == TEXT && is_listed)
        };
        let tested = test.await;
        if let Some(directory) = &self.directory {
            // Fails, as intended, if another server has its test object there.
            let _ = tokio::fs::remove_dir(directory.join(folder.as_ref())).await;
        }
        match tested {
            Ok(true) => Ok(()),
            Ok(false) => Err(Unusable::permanent(
                "the store returned other content for the test object, or did not list it: use another store"
                    .into(),
            )),
            Err((what, error)) => {
                let Unusable { why, is_temporary } = error.into();
                Err(Unusable {
                    why: format!("an object could not be {what} for a test: {why}"),
                    is_temporary,
                })
            }
        }
    }
}

/// Checks the environment variables that a bucket's client reads: the endpoint must be a URL, and `AWS_ACCESS_KEY_ID` and
/// `AWS_SECRET_ACCESS_KEY` must be set both or not at all.
///
/// # Errors
/// A variable is missing or invalid. The text says what the user must change.
pub(super) fn check_environment() -> Result<(), String> {
    let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let endpoint = ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"]
        .into_iter()
        .find_map(|name| variable(name).map(|value| (name, value)));
    if let Some((name, endpoint)) = &endpoint
        && !reqwest::Url::parse(endpoint).is_ok_and(|url| ["http", "https"].contains(&url.scheme()))
    {
        return Err(format!(
            "{name} is {endpoint}, which is not a URL: give a URL such as https://s3.example.org"
        ));
    }
    if let Some((name, endpoint)) = endpoint
        && endpoint.starts_with("http://")
        && variable("AWS_ALLOW_HTTP").is_none_or(|value| value != "true")
    {
        return Err(format!(
            "{name} is {endpoint}, without TLS: give an https:// URL, or set AWS_ALLOW_HTTP=true if others on the network may read the \
             weights"
        ));
    }
    match (variable("AWS_ACCESS_KEY_ID"), variable("AWS_SECRET_ACCESS_KEY")) {
        (Some(_), None) => Err("AWS_ACCESS_KEY_ID is set and AWS_SECRET_ACCESS_KEY is not: set both".into()),
        (None, Some(_)) => Err("AWS_SECRET_ACCESS_KEY is set and AWS_ACCESS_KEY_ID is not: set both".into()),
        _ => Ok(()),
    }
}

/// Whether an error with this text is transient: the store does not respond or is overloaded, or a disk is full.
fn is_temporary(text: &str) -> bool {
    const PERMANENT: [&str; 5] = [
        MACHINE_CREDENTIALS,
        "builder error",
        // Errors of TLS.
        "invalid peer certificate",
        "received fatal alert",
        "corrupt message",
    ];
    if PERMANENT.iter().any(|phrase| text.contains(phrase)) {
        return false;
    }
    let status = text.split_once("status code: ").and_then(|(_, rest)| rest.get(..3));
    matches!(status, Some("429" | "500" | "502" | "503" | "504"))
        || ["HTTP error: ", TIMED_OUT, "No space left on device", "Disk quota exceeded"]
            .iter()
            .any(|phrase| text.contains(phrase))
}

/// The text of an error for users: what is wrong, and what to change.
pub(crate) fn describe(error: &Error) -> String {
    let text = with_causes(error);
    let code =
        text.split_once("<Code>").and_then(|(_, rest)| rest.split_once("</Code>")).map(|(code, _)| code);
    let code_in_brackets = code.map_or_else(String::new, |code| format!(" ({code})"));
    if text.contains(MACHINE_CREDENTIALS) {
        return "no credentials are given: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY".into();
    }
    let is_unknown_key =
        matches!(code, Some("InvalidAccessKeyId" | "SignatureDoesNotMatch" | "InvalidClientTokenId"));
    match error {
        Error::Unauthenticated { .. } | Error::PermissionDenied { .. } if is_unknown_key => format!(
            "the store does not know these credentials{code_in_brackets}: check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and that \
             AWS_ENDPOINT_URL and AWS_REGION are those of the bucket"
        ),
        Error::Unauthenticated { .. } | Error::PermissionDenied { .. }
            if code.is_some() || text.contains("403") =>
        {
            format!(
                "the store refuses access{code_in_brackets}: allow the owner of AWS_ACCESS_KEY_ID to write, read, list and delete objects"
            )
        }
        Error::NotFound { .. } if code == Some("NoSuchBucket") => {
            "there is no such bucket: create the bucket, or name another".into()
        }
        _ if text.contains("HTTP error: ") => {
            let why = text.rsplit_once("HTTP error: ").map_or(text.as_str(), |(_, why)| why);
            format!("the store does not answer ({why}): start it, or give its URL in AWS_ENDPOINT_URL")
        }
        _ if text.contains("builder error") => {
            format!("{text}; AWS_ENDPOINT_URL must be a URL such as https://s3.example.org")
        }
        _ => shorten(text),
    }
}

/// Cuts a text to at most 600 bytes, because the response of a store may be a page of HTML.
fn shorten(mut text: String) -> String {
    const MAX_BYTES: usize = 600;
    if text.len() > MAX_BYTES {
        text.truncate(text.floor_char_boundary(MAX_BYTES));
        text.push_str(" ...");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_that_need_a_change_are_not_temporary() {
        let http = |why: &str| {
            format!("Generic S3 error: Error performing PUT in 1s - HTTP error: error sending request: {why}")
        };
        let status =
            |code: &str| format!("Error performing PUT - Server returned non-2xx status code: {code}: ");
        for (error, expected) in [
            (http("tcp connect error: Connection refused (os error 111)"), true),
            (http("operation timed out"), true),
            (http("invalid peer certificate: UnknownIssuer"), false),
            (http("builder error: relative URL without a base"), false),
            (status("503 Service Unavailable"), true),
            (status("429 Too Many Requests"), true),
            (status("403 Forbidden"), false),
            (status("404 Not Found"), false),
            (status("501 Not Implemented"), false),
            ("Generic object error: it has not answered within 300 s".into(), true),
            ("Unable to copy data to file: No space left on device (os error 28)".into(), true),
            ("Unable to create dir /a: Read-only file system (os error 30)".into(), false),
        ] {
            assert_eq!(is_temporary(&error), expected, "{error}");
        }
    }
}

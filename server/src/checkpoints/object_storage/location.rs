//! Parses the value of `--artifacts`.

use reqwest::Url;
use std::path::PathBuf;

/// The location of the object store.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Location {
    /// A directory, as an absolute path.
    Directory(PathBuf),
    /// A bucket, and the prefix of the names of all objects, which may be empty.
    Bucket { bucket: String, prefix: String },
}

impl Location {
    /// Parses a location.
    ///
    /// # Errors
    /// The location is invalid. The text says what the user must change.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let hint = "give a directory, such as /srv/artifacts, or a bucket, such as s3://BUCKET/PREFIX";
        if text.is_empty() {
            return Err(format!("it is empty; {hint}"));
        }
        if !text.contains("://") {
            let path = std::path::absolute(text).map_err(|error| format!("{error}; {hint}"))?;
            return Ok(Self::Directory(path));
        }
        let url = Url::parse(text).map_err(|error| format!("{error}; {hint}"))?;
        match url.scheme() {
            "file" => match url.to_file_path() {
                Ok(path) if url.host_str().is_none() => Ok(Self::Directory(path)),
                _ => {
                    Err("it is not a path of this machine: write three slashes, as in file:///srv/artifacts"
                        .into())
                }
            },
            "s3" | "s3a" => {
                if url.username() != "" || url.password().is_some() {
                    return Err(
                        "the URL must not contain keys, because it is shown to others: give keys as AWS_ACCESS_KEY_ID and \
                         AWS_SECRET_ACCESS_KEY"
                            .into(),
                    );
                }
                if url.query().is_some() || url.fragment().is_some() || url.port().is_some() {
                    return Err(
                        "the URL of a bucket must be s3://BUCKET/PREFIX: give another server than Amazon's in \
                         AWS_ENDPOINT_URL, and a region in AWS_REGION"
                            .into(),
                    );
                }
                let bucket = url.host_str().unwrap_or_default();
                if bucket.is_empty() {
                    return Err(format!("it must name a bucket; {hint}"));
                }
                let prefix = url.path().trim_matches('/');
                if prefix.contains('%') || prefix.split('/').any(|part| part.is_empty() && !prefix.is_empty())
                {
                    return Err(
                        "its prefix has an empty part, or a character that is not allowed: use letters, \
                                digits, - and _, separated by /"
                            .into(),
                    );
                }
                Ok(Self::Bucket { bucket: bucket.into(), prefix: prefix.into() })
            }
            scheme => Err(format!("artifacts cannot be kept at {scheme}://; {hint}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_and_buckets_are_locations() {
        let bucket =
            |bucket: &str, prefix: &str| Location::Bucket { bucket: bucket.into(), prefix: prefix.into() };
        for (given, expected) in [
            ("/srv/a", Location::Directory("/srv/a".into())),
            ("file:///srv/a%20b", Location::Directory("/srv/a b".into())),
            ("s3://weights", bucket("weights", "")),
            ("s3://weights/", bucket("weights", "")),
            ("s3a://weights/team/one/", bucket("weights", "team/one")),
        ] {
            assert_eq!(Location::parse(given), Ok(expected), "{given}");
        }
        assert!(matches!(Location::parse("here"), Ok(Location::Directory(path)) if path.is_absolute()));
    }

    #[test]
    fn invalid_locations_are_refused_with_a_hint() {
        for (given, expected) in [
            ("", "empty"),
            ("s3://", "bucket"),
            ("s3://key:secret@weights/a", "AWS_SECRET_ACCESS_KEY"),
            ("s3://weights:9000/a", "AWS_ENDPOINT_URL"),
            ("s3://weights/a?region=x", "AWS_REGION"),
            ("s3://weights/a//b", "prefix"),
            ("gs://weights/a", "gs://"),
            ("https://example.org/a", "s3://BUCKET/PREFIX"),
            ("file://host/a", "file:///srv/artifacts"),
        ] {
            let detail = Location::parse(given).unwrap_err();
            assert!(detail.contains(expected), "{given}: {detail}");
        }
    }
}

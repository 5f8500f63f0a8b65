//! Access to the object store for checkpoints (`serve --artifacts`): a directory, or a bucket of S3 or a compatible service. This module
//! handles objects and files. `object_store_state` and the tasks decide which checkpoints are stored.
//!
//! A checkpoint's objects are at `jobs/<job>/<epoch>-<step>/`: each file below the SHA-256 of its bytes, and `MANIFEST.json`, which names
//! the files. `LOCKSTEP.json` at the root identifies the store. An object appears completely or not at all, and files are verified while
//! they are sent. So an existing object is correct, and is never sent again. The manifest is written last, so a checkpoint exists
//! completely or not at all, even if it replaces another checkpoint of the same name.

mod check;
mod connector;
mod file_upload;
mod location;
mod marker;

pub(crate) use check::{Unusable, describe};

use crate::{
    checkpoints::manifest::{self, MANIFEST, Manifest, ManifestFile},
    util::if_exists,
};
use bytes::Bytes;
use futures_util::{TryStreamExt, stream::BoxStream};
use location::Location;
use lockstep_protocol::{
    JobId,
    checkpoint_files::{folder_name, parse_folder_name},
    limits::MANIFEST_BYTES,
};
use object_store::{
    Error, GetOptions, ObjectStore, ObjectStoreExt, RetryConfig,
    aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey},
    local::LocalFileSystem,
    path::Path,
};
use std::{path::PathBuf, sync::Arc, time::Duration};

/// Minimum size of the parts in which a file is sent, in bytes. Buckets require at least 5 MiB for all parts except the last.
pub(crate) const MIN_PART_BYTES: u64 = 8 << 20;
/// Maximum number of parts of an object in a bucket.
const MAX_PARTS: u64 = 10_000;
/// Number of immediate retries of a failed request. Callers try again later.
const RETRIES: usize = 2;
/// Time limit for a request, including its body.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(300);

pub(crate) type Result<T> = std::result::Result<T, Error>;

/// The prefix of the names of a checkpoint's objects.
#[derive(Debug, Clone)]
pub(crate) struct Prefix {
    path: Path,
}

/// An open object store.
#[derive(Debug)]
pub(crate) struct ObjectStorage {
    /// The store's URL in the database: `file:///path`, `s3://bucket/prefix`, or `s3+https://endpoint/bucket/prefix` for other services
    /// than Amazon's.
    url: String,
    objects: Arc<dyn ObjectStore>,
    /// The bucket, if the store is a bucket. Large files are uploaded in parts.
    bucket: Option<Arc<AmazonS3>>,
    /// The directory, if the store is a directory.
    directory: Option<PathBuf>,
    /// Prefix of all objects.
    root: Path,
}

fn store_error(detail: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::Generic { store: "object", source: detail.into() }
}

/// Runs a request with the time limit [`REQUEST_TIMEOUT`].
async fn with_timeout<T>(request: impl Future<Output = Result<T>>) -> Result<T> {
    let timed_out = || store_error(format!("it has not answered within {} s", REQUEST_TIMEOUT.as_secs()));
    tokio::time::timeout(REQUEST_TIMEOUT, request).await.map_err(|_| timed_out())?
}

/// `None` in place of the error that an object does not exist.
fn optional<T>(result: Result<T>) -> Result<Option<T>> {
    match result {
        Err(Error::NotFound { .. }) => Ok(None),
        result => result.map(Some),
    }
}

impl ObjectStorage {
    /// Opens the store that `location`, the value of `--artifacts`, names. Does not send a request.
    ///
    /// # Errors
    /// The store cannot be opened. The text says what the user must change.
    pub(crate) fn open(location: &str) -> std::result::Result<Self, String> {
        match Location::parse(location)? {
            Location::Directory(path) => {
                let failed = |error: &dyn std::fmt::Display| {
                    format!("the directory cannot be made: {error}; make it writable, or choose another")
                };
                std::fs::create_dir_all(&path).map_err(|error| failed(&error))?;
                let path = path.canonicalize().map_err(|error| failed(&error))?;
                let objects = LocalFileSystem::new_with_prefix(&path).map_err(|error| failed(&error))?;
                Ok(Self {
                    url: format!("file://{}", path.display()),
                    objects: Arc::new(objects.with_fsync(true)),
                    bucket: None,
                    directory: Some(path),
                    root: Path::default(),
                })
            }
            Location::Bucket { bucket, prefix } => {
                check::check_environment()?;
                let retry = RetryConfig {
                    max_retries: RETRIES,
                    retry_timeout: REQUEST_TIMEOUT,
                    ..RetryConfig::default()
                };
                let builder = AmazonS3Builder::from_env();
                let endpoint = [AmazonS3ConfigKey::S3Endpoint, AmazonS3ConfigKey::Endpoint]
                    .iter()
                    .find_map(|key| builder.get_config_value(key).filter(|given| !given.is_empty()));
                let opened = builder
                    .with_bucket_name(&bucket)
                    .with_http_connector(connector::Connector)
                    .with_retry(retry)
                    .build();
                let objects = Arc::new(opened.map_err(|error| check::describe(&error))?);
                let root = Path::from(prefix);
                let url = bucket_url(endpoint.as_deref(), &bucket, &root);
                Ok(Self { url, objects: objects.clone(), bucket: Some(objects), directory: None, root })
            }
        }
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// The store's directory. `None` if the store is a bucket.
    pub(crate) fn directory(&self) -> Option<&std::path::Path> {
        self.directory.as_deref()
    }

    /// The prefix of the objects of the checkpoint with this id, `<job>-<epoch>-<step>`. `None` if the text is not a checkpoint's id.
    pub(crate) fn prefix_of(&self, id: &str) -> Option<Prefix> {
        // A job's id has 27 characters.
        let (job, name) = (id.get(..27)?, id.get(27..)?.strip_prefix('-')?);
        job.parse::<JobId>().ok()?;
        parse_folder_name(name)?;
        Some(Prefix { path: self.root.clone().join("jobs").join(job).join(name) })
    }

    /// The bytes of a checkpoint's manifest. `None` if the store does not have the complete checkpoint.
    ///
    /// # Errors
    /// A store error. A manifest that is too large is cut off, and then refused by [`Prefix::parse_manifest`].
    pub(crate) async fn manifest(&self, prefix: &Prefix) -> Result<Option<Bytes>> {
        self.read_start(&prefix.manifest_path(), MANIFEST_BYTES as u64 + 1).await
    }

    /// The jobs and ids of all complete checkpoints in the store. Each job's checkpoints are in the order of their steps.
    pub(crate) async fn complete_checkpoints(&self) -> Result<Vec<(JobId, String)>> {
        let jobs = self.root.clone().join("jobs");
        let listed = self.objects.list(Some(&jobs)).map_ok(|object| object.location);
        let paths: Vec<Path> = with_timeout(listed.try_collect()).await?;
        let key_of = |path: &Path| {
            let parts: Vec<_> = path.prefix_match(&jobs)?.collect();
            let [job, name, file] = &parts[..] else { return None };
            let (epoch, step) = parse_folder_name(name.as_ref())?;
            let job: JobId = job.as_ref().parse().ok()?;
            (file.as_ref() == MANIFEST).then_some((job, step, epoch))
        };
        let mut found: Vec<_> = paths.iter().filter_map(key_of).collect();
        found.sort_unstable();
        let with_id = |(job, step, epoch): (JobId, u64, u32)| {
            let id = format!("{job}-{}", folder_name(epoch, step));
            (job, id)
        };
        Ok(found.into_iter().map(with_id).collect())
    }

    /// The first bytes of an object, at most `max_bytes`. `None` if the object does not exist.
    pub(crate) async fn read_start(&self, path: &Path, max_bytes: u64) -> Result<Option<Bytes>> {
        let options = GetOptions::new().with_range(Some(0..max_bytes));
        let found = optional(with_timeout(self.objects.get_opts(path, options)).await)?;
        let Some(found) = found else { return Ok(None) };
        with_timeout(found.bytes()).await.map(Some)
    }

    /// Whether the store has an object of this size.
    pub(crate) async fn has(&self, path: &Path, size_bytes: u64) -> Result<bool> {
        let found = optional(with_timeout(self.objects.head(path)).await)?;
        Ok(found.is_some_and(|found| found.size == size_bytes))
    }

    /// Writes an object. The caller must have verified the bytes of a file.
    pub(crate) async fn put(&self, path: &Path, bytes: Bytes) -> Result<()> {
        with_timeout(self.objects.put(path, bytes.into())).await.map(drop)
    }

    /// The bytes of an object. The caller must verify them.
    pub(crate) async fn get(&self, path: &Path) -> Result<BoxStream<'static, Result<Bytes>>> {
        Ok(with_timeout(self.objects.get(path)).await?.into_stream())
    }

    /// Deletes the objects of a checkpoint that the manifest `kept` does not name. Without `kept`, deletes all objects, the manifest first.
    pub(crate) async fn delete(&self, prefix: &Prefix, kept: Option<&Manifest>) -> Result<()> {
        let manifest = prefix.manifest_path();
        if kept.is_none() {
            self.delete_one(&manifest).await?;
        }
        let is_kept = |path: &Path| {
            let is_file = |(name, file): (&String, &ManifestFile)| prefix.file_path(name, file) == *path;
            kept.is_some_and(|kept| *path == manifest || kept.files.iter().any(is_file))
        };
        let listed = self.objects.list(Some(&prefix.path)).map_ok(|object| object.location);
        let paths: Vec<Path> = with_timeout(listed.try_collect()).await?;
        for path in paths.iter().filter(|path| !is_kept(path)) {
            self.delete_one(path).await?;
        }
        match (&self.directory, kept) {
            // Also removes folders and incomplete files, which lists of objects do not contain.
            (Some(directory), None) => remove_folder(directory, &prefix.path).await.map_err(store_error),
            _ => Ok(()),
        }
    }

    async fn delete_one(&self, path: &Path) -> Result<()> {
        optional(with_timeout(self.objects.delete(path)).await).map(drop)
    }
}

impl Prefix {
    /// The path of the manifest, which completes the checkpoint.
    pub(crate) fn manifest_path(&self) -> Path {
        self.path.clone().join(MANIFEST)
    }

    /// The path of a file of the checkpoint.
    pub(crate) fn file_path(&self, name: &str, file: &ManifestFile) -> Path {
        self.path.clone().join(file.sha256.as_str()).join(name)
    }

    /// Parses a manifest of this checkpoint.
    ///
    /// # Errors
    /// The bytes are not a valid manifest of this checkpoint.
    pub(crate) fn parse_manifest(&self, bytes: &[u8]) -> std::result::Result<Manifest, String> {
        let invalid = |detail: String| format!("its {MANIFEST} {detail}");
        let manifest = manifest::parse(bytes, self.path.filename().unwrap_or_default()).map_err(invalid)?;
        for (name, file) in &manifest.files {
            let is_hash = file.sha256.len() == 64 && file.sha256.bytes().all(|b| b.is_ascii_hexdigit());
            if !is_hash || std::path::Path::new(name).file_name() != Some(name.as_ref()) || name == MANIFEST {
                return Err(invalid(format!("names {name:?} with the checksum {:?}", file.sha256)));
            }
        }
        if manifest.files.is_empty() {
            return Err(invalid("names no file".into()));
        }
        Ok(manifest)
    }
}

/// The URL of a bucket, as stored in the database. It contains the endpoint, because buckets of different servers may have the same name.
fn bucket_url(endpoint: Option<&str>, bucket: &str, root: &Path) -> String {
    let server = endpoint.map_or_else(
        || "s3:/".to_owned(),
        |given| {
            // Keys must not be stored in the database.
            let without_keys = reqwest::Url::parse(given).map_or_else(
                |_| given.to_owned(),
                |mut url| {
                    let _ = (url.set_username(""), url.set_password(None));
                    url.to_string()
                },
            );
            format!("s3+{}", without_keys.trim_end_matches('/'))
        },
    );
    format!("{server}/{bucket}/{root}").trim_end_matches('/').to_owned()
}

/// The size in bytes of the parts in which a file of this size is sent.
pub(crate) fn part_size_for(size_bytes: u64) -> u64 {
    size_bytes.div_ceil(MAX_PARTS).max(MIN_PART_BYTES)
}

/// Removes the folder of a checkpoint, and the folder of its job if it is empty then.
async fn remove_folder(directory: &std::path::Path, prefix: &Path) -> std::io::Result<()> {
    let folder = directory.join(prefix.as_ref());
    if_exists(tokio::fs::remove_dir_all(&folder).await)?;
    if let Some(job) = folder.parent() {
        // Fails, as intended, if the job has other checkpoints.
        let _ = tokio::fs::remove_dir(job).await;
    }
    Ok(())
}

#[cfg(test)]
mod tests;

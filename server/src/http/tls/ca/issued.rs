//! The certificates that an authority has issued and revoked.
//!
//! `issued.jsonl` in the authority's folder has a line for each certificate. `ca.crl` is the certificate revocation list (CRL): made
//! from `issued.jsonl`, and signed by the authority. Both files are replaced atomically.

use super::{Authority, not_ours};
use crate::{http::tls::files::format_minute, util::private_files};
use jiff::Timestamp;
use rcgen::{CertificateRevocationListParams, KeyIdMethod, RevokedCertParams, SerialNumber};
use serde::{Deserialize, Serialize};
use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};
use time::{Duration, OffsetDateTime};

/// Maximum number of recorded certificates, including expired certificates.
const MAX_RECORDS: usize = 10_000;
/// Minimum length, in hexadecimal digits, of an unknown serial number that is revoked. Shorter texts may be names.
const MIN_DIGITS: usize = 16;
/// Maximum length of a serial number in hexadecimal digits (RFC 5280: 20 bytes).
const MAX_DIGITS: usize = 40;
/// Number of days for which expired certificates stay in the records. No program accepts expired certificates.
const RETENTION_DAYS: i64 = 365;
/// Validity of the revocation list in days. The list is signed again with each change, but some programs, such as openssl, require a date.
const LIST_DAYS: i64 = 3650;

/// The kind of holder of a certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A server, which clients verify.
    Server,
    /// An agent, which the server verifies.
    Agent,
    /// Unknown: only the serial number was given.
    Unknown,
}

/// An issued certificate.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The serial number, in hexadecimal digits.
    pub serial: String,
    /// The certificate's first name.
    pub name: String,
    /// The kind of holder.
    pub kind: Kind,
    /// Start of the validity.
    pub not_before: Timestamp,
    /// End of the validity.
    pub not_after: Timestamp,
    /// When the certificate was revoked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revoked_at: Option<Timestamp>,
}

impl Record {
    /// `valid`, `expired` or `revoked`.
    pub fn state(&self, now: Timestamp) -> &'static str {
        match self.revoked_at {
            Some(_) => "revoked",
            None if self.not_after < now => "expired",
            None => "valid",
        }
    }
}

/// A serial number as people compare it: lower case, without separators and leading zeros.
pub fn serial_text(bytes: &[u8]) -> String {
    plain_serial(&hex::encode(bytes))
}

fn plain_serial(text: &str) -> String {
    let digits: String = text.chars().filter(|c| *c != ':').map(|c| c.to_ascii_lowercase()).collect();
    digits.trim_start_matches('0').to_owned()
}

fn serial_bytes(text: &str) -> Vec<u8> {
    let even = if text.len() % 2 == 1 { format!("0{text}") } else { text.to_owned() };
    hex::decode(even).unwrap_or_default()
}

/// The revocation list of a data directory's authority. The file exists after the first revocation.
pub fn revocation_list(data_dir: &Path) -> PathBuf {
    super::folder(data_dir).join("ca.crl")
}

/// Whether `issued.jsonl`, in the folder of the revocation list `list`, has a revoked certificate.
pub fn has_revoked(list: &Path) -> bool {
    let records = fs::read_to_string(list.with_file_name("issued.jsonl")).unwrap_or_default();
    let revoked =
        |line: &str| serde_json::from_str::<Record>(line).is_ok_and(|record| record.revoked_at.is_some());
    records.lines().any(revoked)
}

impl Authority {
    fn records_file(&self) -> PathBuf {
        self.folder.join("issued.jsonl")
    }

    /// All certificates that this authority has issued, oldest first.
    ///
    /// # Errors
    /// The records cannot be read.
    pub fn issued(&self) -> Result<Vec<Record>, String> {
        let path = self.records_file();
        if !path.exists() {
            return Ok(Vec::new());
        }
        let text = fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let records: Result<Vec<_>, _> = text.lines().map(serde_json::from_str).collect();
        records.map_err(|_| not_ours(&path))
    }

    /// Records an issued certificate.
    ///
    /// # Errors
    /// There are too many records, or the file cannot be written.
    pub(super) fn add_record(&self, record: Record) -> Result<(), String> {
        let _lock = self.lock()?;
        let mut records = self.issued()?;
        let oldest = crate::now().as_second() - RETENTION_DAYS * 86_400;
        records.retain(|record| record.not_after.as_second() > oldest);
        if records.len() >= MAX_RECORDS {
            return Err(format!(
                "this authority has issued {MAX_RECORDS} certificates, the limit of its list; make another authority with \
                 `lockstep ca init --data-dir DIR` and name its certificate with `serve --agent-ca`, too"
            ));
        }
        records.push(record);
        self.write_records(&records)
    }

    /// Revokes all valid certificates of a name, or the certificate with a serial number, and writes the revocation list. Returns the
    /// revoked certificates.
    ///
    /// # Errors
    /// No certificate matches, or the list cannot be written.
    pub fn revoke(&self, name_or_serial: &str) -> Result<Vec<Record>, String> {
        let _lock = self.lock()?;
        let now = crate::now();
        let mut records = self.issued()?;
        let serial = plain_serial(name_or_serial);
        let is_meant = |r: &Record| r.name == name_or_serial || r.serial == serial;
        let mut revoked = Vec::new();
        for record in records.iter_mut().filter(|r| is_meant(r) && r.state(now) == "valid") {
            record.revoked_at = Some(now);
            revoked.push(record.clone());
        }
        if revoked.is_empty() {
            if let Some(known) = records.iter().rev().find(|r| is_meant(r)) {
                let when = known.revoked_at.unwrap_or(known.not_after);
                return Err(format!(
                    "no certificate of {name_or_serial} is valid: the last is {} since {}",
                    known.state(now),
                    format_minute(when)
                ));
            }
            let is_serial = (MIN_DIGITS..=MAX_DIGITS).contains(&serial.len())
                && serial.bytes().all(|byte| byte.is_ascii_hexdigit());
            if !is_serial {
                return Err(format!(
                    "this authority has issued no certificate to {name_or_serial}; `lockstep ca list` shows its certificates. A \
                     certificate that is not in the list is revoked by its serial number, as `openssl x509 -noout -serial` prints it"
                ));
            }
            let (name, kind, not_after) = (String::new(), Kind::Unknown, self.facts.not_after);
            let record = Record { serial, name, kind, not_before: now, not_after, revoked_at: Some(now) };
            records.push(record.clone());
            revoked.push(record);
        }
        // The revocation list is written first. So every certificate that is recorded as revoked is refused.
        self.write_list(&records)?;
        self.write_records(&records)?;
        Ok(revoked)
    }

    fn write_list(&self, records: &[Record]) -> Result<(), String> {
        let now = OffsetDateTime::now_utc();
        let revoked = records.iter().filter_map(|record| {
            let at = OffsetDateTime::from_unix_timestamp(record.revoked_at?.as_second()).ok()?;
            Some(RevokedCertParams {
                serial_number: SerialNumber::from(serial_bytes(&record.serial)),
                revocation_time: at,
                reason_code: None,
                invalidity_date: None,
            })
        });
        let list = CertificateRevocationListParams {
            this_update: now,
            next_update: now + Duration::days(LIST_DAYS),
            // The number increases with every list, unless the clock is set back.
            crl_number: SerialNumber::from(now.unix_timestamp().unsigned_abs()),
            issuing_distribution_point: None,
            revoked_certs: revoked.collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let signed = list.signed_by(&self.issuer).and_then(|list| list.pem());
        let signed = signed.map_err(|error| error.to_string())?;
        self.replace("ca.crl", signed.as_bytes())
    }

    fn write_records(&self, records: &[Record]) -> Result<(), String> {
        let mut text = String::new();
        for record in records {
            let line = serde_json::to_string(record).map_err(|error| error.to_string())?;
            let _ = writeln!(text, "{line}");
        }
        self.replace("issued.jsonl", text.as_bytes())
    }

    /// Replaces a file of the authority's folder atomically.
    pub(super) fn replace(&self, name: &str, content: &[u8]) -> Result<(), String> {
        let path = self.folder.join(name);
        private_files::replace(&path, content).map_err(|error| format!("{}: {error}", path.display()))
    }

    /// Locks the records while they are read and written, because a server and a command may change them at the same time.
    fn lock(&self) -> Result<fs::File, String> {
        let path = self.folder.join("issued.lock");
        let locked = private_files::open_lock_file(&path).and_then(|file| file.lock().map(|()| file));
        locked.map_err(|error| format!("{}: {error}", path.display()))
    }
}

/// A serial number for a new certificate: positive, 16 bytes.
pub(super) fn new_serial() -> Vec<u8> {
    let mut bytes = uuid::Uuid::new_v4().into_bytes();
    // The first byte is not zero, and its sign bit is clear, so the encoded number has exactly 16 bytes.
    bytes[0] = bytes[0] & 0x7f | 0x40;
    bytes.to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::tls::files;

    fn authority(dir: &Path) -> Authority {
        Authority::init(dir).unwrap()
    }

    #[test]
    fn certificates_are_revoked_by_name_and_by_serial_number() {
        let dir = tempfile::tempdir().unwrap();
        let authority = authority(dir.path());
        assert_eq!(authority.issued().unwrap(), []);
        assert!(!revocation_list(dir.path()).exists());
        for _ in 0..2 {
            authority.issue_agent("node-a", 30).unwrap();
        }
        authority.issue_agent("node-b", 30).unwrap();
        assert!(authority.revoke("node-c").unwrap_err().contains("lockstep ca list"));
        assert_eq!(authority.revoke("node-a").unwrap().len(), 2);
        assert!(authority.revoke("node-a").unwrap_err().contains("revoked since"));
        let records = authority.issued().unwrap();
        let states: Vec<_> = records.iter().map(|r| (r.name.as_str(), r.state(crate::now()))).collect();
        assert_eq!(states, [("node-a", "revoked"), ("node-a", "revoked"), ("node-b", "valid")]);
        // In capital letters, as openssl prints serial numbers.
        let serial = records[2].serial.to_uppercase();
        assert_eq!(authority.revoke(&serial).unwrap()[0].name, "node-b");
        assert_eq!(files::revocation_lists(&revocation_list(dir.path())).unwrap().len(), 1);
    }

    #[test]
    fn unknown_serial_numbers_need_16_to_40_digits() {
        let dir = tempfile::tempdir().unwrap();
        let authority = authority(dir.path());
        for (digits, accepted) in
            [(MIN_DIGITS - 1, false), (MIN_DIGITS, true), (MAX_DIGITS, true), (MAX_DIGITS + 1, false)]
        {
            assert_eq!(authority.revoke(&"a".repeat(digits)).is_ok(), accepted, "{digits}");
        }
    }

    #[test]
    fn the_number_of_issued_certificates_is_limited() {
        let dir = tempfile::tempdir().unwrap();
        let authority = authority(dir.path());
        let record = |n: usize| Record {
            serial: format!("{n:x}"),
            name: format!("node-{n}"),
            kind: Kind::Agent,
            not_before: crate::now(),
            not_after: crate::now(),
            revoked_at: None,
        };
        authority.write_records(&(0..MAX_RECORDS - 1).map(record).collect::<Vec<_>>()).unwrap();
        authority.add_record(record(MAX_RECORDS)).unwrap();
        assert!(authority.add_record(record(MAX_RECORDS + 1)).unwrap_err().contains("10000"));
    }
}

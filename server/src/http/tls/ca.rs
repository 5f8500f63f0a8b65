//! The server's own certificate authority (CA), for teams without a CA. Clients install the CA's certificate once. The server
//! signs and renews its own certificates with the CA.
//!
//! The folder `ca` of the data directory has `ca.crt` (for clients), `ca.key` (secret), `server.pem` (the server's certificate and key),
//! `issued.jsonl` (all issued certificates) and `ca.crl` (the revocation list).

mod issued;

pub use issued::{Kind, Record, has_revoked, revocation_list, serial_text};

use super::{
    certificate::Facts,
    files::{self, fingerprint, format_minute},
    names::is_dns_name_or_address,
};
use crate::util::{
    pem_files::{self, Readers},
    private_files,
};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SerialNumber,
};
use std::{
    fs::{self, DirBuilder, File},
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};
use time::{Duration, OffsetDateTime};

/// Validity of the authority's own certificate in days.
const AUTHORITY_DAYS: i64 = 3650;
/// Maximum validity in days. Some clients refuse certificates of private CAs that are valid for longer.
pub const MAX_DAYS: u32 = 825;
/// Default validity in days.
pub const DEFAULT_DAYS: u32 = 397;
/// Certificates are valid from this long before they are issued, because clients' clocks may be slow.
const CLOCK_MARGIN: Duration = Duration::hours(1);
/// Maximum length of a common name.
const COMMON_NAME_CHARS: usize = 64;

/// An authority that can sign.
#[derive(Debug)]
pub struct Authority {
    folder: PathBuf,
    /// The authority's certificate, to be given to browsers and clients.
    pub pem: String,
    /// The facts of the authority's certificate.
    pub facts: Facts,
    /// The SHA-256 of the authority's certificate, for comparison by people.
    pub fingerprint: String,
    issuer: Issuer<'static, KeyPair>,
}

/// An issued certificate and its key.
#[derive(Debug)]
pub struct Issued {
    /// The certificate and the authority's certificate, in PEM.
    pub chain: String,
    /// The key, in PEM.
    pub key: String,
}

/// The authority's folder in a data directory.
pub fn folder(data_dir: &Path) -> PathBuf {
    data_dir.join("ca")
}

/// Whether a data directory has an authority.
pub fn exists(data_dir: &Path) -> bool {
    folder(data_dir).join("ca.crt").exists()
}

impl Authority {
    /// Creates an authority in a data directory.
    ///
    /// # Errors
    /// The data directory already has an authority, or the files cannot be written.
    pub fn init(data_dir: &Path) -> Result<Self, String> {
        let folder = folder(data_dir);
        let id = uuid::Uuid::new_v4().simple().to_string();
        let (params, key) = new_authority(&id[..8]).map_err(|error| error.to_string())?;
        let certificate = params.self_signed(&key).map_err(|error| error.to_string())?;
        // A rename makes the folder visible completely or not at all, also if another process creates an authority at the same time.
        let unfinished = data_dir.join(format!("ca.{id}"));
        let write_folder = || -> std::io::Result<()> {
            private_files::create_data_dir(data_dir)?;
            DirBuilder::new().mode(0o700).create(&unfinished)?;
            private_files::write_new(&unfinished.join("ca.key"), key.serialize_pem().as_bytes())?;
            private_files::write_new(&unfinished.join("ca.crt"), certificate.pem().as_bytes())?;
            // Fails if the target is a folder that is not empty.
            fs::rename(&unfinished, &folder)?;
            File::open(data_dir)?.sync_all()
        };
        write_folder().map_err(|error| {
            let _ = fs::remove_dir_all(&unfinished);
            if folder.exists() {
                format!(
                    "{} exists already; `lockstep ca show` prints its certificate. Every client would have to trust a new authority. To \
                     make a new authority nevertheless, move the folder away first",
                    folder.display()
                )
            } else {
                format!("{}: {error}", folder.display())
            }
        })?;
        Self::open(data_dir)
    }

    /// Reads the authority of a data directory.
    ///
    /// # Errors
    /// The data directory has no authority, its files were not made by `init`, or other users can read its key.
    pub fn open(data_dir: &Path) -> Result<Self, String> {
        let folder = folder(data_dir);
        let (certificate, key) = (folder.join("ca.crt"), folder.join("ca.key"));
        if !certificate.exists() {
            return Err(format!(
                "there is no {}; name the server's data directory with --data-dir, or make a new authority with `lockstep ca init`",
                certificate.display()
            ));
        }
        let der = pem_files::read_certificates(&certificate)?.swap_remove(0);
        let facts = Facts::read(&der).ok_or_else(|| not_ours(&certificate))?;
        let key_pem =
            String::from_utf8(pem_files::read(&key, Readers::Owner)?).map_err(|_| not_ours(&key))?;
        let pair = KeyPair::from_pem(&key_pem).map_err(|_| not_ours(&key))?;
        // Fails if the key does not belong to the certificate.
        files::read_pair(&certificate, &key)?;
        if facts.not_after < crate::now() {
            return Err(format!(
                "the authority {} expired at {}; move the folder away, run `lockstep ca init`, and give the new certificate \
                 to all clients",
                certificate.display(),
                format_minute(facts.not_after)
            ));
        }
        let issuer = Issuer::from_ca_cert_der(&der, pair).map_err(|_| not_ours(&certificate))?;
        let pem = String::from_utf8(pem_files::read(&certificate, Readers::Anybody)?)
            .map_err(|_| not_ours(&certificate))?;
        Ok(Self { folder, pem, facts, fingerprint: fingerprint(&der), issuer })
    }

    /// Issues a certificate for a server with these names.
    ///
    /// # Errors
    /// A name is neither a DNS name nor an address, or `days` is above [`MAX_DAYS`].
    pub fn issue(&self, names: &[String], days: u32) -> Result<Issued, String> {
        if let Some(name) = names.iter().find(|name| !is_dns_name_or_address(name)) {
            return Err(format!(
                "{name:?} is neither a DNS name nor an address; an example is lockstep.example.org"
            ));
        }
        let first = names.first().ok_or("a certificate needs at least one name")?;
        self.sign(Kind::Server, first, names, days)
    }

    /// Issues a certificate that identifies the agent `name`.
    ///
    /// # Errors
    /// `name` is not a possible name of an agent, or `days` is above [`MAX_DAYS`].
    pub fn issue_agent(&self, name: &str, days: u32) -> Result<Issued, String> {
        let is_plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
        if name.is_empty()
            || name.len() > COMMON_NAME_CHARS
            || !name.bytes().all(is_plain)
            || name.starts_with(['-', '.'])
        {
            return Err(format!(
                "{name:?} is not a name for an agent's certificate: it must have 1 to {COMMON_NAME_CHARS} letters, digits, '-', '_' and \
                 '.', and must begin with a letter, a digit or '_'; an example is node-a"
            ));
        }
        let names = if is_dns_name_or_address(name) { vec![name.to_owned()] } else { Vec::new() };
        self.sign(Kind::Agent, name, &names, days)
    }

    /// Signs a certificate for `names`, and records it. `subject` is its common name.
    fn sign(&self, kind: Kind, subject: &str, names: &[String], days: u32) -> Result<Issued, String> {
        if !(1..=MAX_DAYS).contains(&days) {
            return Err(format!("a certificate must be valid for 1 to {MAX_DAYS} days"));
        }
        let now = OffsetDateTime::now_utc();
        let serial = issued::new_serial();
        // A revocation of a name also refuses all certificates of this name whose validity began before the revocation. With the margin, an
        // agent's certificate that is issued soon after a revocation would be refused.
        let not_before = if kind == Kind::Agent { now } else { now - CLOCK_MARGIN };
        let not_after = now + Duration::days(days.into());
        let issue = || -> Result<Issued, rcgen::Error> {
            let mut params = CertificateParams::new(names)?;
            params.distinguished_name = rcgen::DistinguishedName::new();
            if subject.len() <= COMMON_NAME_CHARS {
                params.distinguished_name.push(DnType::CommonName, subject);
            }
            params.serial_number = Some(SerialNumber::from(serial.clone()));
            params.not_before = not_before;
            params.not_after = not_after;
            params.is_ca = IsCa::ExplicitNoCa;
            params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
            params.extended_key_usages = vec![match kind {
                Kind::Agent => ExtendedKeyUsagePurpose::ClientAuth,
                Kind::Server | Kind::Unknown => ExtendedKeyUsagePurpose::ServerAuth,
            }];
            params.use_authority_key_identifier_extension = true;
            let key = KeyPair::generate()?;
            let certificate = params.signed_by(&key, &self.issuer)?;
            Ok(Issued { chain: format!("{}{}", certificate.pem(), self.pem), key: key.serialize_pem() })
        };
        let issued = issue().map_err(|error| error.to_string())?;
        let timestamp = |time: OffsetDateTime| {
            jiff::Timestamp::from_second(time.unix_timestamp()).map_err(|error| error.to_string())
        };
        // Recorded before it is returned, because a certificate that is not in the list is harder to revoke.
        self.add_record(Record {
            serial: serial_text(&serial),
            name: subject.to_owned(),
            kind,
            not_before: timestamp(not_before)?,
            not_after: timestamp(not_after)?,
            revoked_at: None,
        })?;
        Ok(issued)
    }

    /// The file with the server's own certificate chain and key.
    pub(super) fn server_file(&self) -> PathBuf {
        self.folder.join("server.pem")
    }

    /// Issues the server's own certificate, and replaces the old file atomically.
    pub(super) fn issue_for_server(&self, names: &[String]) -> Result<(), String> {
        let issued = self.issue(names, DEFAULT_DAYS)?;
        self.replace("server.pem", format!("{}{}", issued.chain, issued.key).as_bytes())
    }
}

fn new_authority(id: &str) -> Result<(CertificateParams, KeyPair), rcgen::Error> {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    let host: String = host.chars().filter(char::is_ascii_graphic).take(40).collect();
    params.distinguished_name.push(DnType::CommonName, format!("Lockstep CA {id} {host}"));
    let now = OffsetDateTime::now_utc();
    params.not_before = now - CLOCK_MARGIN;
    params.not_after = now + Duration::days(AUTHORITY_DAYS);
    // The authority signs certificates of servers and agents, but not of other authorities.
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    Ok((params, KeyPair::generate()?))
}

fn not_ours(path: &Path) -> String {
    format!("{} is not a file that `lockstep ca init` has made; restore the earlier file", path.display())
}

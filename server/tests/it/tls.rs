//! Certificates of the server: from renewed files, from its own CA, and invalid certificates.

use crate::{
    starting,
    test_server::{TIMEOUT, TestServer, client_builder, config, wait_until},
};
use futures_util::{SinkExt, StreamExt};
use lockstep_server::{
    ServeConfig, TlsConfig,
    tls::{Facts, ca::Authority},
};
use rcgen::{CertificateParams, CertifiedIssuer, IsCa, KeyPair, date_time_ymd};
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, ServerName, pem::PemObject},
};
use std::{
    fs,
    net::SocketAddr,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::TlsConnector;
use tokio_tungstenite::{Connector, connect_async_tls_with_config, tungstenite::Message};

/// A CA that is not the server's, and a folder with certificates that it has issued.
pub struct Files {
    pub dir: TempDir,
    pub ca: CertifiedIssuer<'static, KeyPair>,
}

impl Files {
    pub fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        params.distinguished_name.push(rcgen::DnType::CommonName, "a test CA");
        let ca = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        Self { dir: tempfile::tempdir().unwrap(), ca }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Issues a certificate for `localhost` into `NAME.crt` and `NAME.key`.
    pub fn issue(&self, name: &str, change: impl FnOnce(&mut CertificateParams)) -> TlsConfig {
        let mut params = CertificateParams::new(["localhost".to_owned(), "127.0.0.1".to_owned()]).unwrap();
        change(&mut params);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.ca).unwrap();
        let files = (self.path(&format!("{name}.crt")), self.path(&format!("{name}.key")));
        fs::write(&files.0, certificate.pem()).unwrap();
        fs::write(&files.1, key.serialize_pem()).unwrap();
        fs::set_permissions(&files.1, fs::Permissions::from_mode(0o600)).unwrap();
        TlsConfig::Files { certificate: files.0, key: files.1 }
    }

    /// Replaces the files of `target` with the files of `name`, one after the other, as a renewal does.
    fn replace(&self, target: &str, name: &str) {
        for ending in ["crt", "key"] {
            fs::rename(self.path(&format!("{name}.{ending}")), self.path(&format!("{target}.{ending}")))
                .unwrap();
        }
    }

    pub fn client(&self) -> Arc<ClientConfig> {
        trusting(self.ca.pem().as_bytes())
    }
}

/// A client that trusts one CA.
fn trusting(pem: &[u8]) -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(pem).unwrap()).unwrap();
    Arc::new(ClientConfig::builder().with_root_certificates(roots).with_no_client_auth())
}

pub fn http(config: &Arc<ClientConfig>, token: &str) -> reqwest::Client {
    client_builder(token).tls_backend_preconfigured((**config).clone()).timeout(TIMEOUT).build().unwrap()
}

/// Returns the certificate that the server sends to a new connection.
async fn served_certificate(address: SocketAddr, config: &Arc<ClientConfig>) -> Facts {
    let stream = TcpStream::connect(address).await.unwrap();
    let name = ServerName::try_from("localhost").unwrap();
    let stream = TlsConnector::from(config.clone()).connect(name, stream).await.unwrap();
    let (_, session) = stream.get_ref();
    assert_eq!(session.alpn_protocol(), None);
    Facts::read(&session.peer_certificates().unwrap()[0]).unwrap()
}

pub async fn get_text(client: &reqwest::Client, server: &TestServer, path: &str) -> (u16, String) {
    let url = format!("https://localhost:{}{path}", server.address.port());
    let response = client.get(url).send().await.unwrap();
    (response.status().as_u16(), response.text().await.unwrap())
}

pub async fn with_tls(tls: TlsConfig, change: impl FnOnce(&mut ServeConfig)) -> TestServer {
    TestServer::with(|c| {
        c.tls = Some(tls);
        c.certificate_check_interval = Duration::from_millis(50);
        change(c);
    })
    .await
}

#[tokio::test]
async fn renewed_certificates_are_served_without_closing_connections() {
    let files = Files::new();
    let server = with_tls(files.issue("server", |_| {}), |_| {}).await;
    let (config, port) = (files.client(), server.address.port());
    let client = http(&config, &server.token);
    assert_eq!(get_text(&client, &server, "/readyz").await, (200, "ready\n".into()));
    let mut request = server.socket_request("/stream", &server.token);
    *request.uri_mut() = format!("wss://localhost:{port}/api/v1/stream").parse().unwrap();
    let connector = Some(Connector::Rustls(config.clone()));
    let (mut socket, _) = connect_async_tls_with_config(request, None, false, connector).await.unwrap();

    let day = date_time_ymd(2093, 7, 1);
    files.issue("next", |p| p.not_after = day);
    files.replace("server", "next");
    let renewed = "2093-07-01T00:00:00Z".parse().unwrap();
    wait_until("the new certificate is served", async || {
        served_certificate(server.address, &config).await.not_after == renewed
    })
    .await;

    // A certificate that does not belong to the key, and then no certificate: the last valid certificate stays, and `/readyz` reports the problem.
    files.issue("other", |_| {});
    fs::rename(files.path("other.crt"), files.path("server.crt")).unwrap();
    let is_reported = async |part: &str| get_text(&client, &server, "/readyz").await.1.contains(part);
    wait_until("the problem is reported", async || {
        is_reported("not served").await && is_reported("server.key").await
    })
    .await;
    fs::write(files.path("server.crt"), "broken").unwrap();
    wait_until("the problem is reported", async || is_reported("has no certificate").await).await;
    assert_eq!(served_certificate(server.address, &config).await.not_after, renewed);
    files.issue("soon", |p| p.not_after = time::OffsetDateTime::now_utc() + time::Duration::days(80));
    files.replace("server", "soon");
    wait_until("the expiry is reported", async || {
        is_reported("expires in 79 days").await && !is_reported("not served").await
    })
    .await;

    // The first connection is still open.
    socket.send(Message::Ping("still".into())).await.unwrap();
    let pong = async {
        loop {
            if let Message::Pong(bytes) = socket.next().await.unwrap().unwrap() {
                break bytes;
            }
        }
    };
    assert_eq!(timeout(TIMEOUT, pong).await.unwrap(), "still");
    server.stop().await;
}

#[tokio::test]
async fn a_server_creates_its_ca_and_renews_its_certificate() {
    let server = with_tls(TlsConfig::OwnCa, |_| {}).await;
    let folder = server.dir.path().join("ca");
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(
        (mode(&folder), mode(&folder.join("ca.key")), mode(&folder.join("server.pem"))),
        (0o700, 0o600, 0o600)
    );
    let authority = Authority::open(server.dir.path()).unwrap();
    let config = trusting(authority.pem.as_bytes());
    let client = http(&config, &server.token);
    for host in ["localhost", "127.0.0.1"] {
        let url = format!("https://{host}:{}/readyz", server.address.port());
        assert_eq!(client.get(url).send().await.unwrap().text().await.unwrap(), "ready\n", "{host}");
    }
    let first = served_certificate(server.address, &config).await;
    assert!((395..=397).contains(&first.days_left(jiff::Timestamp::now())), "{first:?}");
    let host = rustix::system::uname().nodename().to_string_lossy().to_lowercase();
    assert!(first.names.iter().any(|name| name.matches(&host)), "{first:?}");

    // A certificate that is valid for 120 more days is kept; with 119 days it is renewed.
    let names: Vec<_> = first.names.iter().map(ToString::to_string).collect();
    for (days, is_renewed) in [(121, false), (120, true)] {
        let issued = authority.issue(&names, days).unwrap();
        // A rename, because the server may read the file at any time.
        fs::write(folder.join("new"), format!("{}{}", issued.chain, issued.key)).unwrap();
        fs::set_permissions(folder.join("new"), fs::Permissions::from_mode(0o600)).unwrap();
        fs::rename(folder.join("new"), folder.join("server.pem")).unwrap();
        wait_until("the expected certificate is served", async || {
            let days_left =
                served_certificate(server.address, &config).await.days_left(jiff::Timestamp::now());
            if is_renewed { days_left > 300 } else { days_left == 120 }
        })
        .await;
    }
    // After a restart with another public URL, the same CA issues a certificate with the new name.
    let dir = server.stop().await;
    let server = TestServer::open(dir, |c| {
        c.tls = Some(TlsConfig::OwnCa);
        c.public_url = Some("https://lockstep.example.org/".parse().unwrap());
    })
    .await;
    let renewed = served_certificate(server.address, &config).await;
    assert!(renewed.names_in_words().contains("lockstep.example.org"), "{renewed:?}");
    server.stop().await;
}

#[tokio::test]
async fn an_http_request_to_a_tls_port_gets_an_error_after_16_kib() {
    let server = with_tls(TlsConfig::OwnCa, |_| {}).await;
    let mut socket = TcpStream::connect(server.address).await.unwrap();
    let head = "GET / HTTP/1.1\r\nx: ";
    let rest = "x".repeat((16 << 10) - head.len() - 1);
    socket.write_all(format!("{head}{rest}").as_bytes()).await.unwrap();
    let mut response = Vec::new();
    let early_read = timeout(Duration::from_millis(200), socket.read_buf(&mut response)).await;
    assert!(early_read.is_err(), "the end of the head may still arrive");
    socket.write_all(b"x").await.unwrap();
    timeout(TIMEOUT, socket.read_to_end(&mut response)).await.expect("a response").unwrap();
    let response = String::from_utf8_lossy(&response);
    assert!(
        response.starts_with("HTTP/1.1 400") && response.contains("write https:// instead"),
        "{response}"
    );
    server.stop().await;
}

#[test]
fn a_ca_is_created_once_and_issues_certificates() {
    let dir = tempfile::tempdir().unwrap();
    assert!(Authority::open(dir.path()).unwrap_err().contains("lockstep ca init"));
    let authority = Authority::init(dir.path()).unwrap();
    assert_eq!(authority.fingerprint.len(), 32 * 3 - 1);
    let error = Authority::init(dir.path()).unwrap_err();
    assert!(error.contains("exists already") && error.contains("ca show"), "{error}");
    assert_eq!(Authority::open(dir.path()).unwrap().fingerprint, authority.fingerprint);
    let names = |names: &[&str]| names.iter().map(ToString::to_string).collect::<Vec<_>>();
    for wrong in [names(&[]), names(&["a b"]), names(&["https://a"]), names(&["a", ""])] {
        assert!(authority.issue(&wrong, 30).is_err(), "{wrong:?}");
    }
    for (days, is_valid) in [(0, false), (1, true), (825, true), (826, false)] {
        assert_eq!(
            authority.issue(&names(&["proxy.example", "*.lab.example", "10.0.0.7"]), days).is_ok(),
            is_valid,
            "{days}"
        );
    }
    let issue_agent = |chars: usize| authority.issue_agent(&"a".repeat(chars), 30);
    assert!(issue_agent(64).is_ok());
    let error = issue_agent(65).expect_err("a common name has 64 characters at most (X.520)");
    assert!(error.contains("1 to 64 letters"), "{error}");
    // A key that others can read is refused.
    let key = dir.path().join("ca/ca.key");
    fs::set_permissions(&key, fs::Permissions::from_mode(0o604)).unwrap();
    assert!(Authority::open(dir.path()).unwrap_err().contains("chmod 600"));
    fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).unwrap();
    let other_dir = tempfile::tempdir().unwrap();
    Authority::init(other_dir.path()).unwrap();
    fs::copy(other_dir.path().join("ca/ca.key"), &key).unwrap();
    assert!(Authority::open(dir.path()).unwrap_err().contains("does not belong"));
}

/// Returns the message of a server that must not start.
pub async fn start_error(config: ServeConfig) -> String {
    starting::start_error(config).await.to_string()
}

#[tokio::test]
async fn unusable_certificates_are_refused_at_the_start() {
    let files = Files::new();
    let dir = tempfile::tempdir().unwrap();
    let config_with = |tls: TlsConfig| {
        let mut config = config(&dir);
        config.tls = Some(tls);
        config
    };
    let expired = files.issue("expired", |p| p.not_after = date_time_ymd(2020, 1, 2));
    let error = start_error(config_with(expired)).await;
    assert!(error.contains("expired at 2020-01-02") && error.contains("renew"), "{error}");
    let error =
        start_error(config_with(files.issue("early", |p| p.not_before = date_time_ymd(2090, 1, 1)))).await;
    assert!(error.contains("not valid before 2090-01-01"), "{error}");
    let error = start_error(config_with(files.issue("nameless", |p| p.subject_alt_names.clear()))).await;
    assert!(error.contains("no subject alternative name"), "{error}");
    let (a, b) = (files.issue("a", |_| {}), files.issue("b", |_| {}));
    let (TlsConfig::Files { certificate, .. }, TlsConfig::Files { key, .. }) = (a, b) else { unreachable!() };
    let error =
        start_error(config_with(TlsConfig::Files { certificate: certificate.clone(), key: key.clone() }))
            .await;
    assert!(error.contains("does not belong to the certificate"), "{error}");
    for (mode, shown_mode) in [(0o604, "0604"), (0o660, "0660")] {
        fs::set_permissions(files.path("a.key"), fs::Permissions::from_mode(mode)).unwrap();
        let tls = TlsConfig::Files { certificate: certificate.clone(), key: files.path("a.key") };
        let error = start_error(config_with(tls)).await;
        assert!(error.contains(shown_mode) && error.contains("chmod 600"), "{error}");
    }
    for path in ["none.crt", "a.key"] {
        let tls = TlsConfig::Files { certificate: files.path(path), key: key.clone() };
        let error = start_error(config_with(tls)).await;
        assert!(error.contains(path), "{error}");
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "a refused start writes no file");
}

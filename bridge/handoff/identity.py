"""Who talks to whom: one self-signed certificate a host, every peer's certificate pinned in the configuration, TLS 1.3 both ways.

Trust is by equality with a configured certificate, not by a chain: a peer can vouch for nobody else.
"""

from __future__ import annotations

import datetime
import os
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from bridge.handoff.errors import BadIdentity, PeerUnknown

_LIFETIME = datetime.timedelta(days=3650)
_MAX_PEM_BYTES = 1 << 20


@dataclass(frozen=True)
class Identity:
    """This host's name, certificate and private key (PEM files)."""

    name: str
    certificate: Path
    private_key: Path


@dataclass(frozen=True)
class PeerConfig:
    """A peer as the configuration names it. host, port: its control port; not needed for peers that only connect to us."""

    certificate: Path
    host: str = ""
    port: int = 0


def create_identity(name: str, folder: Path) -> Identity:
    """Makes a P-256 key and a self-signed certificate in `folder`, which is made for its owner only. So is the key file.

    Raises FileExistsError rather than replace either, and ValueError for names of over 64 characters.
    """
    identity = Identity(name, folder / f"{name}.crt", folder / f"{name}.key")
    for path in (identity.certificate, identity.private_key):
        if path.exists():
            raise FileExistsError(17, "exists already", str(path))
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + _LIFETIME)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    handle = os.open(identity.private_key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(private)
    identity.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return identity


def _context(identity: Identity, trusted: Iterable[Path], protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    _read_pem(identity.certificate)
    _read_pem(identity.private_key)
    try:
        context.load_cert_chain(identity.certificate, identity.private_key, password="")  # an encrypted key is refused, not asked about
    except ssl.SSLError as error:
        reason = error.reason or "one of the two holds something else"  # such as the certificate given for both
        raise BadIdentity(f"{identity.certificate} and {identity.private_key} are no certificate and its key: {reason}") from None
    for certificate in trusted:
        certificate_der(certificate)
        try:
            context.load_verify_locations(cafile=certificate)
        except ssl.SSLError:
            raise BadIdentity(f"{certificate} is in PEM form, and no certificate") from None
    return context


def _read_pem(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_PEM_BYTES + 1)
        if len(data) > _MAX_PEM_BYTES:
            raise BadIdentity(f"{path} is longer than {_MAX_PEM_BYTES} bytes, and so no certificate or key")
        return data.decode("ascii")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no PEM file"
        raise BadIdentity(f"{path} cannot be read: {reason}") from None


def certificate_der(path: Path) -> bytes:
    """A certificate file's DER bytes. Raises BadIdentity, also where the file holds several: a peer shows but one."""
    text = _read_pem(path)
    if (blocks := text.count("-----BEGIN")) > 1:
        raise BadIdentity(f"{path} holds {blocks} certificates or keys", remedy="leave the host's own certificate in it, and nothing else")
    try:
        return ssl.PEM_cert_to_DER_cert(text)
    except ValueError:
        raise BadIdentity(f"{path} is no certificate in PEM form") from None


def common_name(path: Path) -> str:
    """Whom a certificate was made for, as `create_identity` writes it; empty where it says nothing. Raises BadIdentity."""
    try:
        subject = x509.load_der_x509_certificate(certificate_der(path)).subject
    except ValueError:
        raise BadIdentity(f"{path} is no certificate that can be read") from None
    return next((str(name.value) for name in subject.get_attributes_for_oid(NameOID.COMMON_NAME)), "")


def server_context(identity: Identity, peers: Mapping[str, PeerConfig]) -> ssl.SSLContext:
    """TLS 1.3 for the listening side; clients must show one of the configured certificates."""
    return _context(identity, (peer.certificate for peer in peers.values()), ssl.PROTOCOL_TLS_SERVER)


def client_context(identity: Identity, peer: PeerConfig) -> ssl.SSLContext:
    """TLS 1.3 for the connecting side; the server must show this peer's certificate."""
    return _context(identity, [peer.certificate], ssl.PROTOCOL_TLS_CLIENT)


class PinnedPeers:
    """Names of the configured peers by their certificate. Raises BadIdentity where two have the same."""

    def __init__(self, peers: Mapping[str, PeerConfig]) -> None:
        self._names: dict[bytes, str] = {}
        for name, peer in peers.items():
            other = self._names.setdefault(certificate_der(peer.certificate), name)
            if other != name:
                raise BadIdentity(f"the peers {other!r} and {name!r} have the same certificate", remedy="make an identity for each")

    def name_of(self, certificate: bytes | None) -> str:
        """The peer that this DER certificate belongs to. Raises PeerUnknown."""
        name = self._names.get(certificate or b"")
        if name is None:
            raise PeerUnknown("a peer showed a certificate that is not in the configuration")
        return name

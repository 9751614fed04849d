"""Paths, URIs and their secrets; sizes as text."""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from raygnn.util.files import FULL


def size(count: float | None) -> str:
    """Return a number of bytes as text: ``512 MiB``, ``1.4 GiB``; empty for None."""
    if count is None:
        return ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.1f} {unit}" if unit == "GiB" else f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"


HIDDEN = "***"
"""Replacement of a secret in everything shown and written."""

# Only complete words if harmless names contain them: NCCL_IB_PKEY is a number.
_SECRET_NAMES = re.compile(
    r"SECRET|TOKEN|PASSW|PASSPHRASE|CREDENTIAL|APIKEY|(^|_)(KEYS?|AUTH|PASS|PWD|PAT)(_|$)", re.I
)
_USER_IN_URI = re.compile(r"://\S+@")


def is_secret(name: str, value: str = "") -> bool:
    """Return True if a variable is a secret, by its name or as a URI with a user in it."""
    return bool(_SECRET_NAMES.search(name) or _USER_IN_URI.search(value))


def without_users(text: str) -> str:
    """Return the text with the user and password of URIs hidden."""
    return _USER_IN_URI.sub(f"://{HIDDEN}@", text)


SCHEMES = ("file", "s3", "gs", "gcs", "hdfs", "viewfs", "abfs", "abfss")
"""Schemes of the URIs that pyarrow.fs opens."""

# Query options that are not secret.
_PUBLIC = {"region", "scheme", "endpoint_override", "allow_bucket_creation", "enable_tls"}


@dataclass(frozen=True, repr=False)
class Uri:
    """A URI. Its string hides user, password and options; ``text`` is the complete URI."""

    text: str

    def __repr__(self) -> str:
        return f"Uri({str(self)!r})"

    def __str__(self) -> str:
        return self._shown(urlsplit(self.text).path)

    @property
    def shared(self) -> str:
        """The URI without user and secret options, to be recorded and opened again."""
        uri = urlsplit(self.text)
        query = "&".join(
            f"{k}={quote(v, safe=':/')}" for k, v in parse_qsl(uri.query) if k in _PUBLIC
        )
        host = uri.netloc.rpartition("@")[2]
        return f"{uri.scheme}://{host}{uri.path}{'?' if query else ''}{query}"

    def __truediv__(self, name: str) -> Uri:
        base, mark, options = self.text.partition("?")
        return Uri(f"{base.rstrip('/')}/{name}{mark}{options}")

    @property
    def parent(self) -> Uri:
        base, mark, options = self.text.partition("?")
        return Uri(f"{base.rstrip('/').rpartition('/')[0]}{mark}{options}")

    @property
    def name(self) -> str:
        return self.text.partition("?")[0].rstrip("/").rpartition("/")[2]

    def with_path(self, path: str) -> str:
        """Return the URI of another path of the same file system; ``path``: as in pyarrow.fs."""
        uri = urlsplit(self.text)
        if uri.netloc and uri.scheme not in ("hdfs", "viewfs"):  # the path begins with the bucket
            _, _, path = path.partition("/")
        return self._shown(f"/{path.lstrip('/')}")

    def hide(self, message: str) -> str:
        """Return a library's message with this URI's secrets hidden."""
        uri = urlsplit(self.text)
        message = message.replace(self.text, str(self))
        secrets = [value for key, value in parse_qsl(uri.query) if key not in _PUBLIC]
        secrets += [part for part in uri.netloc.rpartition("@")[0].split(":") if part]
        for secret in sorted({s for each in secrets for s in (each, unquote(each))}, key=len)[::-1]:
            message = message.replace(secret, HIDDEN)
        return message

    def _shown(self, path: str) -> str:
        uri = urlsplit(self.text)
        user, at, host = uri.netloc.rpartition("@")
        return f"{uri.scheme}://{HIDDEN if user else ''}{at}{host}{path}"


def nearest_existing(path: Path) -> Path:
    """Return the path, or its nearest existing parent, in which it will be created. Raises OSError
    if permissions forbid the query, or the name is invalid."""
    for part in (path, *path.parents):
        try:
            part.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        return part
    return path  # a relative path in a directory that was removed


def unwritable(path: Path) -> str | None:
    """Return why no file can be written to a directory, which need not exist yet; None if one can.
    Opens an unnamed file there, which leaves nothing behind: permissions do not show that a file
    system is read-only, or does not store files."""
    try:
        existing = nearest_existing(path)
        if not existing.is_dir():
            return f"{existing} is not a directory"
        with tempfile.TemporaryFile(dir=existing):
            return None
    except FileNotFoundError:
        return f"nothing can be created in {existing}"
    except OSError as error:
        return None if error.errno in FULL else (error.strerror or str(error))

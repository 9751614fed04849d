"""URIs that may hold credentials, and never show them."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlsplit

SCHEMES = ("file", "s3", "gs", "gcs", "hdfs", "viewfs", "abfs", "abfss")
"""What pyarrow.fs opens."""

_HIDDEN = "***"
# options that say where, not who
_PUBLIC = {"region", "scheme", "endpoint_override", "allow_bucket_creation", "enable_tls"}


@dataclass(frozen=True, repr=False)
class Uri:
    """A URI. As text it is without user, password and options; ``text`` is all of it."""

    text: str

    def __repr__(self) -> str:
        return f"Uri({str(self)!r})"

    def __str__(self) -> str:
        return self._shown(urlsplit(self.text).path)

    def with_path(self, path: str) -> str:
        """How another place of the same file system is shown; ``path`` as pyarrow.fs has it."""
        uri = urlsplit(self.text)
        if uri.netloc and uri.scheme not in ("hdfs", "viewfs"):  # the path has the bucket in it
            _, _, path = path.partition("/")
        return self._shown(f"/{path.lstrip('/')}")

    def hide(self, message: str) -> str:
        """The message of someone else, without what is secret in it."""
        uri = urlsplit(self.text)
        message = message.replace(self.text, str(self))
        secrets = [value for key, value in parse_qsl(uri.query) if key not in _PUBLIC]
        secrets += [part for part in uri.netloc.rpartition("@")[0].split(":") if part]
        for secret in sorted({s for each in secrets for s in (each, unquote(each))}, key=len)[::-1]:
            message = message.replace(secret, _HIDDEN)
        return message

    def _shown(self, path: str) -> str:
        uri = urlsplit(self.text)
        user, at, host = uri.netloc.rpartition("@")
        return f"{uri.scheme}://{_HIDDEN if user else ''}{at}{host}{path}"

"""What of a configuration is not for others' eyes."""

from __future__ import annotations

import re

HIDDEN = "***"
"""What is shown and written in place of a secret."""

# Whole words where they are part of harmless ones: NCCL_IB_PKEY is a number.
_NAMES = re.compile(
    r"SECRET|TOKEN|PASSW|PASSPHRASE|CREDENTIAL|APIKEY|(^|_)(KEYS?|AUTH|PASS|PWD|PAT)(_|$)", re.I
)
_USER_IN_URI = re.compile(r"://\S+@")


def is_secret(name: str, value: str = "") -> bool:
    """Whether a variable is a secret: its name says so, or its value is a URI with a user in it."""
    return bool(_NAMES.search(name) or _USER_IN_URI.search(value))


def without_users(text: str) -> str:
    """The text, with a user and a password in a URI hidden."""
    return _USER_IN_URI.sub(f"://{HIDDEN}@", text)

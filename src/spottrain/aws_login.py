"""boto3's sessions, which read a login: for machines of AWS and for buckets."""

from __future__ import annotations

from typing import Any


def open_session(profile: str | None = None) -> Any:
    """Return a session of boto3 that asks nobody anything.

    Where a role wants an MFA code it raises ``RefreshWithMFAUnsupportedError``: nobody may
    be there to type one, and the terminal may not be ours.

    Raises:
        ImportError: boto3 is not installed.
        BotoCoreError: Its configuration cannot be read, or there is no such profile.
    """
    import boto3
    from botocore.exceptions import RefreshWithMFAUnsupportedError

    def refuse(prompt: str) -> str:
        raise RefreshWithMFAUnsupportedError

    # A session of our own: boto3's default one is not thread-safe.
    session = boto3.session.Session(profile_name=profile)
    providers = session._session.get_component("credential_provider")
    providers.get_provider("assume-role")._prompter = refuse
    return session

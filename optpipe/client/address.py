"""Where a service is, and who asks: the arguments of an httpx client."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Any

import httpx

from optpipe.errors import InputError

__all__ = ["Address"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A service's address and how it is spoken to.

    Parameters
    ----------
    url
        Such as ``http://127.0.0.1:8000``.
    api_key
        What a service asks for that other machines can reach; ``optpipe keys create`` makes one.
    timeout_s
        For each answer; waiting for a job's end does not count.
    num_retries
        How often a call is repeated before it fails.
    """

    url: httpx.URL
    api_key: str | None
    timeout_s: float
    num_retries: int

    @classmethod
    def checked(
        cls, base_url: str, api_key: str | None, timeout_s: float, num_retries: int
    ) -> Address:
        """Return the address.

        Raises
        ------
        InputError
            If it is none, or the key cannot be one.
        """
        try:
            url = httpx.URL(base_url)
        except (httpx.InvalidURL, TypeError):
            url = httpx.URL()
        if url.scheme not in ("http", "https") or not url.host:
            raise InputError(
                f"{base_url!r} is not the address of a service; write it like http://127.0.0.1:8000"
            )
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            # Not shown: it may be nearly the true one.
            raise InputError("the API key has letters that no key has; copy it again")
        return cls(url=url, api_key=api_key, timeout_s=timeout_s, num_retries=num_retries)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of httpx's clients."""
        return {
            "base_url": self.url,
            "headers": {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"},
            "timeout": self.timeout_s,
            # A proxy of the environment does not lead to this machine.
            "trust_env": not _is_loopback(self.url.host),
        }

    def __str__(self) -> str:
        # It stands in messages, where a password has no place.
        return str(self.url.copy_with(userinfo=b""))


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

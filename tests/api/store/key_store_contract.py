"""What `optpipe_api.store.keys` promises; run over each database by test_keys."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from optpipe_api.access import Role, id_of
from optpipe_api.errors import KeyNameError

if TYPE_CHECKING:
    from optpipe_api.store.keys import KeyStore


class KeyStoreContract:
    """A subclass gives the fixture ``keys``: an empty store, whose clock says 1000.0."""

    def test_a_new_key_is_found_and_its_text_is_kept_nowhere(self, keys: KeyStore) -> None:
        """The record proves the text, and holds neither it nor its secret."""
        key, text = keys.create("ci", Role.SUBMIT)
        assert keys.all() == keys.valid() == [key]
        assert (key.name, key.role) == ("ci", Role.SUBMIT)
        assert (key.created_at, key.revoked_at) == (1000.0, None)
        assert key.id == id_of(text)
        assert key.is_text(text)
        secret = text.split("_", 2)[2]
        assert all(secret not in str(getattr(key, name)) for name in type(key).__slots__)
        assert key.digest not in repr(key)

    def test_a_revoked_key_is_listed_and_not_valid(self, keys: KeyStore) -> None:
        """Revoking twice changes nothing; other keys stay."""
        keys.create("ci", Role.SUBMIT)
        other, _ = keys.create("ops", Role.ADMIN)
        revoked = keys.revoke("ci")
        assert revoked.revoked_at == 1000.0
        assert keys.revoke("ci") == revoked
        assert keys.all() == [revoked, other]
        assert keys.valid() == [other]

    def test_a_name_is_given_once_until_it_is_revoked(self, keys: KeyStore) -> None:
        """A name that is given again belongs to the new key alone."""
        _, old = keys.create("ci", Role.SUBMIT)
        with pytest.raises(KeyNameError, match="'ci' already"):
            keys.create("ci", Role.READ)
        keys.revoke("ci")
        key, text = keys.create("ci", Role.READ)
        assert keys.all() == [key]
        assert key.is_text(text)
        assert not key.is_text(old)

    def test_of_keys_made_at_once_under_one_name_one_stays(self, keys: KeyStore) -> None:
        """Eight threads create the same name; seven are refused."""
        refused: list[KeyNameError] = []

        def create() -> None:
            try:
                keys.create("ci", Role.SUBMIT)
            except KeyNameError as error:
                refused.append(error)

        threads = [threading.Thread(target=create) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(refused), len(keys.valid())) == (7, 1)

    @pytest.mark.parametrize("name", ["", " ", "-x", "a b", "a\n", "a/b", "\x00", "ü", "x" * 101])
    def test_an_illegal_name_is_refused(self, keys: KeyStore, name: str) -> None:
        """Names stand in logs and in headers: short words only."""
        with pytest.raises(KeyNameError, match="cannot be a key's name"):
            keys.create(name, Role.READ)
        assert keys.all() == []

    def test_an_unknown_name_cannot_be_revoked(self, keys: KeyStore) -> None:
        """The message says where the names are."""
        with pytest.raises(KeyNameError, match="keys list"):
            keys.revoke("nobody")

"""Key files: what is read back is what was written, and what is wrong is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo_shared.keyfile import KeyFileError, KeyRecord, digest_of, mint_key, read_key_file, record_of, table_text

DIGEST = digest_of(b"x")
GOOD = f'tenant = "a"\nsha256 = "{DIGEST}"\n'


@pytest.mark.parametrize(
    "record",
    [
        KeyRecord("acme", DIGEST),
        KeyRecord("A.b-c_d@e", DIGEST, 60, 100_000, -3, 2.5, True),
        KeyRecord("x", DIGEST, priority_ceiling=0),
    ],
)
def test_there_and_back(record: KeyRecord, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(table_text(record))
    assert read_key_file(path) == [record]


def test_keys_are_random_and_only_their_hash_is_kept() -> None:
    keys = {mint_key() for _ in range(100)}
    assert len(keys) == 100
    # 256 bits in 43 letters.
    assert all(key.startswith("octavo-") and len(key) == 7 + 43 for key in keys)
    key = keys.pop()
    assert key not in table_text(record_of({"tenant": "a", "sha256": digest_of(key.encode())}))
    assert digest_of(b"abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad", "FIPS 180-4, B.1"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[key]", "no TOML"),
        ("\xff", "no TOML"),
        ("key = 1", "only have tables"),
        ("key = [1]", "only have tables"),
        ("[other]\nx = 1", "only have tables"),
        ("[[key]]\n", "key 1: tenant must be"),
        (f'[[key]]\n{GOOD}\n[[key]]\ntenant = "b"\nsha256 = "{"A" * 64}"', "key 2: sha256 must be"),
        ('[[key]]\ntenant = "a"\nsha256 = "secret"', "the digest of the key, not the key"),
        (f'[[key]]\ntenant = "a b"\nsha256 = "{DIGEST}"', "tenant must be"),
        (f'[[key]]\ntenant = "t-0123456789abcdef"\nsha256 = "{DIGEST}"', "must not look like"),
        (f"[[key]]\n{GOOD}tokens_per_minutes = 5", "no field 'tokens_per_minutes'"),
        (f"[[key]]\n{GOOD}tokens_per_minute = 0", "tokens_per_minute must be"),
        (f"[[key]]\n{GOOD}requests_per_minute = true", "requests_per_minute must be"),
        (f"[[key]]\n{GOOD}requests_per_minute = 1.5", "requests_per_minute must be"),
        (f"[[key]]\n{GOOD}priority_ceiling = 2147483648", "priority_ceiling must be"),
        (f"[[key]]\n{GOOD}weight = 0", "weight must be"),
        (f"[[key]]\n{GOOD}weight = nan", "weight must be a number"),
        (f'[[key]]\n{GOOD}admin = "yes"', "admin must be"),
        (f"[[key]]\n{GOOD}\n[[key]]\n{GOOD}", "twice"),
        (f'[[key]]\n{GOOD}\n[[key]]\ntenant = "a"\nsha256 = "{"0" * 64}"\nweight = 2', "different weights"),
    ],
)
def test_what_is_wrong_is_named(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(KeyFileError, match=said) as error:
        read_key_file(path)
    assert "secret" not in str(error.value), "somebody may have put the key where its hash belongs"


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="cannot be read: No such file"):
        read_key_file(tmp_path / "keys.toml")


def test_the_manuals_example(tmp_path: Path) -> None:
    manual = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    path = tmp_path / "keys.toml"
    path.write_text(manual.partition("```toml\n")[2].partition("```")[0])
    assert read_key_file(path) == [KeyRecord("acme", digest_of(b"test"), 600, 200_000, 0, 2.0)]

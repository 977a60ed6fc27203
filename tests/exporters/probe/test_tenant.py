"""A header's value -> the tenant that is recorded."""

from __future__ import annotations

from vllm_slo.exporters.probe.tenant import LONGEST, tenant_of


def test_a_name_is_kept_as_it_is_without_the_space_around_it() -> None:
    assert tenant_of(b" team blue ", hashed=False) == "team blue"
    assert tenant_of("Müller & Søn".encode(), hashed=False) == "Müller & Søn"


def test_an_empty_header_names_nobody() -> None:
    assert tenant_of(b"  ", hashed=False) is None
    assert tenant_of(b"", hashed=True) is None


def test_a_long_or_unprintable_value_cannot_fill_the_lake_or_command_a_terminal() -> None:
    assert tenant_of(b"x" * 10_000, hashed=False) == "x" * LONGEST
    assert tenant_of(b"a\x1b[31m\xff\nb", hashed=False) == "a?[31m\ufffd?b"


def test_a_hash_tells_tenants_apart_and_does_not_hold_the_name() -> None:
    blue, green = tenant_of(b"blue", hashed=True), tenant_of(b"green", hashed=True)
    assert blue is not None
    assert blue != green
    assert blue == tenant_of(b" blue", hashed=True)
    assert len(blue) == 16
    assert int(blue, 16) >= 0


def test_the_hash_depends_on_the_salt_however_long_it_is() -> None:
    plain = tenant_of(b"blue", hashed=True)
    salted = tenant_of(b"blue", hashed=True, salt=b"s")
    long = tenant_of(b"blue", hashed=True, salt=b"s" * 1000)
    assert len({plain, salted, long}) == 3

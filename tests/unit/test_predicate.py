"""Conditions on headers: what they are true for, and how a mistake is named."""

from __future__ import annotations

import pytest

from memq.client.consumer.predicate import CONDITION_BYTES_MAX, DEPTH_MAX, Condition
from memq.errors import InvalidFilterError


def holds(text: str, **headers: bytes | None) -> bool:
    return Condition(text).holds(tuple(headers.items()))


@pytest.mark.parametrize(
    "text",
    [
        "amount = 100",
        "amount = 1e2",
        "amount <> 99 AND amount != 99",
        "amount >= 100 and amount <= 100",
        "amount > 99.5",
        "amount < 100.5",
        "100 = amount",
        "amount BETWEEN 100 AND 200",
        "amount NOT BETWEEN 101 AND 200",
        "amount IN (1, 100)",
        "amount NOT IN (1, 2)",
        "amount > -1",
        "region = 'EU'",
        "region < 'F'",
        "region IN ('US', 'EU')",
        "region BETWEEN 'E' AND 'F'",
        "amount IS NOT NULL",
        "other IS NULL",
        "nothing IS NULL",
        "paid",
        "paid = TRUE",
        "NOT late",
        "late = false",
        "NOT (region = 'US' OR amount < 100)",
        "region = 'US' OR amount = 100 AND paid",
        "amount = copy",
        "region <> paid",
        "\"region\" = 'EU'",
        "\tregion\n=\n'EU' ",
        "notes = 'it''s'",
        "android = 1 AND order.id = 2",
    ],
)
def test_a_condition_is_true(text: str) -> None:
    headers = {"order.id": b"2", "copy": b"100.0", "notes": b"it's", "android": b"1", "nothing": None}
    assert holds(text, amount=b"100", region=b"EU", paid=b"True", late=b"FALSE", **headers)


@pytest.mark.parametrize(
    "text",
    [
        "amount > 100",
        "amount = '100.0'",
        "region = 5",
        "region > 5",
        "NOT region > 5",
        "other = 1",
        "NOT other = 1",
        "other <> 1",
        "other NOT IN (1, 2)",
        "other BETWEEN 1 AND 2",
        "other NOT BETWEEN 1 AND 2",
        "NOT other",
        "region",
        "NOT region",
        "nothing IS NOT NULL",
        "amount IS NULL",
        "raw = 'x'",
        "raw <> 'x'",
        "raw < amount",
        "1 = '1'",
        "1 = TRUE",
        "Region = 'EU'",
    ],
)
def test_a_condition_is_false_or_unknown(text: str) -> None:
    assert not holds(text, amount=b"100", region=b"EU", raw=b"\xff", nothing=None)


def test_unknown_is_decided_by_the_other_side_where_that_suffices() -> None:
    assert holds("other = 1 OR amount = 100", amount=b"100")
    assert not holds("other = 1 AND amount = 100", amount=b"100")
    assert holds("NOT (other = 1 AND amount = 99)", amount=b"100")


def test_the_last_of_several_headers_of_one_name_counts() -> None:
    assert Condition("a = 2").holds((("a", b"1"), ("a", b"2")))
    assert not Condition("a = 1").holds((("a", b"1"), ("a", b"2")))


def test_large_integers_are_compared_exactly() -> None:
    assert holds(f"a = {1 << 70}", a=b"%d" % (1 << 70))
    assert not holds(f"a = {1 << 70}", a=b"%d" % ((1 << 70) + 1))


@pytest.mark.parametrize(
    ("text", "value"), [("a = 1", b"nan"), ("a < 9", b"1_0"), ("a = 1", b" 1"), ("a >= 0", b"9" * 500)]
)
def test_a_header_that_is_no_plain_decimal_number_is_unknown_next_to_one(text: str, value: bytes) -> None:
    assert not holds(text, a=value)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("", "at its end"),
        ("a >", "at its end; expected is FALSE, TRUE, a header, a number, a text in single quotes"),
        ("a > > 1", "at character 5, '> 1'"),
        ("(a = 1", "at its end; expected is ')'"),
        ("a = 1)", "at character 6, ')'"),
        ("a = 'x", "at character 5, ''x'"),
        ("a IN ()", "at character 7, ')'"),
        ("a LIKE 'x%'", "at character 3, 'LIKE 'x%''"),
        ("a = 1x", "at character 5, '1x'"),
        ("a BETWEEN 1", "at its end; expected is AND"),
        ("a IS 3", "at character 6, '3'; expected is NOT, NULL"),
        ("a = b = c", "at character 7, '= c'"),
        ("ä = 1", "at character 1, 'ä = 1'"),
        ("a; b", "at character 2, '; b'"),
        ("a = 1;", "at character 6, ';'; expected is AND, OR, the end"),
        ("(a = 1;", "at character 7, ';'; expected is ')', AND, OR:"),
    ],
)
def test_a_malformed_condition_is_refused_with_the_place_of_the_mistake(text: str, place: str) -> None:
    with pytest.raises(InvalidFilterError) as refused:
        Condition(text)
    assert place in str(refused.value)
    assert refused.value.hint


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("region == 'EU'", "a single ="),
        ("region = 'EU", "begins and ends with a single quote"),
        ('region = "EU', "texts are in single quotes"),
        ("content-type = 'x'", 'in double quotes: "content-type"'),
        ("a = 1 && b = 2", "write AND"),
        ("a = 1 || b = 2", "write OR"),
        ("!urgent", "write NOT"),
        ("region like 'E%'", "patterns can't be searched"),
        ("amount = NULL", "write IS NULL or IS NOT NULL"),
        ("amount IN (1) OR null <> amount", "write IS NULL or IS NOT NULL"),
    ],
)
def test_a_condition_with_a_usual_mistake_says_what_to_write(text: str, hint: str) -> None:
    with pytest.raises(InvalidFilterError) as refused:
        Condition(text)
    assert hint in refused.value.hint


def test_a_header_may_have_the_name_null_in_double_quotes() -> None:
    assert holds('"NULL" = 1', NULL=b"1")
    assert holds('"NULL" IS NOT NULL', NULL=b"1")


def test_a_condition_has_bounds() -> None:
    assert holds("(" * 500 + "a = 1" + ")" * 500, a=b"1")
    assert holds("NOT " * (DEPTH_MAX - 1) + "a = 1", a=b"1") is (DEPTH_MAX % 2 == 1)
    with pytest.raises(InvalidFilterError, match=f"more than {DEPTH_MAX} levels"):
        Condition("NOT " * 500 + "a = 1")
    with pytest.raises(InvalidFilterError, match=f"{CONDITION_BYTES_MAX} bytes are allowed"):
        Condition("a = '" + "x" * CONDITION_BYTES_MAX + "'")
    with pytest.raises(TypeError, match="where must be a text, not bytes"):
        Condition(b"a = 1")  # type: ignore[arg-type]

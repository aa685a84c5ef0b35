"""Layouts of tables, as the configuration says them."""

import pytest

from walsender_bridge.postgres.table_layout import (
    CODEC,
    LEVEL,
    LayoutRule,
    PartitionField,
    SortField,
    TableLayout,
    compression,
    is_delta,
    layout_of,
    refusal,
)
from walsender_bridge.postgres.table_patterns import Pattern


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("Region", PartitionField("identity", "region")),
        ('"Re""gion"', PartitionField("identity", 'Re"gion')),
        (" identity( region ) ", PartitionField("identity", "region")),
        ("DAY(created_at)", PartitionField("day", "created_at")),
        ('bucket(16,"a b")', PartitionField("bucket", "a b", 16)),
        ("truncate(4, größe)", PartitionField("truncate", "größe", 4)),
    ],
)
def test_a_partition_field_is_a_column_or_a_transform_of_one(text, field):
    assert PartitionField.parse(text) == field


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a partition field"),
        ("a b", "is not a partition field"),
        ("day(a, b)", "is not a partition field"),
        ("week(a)", "week is not a transform; there are identity, year"),
        ("bucket(a)", r"write bucket\(16, a\)"),
        ("day(3, a)", "it takes no number"),
        ("bucket(0, a)", "between 1 and 2147483647"),
        ("truncate(2147483648, a)", "between 1 and 2147483647"),
    ],
)
def test_what_is_no_partition_field_is_refused_by_name(text, message):
    with pytest.raises(ValueError, match=message):
        PartitionField.parse(text)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("At", SortField("at")),
        ("at DESC", SortField("at", descending=True, nulls_first=True)),
        ("at desc nulls LAST", SortField("at", descending=True)),
        ('"At" asc nulls first', SortField("At", nulls_first=True)),
    ],
)
def test_a_sort_field_has_postgresql_s_words_and_defaults(text, field):
    assert SortField.parse(text) == field


@pytest.mark.parametrize("text", ["", "a b", "a desc asc", "day(a)", "a nulls"])
def test_what_is_no_sort_field_is_refused_by_name(text):
    with pytest.raises(ValueError, match="is not a sort field"):
        SortField.parse(text)


@pytest.mark.parametrize(
    ("partition", "sort", "message"),
    [
        (["day(a)", "hour(a)"], [], "one of two partition fields"),
        (["a", "identity(a)"], [], "one of two partition fields"),
        ([], ["a", "a desc"], "sorted by a twice"),
    ],
)
def test_what_says_nothing_a_second_time_is_refused(partition, sort, message):
    with pytest.raises(ValueError, match=message):
        TableLayout.parse(partition, sort)
    TableLayout.parse(["day(a)", "day(b)", "bucket(3, a)", "bucket(4, a)"], ["a", "b"])


@pytest.mark.parametrize(
    "name",
    [
        "format-version",
        "tuskline.columns",
        "write.delete.mode",
        "write.data.path",
        "write.metadata.path",
        "write.manifest.compression-codec",
        "write.metadata.compression-codec",
        "history.expire.max-snapshot-age-ms",
        "gc.enabled",
    ],
)
def test_properties_that_the_lake_depends_on_are_refused_by_name(name):
    with pytest.raises(ValueError, match=f"option '{name}' .*: "):
        TableLayout.parse(options={name: "1"})


@pytest.mark.parametrize(
    "name",
    [
        "commit.manifest.min-count-to-merge",
        "commit.retry.num-retries",
        "write.metadata.previous-versions-max",
        "write.metadata.metrics.max-inferred-column-defaults",
        "write.summary.partition-limit",
    ],
)
@pytest.mark.parametrize("value", ["many", "-1", "", "1e3", "9999999999"])
def test_what_iceberg_takes_for_a_number_is_one(name, value):
    with pytest.raises(ValueError, match=f"option '{name}': '{value}' is not a whole number"):
        TableLayout.parse(options={name: value})
    assert TableLayout.parse(options={name: "7"}).options == ((name, "7"),)


def test_other_properties_are_the_user_s():
    for name in ("write.parquet.compression-codec", "write.target-file-size-bytes", "team"):
        assert not refusal(name)


@pytest.mark.parametrize(
    ("codec", "level", "found"),
    [
        ("gzip", "9", ("gzip", 9)),
        ("uncompressed", None, ("none", None)),
        ("zip", None, "'zip' is none of zstd"),
        ("zstd", "23", "'23' is no level of zstd: its levels are 1 to 22"),
        ("snappy", "1", "'1' is no level of snappy: it has no levels"),
    ],
)
def test_compression_is_one_that_parquet_has(codec, level, found):
    options = {CODEC: codec} | ({LEVEL: level} if level else {})
    if isinstance(found, tuple):
        assert compression(dict(TableLayout.parse(options=options).options)) == found
        return
    with pytest.raises(ValueError, match=found):
        TableLayout.parse(options=options)


def test_the_first_rule_that_matches_a_table_holds_for_it():
    def rule(pattern, field, source=None):
        return LayoutRule(Pattern.parse(pattern), TableLayout.parse([field]), source)

    rules = [
        rule("public.orders*", "a", "shop"),
        rule("public.*", "b"),
        rule('"a.b".*', "c"),
    ]
    found = {
        name: [field.column for field in layout_of(rules, name).partition]
        for name in ("shop.public.orders_1", "hr.public.orders", 'x."a.b".t', "x.a.b")
    }
    assert [*found.values()] == [["a"], ["b"], ["c"], []]


def test_28_a_section_of_tables_says_which_are_delta_tables():
    def rule(pattern, delta):
        return LayoutRule(Pattern.parse(pattern), TableLayout(), delta=delta)

    rules = [rule("public.orders", True), rule("public.o*", None), rule("public.*", False)]
    names = ("shop.public.orders", "shop.public.others", "shop.public.t", "shop.hr.t")
    for default, expected in ((False, [1, 0, 0, 0]), (True, [1, 1, 0, 1])):
        assert [is_delta(rules, name, default) for name in names] == expected
